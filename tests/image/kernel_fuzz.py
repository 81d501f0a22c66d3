"""Damaged images through the kernels in C, with AddressSanitizer and UBSan: `python -m tests.image.kernel_fuzz`.

`scripts/fuzz-jpeg` calls this. With clang, the same file is a target of libFuzzer:

    clang -O2 -g -fsanitize=fuzzer,address,undefined -DLIBFUZZER -DFASTLOAD_JPEG -Ifastload/image/kernels \\
        tests/image/fuzz_kernels.c fastload/image/kernels/*.c -ljpeg -lm -o fuzz && ./fuzz
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from fastload.image import kernels
from tests.image.compiling import SANITIZERS, compiled
from tests.image.jpeg_fuzz import intact

PARTS = ("scan", "header", "records")
SEEDS = 200


def compiler() -> list[str]:
    """Return the command of the C compiler, or an empty list if there is none."""
    words = shlex.split(os.environ.get("CC", "cc"))
    return words if shutil.which(words[0]) else []


def build(folder: Path) -> Path:
    """Compile the program that damages files, with libjpeg-turbo if the kernels have it. Return its path."""
    ready = kernels.kernels()
    if ready is None or ready.libjpeg is None:
        return compiled("fuzz_kernels", folder, compiler(), *SANITIZERS)
    options = [*SANITIZERS, "-DFASTLOAD_JPEG"]
    return compiled("fuzz_kernels", folder, compiler(), *options, libraries=["-ljpeg"])


def seeds(folder: Path) -> list[Path]:
    """Write JPEGs of all kinds to a folder, and return their paths."""
    paths = [folder / f"{k}.jpg" for k in range(SEEDS)]
    for k, path in enumerate(paths):
        path.write_bytes(intact(np.random.default_rng(k)))
    return paths


def run(program: Path, part: str, count: int, seed: int, files: list[Path]) -> dict[str, int]:
    """Run the program, and return how many inputs had each state. Raises CalledProcessError if one crashes."""
    command = [program, part, str(count), str(seed), *files]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    words = done.stdout.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


def main() -> None:
    """Build the program, run all parts, and print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs of each part")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        program, files = build(Path(name)), seeds(Path(name))
        for part in PARTS:
            counts = run(program, part, options.count, options.seed, files)
            print(json.dumps({"part": part, "inputs": options.count, **counts}), flush=True)


if __name__ == "__main__":
    main()
