"""Promises:
- The kernels give torch's pixels and draws to the bit on aarch64 too, with its own instructions and without.
- On this processor they do so without an error that AddressSanitizer or UBSan sees.
"""

from __future__ import annotations

import ctypes
import random
import re
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload.image import Plan, RandomResizedCrop, Resize, ResizeCenterCrop
from fastload.image.kernels.tables import DAMAGED, DONE, IMAGE, PLAN, UNREADABLE
from fastload.image.plan_tables import plan_table, result_size
from tests.image.compiling import SANITIZERS, compiled
from tests.image.kernel_runs import EXTREMES, by_torch, image_of, noise
from tests.image.photographs import Pixels

pytestmark = pytest.mark.slow

DRAW, RESAMPLE, RAW, CRC = range(4)  # `enum entry` of replay.c
RECORD = np.dtype(
    [
        ("entry", np.int64),
        ("input_bytes", np.int64),
        ("result_bytes", np.int64),
        ("image", IMAGE),
        ("expected", IMAGE),
        ("plan", PLAN),
    ]
)
UNTOUCHED = 77
LEVELS_BYTES = 3 * 256 * 4
ARM = "aarch64-linux-gnu-gcc"


# ---- what compiles and runs ----


def replay(command: Sequence[Any], environment: dict[str, str] | None = None) -> str:
    """Run all cases, and return the name of the instructions that ran."""
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = re.fullmatch(r"(.*): (\d+) same, (\d+) left to Python, 0 differ\n", run.stdout)
    assert counts is not None
    assert int(counts[2]) > 1_000
    assert int(counts[3]) < 0.02 * int(counts[2])
    return counts[1]


@pytest.fixture(scope="module")
def on_arm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The command that replays on aarch64."""
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if qemu is None or shutil.which(ARM) is None:
        pytest.skip(
            "no compiler for aarch64 here: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user"
        )
    return [qemu, compiled("replay", tmp_path_factory.mktemp("arm"), [ARM], "-static")]


@pytest.fixture(scope="module")
def with_sanitizers(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The command that replays on this processor."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here")
    return [compiled("replay", tmp_path_factory.mktemp("sanitized"), ["gcc"], *SANITIZERS)]


def test_on_arm(on_arm: list[Any], cases: Path) -> None:
    assert replay([*on_arm, cases]) == "NEON"
    assert replay([*on_arm, cases, "plain"]) == "plain C"


def test_under_the_sanitizers(with_sanitizers: list[Any], cases: Path) -> None:
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}
    assert replay([*with_sanitizers, cases], environment)
    assert replay([*with_sanitizers, cases, "plain"], environment) == "plain C"


# ---- cases ----


class Cases:
    """Writes cases into a file: what goes into the kernels, and what torch makes of it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def _write(
        self, entry: int, image: Any, expected: Any, plan: Any, content: bytes, result: bytes
    ) -> None:
        record = np.zeros((), RECORD)
        record["entry"], record["image"], record["expected"] = entry, image, expected
        record["input_bytes"], record["result_bytes"] = len(content), len(result)
        levels = b""
        if plan is not None:
            record["plan"] = plan
            if plan["levels"]:
                levels = ctypes.string_at(int(plan["levels"]), LEVELS_BYTES)
        self._file.write(record.tobytes() + levels + content + result)

    def draw(self, plan: Plan, height: int, width: int, key: int) -> None:
        image = np.zeros(1, IMAGE)
        image["key"], image["file"], image["height"], image["width"] = key, -1, height, width
        expected = with_region(image, plan, key)
        self._write(DRAW, image[0], expected[0], plan_row(plan, (1, 1, 1)), b"", b"")

    def checksum(self, content: bytes, begin: int) -> None:
        image = np.zeros(1, IMAGE)
        image["key"], image["file"] = begin, -1
        expected = image.copy()
        expected["checksum"] = zlib.crc32(content, begin)
        self._write(CRC, image[0], expected[0], None, content, b"")

    def pixels(
        self,
        plan: Plan,
        pixels: Pixels,
        key: int = 0,
        *,
        gap: int = 0,
        before: int = 0,
        state: int = DONE,
        levels: Any = None,
        **fields: int,
    ) -> None:
        """Add raw pixels, after `before` other bytes. `gap` pixels are between rows of the result."""
        strides = strides_of(plan, gap)
        row, memory = empty_memory(plan, strides)
        image = image_of(pixels, row, key=key)
        image["source"], image["row"] = before, 0
        for name, value in fields.items():
            image[name] = value
        expected = with_region(image, plan, key)
        expected["state"] = state
        table = plan_row(plan, strides)
        if state == DONE:
            made = by_torch(plan, pixels, key)
            if levels is not None:
                table["levels"] = levels.ctypes.data
                values = by_torch(Resize(plan.size), pixels).numpy()  # type: ignore[attr-defined]
                made = torch.from_numpy(np.stack([levels[k][values[k]] for k in range(3)]))
            row.copy_(made)
        content = bytes(before) + pixels.tobytes()
        self._write(RAW, image[0], expected[0], table, content, memory.numpy().tobytes())

    def box(self, plan: Plan, pixels: Pixels, top: int, left: int, height: int, width: int) -> None:
        """Add a box in decoded pixels, for `resample_run`."""
        row, memory = empty_memory(plan, strides_of(plan, 0))
        image = image_of(pixels[top : top + height, left : left + width], row)
        end = (top + height - 1) * pixels.strides[0] + 3 * (
            left + width
        )  # nothing after it is read
        image["source"], image["row"] = top * pixels.strides[0] + 3 * left, 0
        row.copy_(by_torch(plan, pixels[top : top + height, left : left + width]))
        content = pixels.tobytes()[:end]
        table = plan_row(plan, row.stride())
        self._write(RESAMPLE, image[0], image[0], table, content, memory.numpy().tobytes())


