"""The kernels in a wheel for aarch64, in an emulator: `python -m tests.image.wheel_on_arm WHEEL`.

`scripts/release` calls this. QEMU runs them with the C library of Debian's libc6-arm64-cross. They must give torch's
pixels and draws to the bit. Of JPEGs they must make what the kernels of this machine make of them.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np

from fastload.image import RandomResizedCrop, Resize, ResizeCenterCrop
from fastload.image.kernels import kernels
from tests.image.compiling import compiled
from tests.image.jpeg_fuzz import damaged, intact
from tests.image.kernel_runs import Trial
from tests.image.test_kernels_on_arm import Cases, add_extremes, add_random_ones, replay

LIBRARY = "fastload/image/kernels/_kernels.so"
QEMU = ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]
ZIG = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.28"]
JPEGS = 400
PLANS = [
    RandomResizedCrop(40, flip=0.5),
    RandomResizedCrop((100, 130), scaled_decode=False),
    Resize((64, 33)),
    ResizeCenterCrop(60, (48, 20), scaled_decode=False),
]


def add_jpegs(cases: Cases) -> None:
    """Add JPEGs of all kinds, each as it is and damaged."""
    here = kernels()
    assert here, "this machine has no kernels"
    assert here.libjpeg, "the kernels of this machine do not decode"
    trial = Trial(here)
    for seed in range(JPEGS):
        random = np.random.default_rng(seed)
        encoded = intact(random)
        plan, bad = PLANS[seed % len(PLANS)], damaged(encoded, random)[0]
        cases.add_jpeg(plan, encoded, seed, trial, intact=True)
        cases.add_jpeg(plan, bad, seed, trial, intact=False)


def main(wheel: str) -> None:
    """Run the cases by NEON and in plain C, and say how many they were."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = Path(zipfile.ZipFile(wheel).extract(LIBRARY, folder))
        program = compiled("replay", folder, ZIG, kernels=[library])
        cases = Cases(folder / "cases")
        add_random_ones(cases)
        add_extremes(cases)
        add_jpegs(cases)
        cases.close()
        for words, passes in ([], "NEON"), (["plain"], "plain C"):
            assert replay([*QEMU, program, *words], cases) == passes
            print(f"{passes} of {LIBRARY}: {len(cases.expected)} cases hold, {2 * JPEGS} are JPEGs")


if __name__ == "__main__":
    main(sys.argv[1])
