"""Promises:
- Code is plainly safe only if it loads, indexes, calls what is listed or read, and stores to local names.
- What cannot be read is not plainly safe. The reason names the code and its line.
- Reading reads no sample and runs no code of the user's. A second one takes at most 30 ms.
"""

from __future__ import annotations

import linecache
import re
import statistics
import time
from pathlib import Path

import pytest

from fastload.safety import Survey
from tests.safety.programs import Case, code_of, made

pytest.importorskip("torchvision", reason="the programs import it")

TOP = """
import functools, math, os, random
from pathlib import Path
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torchvision.transforms import Compose, Lambda
from torchvision.transforms.functional import normalize
LISTS, TABLE, SIZE, NAMES = [[0] * 8] * 8, {}, 4, ("a", "b")
ARRAY, RNG = np.zeros((8, 4)), np.random.default_rng(0)
class Box:
    "A box of the user's."
    def __init__(self, size): self.size = size
    def area(self): return self.size ** 2
    def grow(self): self.size += 1
def twice(x): return x * 2
last = lambda w: w[-1]
def keep(x): LISTS.append(x)
def change(x):
    x[0] = 1
    return x
BOX = Box(1)
"""
INIT = """
self.rows = np.arange(32.0).reshape(8, 4)
self.words, self.items, self.function = ["a b", "c"] * 4, {"a": [1]}, twice
self.boxes, self.rng, self.tensor = [Box(k) for k in range(8)], np.random.default_rng(0), torch.zeros(8, 4)
"""

PLAIN = r"""
return self.rows[i] * 2
x = torch.from_numpy(self.rows[i]); return {"x": x.float().clamp(0, 1), "n": len(self)}
x, *rest = self.words[i].split(" ", 1); return x.lower().strip()
return [w for w in self.words if w.startswith(NAMES)][0]
out = np.zeros(SIZE); out[1] = self.rows[i, 1]; return out
out = []; out.append(i); out.extend(self.items["a"]); return out
total = 0\nfor k in range(3): total += k * i\nreturn total
row = dict(self.items); row["b"] = i; return row
return twice(self.rows[i]), self.function(i)
return max(self.words, key=len)
with open(__file__) as f: return len(f.read())
return len(open(__file__).read())
return Image.fromarray(self.rows.astype(np.uint8)).convert("RGB").getpixel((0, 0))
if i is None or i not in (1, 2): return math.sqrt(i)\nraise ValueError(f"bad {i!r:>4}")
try: return self.tensor[i].numpy()\nexcept (IndexError, KeyError) as e: return None
return random.random() + torch.rand(2) + np.random.rand(2) + self.rng.normal()
return os.path.join("a", Path("b").name), np.sqrt(self.rows[i]), np.mean(self.rows, 1)
return F.pad(self.tensor[i], (1, 1)), torch.zeros_like(self.tensor).view(-1)
"""