def with_region(image: Any, plan: Plan, key: int) -> Any:
    """The row of IMAGE with the box and the flip that torch draws."""
    region = plan.region(
        int(image["height"][0]), int(image["width"][0]), torch.Generator().manual_seed(key)
    )
    drawn = image.copy()
    for name, value in zip(("top", "left", "box_height", "box_width"), region.box, strict=True):
        drawn[name] = value
    drawn["flip"] = region.flip
    return drawn


def plan_row(plan: Plan, strides: tuple[int, ...]) -> Any:
    content = ctypes.string_at(plan_table(plan, strides, 0).address, PLAN.itemsize)
    return np.frombuffer(content, PLAN)[0].copy()


def strides_of(plan: Plan, gap: int) -> tuple[int, ...]:
    height, width = result_size(plan)
    line = width + gap
    return (1, 3 * line, 3) if plan.channels_last else (height * line, line, 1)


def empty_memory(plan: Plan, strides: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """A result, and all bytes of its memory."""
    shape = 3, *result_size(plan)
    count = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    dtype = torch.uint8 if plan.mean is None else torch.float32
    memory = torch.full((count * dtype.itemsize,), UNTOUCHED, dtype=torch.uint8)
    return memory.view(dtype).as_strided(shape, strides), memory


def any_plan(draw: random.Random, most: int) -> Plan:
    """A plan with results of up to `most` by `most` pixels."""
    common: dict[str, Any] = {"channels_last": draw.random() < 0.5}
    if draw.random() < 0.5:
        common["mean"] = [draw.uniform(-1, 1) for _ in range(3)]
        common["std"] = [draw.uniform(0.01, 2) for _ in range(3)]
    size = draw.randint(1, most), draw.randint(1, most)
    kind = draw.choice([RandomResizedCrop, Resize, ResizeCenterCrop])
    if kind is Resize:
        return Resize(size, **common)
    if kind is ResizeCenterCrop:
        both = draw.randint(1, most), draw.randint(1, most)
        before: Any = draw.choice([draw.randint(1, 80), both])
        return ResizeCenterCrop(before, size, **common)
    low = draw.uniform(0.01, 1.0)
    ratio = draw.uniform(0.2, 1.5)
    bounds = (low, draw.uniform(low, 1.0)), (ratio, draw.uniform(ratio, 3.0))
    return RandomResizedCrop(size, *bounds, draw.choice([0.0, 0.5, 1.0]), **common)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of all cases."""
    path = tmp_path_factory.mktemp("cases") / "cases"
    draw = random.Random(0)
    with path.open("wb") as file:
        made = Cases(file)
        for length in [*range(300), 1_000, 4_095, 196_608]:
            made.checksum(draw.randbytes(length), draw.getrandbits(32))
        for _ in range(600):
            most = draw.choice([64, 4_000, 40_000])
            sides = draw.randint(1, most), draw.randint(1, most)
            made.draw(any_plan(draw, 300), *sides, draw.getrandbits(63))
        for key in range(400):
            add_random_pixels(made, draw, key)
        add_extremes(made)
        add_what_cannot_be_read(made)
    return path


def add_random_pixels(made: Cases, draw: random.Random, key: int) -> None:
    plan = any_plan(draw, draw.choice([12, 80, 260]))
    most = draw.choice([12, 80, 400])
    pixels = noise(draw.randint(1, most), draw.randint(1, most), key)
    made.pixels(plan, pixels, key)
    made.pixels(
        plan,
        pixels,
        key,
        gap=draw.randint(0, 5),
        before=draw.randint(0, 99),
        file=0,
        checksum=draw.choice([-1, zlib.crc32(pixels.tobytes())]),
    )
    if isinstance(plan, Resize):
        top, left = draw.randrange(pixels.shape[0]), draw.randrange(pixels.shape[1])
        height = draw.randint(1, pixels.shape[0] - top)
        made.box(plan, pixels, top, left, height, draw.randint(1, pixels.shape[1] - left))


def add_extremes(made: Cases) -> None:
    for height, width, size in EXTREMES:
        for channels_last in (False, True):
            plan = Resize(size, channels_last=channels_last)
            made.pixels(plan, noise(height, width))
            made.pixels(plan, np.full((height, width, 3), 255, np.uint8))
    for width in (1, 7, 8, 24, 25, 224):
        levels = np.random.default_rng(width).normal(size=(3, 256)).astype(np.float32)
        for channels_last in (False, True):
            options: Any = {"channels_last": channels_last, "mean": (0,) * 3, "std": (1,) * 3}
            made.pixels(Resize((20, width), **options), noise(30, 40), levels=levels)


def add_what_cannot_be_read(made: Cases) -> None:
    plan, pixels = Resize((32, 33)), noise(61, 47)
    wrong = zlib.crc32(pixels.tobytes()) ^ 1
    made.pixels(plan, pixels, checksum=wrong, state=DAMAGED)
    made.pixels(plan, pixels, checksum=wrong, file=0, state=DAMAGED)
    made.pixels(plan, pixels, length=pixels.size + 1, state=DAMAGED)
    for source in (1, 10**9, -1, -(2**63), 2**63 - 1):
        made.pixels(plan, pixels, file=0, source=source, state=UNREADABLE)
