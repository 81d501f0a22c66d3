"""Promises:
- The kernels give torch's pixels and draws to the bit on aarch64 too, with its own instructions and without.
- On this processor they do so without an error that AddressSanitizer or UBSan sees.
"""

from __future__ import annotations

import ctypes
import io
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fastload.image import Plan, RandomResizedCrop, Resize
from fastload.image.kernels.tables import DAMAGED, DONE, IMAGE, PLAN, UNDECIDED, UNREADABLE
from fastload.image.plan_tables import plan_table
from tests.image.compiling import SANITIZERS, compiled
from tests.image.kernel_fuzz import compiler
from tests.image.kernel_runs import EXTREMES, Trial, by_torch, empty_row, image_of, noise
from tests.image.photographs import Pixels
from tests.image.test_kernels_draws import BOUNDS, BOX
from tests.image.test_kernels_draws import SIDES as DRAWN_SIDES
from tests.image.test_kernels_pixels import SIDES, plans

pytestmark = pytest.mark.slow

ARM = "aarch64-linux-gnu-gcc"
HEADER = 3 * 8 + IMAGE.itemsize + PLAN.itemsize  # bytes of replay.c's `struct record`
ANSWERED = ["state", *BOX]
KEYS = st.integers(0, 2**63 - 1)
SAMPLED = settings(
    max_examples=400, phases=[Phase.generate], derandomize=True, database=None, deadline=None
)


class Cases:
    """Images and plans in a file for replay.c, and what the kernels are to make of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.expected: list[tuple[tuple[int, ...], bytes, bool]] = []
        self._file = path.open("wb")

    def add(
        self,
        plan: Plan,
        pixels: Pixels,
        key: int = 0,
        *,
        in_file: bool = False,
        state: int = DONE,
        **fields: int,
    ) -> None:
        """Add raw pixels in memory, or in this file, with `fields` of IMAGE set. `state` is what they end with."""
        row = empty_row(plan)
        image = image_of(pixels, row, key=key)
        if in_file:
            image["file"], image["source"] = 0, self._file.tell() + HEADER
        for name, value in fields.items():
            image[name] = value
        table = ctypes.string_at(plan_table(plan, row.stride(), 0).address, PLAN.itemsize)
        numbers = np.array([pixels.nbytes, row.nbytes, 0])
        self._file.write(numbers.tobytes() + image.tobytes() + table + pixels.tobytes())
        generator = torch.Generator().manual_seed(key)
        region = plan.region(int(image["height"][0]), int(image["width"][0]), generator)
        if state == DONE:
            row.copy_(by_torch(plan, pixels, key))
        answer = (state, *region.box, int(region.flip))
        self.expected.append((answer, ctypes.string_at(row.data_ptr(), row.nbytes), True))

    def add_jpeg(self, plan: Plan, encoded: bytes, key: int, trial: Trial, *, intact: bool) -> None:
        """Add a JPEG in memory. It is to become what this machine's kernels make of it.

        The instructions of two processors may make other pixels of damaged coefficients, but no other state.
        """
        state, result = trial.run_bytes(plan, key, encoded)
        image = np.zeros(1, IMAGE)
        image["key"], image["file"], image["checksum"], image["length"] = key, -1, -1, len(encoded)
        table = plan_table(plan, (1, 3 * result.shape[1], 3), 0).address
        numbers = np.array([len(encoded), result.nbytes, 1])
        parts = numbers.tobytes(), image.tobytes(), ctypes.string_at(table, PLAN.itemsize), encoded
        self._file.write(b"".join(parts))
        answer = trial.image[0][ANSWERED].item()
        self.expected.append((answer, result.tobytes(), intact and state == DONE))

    def close(self) -> None:
        self._file.close()


def add_random_ones(cases: Cases) -> None:
    @SAMPLED
    @given(plan=plans(), height=SIDES, width=SIDES, key=KEYS)
    def add_pixels(plan: Plan, height: int, width: int, key: int) -> None:
        pixels = noise(height, width, key)
        cases.add(plan, pixels, key)
        cases.add(plan, pixels, key, in_file=True, checksum=zlib.crc32(pixels.tobytes()))

    @SAMPLED
    @given(scale=BOUNDS, ratio=BOUNDS, height=DRAWN_SIDES, width=DRAWN_SIDES, key=KEYS)
    def add_draw(scale: Any, ratio: Any, height: int, width: int, key: int) -> None:
        # The kernels draw before they compare the length.
        plan, state = RandomResizedCrop(8, scale, ratio, 0.5), DAMAGED
        cases.add(plan, noise(1, 1), key, state=state, height=height, width=width, length=0)

    add_pixels()
    add_draw()


def add_extremes(cases: Cases) -> None:
    for height, width, size in EXTREMES:
        for channels_last in (False, True):
            plan = Resize(size, channels_last=channels_last)
            cases.add(plan, noise(height, width))
            cases.add(plan, np.full((height, width, 3), 255, np.uint8))
    for width in [*range(1, 70), 1_365, 65_536]:
        pixels = noise(1, width, width)
        checksum = zlib.crc32(pixels.tobytes())
        cases.add(Resize((1, 1)), pixels, checksum=checksum)
        cases.add(Resize((1, 1)), pixels, checksum=checksum ^ 1, state=DAMAGED)
    for source in (10**12, -2, -(2**63), 2**63 - 1):  # -1 would move the position of the file
        cases.add(Resize((8, 8)), noise(61, 47), in_file=True, source=source, state=UNREADABLE)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    made = Cases(tmp_path_factory.mktemp("cases") / "cases")
    add_random_ones(made)
    add_extremes(made)
    made.close()
    return made


def replay(command: Sequence[Any], cases: Cases, environment: dict[str, str] | None = None) -> str:
    """Run all cases, compare what they became, and return the name of the instructions that ran."""
    with cases.path.open("rb") as file:
        run = subprocess.run(command, stdin=file, env=environment, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr.decode()
    answers, left_to_torch = io.BytesIO(run.stdout), 0
    for number, (answer, result, defined) in enumerate(cases.expected):
        image = np.frombuffer(answers.read(IMAGE.itemsize), IMAGE)[0]
        made = answers.read(len(result))
        if image["state"] == UNDECIDED:
            left_to_torch += 1
        else:
            assert image[ANSWERED].item() == answer, f"case {number}"
            assert made == result or not defined, f"case {number}"
    assert left_to_torch < 0.02 * len(cases.expected)
    return run.stderr.decode()


def test_on_arm(tmp_path: Path, cases: Cases) -> None:
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if qemu is None or shutil.which(ARM) is None:
        pytest.skip("apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user")
    program = compiled("replay", tmp_path, [ARM], "-O3", "-static")
    assert replay([qemu, program], cases) == "NEON"
    assert replay([qemu, program, "plain"], cases) == "plain C"


@pytest.mark.skipif(not compiler(), reason="there is no C compiler")
def test_under_the_sanitizers(tmp_path: Path, cases: Cases) -> None:
    program = compiled("replay", tmp_path, compiler(), *SANITIZERS)
    environment = {"ASAN_OPTIONS": "detect_leaks=0"}
    assert replay([program], cases, environment)
    assert replay([program, "plain"], cases, environment) == "plain C"
