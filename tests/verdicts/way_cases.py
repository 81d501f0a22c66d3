"""Programs that reach a module-level dict of a helper module, each in another way; and code that cannot be read."""

from __future__ import annotations

from tests.verdicts.programs import Case

HELPERS = {
    "PKG/__init__.py": "",
    "PKG/mod.py": """
        CACHE = {}
        def transform(x, k=0):
            CACHE[x] = x
            return len(CACHE)
        def worker(index):
            CACHE.clear()
        def timed(function):
            def inner(*args):
                CACHE[args] = 1
                return function(*args)
            return inner
        class Base:
            def load(self, i):
                return transform(i)
        class Call:
            def __call__(self, x):
                return transform(x)
        """,
}


def way(
    name: str, body: str = "return i", top: str = "", init: str = "pass", program: str = ""
) -> Case:
    """Return a case in which samples reach `CACHE` of a helper module."""
    return Case("way " + name, "CACHE", body, top, init, program, HELPERS)


def with_method(decorator: str, use: str) -> str:
    """Return a program whose dataset has a method under `decorator` that leads to `CACHE`."""
    return f"""
        from torch.utils.data import Dataset
        from PKG.mod import Base, timed, transform
        class Images(Base, Dataset):
            {decorator}
            def part(*args):
                return transform(1)
            def __len__(self): return 4
            def __getitem__(self, i):
                return {use}
        make = Images
        """


TRANSFORM = "from PKG.mod import transform\n"
WAYS = [
    way("from import", "return transform(i)", TRANSFORM),
    way("module", "return PKG.mod.transform(i)", "import PKG.mod\n"),
    way(
        "partial",
        "return self.f(i)",
        "import functools\n" + TRANSFORM,
        "self.f = functools.partial(transform, k=1)",
    ),
    way("lambda", "return self.f(i)", TRANSFORM, "self.f = lambda x: transform(x)"),
    way(
        "decorator", "return load(i)", "from PKG.mod import timed\n@timed\ndef load(i): return i\n"
    ),
    way("import inside", "from PKG.mod import transform\nreturn transform(i)", "import PKG.mod\n"),
    way("import as inside", "import PKG.mod as m\nreturn m.transform(i)", "import PKG.mod\n"),
    Case(
        "way not imported yet",  # reading may not import it, so it names the module
        r"CACHE|own_\d+.mod",
        "from PKG.mod import transform\nreturn transform(i)",
        files=HELPERS,
    ),
    way("comprehension", "return [transform(k) for k in range(i)]", TRANSFORM),
    way("map", "return list(map(transform, range(i)))", TRANSFORM),
    way("dict of functions", "return STEPS['a'](i)", TRANSFORM + "STEPS = {'a': transform}\n"),
    way("static method", program=with_method("@staticmethod", "self.part()")),
    way("class method", program=with_method("@classmethod", "self.part()")),
    way("property", program=with_method("@property", "self.part")),
    way("base class", program=with_method("", "self.load(i)")),
    way("super", program=with_method("", "super().load(i)")),
    way(
        "list of transforms",
        "for f in self.fs: i = f(i)\nreturn i",
        "from PKG.mod import Call\n",
        "self.fs = [Call()]",
    ),
    way(
        "Compose",
        "return self.f(i)",
        "from torchvision.transforms import Compose\nfrom PKG.mod import Call\n",
        "self.f = Compose([Call()])",
    ),
    way(
        "collate_fn",
        program="""
        from torch.utils.data import Dataset
        from PKG.mod import transform
        class Images(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return i
        def make(): return Images(), transform, None
        """,
    ),
    way(
        "worker_init_fn",
        program="""
        from torch.utils.data import Dataset
        from PKG.mod import worker
        class Images(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return i
        def make(): return Images(), None, worker
        """,
    ),
    Case(
        "way installed",
        "CACHE",
        "return transform(i)",
        TRANSFORM,
        files={f"site-packages/{path}": text for path, text in HELPERS.items()},
    ),
]

HOSTILE = """
class Late:
    def __getattribute__(self, name):
        raise ModuleNotFoundError(name)
late = Late()
"""
COMPILED = [
    Case(
        "method of a class in C",  # its module is of Python, as those of pydantic and orjson are
        "compiled library msgpack",
        "return self.packer.pack(i)",
        "import msgpack\n",
        "self.packer = msgpack.Packer()",
        needs="msgpack",
    ),
    Case(
        "function in C",
        "compiled library msgpack",
        "return unpack(b'\\x01')",
        "from msgpack._cmsgpack import unpackb as unpack\n",
        needs="msgpack",
    ),
    Case("object that fails", r"\.C`", "C[i] = late; return i", HOSTILE + "C = {}\n"),
]

NOT_READ = [
    *COMPILED,
    Case("eval", "eval", "return eval('i + 1')", proven=False),
    Case("exec", "exec", "exec('x = 1'); return i", proven=False),
    Case("globals", "globals", "globals()['x'] = i; return i"),
    Case(
        "import_module",
        "import_module",
        "return importlib.import_module(self.name).dumps(i)",
        "import importlib\n",
        "self.name = 'json'",
        proven=False,
    ),
    Case(
        "__import__",
        "__import__",
        "return __import__(self.name).dumps(i)",
        "",
        "self.name = 'json'",
        proven=False,
    ),
    Case(
        "class without source",
        "SEEN|Mark",
        "return self.mark(i)",
        """
        SEEN = {}
        exec("class Mark:\\n    def __call__(self, x):\\n        SEEN[x] = x\\n        return len(SEEN)")
        """,
        "self.mark = Mark()",
    ),
]
