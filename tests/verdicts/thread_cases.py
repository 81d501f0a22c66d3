"""Ordinary programs whose samples are right in threads."""

from __future__ import annotations

from tests.verdicts.process_cases import ARRAYS, BIG, NP, TORCH
from tests.verdicts.programs import Case
from tests.verdicts.thread_functions import FUNCTIONS

IMAGE = """
import numpy as np
from pathlib import Path
from PIL import Image
FILE = Path(__file__).with_suffix(".png")
Image.new("RGB", (8, 8)).save(FILE)
"""
PATHS = "self.paths = [str(FILE)] * 5_000"

FOLDER = """
from pathlib import Path
from PIL import Image
from torchvision import transforms as T
from torchvision.datasets import ImageFolder
def make():
    root = Path(__file__).parent / "images"
    for kind in ("cat", "dog"):
        (root / kind).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 40)).save(root / kind / "0.png")
    steps = [T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize([0.5] * 3, [0.2] * 3)]
    return ImageFolder(root, T.Compose(steps))
"""

SUBSETS = """
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
class Numbers(Dataset):
    def __len__(self): return 10
    def __getitem__(self, i): return i
def make():
    first, second = random_split(Numbers(), [4, 6])
    return ConcatDataset([Subset(first, [0, 1]), second])
"""

STREAM = """
from torch.utils.data import IterableDataset, get_worker_info
class Lines(IterableDataset):
    def __init__(self, path):
        self.path = path
    def __iter__(self):
        info = get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        with open(self.path) as file:
            for k, line in enumerate(file):
                if k % count == number:
                    yield line.strip()
def make(): return Lines(__file__)
"""

PLOT = """
import os
import matplotlib.pyplot as plt
from torch.utils.data import Dataset
class Images(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return i
    def show(self, i):
        os.chdir("/")
        plt.plot([self[i]])
        plt.show()
make = Images
"""

DRAWS = """
import random
import numpy as np
import torch
class Noise:
    def __init__(self, scale=1.0):
        self.scale = scale
    def __call__(self, x):
        if random.random() < 0.5:
            x = x + np.random.normal(0, self.scale)
        return x * float(torch.rand(1))
"""

CONFIG = """
from dataclasses import dataclass
@dataclass
class Config:
    size: int = 8
    name: str = "a"
    def area(self): return self.size * self.size
CONFIG = Config()
"""

SELF_IS = """
class Color:
    def __init__(self, name):
        self.name = name
    def place(self):
        return ALL.index(self), self is RED, NAMES[self]
RED, BLUE = Color("red"), Color("blue")
ALL, NAMES = [RED, BLUE], {RED: "r", BLUE: "b"}
"""

LOCALS = """
count = 0
boxes = []
for k in range(i):
    count += 1
    boxes.append(k)
boxes += [count]
boxes.sort()
return {"count": count, "boxes": boxes}
"""

COPIES_OF_CODE = [
    Case("ImageFolder", program=FOLDER),
    Case("subsets", program=SUBSETS),
    Case("stream", program=STREAM),
    Case("plot method", program=PLOT, needs="matplotlib"),
    Case(
        "TensorDataset",
        program="""
        import torch
        from torch.utils.data import TensorDataset
        def make(): return TensorDataset(torch.zeros(8, 2), torch.zeros(8))
        """,
    ),
    Case(
        "memmap",
        "",
        "return np.array(self.data[i])",
        NP,
        "self.data = np.memmap(__file__ + '.bin', 'f4', 'w+', shape=(4, 2))",
    ),
    Case(
        "class constant",
        program="""
        from torch.utils.data import Dataset
        class Images(Dataset):
            names = ["cat", "dog"]
            size = 32
            index = {"cat": 0, "dog": 1}
            def __len__(self): return 4
            def __getitem__(self, i): return self.index[self.names[i % 2]], self.size
        make = Images
        """,
    ),
]

CONSTANTS = [
    Case(
        "names",
        "",
        "return INDEX[NAMES[i % 2]]",
        "NAMES = ['a', 'b']\nINDEX = {n: k for k, n in enumerate(NAMES)}\n",
    ),
    Case("pattern", "", "return WORD.findall(str(i))", "import re\nWORD = re.compile('[0-9]+')\n"),
    Case(
        "logger",
        "",
        "LOG.info('sample %d', i); return i",
        "import logging\nLOG = logging.getLogger(__name__)\n",
    ),
    Case("tuple", "", "return MEAN[0] * i", "MEAN = (0.5, 0.5, 0.5)\n"),
    Case(
        "mean array",
        "",
        "return (np.ones(3) - MEAN) / STD",
        NP + "MEAN, STD = np.zeros(3), np.ones(3)\n",
    ),
    Case("mean tensor", "", "return torch.ones(3) - MEAN", TORCH + "MEAN = torch.zeros(3)\n"),
    Case(
        "frozen dataclass",
        "",
        "return CONFIG.size",
        """
        from dataclasses import dataclass
        @dataclass(frozen=True)
        class Config:
            size: int = 8
        CONFIG = Config()
        """,
    ),
    Case("config", "", "return CONFIG.size + CONFIG.area()", CONFIG),
    Case(
        "enum",
        "",
        "return Split.TRAIN.value, Split('train').name",
        "import enum\nclass Split(enum.Enum):\n    TRAIN = 'train'\n",
    ),
    Case(
        "namedtuple",
        "",
        "return Box(i, i)._replace(x=0)",
        "from collections import namedtuple\nBox = namedtuple('Box', 'x y')\n",
    ),
    Case(
        "typed tuple",
        "",
        "return Box(i)",
        "from typing import NamedTuple\nclass Box(NamedTuple):\n    x: int\n",
    ),
    Case("self is a constant", "", "return RED.place()", SELF_IS),
    Case(
        "environ read",
        "",
        "return os.environ.get('HOME'), os.getcwd(), os.path.join('a', 'b')",
        "import os\n",
    ),
    Case(
        "Compose of the module",
        "",
        "return STEPS(Image.new('RGB', (8, 8)))",
        """
        from PIL import Image
        from torchvision import transforms as T
        STEPS = T.Compose([T.RandomCrop(4), T.ColorJitter(0.1), T.ToTensor()])
        """,
    ),
    Case(
        "font of the module",
        "",
        "return FONT.getbbox(str(i)), ImageDraw.Draw(Image.new('L', (8, 8))).text((0, 0), 'a', font=FONT)",
        """
        from PIL import Image, ImageDraw, ImageFont
        FONT = ImageFont.load_default()
        """,
    ),
    Case(
        "v2 of the module",
        "",
        "return STEPS(Image.new('RGB', (8, 8)))",
        """
        import torch
        from PIL import Image
        from torchvision.transforms import v2
        STEPS = v2.Compose([v2.ToImage(), v2.RandomCrop(4), v2.ToDtype(torch.float32, scale=True)])
        """,
    ),
]

