"""Programs that change shared state in a roundabout way, so that a reader can miss it."""

from __future__ import annotations

from tests.verdicts.process_cases import ARRAYS, LISTS, NP
from tests.verdicts.programs import Case
from tests.verdicts.way_cases import HELPERS, TRANSFORM, way, with_method

DICTS = "self.rows = [dict(a=k) for k in range(2_000)]"
C, L = "C = {}\n", "L = []\n"
NUM = TRANSFORM + "class Num:\n    def {method}: return {value}\n"


def method(name: str, use: str, signature: str, value: str = "transform(1)") -> Case:
    """Return a case in which a method that Python calls by itself leads to `CACHE`."""
    return way(name, use, NUM.format(method=signature, value=value))


PYTHON_CALLS = [
    way("super with arguments", program=with_method("", "super(Images, self).load(i)")),
    way("base class by name", program=with_method("", "Base.load(self, i)")),
    method("init", "return Num()", "__init__(self)", "transform(1) and None"),
    method("add", "return Num() + 1", "__add__(self, other)"),
    method("enter", "with Num() as x: return x", "__enter__(self)"),
    method("iter", "return list(Num())", "__iter__(self)", "iter([transform(1)])"),
    method("getitem", "return Num()[i]", "__getitem__(self, i)"),
    method("str", "return f'{Num()}'", "__str__(self)", "str(transform(1))"),
    way(
        "cached property",
        program=with_method("@__import__('functools').cached_property", "self.part"),
    ),
    way(
        "generator",
        "return list(gen(i))",
        TRANSFORM + "def gen(n):\n    for k in range(n): yield transform(k)\n",
    ),
    way("sort key", "return sorted([1, 2], key=transform)", TRANSFORM),
    way("vectorize", "return np.vectorize(transform)([i])", NP + TRANSFORM),
    way(
        "getitems",
        program="""
        from torch.utils.data import Dataset
        from PKG.mod import transform
        class Images(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return i
            def __getitems__(self, indices): return [transform(i) for i in indices]
        make = Images
        """,
    ),
]

BY_FUNCTION = [
    Case("getattr", r"chdir|getattr", "getattr(os, 'chdir')('/'); return i", "import os\n"),
    Case(
        "getattr by a variable",
        r"line 10\) calls getattr",
        "return getattr(json, self.name)('1')",
        "import json\n",
        "self.name = 'loads'",
    ),
    Case(
        "setattr of the class",
        "setattr|Images. ?.class",
        "setattr(Images, 'n', i); return Images.n",
    ),
    Case(
        "setattr of the module",
        "setattr|modules",
        "setattr(sys.modules[__name__], 'n', i)",
        "import sys\n",
    ),
    Case(
        "operator.setitem",
        r"\.C`",
        "operator.setitem(C, i, 1); return len(C)",
        "import operator\n" + C,
    ),
    Case("dict.__setitem__", r"\.C`", "dict.__setitem__(C, i, 1); return len(C)", C),
    Case("bound append", r"\.L`", "add = L.append; add(i); return len(L)", L),
    Case(
        "bound append of the module", r"\.L`|add", "add(i); return len(L)", L + "add = L.append\n"
    ),
    Case(
        "heappush", r"\.L`", "heapq.heappush(L, i); return heapq.heappop(L)", "import heapq\n" + L
    ),
    Case(
        "shuffle",
        "tokens",
        "random.shuffle(self.tokens); return self.tokens[0]",
        "import random\n",
        LISTS,
    ),
    Case("copyto", "boxes", "np.copyto(self.boxes[i], 1); return self.boxes[i]", NP, ARRAYS),
    Case(
        "out",
        "boxes",
        "np.add(self.boxes[i], 1, out=self.boxes[i]); return self.boxes[i]",
        NP,
        ARRAYS,
    ),
    Case("add.at", r"\.A`", "np.add.at(A, 0, 1); return A[0]", NP + "A = np.zeros(3)\n"),
    Case(
        "imported by a variable",
        "import_module",
        "return import_module(self.n)",
        "from importlib import import_module\n",
        "self.n = 'json'",
    ),
    Case("run_path", "run_path|runpy", "return runpy.run_path('x.py')", "import runpy\n"),
]

BY_STATEMENT = [
    Case(
        "loop over a slice",
        "tokens",
        "for t in self.tokens[i : i + 2]: t.append(0)\nreturn i",
        "",
        LISTS,
    ),
    Case("loop over all", "tokens", "for t in self.tokens: t.append(0)\nreturn i", "", LISTS),
    Case("loop target", r"\.C`", "for C[i] in range(3): pass\nreturn len(C)", C),
    Case("with target", r"\.C`", "with open(__file__) as C['f']: pass\nreturn len(C)", C),
    Case("walrus", r"\.C`", "(c := C)[i] = 1; return len(c)", C),
    Case("either of two", r"\.C`", "c = C if i else {}\nc[i] = 1; return len(c)", C),
    Case("in a tuple", r"\.C`", "a, b = C, 1\na[i] = b; return len(C)", C),
    Case("union", r"\.C`", "c = C; c |= {i: i}; return len(c)", C),
    Case(
        "row of dicts",
        "rows",
        "row = self.rows[i]; row['n'] = 1; return row",
        "",
        DICTS,
    ),
    Case(
        "objects of a list",
        "rows",
        "row = self.rows[i]; row.n += 1; return row.n",
        "class Row: n = 0\n",
        "self.rows = [Row() for k in range(2_000)]",
    ),
]

LAZY = """
def __getattr__(name):
    import importlib
    return getattr(importlib.import_module("PKG.mod"), name)
"""
NOT_LOADED = [
    Case(
        "lazy package",
        r"own_\d+.transform, whose code is not loaded",
        "return lazy.transform(i)",
        "import PKG as lazy\n",
        files={**HELPERS, "PKG/__init__.py": LAZY},
    ),
    Case(
        "imported from a lazy package",
        r"own_\d+.transform, whose code is not loaded",
        "from PKG import transform\nreturn transform(i)",
        "import PKG\n",
        files={**HELPERS, "PKG/__init__.py": LAZY},
    ),
    Case(
        "LazyLoader",
        r"CACHE|own_\d+.mod.transform, whose code is not loaded",
        "return mod.transform(i)",
        """
        import importlib.util, PKG
        spec = importlib.util.find_spec("PKG.mod")
        loader = importlib.util.LazyLoader(spec.loader)
        spec.loader = loader
        mod = importlib.util.module_from_spec(spec)
        loader.exec_module(mod)
        """,
        files=HELPERS,
    ),
]

HIDDEN = [*NOT_LOADED, *PYTHON_CALLS, *BY_FUNCTION, *BY_STATEMENT]