NOT_PLAIN = {
    "assigns to an element": "self.rows[i] = 0; return i",
    "element or attribute": "self.n = i; return i",
    "changes an object in place": "x = self.rows[i]; x /= 2; return x",
    "`append`": "self.items['a'].append(i); return i",
    r"\.LISTS`, which all threads share": "LISTS[0] = i; return i",
    r"`LISTS` \(list\), which a module": "return LISTS[i]",
    r"`ARRAY` \(ndarray\), which a module": "return ARRAY[i].sum()",
    "`RNG` is a random generator": "return RNG.random()",
    r"`BOX` \(Box\), which a module": "return BOX.size",
    "uses `global`": "global SIZE; SIZE = i; return i",
    "uses `delete`": "x = [i]; del x[0]; return i",
    "uses `yield`": "yield i",
    "uses `namedexpr`": "return (n := i) + n",
    "uses `functiondef`": "def f(x, memo=[]): return x\nreturn f(i)",
    "uses `lambda`": "return max(self.words, key=lambda w: w[-1])",
    "has no source": "return last(self.words[i])",
    "asks by `is`": "return self.rows is self.tensor",
    "`getattr`": "return getattr(self, 'rows')[i]",
    "reads `__dict__`": "return self.__dict__['rows'][i]",
    "passes `out=`": "return np.add(1, 2, out=self.rows)",
    "more than 2 arguments by position": "return np.add(1, 2, self.rows)",
    r"by `\*` or": "return torch.zeros(*self.rows.shape)",
    "`F.relu`": "return F.relu(self.tensor[i], True)",
    "`random.shuffle`": "random.shuffle(self.words); return i",
    "tensor.relu_": "return self.tensor.relu_()",
    "context that is not": "with np.errstate(all='ignore'): return i",
    "passes on the method `append`": "return [*map(self.items['a'].append, [1])]",
    "not named": "f = self.function; return f(i)",
    "method `grow`": "self.boxes[i].grow(); return i",
    "`Box`, a type, which is not on": "return Box(i).size",
    r"LISTS`, which all": "return keep(i)",
    "change.*assigns to an element": "return change(self.rows)",
    "change.* assigns": "return max([self.rows], key=change)",
    r"`self\.missing`": "return self.missing(i)",
    "calls another method by": "return super().other(i)",
    "passes on a function of NumPy": "return [*map(np.sin, [self.rows[i]], [self.rows[0]])]",
    "names `__hidden`": "return __hidden(i)",
    "passes `allow_pickle=`": "return np.load('x', allow_pickle=True)",
    "arguments by position to `random`": "return self.rng.random(4, float, self.rows[0])",
    "`normalize`": "return normalize(self.tensor, [0], [1], True)",
    "functools.reduce`": "return functools.reduce(twice, [[1], [2]])",
    "passes on the module": "return twice(np)",
}

OBJECTS = {
    r"a _csv\.reader": "import csv; self.held = csv.reader(['a'])",
    "defaultdict": "import collections; self.held = collections.defaultdict(list)",
    "array of objects": "self.held = np.array([[], [1]], dtype=object)",
    "a torch.*Sequential": "self.held = nn.Sequential(nn.BatchNorm1d(2))",
    "works in place": "from torchvision.transforms import Normalize; self.held = Normalize([0], [1], inplace=True)",
    "a functools._lru_cache": "self.held = functools.lru_cache(len)",
    "`neg_`": "self.held = Compose([torch.neg_])",
    "passes `inplace=`": "self.held = Lambda(functools.partial(normalize, mean=[0], std=[1], inplace=True))",
    "held.*not on the list": "self.held = normalize",
    r"held\[...\]`, a map": "self.held = [None] * 20_000 + [map(keep, LISTS)]",
    r"held\[...\]`, a filter": "self.held = [LISTS] * 20_000 + [filter(keep, LISTS)]",
    "requires gradients": "self.held = torch.zeros(2, requires_grad=True)",
    r"_thread\._local": "import threading; self.held = threading.local()",
    "more code and objects": "self.held = [Box(k) for k in range(20_000)]",
}


def cases(texts: dict[str, str], *, init: bool = False) -> list[tuple[str, Case]]:
    found = []
    for reason, text in texts.items():
        more = {"init": INIT + text} if init else {"init": INIT, "body": text.replace("\\n", "\n")}
        found.append((reason, Case(text, top=TOP, **more)))  # type: ignore[arg-type]
    return found


