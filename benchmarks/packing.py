"""Promises:
- The time of packing is measured beside the decoding and encoding in it.
- The memory of packing is measured for a set and for a larger one.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch

from benchmarks._data import sample_images
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.recipes import PACKED_SIDE, QUALITY
from fastload.bench.figures import BenchError
from fastload.datasets import PackedDataset
from fastload.datasets.manifest import Mode
from fastload.datasets.packed.format import MODES
from fastload.datasets.packed.packing import pack
from fastload.image import decode_pixels, encode_rgb
from fastload.measure.page_cache import prepare_cache
from fastload.measure.processes import tree_memory

TITLE = (
    f"packing: 2,048 JPEGs, in the page cache, into a set on this machine's temporary folder, 2 threads; "
    f"jpeg and raw of {PACKED_SIDE} px"
)
REPEATS = 3

Which = Literal["", "bare", "larger"]
COUNT, SMOKE_COUNT = 2048, 16
COPIES = 4
"""How often the larger set has each image."""
WORKERS = 2
WAYS: list[tuple[Which, str, int]]
WAYS = [("", "pack", 1), ("bare", "bare", 1), ("larger", "pack", COPIES)]
SLOWER, LARGER = 1.2, 1.1
"""The most that packing may take: of the time of its decoding and encoding, and of a smaller set's memory."""


def cases(*, smoke: bool) -> list[Case]:
    count = SMOKE_COUNT if smoke else COUNT
    return [
        Case(
            _name(mode, which),
            {"mode": mode, "count": count, "way": way, "copies": copies},
            watch_memory=way == "pack",
        )
        for mode in MODES
        for which, way, copies in WAYS
    ]


def measure(*, mode: Mode, way: Literal["pack", "bare"], count: int, copies: int) -> Figures:
    """Seconds of either way, and of packing the memory. BenchError unless the set has all images, right ones."""
    paths = sample_images(count)
    prepare_cache(paths, "warm")
    torch.set_num_threads(1)  # as in the threads of a loader
    if way == "bare":
        return {"seconds": _bare_seconds(mode, paths)}
    with tempfile.TemporaryDirectory(prefix="fastload-packing-") as folder:
        _pack(mode, paths[:1], Path(folder, "first"))  # imports what the next one does without
        began = perf_counter()
        out = _pack(mode, paths * copies, Path(folder, "timed"))
        seconds = perf_counter() - began
        memory = tree_memory(os.getpid())
        check(out, paths, copies=copies)
    return {"seconds": seconds, "peak_mib": (memory or 0) / 2**20}


def _pack(mode: Mode, paths: list[str], folder: Path) -> Path:
    """The set of these images."""
    folder.mkdir()
    listed = folder / "list.txt"
    listed.write_text("".join(f"{path}\n" for path in paths))
    pack(
        listed,
        folder / "set",
        mode=mode,
        max_size=None if mode == "encoded" else PACKED_SIDE,
        quality=QUALITY if mode == "jpeg" else None,
        workers=WORKERS,
    )
    return folder / "set"


def payload(mode: Mode, path: str, encoded: bytes) -> bytes:
    """What an image is packed as: decoded in every mode, as `pack` does to see whether it can be."""
    pixels = decode_pixels(encoded, name=path, max_size=None if mode == "encoded" else PACKED_SIDE)
    if mode == "jpeg":
        return encode_rgb(pixels, quality=QUALITY)
    return encoded if mode == "encoded" else pixels.tobytes()


def _bare_seconds(mode: Mode, paths: list[str]) -> float:
    """Of plain threads that only make the payloads: out of memory, and into nothing."""
    images = [(path, Path(path).read_bytes()) for path in paths]
    payload(mode, *images[0])
    with ThreadPoolExecutor(WORKERS) as pool:
        began = perf_counter()
        for _ in pool.map(partial(payload, mode), *zip(*images, strict=True)):
            pass
        return perf_counter() - began


def check(out: Path, paths: list[str], *, copies: int) -> None:
    """Raise BenchError unless the set has each image so often, in order; the payloads of 16 of them are looked at."""
    dataset = PackedDataset(out, decode=False)
    count = len(paths) * copies
    if len(dataset) != count:
        raise BenchError(f"the set has {len(dataset)} records, expected {count}")
    for number in range(0, count, max(1, count // 16)):
        path = paths[number % len(paths)]
        if dataset.read(number) != payload(dataset.mode, path, Path(path).read_bytes()):
            raise BenchError(f"record {number} is not {path} as mode {dataset.mode} makes it")
    dataset.close()


def rows(results: Results) -> list[Row]:
    found = []
    for mode in MODES:
        bare, aim = _name(mode, "bare"), Aim("<=", SLOWER)
        reference = f"bare threads that {_work(mode)}"
        of = partial(row, results, key="seconds", unit="s")
        found.append(of(_name(mode), against=(bare, "seconds"), reference=reference, aim=aim))
        found.append(of(bare))
    for mode in MODES:
        smaller, larger, aim = _name(mode), _name(mode, "larger"), Aim("<=", LARGER)
        of = partial(row, results, key="peak_mib", unit="MiB at most")
        found += [of(smaller), of(larger, against=(smaller, "peak_mib"), aim=aim)]
    return found


def _name(mode: Mode, which: Which = "") -> str:
    if which == "bare":
        return f"{mode}: bare threads that {_work(mode)}"
    return f"{mode}: fastload set pack" + f", {COPIES} times the images" * (which == "larger")


def _work(mode: Mode) -> str:
    return "decode and encode" if mode == "jpeg" else "decode"
