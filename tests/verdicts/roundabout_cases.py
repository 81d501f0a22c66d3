"""Programs that keep state in what Python calls by itself, or change shared data under an innocent name."""

from __future__ import annotations

from tests.verdicts.escape_cases import CHANGES
from tests.verdicts.process_cases import BIG, NP, TORCH
from tests.verdicts.programs import Case

HOLDER = """
from torch.utils.data import Dataset
{top}
class Images(Dataset):
    {member}
    def __len__(self): return 4
    def __getitem__(self, i): return {use}
make = Images
"""
SCRATCH = """
import functools
V = [0]
class Scratch:
    def __init__(self): self.v = 0
    def __get__(self, instance, owner): return self
    def put(self, i):
        self.v = i
        return self.v
class memo:
    def __init__(self, f): self.f, self.last = f, None
    def __get__(self, instance, owner): return functools.partial(self, instance)
    def __call__(self, instance, i):
        self.last = i
        return self.f(instance, i)
class lazy:
    def __init__(self, f): self.f = f
    def __get__(self, instance, owner): return self.f(instance)
class of_class(property):
    def __get__(self, instance, owner): return self.fget(owner)
"""
PUTS = "(self, i=0):\n        V[0] = i\n        return V[0]"
BY_TYPE = """@functools.singledispatchmethod
    def go(self, i): return i
    @go.register(int)
    def _"""


def member(name: str, culprit: str, text: str, use: str) -> Case:
    """Return a case of a dataset with an attribute of its class."""
    program = HOLDER.format(top=SCRATCH, member=text, use=use)
    return Case(name, culprit, program=program)


META = """
class Meta(type):
    made = {}
    def __call__(cls):
        if cls not in cls.made: cls.made[cls] = super().__call__()
        return cls.made[cls]
class One(metaclass=Meta):
    def __init__(self): self.v = 0
"""
BORG = "class Borg:\n    state = {}\n    def __init__(self): self.__dict__ = self.state\n"
ROWS = "self.rows = [{'x': torch.zeros(3), 'n': 0} for _ in range(2_000)]"
PREPARE = """
import torch
class Row:
    def __init__(self): self.more = {"box": torch.zeros(4)}
class Prepare:
    def __call__(self, row):
        row.more["box"].add_(1)
        return row
"""
TOKENS = """
class Tokens:
    def {copy}
    def __call__(self, i):
        self.last = i
        return self.last
TOKENS = Tokens()
"""
OWN_COPY = "whose own methods copy it"
OUT = NP + "OUT = np.zeros(4)\n"
BY_NAME = """
import torch
from torch.utils.data import Dataset
class Images(Dataset):
    def __init__(self):
        self.rows = [{'n': 0} for _ in range(2_000)]
    def __len__(self): return 4
    def item(self, i): return self.rows[i]
    def __getitem__(self, i):
        row = self.item(i)
        row['n'] += 1
        return row['n']
make = Images
"""
TENSORS = "TensorDataset(torch.zeros(20, 1 << 18), torch.arange(20))"
OF_OTHERS = "from torch.utils.data import Subset, TensorDataset\n" + TORCH
DISPATCH = """
import functools
V = [0]
@functools.singledispatch
def encode(x): return x
@encode.register(int)
def _(x):
    V[0] = x
    return V[0]
"""