OWN_STATE = [
    Case(
        "cache",
        "",
        "if i not in self.cache: self.cache[i] = i * i\nreturn self.cache[i]",
        "",
        "self.cache = {}",
    ),
    Case("counter", "", "self.i += 1; return self.i", "", "self.i = 0"),
    Case(
        "late file",
        "",
        """
        if self.file is None:
            self.file = open(__file__, "rb")
        self.file.seek(i)
        return self.file.read(1)
        """,
        "",
        "self.file = None",
    ),
    Case(
        "state in init",
        "",
        "return i",
        "import os\nCOUNT = 0\n",
        "global COUNT; COUNT += 1; os.chdir(os.getcwd())",
    ),
    Case(
        "lock", "", "with self.lock: return i", "import threading\n", "self.lock = threading.Lock()"
    ),
    Case("transform with draws", "", "return self.t(i)", DRAWS, "self.t = Noise(2.0)"),
    Case(
        "transform keeps its last",
        "",
        "return self.t(i)",
        "class T:\n    def __call__(self, x):\n        self.last = x\n        return x\n",
        "self.t = T()",
    ),
]

FRESH = [
    Case(
        "dict of a sample",
        "",
        "sample = {'i': i}; sample['x'] = 1; sample.update(y=2); return sample",
    ),
    Case("locals", "", LOCALS),
    Case(
        "fresh pixels",
        "",
        """
        image = Image.open(self.paths[i]).convert("RGB")
        x = np.array(image)
        x[..., 0] = 0
        x = x.astype(np.float32)
        x /= 255
        x -= x.mean()
        return x
        """,
        IMAGE,
        PATHS,
    ),
    Case("fresh zeros", "", "x = np.zeros((4, 4)); x[0] = i; x += 1; return x", NP),
    Case(
        "copy",
        "",
        "x = self.big[i].copy(); x /= 2; return x",
        NP,
        "self.big = np.zeros((20, 1 << 17))",
    ),
    Case("clone", "", "x = self.big[i].clone(); x.mul_(2); return x", TORCH, BIG),
    Case("divided", "", "x = self.big[i] / 2; x += 1; return x", TORCH, BIG),
    Case(
        "torch tensor",
        "",
        "x = torch.tensor(self.big[i]); x /= 2; x[0] = 1; return x",
        NP + TORCH,
        "self.big = np.zeros((20, 1 << 17))",
    ),
    Case("boxes copied", "", "boxes = self.boxes[i].copy(); boxes *= 2; return boxes", NP, ARRAYS),
    Case(
        "tokens copied",
        "",
        "tokens = list(self.tokens[i]); tokens.append(0); return tokens",
        "",
        "self.tokens = [[1, 2] for _ in range(2_000)]",
    ),
    Case(
        "tokens added",
        "",
        "tokens = self.tokens[i] + [0]; tokens.append(1); return tokens",
        "",
        "self.tokens = [[1, 2] for _ in range(2_000)]",
    ),
    Case(
        "number of a shared list",
        "",
        "x = self.labels[i]; x += 1; return x",
        "",
        "self.labels = list(range(5_000))",
    ),
    Case(
        "helper changes what is fresh",
        "",
        "return add_end([i])",
        "def add_end(words):\n    words.append(0)\n    return words\n",
    ),
]

SHARED_ALIKE = [
    Case(
        "a model",
        "",
        "return self.net(torch.ones(2)).mul_(2).tolist()",
        "import torch\n",
        "self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()).eval()",
    ),
    # A thread inherits the context of the loop, and processes share such memory as well.
    Case(
        "context",
        "",
        "return MODE.get()",
        "from contextvars import ContextVar\nMODE = ContextVar('MODE', default=0)\nMODE.set(1)\n",
    ),
    Case(
        "context of the dataset",
        "",
        "return self.mode.get()",
        "from contextvars import ContextVar\nMODE = ContextVar('MODE')\nMODE.set(1)\n",
        "self.mode = MODE",
    ),
    Case(
        "shared memory",
        "",
        "self.cache[i] = i; return self.cache[i].clone()",
        "import multiprocessing as mp, torch, numpy as np\n",
        "self.shared = mp.Array('f', 8, lock=False); self.cache = torch.from_numpy(np.frombuffer(self.shared, 'f4'))",
    ),
]

THREAD = [*COPIES_OF_CODE, *CONSTANTS, *OWN_STATE, *FRESH, *FUNCTIONS, *SHARED_ALIKE]