def test_plainly_safe(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for text in PLAIN.strip().splitlines():
        with subtests.test(text):
            case = Case(text, body=text.replace("\\n", "\n"), top=TOP, init=INIT)
            found = code_of(case, tmp_path)
            assert found.plain, found.reason


@pytest.mark.parametrize("table", ["functions", "objects"])
def test_not_plainly_safe(table: str, subtests: pytest.Subtests, tmp_path: Path) -> None:
    texts = {"functions": NOT_PLAIN, "objects": OBJECTS}[table]
    for reason, case in cases(texts, init=table == "objects"):
        with subtests.test(case.name):
            found = code_of(case, tmp_path)
            assert not found.plain
            assert re.search(reason, found.reason), found.reason


def test_what_threads_are_known_to_share(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for text in ("LISTS[0] = i", "TABLE.update(a=i)", "os.chdir('.')", "RNG.random()", "keep(i)"):
        with (
            subtests.test(text),
            made(Case(text, body=f"{text}; return i", top=TOP), tmp_path) as (dataset,),
        ):
            assert any(each.shared for each in Survey(dataset).code(whole=True).findings)
    with made(Case("local", body="self.rows[i] = 0; return i", top=TOP, init=INIT), tmp_path) as (
        dataset,
    ):
        assert not any(each.shared for each in Survey(dataset).code(whole=True).findings)


NAMES = """getattr eq ne hash len getitem iter next contains call bool repr str format copy deepcopy reduce reduce_ex
getstate enter exit lt index int float add iadd setattr delattr set_name dir sizeof get set length_hint""".split()
HOSTILE = """
from torch.utils.data import Dataset
CALLS = []
def fail(*args, **kwargs):
    CALLS.append(args)
    raise RuntimeError("the user's code ran")
class Meta(type):
    __instancecheck__ = __subclasscheck__ = __getattr__ = __len__ = __iter__ = __repr__ = fail
class Value:
    def __get__(self, instance, owner): fail()
    def __set__(self, instance, value): fail()
class Part(metaclass=Meta):
    value = Value()
    size = property(fail)
    {methods}
class Images(Dataset):
    value = Value()
    size = property(fail)
    {methods}
def make():
    dataset, part = object.__new__(Images), object.__new__(Part)
    object.__getattribute__(dataset, "__dict__").update(part=part, parts=[part] * 3, named=dict(a=part), calls=CALLS)
    return dataset, part, object.__new__(Part)
"""


@pytest.mark.parametrize("more", [[], ["getattribute"]], ids=["methods", "getattribute"])
def test_no_code_of_the_user_runs(more: list[str], tmp_path: Path) -> None:
    methods = " = ".join(f"__{name}__" for name in NAMES + more) + " = fail"
    with made(Case("hostile", program=HOSTILE.format(methods=methods)), tmp_path) as arguments:
        calls = object.__getattribute__(arguments[0], "__dict__")["calls"]
        calls.clear()
        found = Survey(*arguments).code(whole=True)
        assert calls == []
    assert not found.plain


def test_a_changed_file_counts_as_no_source(tmp_path: Path) -> None:
    with made(Case("changed", body="return self.rows[i]", init=INIT, top=TOP), tmp_path) as (
        dataset,
    ):
        linecache.clearcache()
        path = Path(type(dataset).__getitem__.__code__.co_filename)
        path.write_text(path.read_text().replace("return self.rows[i]", "return self.words[i]"))
        assert "has no source to read" in Survey(dataset).code().reason


STEPS = "".join(
    f"def of_{k}(x): return [y for y in range(9) if y != x + {k}][0]\n" for k in range(40)
)


def test_a_second_verdict_takes_at_most_30_ms(tmp_path: Path) -> None:
    body = "return " + " + ".join(f"of_{k}(i)" for k in range(40))
    init = "self.paths = [f'{k}.png' for k in range(100_000)]"
    with made(Case("many steps", body=body, top=STEPS, init=init), tmp_path) as (dataset,):
        assert Survey(dataset).code().plain
        times = []
        for _ in range(5):
            begin = time.process_time()
            Survey(dataset).code()
            times.append(time.process_time() - begin)
    assert statistics.median(times) <= 0.030, times


def test_the_reading_ends_at_a_limit_of_code(tmp_path: Path) -> None:
    steps = "".join(
        f"def of_{k}(i): return of_{k + 1}(i) + [{k} for _ in range(9)][0]\n" for k in range(400)
    )
    case = Case("large", body="return of_0(i)", top=steps + "def of_400(i): return i\n")
    assert "reaches more code" in code_of(case, tmp_path).reason
