"""Programs whose samples are wrong, or not known to be right, in threads: what a process has only one of."""

from __future__ import annotations

import multiprocessing as mp

from tests.verdicts.programs import Case

BIG = "self.big = torch.zeros(20, 1 << 18)"
ARRAYS = "self.boxes = [np.zeros((2, 4)) for _ in range(2_000)]"
HELD = mp.Array("f", 8, lock=False)
"""Keeps the pool of shared memory of this process open, so that no test is seen to open it."""

LISTS = "self.tokens = [[1, 2] for _ in range(2_000)]"
NP, TORCH = "import numpy as np\n", "import torch\n"

OF_THE_PROCESS = [
    Case(
        "pyplot",
        "plt|plot",
        "plt.plot([i, i]); plt.savefig('x.png'); plt.close(); return i",
        "import matplotlib.pyplot as plt\n",
        proven=True,
        needs="matplotlib",
    ),
    Case(
        "pyplot figure in a function",
        "plt|plot",
        """
        import matplotlib.pyplot as plt
        plt.figure()
        plt.imshow([[i]])
        return i
        """,
        needs="matplotlib",
        proven=True,
    ),
    Case("chdir", "chdir", "os.chdir('/'); return i", "import os\n", proven=True),
    Case("chdir by name", "chdir", "chdir('/'); return i", "from os import chdir\n", proven=True),
    Case(
        "contextlib chdir", "chdir", "with chdir('/'): return i", "from contextlib import chdir\n"
    ),
    Case(
        "environ item", "environ", "os.environ['A'] = str(i); return i", "import os\n", proven=True
    ),
    Case("environ update", "environ", "os.environ.update(A=str(i)); return i", "import os\n"),
    Case("environ del", "environ", "del os.environ['A']; return i", "import os\n"),
    Case("environ name", "environ", "environ['A'] = 'b'; return i", "from os import environ\n"),
    Case("putenv", "putenv", "os.putenv('A', 'b'); return i", "import os\n"),
    Case(
        "getpid",
        "getpid",
        """
        name = f"/tmp/scratch-{os.getpid()}"
        with open(name, "w") as file:
            file.write(str(i))
        with open(name) as file:
            return int(file.read())
        """,
        "import os\n",
    ),
    Case(
        "catch_warnings",
        "catch_warnings",
        "with warnings.catch_warnings(): return i",
        "import warnings\n",
        proven=True,
    ),
    Case(
        "simplefilter",
        "simplefilter",
        "warnings.simplefilter('ignore'); return i",
        "import warnings",
    ),
    Case(
        "filterwarnings", "filterwarnings", "w.filterwarnings('ignore')", "import warnings as w\n"
    ),
    Case(
        "redirect_stdout",
        "redirect_stdout",
        """
        with contextlib.redirect_stdout(io.StringIO()):
            print(i)
        return i
        """,
        "import contextlib, io\n",
        proven=True,
    ),
    Case(
        "stdout",
        r"stdout|\.sys`",
        "sys.stdout = io.StringIO(); return i",
        "import io, sys\n",
        proven=True,
    ),
    Case("lseek", "lseek", "os.lseek(3, i, os.SEEK_SET); return i", "import os\n"),
    Case("umask", "umask", "os.umask(0o77); return i", "import os\n", proven=True),
    Case(
        "setlocale",
        "setlocale",
        "locale.setlocale(locale.LC_ALL, 'C')",
        "import locale\n",
        proven=True,
    ),
    Case("seterr", "seterr", "np.seterr(all='raise'); return i", NP),
    Case(
        "default dtype",
        "set_default_dtype",
        "torch.set_default_dtype(torch.float64); return torch.zeros(1)",
        TORCH,
        proven=True,
    ),
    Case("alarm", "alarm", "signal.alarm(1); return i", "import signal\n", proven=True),
    Case(
        "signal", "signal", "signal.signal(signal.SIGALRM, print)", "import signal\n", proven=True
    ),
    Case("event loop", "get_event_loop", "asyncio.get_event_loop(); return i", "import asyncio\n"),
    Case(
        "clahe of the module",
        "CLAHE",
        "return CLAHE.apply(i)",
        "import cv2\nCLAHE = cv2.createCLAHE()\n",
        needs="cv2",
    ),
    Case(
        "clahe of the dataset",
        "clahe|CLAHE",
        "return self.tool.apply(i)",
        "import cv2\n",
        "self.tool = cv2.createCLAHE()",
        needs="cv2",
    ),
    Case(
        "zstandard",
        "UNPACK|[Zz]std",
        "return UNPACK.decompress(b'')",
        "import zstandard\nUNPACK = zstandard.ZstdDecompressor()\n",
        needs="zstandard",
    ),
    Case(
        "thread local",
        "HERE|local",
        "return HERE.x",
        "import threading\nHERE = threading.local()\nHERE.x = 1\n",
    ),
    Case(
        "thread local of the dataset",
        "local",
        "return self.here.x",
        "import threading\n",
        "self.here = threading.local(); self.here.x = 1",
    ),
    Case(
        "numba parallel",
        "total|numba|parallel",
        "return total(self.x)",
        """
        import numba, numpy as np
        @numba.njit(parallel=True)
        def total(x):
            s = 0.0
            for k in numba.prange(len(x)):
                s += x[k]
            return s
        """,
        "self.x = np.zeros(3)",
        needs="numba",
    ),
]

