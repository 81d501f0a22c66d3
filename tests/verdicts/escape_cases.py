"""Programs in which one object gets to code that does not name it, or is there twice for a thread."""

from __future__ import annotations

from tests.verdicts.programs import Case

ADD = """
L, T, X = [], {}, None
def add(words):
    words.append(1)
    return len(words)
def put(row):
    row["n"] = 2
    return row
"""
PIPE = """
import functools
class Pipe:
    def __init__(self): self.n = 0
    def run(self):
        self.n += 1
        return self.n
PIPE = Pipe()
"""
BUMP = """
import types
class Row:
    def __init__(self): self.n = 0
ROW, SPACE = Row(), types.SimpleNamespace(n=0)
def bump(x): x.n += 1
def put(x): setattr(x, "n", 1)
"""
BOX = """
class Box:
    def __init__(self): self.rows = []
BOX = Box()
def box(): return BOX
"""
ROWS = "self.rows = [Row() for _ in range(2_000)]"
HOLDER = """
L = []
class Holder:
    def __init__(self, x): self.x = x
    def go(self): return self.x.append(1)
"""
STORED = """
from torch.utils.data import Dataset
L = []
class Images(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i):
        self.words = L
        return self.go()
    def go(self):
        self.words.append(1)
        return len(self.words)
make = Images
"""
SINGLE = """
class Single:
    one = None
    def __new__(cls):
        if cls.one is None:
            cls.one = super().__new__(cls)
        return cls.one
"""

CHANGES = "changes an object"
ESCAPES = [
    Case("list of a returned object", "append", "box().rows.append(i); return i", BOX),
    Case("list passed", CHANGES, "return add(L)", ADD),
    Case("list passed in a tuple", CHANGES, "return go((L, 1))", ADD + "def go(t): return add(t[0])\n"),
    Case("list passed by name", CHANGES, "return add(words=L)", ADD),
    Case("dict passed", CHANGES, "return put(T)", ADD),
    Case("list of a class passed", CHANGES, "return add(K.a)", ADD + "class K: a = []\n"),
    Case("list mapped", CHANGES, "return list(map(add, [L]))", ADD),
    Case("list of a partial", CHANGES, "return P()", "import functools\n" + ADD + "P = functools.partial(add, L)\n"),
    Case("list passed to a lambda", CHANGES, "f(L); return i", "L = []\nf = lambda x: x.append(1)\n"),
    Case("list returned", CHANGES, "get().append(i); return i", "L = []\ndef get(): return L\n"),
    Case("list yielded", CHANGES, "for x in gen(): x.append(i)\nreturn i", "L = []\ndef gen(): yield L\n"),
    Case("list kept by a new object", CHANGES, "return Holder(L).go()", HOLDER),
    Case("list kept by the dataset", CHANGES, program=STORED),
    Case("array passed", CHANGES, "return put(X)", "import numpy as np\nX = np.zeros(3)\ndef put(x): x[0] = 1\n"),
    Case("instance passed", CHANGES, "return bump(ROW)", BUMP),
    Case("instance of a list passed", CHANGES, "return bump(self.rows[i])", BUMP, ROWS),
    Case("namespace passed", CHANGES, "return bump(SPACE)", BUMP),
    Case("instance passed to setattr", CHANGES, "return put(ROW)", BUMP),
    Case("bound method", "Pipe", "return GO()", PIPE + "GO = PIPE.run\n"),
    Case("bound method in a dict", "Pipe", "return T['a']()", PIPE + "T = {'a': PIPE.run}\n"),
    Case("bound method in an attribute", "Pipe", "return PIPE.hook()", PIPE + "PIPE.hook = PIPE.run\n"),
    Case("bound method in a partial", "Pipe", "return GO()", PIPE + "GO = functools.partial(PIPE.run)\n"),
    Case("object made once", "Single", "return Single() is self.s", SINGLE, "self.s = Single()"),
]  # fmt: skip

SENTINEL = "class Mode: pass\nTRAIN, EVAL = Mode(), Mode()\n"
COPY = "of which a thread has a copy"
TWICE = [
    Case("sentinel", COPY, "return self.mode is TRAIN", SENTINEL, "self.mode = TRAIN"),
    Case("equal sentinel", COPY, "return self.mode == TRAIN", SENTINEL, "self.mode = TRAIN"),
    Case("in a list", COPY, "return TRAIN in self.modes", SENTINEL, "self.modes = [TRAIN, EVAL]"),
    Case("key", COPY, "return W[self.mode]", SENTINEL + "W = {TRAIN: 1, EVAL: 2}\n", "self.mode = TRAIN"),
    Case("dict by identity", COPY, "return self.cfg is CFG", "CFG = {'a': 1}\n", "self.cfg = CFG"),
    Case("event loop by its policy", "_policy", "return aio.get_event_loop_policy()", "import asyncio as aio\n"),
]  # fmt: skip

ONE = """
import dataclasses, enum, logging
import numpy as np
class Mode(enum.Enum): TRAIN = 1
@dataclasses.dataclass
class Config:
    n: int = 0
CFG, LOG, MEAN, CLASSES, NOTHING = Config(), logging.getLogger("a"), np.zeros(3), ["a", "b"], object()
def value(): return 1
class Unnamed:
    def __call__(self, x): return x
UNNAMED = Unnamed()
"""
CONSTANTS = """
import torch
from torchvision.transforms import functional as F
CLASSES, IDS, MEAN = ["a", "b"], {"a": 0}, [0.1, 0.2, 0.3]
def put(row):
    row["n"] = 2
    row[0] = 1
    return row
"""
QUIET = [
    Case("enum in the dataset", body="return self.mode is Mode.TRAIN", top=ONE, init="self.mode = Mode.TRAIN"),
    Case("sentinel object()", body="return self.fill is NOTHING", top=ONE, init="self.fill = NOTHING"),
    Case("data class in the dataset", body="return self.cfg.n + CFG.n", top=ONE, init="self.cfg = CFG"),
    Case("logger in the dataset", body="return self.log is LOG", top=ONE, init="self.log = LOG"),
    Case("array in the dataset", body="return self.mean - MEAN", top=ONE, init="self.mean = MEAN"),
    Case("list in the dataset", body="return self.c == CLASSES", top=ONE, init="self.c = CLASSES"),
    Case("function in the dataset", body="return self.f is value", top=ONE, init="self.f = value"),
    Case("class in the dataset", body="return self.f is Config", top=ONE, init="self.f = Config"),
    Case("transform that no code names", body="return self.t(i)", top=ONE, init="self.t = UNNAMED"),
    Case(
        "constants beside a function that changes its argument",
        body="""
        row = put({"c": CLASSES[i], "k": IDS.get("a"), "n": len(CLASSES)})
        for c in CLASSES: i += c in IDS
        return row, F.normalize(torch.zeros(3, 2, 2), MEAN, std=MEAN)
        """,
        top=CONSTANTS,
    ),
    Case(
        "list of a new object beside a list that is passed",
        body="b = Builder(); b.add(i); return keep(L)",
        top="""
        L = []
        def keep(x): return len(x)
        class Builder:
            def __init__(self): self.out = []
            def add(self, x): self.out.append(x)
        """,
    ),
]  # fmt: skip
