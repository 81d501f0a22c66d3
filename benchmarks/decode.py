"""What a picture costs one thread: CPU, the time in which it holds the GIL, and a plan beside the bare calls under it.

The GIL is measured in two ways, as neither is exact.

"GIL held": the path runs in a loop in one thread, and the main thread does nothing but look at the clock, in Python. A
gap between two looks is a time in which it had not the GIL: the other thread asked for it, had it, gave it back, and
the main thread woke up. Before and after, the other thread does nothing but give the GIL back (`os.sched_yield`), so
that a gap is the two hand-overs alone; their mean is taken off each gap of the path. What is left is the time of
whatever holds the GIL, to within the spread of the hand-overs, some microseconds each time that the path takes the
GIL. A gap longer than all CPU that the picture takes (and half a millisecond) is another process's doing, and left
out. On a machine that does something else besides the figure is worthless; the control, a path that holds the GIL for
a known time, shows whether it is.

"no pixels": the CPU of the same path for pictures of 8 x 8 pixels, made 8 x 8. Nearly all of the work that lets the
GIL go is gone, and the Python and the calls are the same. It is more than the GIL is held by the system calls of
opening and reading, and less by what holds the GIL in proportion to the pixels; CPU time, so a busy machine hardly
moves it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms.v2 import functional

from benchmarks._measure import NotMeasuredError
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.images import sample_images
from fastload.datasets import ImageFileList
from fastload.harness.figures import BenchError
from fastload.image import RandomResizedCrop, Resize, encode_rgb

TITLE = "decode: JPEGs of 500 x 375, warm, one thread; crop to 224 and flip from files, Resize((224, 224)) from memory"
REPEATS = 5

HEIGHT, WIDTH, SIZE = 375, 500, 224
TINY = 8
SWITCH_S = 0.0002
"""Python's switch interval: how long the path waits each time until it has the GIL back."""
LOOK_S = 2e-6
"""The main thread looks at the clock every 0.1 us; a longer pause is a gap."""
NOT_OURS_S = 0.0005
CONTROL_S = 100e-6

FILES = {
    "plan": "fastload, a plan",
    "pillow": "Pillow, torchvision v1",
    "simplejpeg": "simplejpeg.decode_jpeg alone",
}
MEMORY = {
    "plan_memory": "fastload's Resize, from memory",
    "bare": "simplejpeg, torchvision's resize",
}
CONTROL = f"control: holds the GIL for {CONTROL_S * 1e6:.0f} us"


def cases(*, smoke: bool) -> list[Case]:
    options = {"pictures": 4, "seconds": 0.05} if smoke else {"pictures": 64, "seconds": 2.0}
    names = FILES | MEMORY | {"control": CONTROL}
    return [Case(title, {"path": path, **options}) for path, title in names.items()]


def measure(*, path: str, pictures: int, seconds: float) -> Figures:
    if len(os.sched_getaffinity(0)) < 2:
        raise NotMeasuredError("the GIL is watched from a second core; this machine has one")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        load = _path(path, _paint(Path(folder, "typical"), pictures, HEIGHT, WIDTH), SIZE)
        tiny = _path(path, _paint(Path(folder, "tiny"), pictures, TINY, TINY), TINY)
        cpu_s = _cpu_seconds(load, seconds)
        tiny_s = _cpu_seconds(tiny, seconds / 4)
        held_s, takes = _held_seconds(load, seconds, longest_s=cpu_s + NOT_OURS_S)
    return {
        "cpu_us": cpu_s * 1e6,
        "tiny_us": tiny_s * 1e6,
        "held_us": held_s * 1e6,
        "takes": takes,
        "rate": 1 / cpu_s,
    }


def _paint(folder: Path, count: int, height: int, width: int) -> list[str]:
    """The paths of generated photographs of one size."""
    paths = []
    for number, source in enumerate(sample_images(count)):
        path = folder / "class" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(source) as picture:
            pixels = np.asarray(picture.convert("RGB").resize((width, height)))
        path.write_bytes(encode_rgb(pixels, quality=90))
        paths.append(str(path))
    (folder / "list.txt").write_text("\n".join(paths))
    return paths