SHARED_DATA = [
    Case(
        "boxes times",
        "boxes",
        "boxes = self.boxes[i]; boxes *= 2; return boxes",
        NP,
        ARRAYS,
        proven=True,
    ),
    Case("boxes item", "boxes", "boxes = self.boxes[i]; boxes[0] = 2; return boxes", NP, ARRAYS),
    Case("boxes sort", "boxes", "self.boxes[i].sort(); return self.boxes[i]", NP, ARRAYS),
    Case(
        "tokens append",
        "tokens",
        "tokens = self.tokens[i]; tokens.append(0); return tokens",
        "",
        LISTS,
        proven=True,
    ),
    Case(
        "tokens add", "tokens", "tokens = self.tokens[i]; tokens += [0]; return tokens", "", LISTS
    ),
    Case("tokens at once", "tokens", "self.tokens[i].append(0); return self.tokens[i]", "", LISTS),
    Case(
        "array divided",
        "big",
        "x = self.big[i]; x /= 2; return x",
        NP,
        "self.big = np.zeros((20, 1 << 17))",
        proven=True,
    ),
    Case("tensor divided", "big", "x = self.big[i]; x /= 2; return x", TORCH, BIG, proven=True),
    Case("tensor mul_", "big", "x = self.big[i]; x.mul_(2); return x", TORCH, BIG),
    Case("tensor out", "big|out", "x = self.big[i]; torch.mul(x, 2, out=x); return x", TORCH, BIG),
    Case("view divided", "big", "x = self.big[i].view(-1); x /= 2; return x", TORCH, BIG),
    Case(
        "from_numpy",
        "big",
        "x = torch.from_numpy(self.big[i]); x /= 2; return x",
        NP + TORCH,
        "self.big = np.zeros((20, 1 << 17))",
    ),
    Case(
        "transform divides",
        "Halve|big",
        "return self.transform(self.big[i])",
        """
        import torch
        class Halve:
            def __call__(self, x):
                x /= 2
                return x
        """,
        BIG + "; self.transform = Halve()",
    ),
    Case(
        "transform function appends",
        "add_end|tokens",
        "return add_end(self.tokens[i])",
        """
        def add_end(words):
            words.append(0)
            return words
        """,
        LISTS,
    ),
]

