"""Promises:
- The CPU of an image without its pixels, which stands for the time that the GIL is held, is measured.
- The time of a plan is measured beside the bare calls under it.

"no pixels" stands for the time in which the GIL is held, which cannot be read off: it is the CPU of the same path for
images of 8 x 8 pixels, made 8 x 8. Nearly all of the work that lets the GIL go is gone, and the Python and the calls
are the same. It is more than the GIL is held by the system calls of opening and reading, and less by what holds the GIL
in proportion to the pixels, and by caches that real pixels leave cold. CPU time, so a busy machine hardly moves it.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms.v2 import functional

from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.images import sample_images
from fastload.bench.figures import BenchError
from fastload.datasets import ImageFileList
from fastload.image import RandomResizedCrop, Resize, encode_rgb

TITLE = "decode: JPEGs of 500 x 375, warm, one thread; crop to 224 and flip from files, Resize((224, 224)) from memory"
REPEATS = 5

HEIGHT, WIDTH, SIZE = 375, 500, 224
TINY = 8
FILES = {
    "plan": "fastload, a plan",
    "pillow": "Pillow, torchvision v1",
    "decoded": "Pillow, decoding alone",
}
MEMORY = {
    "plan_memory": "fastload's Resize, from memory",
    "bare": "Pillow, torchvision's resize",
}
AIMS = {"plan": Aim("<=", 50, of="figure")}
FAST = Aim(">=", 0.9)


def cases(*, smoke: bool) -> list[Case]:
    options = {"images": 4, "seconds": 0.05} if smoke else {"images": 64, "seconds": 2.0}
    names = FILES | MEMORY
    return [Case(title, {"path": path, **options}) for path, title in names.items()]


def measure(*, path: str, images: int, seconds: float) -> Figures:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        load = _path(path, _paint(Path(folder, "typical"), images, HEIGHT, WIDTH), SIZE)
        tiny = _path(path, _paint(Path(folder, "tiny"), images, TINY, TINY), TINY)
        cpu_s = _cpu_seconds(load, seconds)
        tiny_s = _cpu_seconds(tiny, seconds / 4)
    return {
        "cpu_us": cpu_s * 1e6,
        "tiny_us": tiny_s * 1e6,
        "rate": 1 / cpu_s,
    }


def _paint(folder: Path, count: int, height: int, width: int) -> list[str]:
    """The paths of generated photographs of one size."""
    paths = []
    for number, source in enumerate(sample_images(count)):
        path = folder / "class" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(source) as image:
            pixels = np.asarray(image.convert("RGB").resize((width, height)))
        path.write_bytes(encode_rgb(pixels, quality=90))
        paths.append(str(path))
    (folder / "list.txt").write_text("\n".join(paths))
    return paths


def _path(name: str, paths: list[str], size: int) -> Callable[[int], Any]:
    """A function of a number that loads one of the images; checked to give the right shape of each."""
    encoded = [Path(path).read_bytes() for path in paths]
    plan = Resize((size, size))
    listed = ImageFileList(
        Path(paths[0]).parents[1] / "list.txt", transform=RandomResizedCrop(size, flip=0.5)
    )
    recipe = transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
    )

    def by_pillow(number: int) -> Any:
        with Image.open(paths[number % len(paths)]) as image:
            return recipe(image.convert("RGB"))

    def decoded(number: int) -> Any:
        with Image.open(paths[number % len(paths)]) as image:
            return np.asarray(image)

    def bare(number: int) -> Any:
        with Image.open(io.BytesIO(encoded[number % len(encoded)])) as image:
            image.draft("RGB", (size, size))  # as the plan
            pixels = np.array(image)
        return functional.resize(
            torch.from_numpy(pixels).permute(2, 0, 1), [size, size]
        ).contiguous()

    loads: dict[str, Callable[[int], Any]] = {
        "plan": lambda number: listed[number % len(paths)][0],
        "pillow": by_pillow,
        "decoded": decoded,
        "plan_memory": lambda number: plan.decode(encoded[number % len(encoded)], name="an image"),
        "bare": bare,
    }
    load = loads[name]
    for number in range(len(paths)):
        result = load(number)
        whole = name == "decoded"
        right = result.shape[2] == 3 if whole else tuple(result.shape) == (3, size, size)
        if not right or "uint8" not in str(result.dtype):
            raise BenchError(f"{name} gave {result.dtype} {tuple(result.shape)} of {paths[number]}")
    return load


def _cpu_seconds(load: Callable[[int], Any], seconds: float) -> float:
    """CPU of this thread, alone, for one image."""
    end, count, began = perf_counter() + seconds, 0, thread_time()
    while perf_counter() < end or not count:
        load(count)
        count += 1
    return (thread_time() - began) / count


def rows(results: Results) -> list[Row]:
    of, plan, bare = partial(row, results), *MEMORY.values()
    pixelless = partial(of, key="tiny_us", unit="us")
    return [
        *(
            pixelless(title, name=f"no pixels: {title}", aim=AIMS.get(path))
            for path, title in FILES.items()
        ),
        *(
            of(title, "cpu_us", name=f"CPU: {title}", unit="us")
            for title in (*FILES.values(), *MEMORY.values())
        ),
        of(plan, "rate", name=f"rate: {plan}", unit="img/CPU s", against=(bare, "rate"), aim=FAST),
    ]