def _path(name: str, paths: list[str], size: int) -> Callable[[int], Any]:
    """A function of a number that loads one of the pictures; checked to give the right shape of each."""
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
        with Image.open(paths[number % len(paths)]) as picture:
            return recipe(picture.convert("RGB"))

    def by_simplejpeg(number: int) -> Any:
        with open(paths[number % len(paths)], "rb") as file:
            return simplejpeg.decode_jpeg(file.read())

    def bare(number: int) -> Any:
        # The decoder's settings are the plan's.
        pixels = simplejpeg.decode_jpeg(
            encoded[number % len(encoded)],
            min_height=size,
            min_width=size,
            min_factor=2,
            fastupsample=False,
        )
        return functional.resize(
            torch.from_numpy(pixels).permute(2, 0, 1), [size, size]
        ).contiguous()

    def control(_: int) -> None:
        until = perf_counter() + CONTROL_S
        while perf_counter() < until:
            pass
        os.sched_yield()

    loads: dict[str, Callable[[int], Any]] = {
        "plan": lambda number: listed[number % len(paths)][0],
        "pillow": by_pillow,
        "simplejpeg": by_simplejpeg,
        "plan_memory": lambda number: plan.decode(encoded[number % len(encoded)], name="a picture"),
        "bare": bare,
        "control": control,
    }
    load = loads[name]
    for number in range(0 if name == "control" else len(paths)):
        result = load(number)
        whole = name == "simplejpeg"
        right = result.shape[2] == 3 if whole else tuple(result.shape) == (3, size, size)
        if not right or "uint8" not in str(result.dtype):
            raise BenchError(f"{name} gave {result.dtype} {tuple(result.shape)} of {paths[number]}")
    return load


def _cpu_seconds(load: Callable[[int], Any], seconds: float) -> float:
    """CPU of this thread, alone, for one picture."""
    end, count, began = perf_counter() + seconds, 0, thread_time()
    while perf_counter() < end or not count:
        load(count)
        count += 1
    return (thread_time() - began) / count


def _held_seconds(
    load: Callable[[int], Any], seconds: float, *, longest_s: float
) -> tuple[float, float]:
    """For one picture: how long the GIL is held, and how often it is taken."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_S)
    try:
        before, _ = _gaps(lambda _: os.sched_yield(), seconds / 4)
        gaps, count = _gaps(load, seconds)
        after, _ = _gaps(lambda _: os.sched_yield(), seconds / 4)
    finally:
        sys.setswitchinterval(interval)
    handovers, ours = (
        [gap for gap in found if gap < longest_s] for found in (before + after, gaps)
    )
    takes = len(gaps) / count
    return (fmean(ours) - fmean(handovers)) * takes, takes


def _gaps(load: Callable[[int], Any], seconds: float) -> tuple[list[float], int]:
    """The gaps in seconds, and how often `load` ran in another thread meanwhile."""
    ran, stop, ready = 0, False, threading.Event()

    def loop() -> None:
        nonlocal ran
        ready.set()
        while not stop:
            load(ran)
            ran += 1

    thread = threading.Thread(target=loop)
    thread.start()
    ready.wait()
    gaps: list[float] = []
    first = ran
    began = last = perf_counter()
    while last - began < seconds or ran == first:
        now = perf_counter()
        if now - last > LOOK_S:
            gaps.append(now - last)
        last = now
    count = ran - first
    stop = True
    thread.join()
    return gaps, count


def rows(results: Results) -> list[Row]:
    found = []
    for path, title in FILES.items():
        ours = path == "plan"
        aim = Aim("<=", 50, of="figure") if ours else None
        against = (FILES["pillow"], "held_us") if ours else None
        found.append(
            row(
                results,
                title,
                "held_us",
                name=f"GIL held: {title}",
                unit="us",
                against=against,
                aim=aim,
            )
        )
    found.append(row(results, CONTROL, "held_us", name=CONTROL, unit="us"))
    found += [
        row(results, title, "takes", name=f"GIL taken: {title}", unit="times")
        for title in FILES.values()
    ]
    found += [
        row(results, title, "tiny_us", name=f"no pixels: {title}", unit="us", aim=aim)
        for title, aim in zip(FILES.values(), (Aim("<=", 50, of="figure"), None, None), strict=True)
    ]
    found += [
        row(results, title, "cpu_us", name=f"CPU: {title}", unit="us")
        for title in (*FILES.values(), *MEMORY.values())
    ]
    plan, bare = MEMORY.values()
    aim = Aim(">=", 0.9)
    found.append(
        row(
            results,
            plan,
            "rate",
            name=f"rate: {plan}",
            unit="img/CPU s",
            against=(bare, "rate"),
            aim=aim,
        )
    )
    return found