WEIGHTS = (
    "import torch\n",
    "self.net = torch.nn.Linear(2, 2); self.more = torch.nn.ReLU(), torch.nn.Linear(1, 1, bias=False)",
)
KEPT_STATE = [
    Case("weights", "weight", "self.net.weight.data.mul_(0.5); return i", *WEIGHTS, proven=True),
    Case("weight by weight", "", "for p in self.net.parameters(): p.data.mul_(0.5)", *WEIGHTS),
    Case("weights by name", "", "self.net.state_dict()['bias'].zero_(); return i", *WEIGHTS),
    Case("module dict", "CACHE", "CACHE[i] = i; return CACHE[i]", "CACHE = {}\n", proven=True),
    Case("module list", "LOG", "LOG.append(i); return len(LOG)", "LOG = []\n", proven=True),
    Case(
        "module array",
        "SCRATCH",
        "SCRATCH[:] = i; return SCRATCH.copy()",
        NP + "SCRATCH = np.zeros(4)\n",
        proven=True,
    ),
    Case("global", "COUNT", "global COUNT; COUNT += 1; return COUNT", "COUNT = 0\n", proven=True),
    Case("setdefault", "CACHE", "return CACHE.setdefault(i, len(CACHE))", "CACHE = {}\n"),
    Case(
        "alias of a dict", "CACHE", "cache = CACHE; cache[i] = i; return len(cache)", "CACHE = {}\n"
    ),
    Case(
        "class counter",
        "count|Images. ?.class",
        "Images.count = i; Images.count += 1; return Images.count",
        proven=True,
    ),
    Case("type of self", "last|Images. ?.class", "type(self).last = i; return type(self).last"),
    Case("__class__ of self", "last|Images. ?.class", "self.__class__.last = i; return self.last"),
    Case(
        "class dict",
        "cache",
        program="""
        from torch.utils.data import Dataset
        class Images(Dataset):
            cache = {}
            def __len__(self): return 4
            def __getitem__(self, i):
                self.cache[i] = i
                return len(self.cache)
        make = Images
        """,
    ),
    Case(
        "class method",
        r"seen|Images.note",
        program="""
        from torch.utils.data import Dataset
        class Images(Dataset):
            seen = 0
            @classmethod
            def note(cls):
                cls.seen += 1
            def __len__(self): return 4
            def __getitem__(self, i):
                self.note()
                return self.seen
        make = Images
        """,
    ),
    Case(
        "tokenizer",
        "TOKENIZER",
        "return TOKENIZER.encode(str(i))",
        """
        class Tokenizer:
            def __init__(self):
                self.buffer = []
            def encode(self, text):
                self.buffer.clear()
                self.buffer.extend(text)
                return list(self.buffer)
        TOKENIZER = Tokenizer()
        """,
        proven=True,
    ),
    Case(
        "function attribute",
        r"calls|\d\.f`",
        "f.calls += 1; return f.calls",
        "def f(): pass\nf.calls = 0\n",
    ),
    Case(
        "default argument",
        "seen|remember",
        "return remember(i)",
        """
        def remember(x, seen=[]):
            seen.append(x)
            return len(seen)
        """,
    ),
    Case(
        "nonlocal",
        "total|count",
        "return count()",
        """
        def counter():
            total = 0
            def count():
                nonlocal total
                total += 1
                return total
            return count
        count = counter()
        """,
    ),
    Case(
        "cached open file",
        "opened",
        "file = opened(__file__); file.seek(i); return file.read(1)",
        """
        import functools
        @functools.lru_cache(maxsize=None)
        def opened(path):
            return open(path, 'rb')
        """,
    ),
    Case(
        "module iterator", "IDS", "return next(IDS)", "import itertools\nIDS = itertools.count()\n"
    ),
    Case(
        "module file",
        "FILE",
        "FILE.seek(i); return FILE.read(1)",
        "FILE = open(__file__, 'rb')\n",
    ),
]

PROCESS = [*OF_THE_PROCESS, *SHARED_DATA, *KEPT_STATE]
