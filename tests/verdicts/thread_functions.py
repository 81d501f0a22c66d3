"""Ordinary functions, closures and calls of the standard library, which are right in threads."""

from __future__ import annotations

from tests.verdicts.programs import Case

FUNCTIONS = [
    Case(
        "partial",
        "",
        "return self.f(i)",
        "import functools\ndef f(x, k): return x * k\n",
        "self.f = functools.partial(f, k=2)",
    ),
    Case(
        "closure",
        "",
        "return self.f(i)",
        """
        def scaled(k, names=("a",)):
            def scale(x):
                return x * k, names[0]
            return scale
        """,
        "self.f = scaled(3)",
    ),
    Case(
        "text at the left edge of a method",
        body="return LEFT.name()",
        top="class Left:\n    def name(self): d = {}; d[0] = '''\nleft'''; return d\nLEFT = Left()\n",
    ),
    Case(
        "more defaults than arguments",
        body="return f([i])",
        top="def f(x, *a):\n    x.append(1)\n    return x\nf.__defaults__ = (1, 2)\n",
    ),
    Case("lambda", "", "return self.f(i)", "", "self.f = lambda x: x + 1"),
    Case(
        "cached pure function",
        "",
        "return square(i)",
        """
        import functools
        @functools.lru_cache
        def square(x: int) -> int:
            return x * x
        """,
    ),
    Case(
        "standard library",
        "",
        """
        assert i >= 0
        if __debug__:
            i = int(i)
        data = json.loads(json.dumps({"i": math.sqrt(i)}))
        packed = io.BytesIO(struct.pack("<f", data["i"])).read()
        return re.sub("a", "b", str(packed)), collections.Counter("ab"), copy.deepcopy(data)
        """,
        "import collections, copy, io, json, math, re, struct\n",
    ),
    Case("open", "", "with open(__file__) as file: return file.read(i)"),
    Case(
        "errors",
        "",
        """
        try:
            return 1 / i
        except ZeroDivisionError as error:
            raise ValueError(f"sample {i}") from error
        """,
    ),
    Case(
        "functions named as methods",
        "",
        "return torch.add(self.x[i], torch.sort(self.x)[0]), cv2.resize(self.image, (4, 4))",
        "import cv2, numpy as np, torch\n",
        "self.x, self.image = torch.zeros(4), np.zeros((8, 8))",
        needs="cv2",
    ),
    Case(
        "torch.add",
        "",
        "return torch.add(self.x[i], 1)",
        "import torch\n",
        "self.x = torch.zeros(4)",
    ),
    Case(
        "objects of libraries",
        "",
        """
        image = self.image.copy()
        image.putpixel((0, 0), i)
        ImageDraw.Draw(image).rectangle(self.boxes[i], fill=1)
        width = self.image.size[0]
        width += 1
        found = FRAME.reset_index().set_index("a").add(1)
        return width, FORM.pack(i), SALT.copy().hexdigest(), found["index"].iloc[0]
        """,
        """
        import hashlib, struct
        import pandas as pd
        from PIL import Image, ImageDraw
        FORM, SALT, FRAME = struct.Struct("B"), hashlib.md5(b"salt"), pd.DataFrame({"a": [0]})
        """,
        "self.image = Image.new('L', (8, 8)); self.boxes = [[0, 0, 4, 4]] * 2_000",
        needs="pandas",
    ),
    Case(
        "seeds and states",
        "",
        "torch.manual_seed(i); s = torch.get_rng_state(); torch.set_rng_state(s); np.random.seed(i); return i",
        "import numpy as np, torch\n",
    ),
    Case(
        "each thread opens its own",
        "",
        """
        if not hasattr(HERE, "file"):
            HERE.file = open(__file__)
        return HERE.file.readline(), SUB.n
        """,
        """
        import threading
        class Local(threading.local):
            def __init__(self): self.n = None
        HERE, SUB = threading.local(), Local()
        """,
    ),
    Case(
        "getattr of an argument",
        "",
        "return field(Row(i), self.name)",
        """
        class Row:
            def __init__(self, size): self.size = size
        def field(row, name): return getattr(row, name)
        """,
        "self.name = 'size'",
    ),
    Case(
        "own collate",
        program="""
        import torch
        from torch.utils.data import Dataset, default_collate
        class Words(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return {"ids": list(range(i))}
        def collate(samples):
            longest = max(len(s["ids"]) for s in samples)
            out = torch.zeros(len(samples), longest)
            for row, s in enumerate(samples):
                out[row, : len(s["ids"])] = torch.tensor(s["ids"])
                s["ids"] = out[row]
            return default_collate(samples)
        def make(): return Words(), collate, None
        """,
    ),
]
