"""Programs in C that the tests link with the kernels' sources."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from fastload.image import kernels

KERNELS = Path(kernels.__file__).parent
SOURCES = sorted(KERNELS.glob("*.c"))
FLAGS = ["-std=gnu11", "-O2", "-g", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def compiled(
    name: str,
    folder: Path,
    compiler: Sequence[str],
    *options: str,
    libraries: Sequence[str] = (),
    kernels: Sequence[Path] = SOURCES,
) -> Path:
    """Compile the program `name`.c of this folder and the kernels. Return its path in `folder`."""
    program = folder / name
    sources = [Path(__file__).with_name(f"{name}.c"), *kernels]
    command = [*compiler, *FLAGS, *options, f"-I{KERNELS}", *map(str, sources), *libraries, "-lm"]
    subprocess.run([*command, "-o", program], check=True)
    return program