ROUNDABOUT = [
    member("descriptor with state", "Scratch", "scratch = Scratch()", "self.scratch.put(i)"),
    member("decorator with state", "memo", "@memo\n    def go(self, i): return i", "self.go(i)"),
    member("function of a descriptor", r"\.V`", "@lazy\n    def go" + PUTS, "self.go"),
    member(
        "subclass of property",
        "class",
        "n = 0\n    @of_class\n    def go(cls):\n        cls.n += 1\n        return cls.n",
        "self.go",
    ),
    member("method by its argument's type", r"\.V`", BY_TYPE + PUTS, "self.go(i)"),
    Case("function by its argument's type", r"\.V`", "return encode(i)", DISPATCH),
    Case("metaclass", "made", "return One().v", META),
    Case(
        "empty defaultdict",
        r"\.G",
        "G[0].append(i); return len(G[0])",
        "from collections import defaultdict\nG = defaultdict(list)\n",
    ),
    Case("shared __dict__", "state", "Borg().n = i; return Borg().n", BORG),
    Case(
        "update of __dict__",
        "CFG",
        "CFG.__dict__.update(n=i); return CFG.n",
        "class C: n = 0\nCFG = C()\n",
    ),
    Case("own method named item", CHANGES, program=BY_NAME),
    Case(
        "astype without a copy",
        "big",
        "x = self.big[i].astype('f4', copy=False); x /= 2; return x",
        NP,
        "self.big = np.zeros((20, 1 << 18), 'f4')",
    ),
    Case("out by its place", r"\.OUT`", "np.multiply(i, 2.0, OUT); return OUT[0]", OUT),
    Case(
        "clip by its place",
        "big",
        "x = self.big[i]; np.clip(x, 0, 1, x); return x",
        NP,
        "self.big = np.zeros((20, 1 << 17))",
    ),
    Case(
        "sample of a TensorDataset",
        "data",
        "x, y = self.data[i]; x *= 2; return x",
        OF_OTHERS,
        "self.data = " + TENSORS,
    ),
    Case(
        "sample of a subset",
        "data",
        "x, y = self.data[i]; x *= 2; return x",
        OF_OTHERS,
        "self.data = Subset(" + TENSORS + ", range(9, 0, -1))",
    ),
    Case(
        "network in place",
        "works in place",
        "return self.act(self.big[i])",
        TORCH,
        BIG + "; self.act = torch.nn.ReLU(inplace=True)",
    ),
    Case(
        "deep in a row",
        CHANGES,
        "return self.prepare(self.rows[i]).more",
        PREPARE,
        "self.rows = [Row() for _ in range(2_000)]; self.prepare = Prepare()",
    ),
    Case(
        "unpacked row",
        "rows",
        "row = {**self.rows[i]}; row['x'].add_(1); return row['x']",
        TORCH,
        ROWS,
    ),
    Case(
        "later than the function within",
        "rows",
        "def go(): row['n'] += 1\nrow = self.rows[i]\ngo()\nreturn row['n']",
        TORCH,
        ROWS,
    ),
    Case(
        "its deepcopy is itself",
        OWN_COPY,
        "return self.t(i)",
        TOKENS.format(copy="__deepcopy__(self, memo): return self"),
        "self.t = Tokens()",
    ),
    Case(
        "pickled by name",
        OWN_COPY + "|module level",
        "return self.t(i)",
        TOKENS.format(copy="__reduce__(self): return 'TOKENS'"),
        "self.t = Tokens()",
    ),
    Case(
        "BatchNorm in train mode",
        "NET",
        "return NET(torch.ones(4, 2))",
        TORCH + "NET = torch.nn.BatchNorm1d(2)\n",
    ),
    Case(
        "functions of C by ctypes",
        "LIB",
        "LIB.srand(i); return LIB.rand()",
        "import ctypes\nLIB = ctypes.CDLL(None)\n",
    ),
    Case(
        "incremental decoder",
        "DEC",
        "return DEC.decode(b'a')",
        "import codecs\nDEC = codecs.getincrementaldecoder('utf-8')()\n",
    ),
]

CHECKED = """
import functools
class Checked:
    def __set_name__(self, owner, name): self.name = "_" + name
    def __get__(self, instance, owner): return getattr(instance, self.name)
    def __set__(self, instance, value): setattr(instance, self.name, value)
class lazy:
    def __init__(self, f):
        functools.update_wrapper(self, f)
        self.f = f
    def __get__(self, instance, owner):
        value = instance.__dict__[self.f.__name__] = self.f(instance)
        return value
class Step:
    k = Checked()
    def __init__(self, k): self.k = k
    @lazy
    def table(self): return [self.k]
"""
REGISTER = """
KINDS, STEPS = {}, {}
class Base:
    def __init_subclass__(cls): KINDS[cls.__name__] = cls
class Meta(type):
    def __init__(cls, name, bases, space):
        super().__init__(name, bases, space)
        STEPS[name] = cls
class Kind(Base):
    def go(self, i): return i
class Flip(metaclass=Meta):
    def go(self, i): return -i
"""
COLLATE = """
from torch.utils.data import Dataset
import torch
def collate(samples):
    out = {}
    for sample in samples:
        for key, value in sample.items(): out.setdefault(key, []).append(value)
    return {key: torch.stack(values) for key, values in out.items()}
class Images(Dataset):
    def __init__(self): self.rows = [{"x": torch.ones(3)} for _ in range(2_000)]
    def __len__(self): return 4
    def __getitem__(self, i): return self.rows[i]
def make(): return Images(), collate, None
"""
BOXES = "boxes = torch.as_tensor([a['box'] for a in self.rows[i : i + 2]]); boxes[:, 2:] += boxes[:, :2]; return boxes"
DIRECT = [
    Case(
        "descriptors that hold no state",
        body="return self.step.k * i + self.step.table[0]",
        top=CHECKED,
        init="self.step = Step(3)",
    ),
    Case(
        "registries of classes",
        body="return KINDS['Kind']().go(i) + STEPS['Flip']().go(i)",
        top=REGISTER,
    ),
    Case("lists of a sample's parts", program=COLLATE),
    Case(
        "boxes of lists",
        body=BOXES,
        top=TORCH,
        init="self.rows = [{'box': [0.0, 0.0, 4.0, 5.0]} for _ in range(3_000)]",
    ),
    Case(
        "created beside one of the module",
        body="return Config(i).n + CONFIG.n",
        top="class Config:\n    def __init__(self, n): self.n = n\nCONFIG = Config(1)\n",
    ),
]
