"""Promises:
- fastload installs with or without a C compiler and libjpeg-turbo. A line of the build says what the kernels lack.
- A wheel serves every Python: on this platform if it has the kernels, and else on any.
- Flags of the environment do not change how the kernels round.

setup.py runs for real, in a folder with one source in C. The compiler is a script that fails for some of its arguments.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KERNELS = "fastload/image/kernels"

PROJECT = f"""
[project]
name = "fastload"
version = "1"
[tool.setuptools]
packages = ["fastload"]
package-data.fastload = ["{KERNELS.partition("/")[2]}/*.txt"]
"""

SOURCE = """
#ifdef FASTLOAD_JPEG
#include <stdio.h>
#include <jpeglib.h>
static struct jpeg_error_mgr errors;
__attribute__((visibility("default"))) int decoder(void)
{
    struct jpeg_decompress_struct made = {.err = &errors};
    jpeg_create_decompress(&made);
    jpeg_destroy_decompress(&made);
    return LIBJPEG_TURBO_VERSION_NUMBER;
}
#else
__attribute__((visibility("default"))) int decoder(void) { return 0; }
#endif
"""

COMPILER = """#!/bin/sh
echo "$@" >>'{log}'
case "$*" in {refused}) exit 1 ;; esac
exec cc "$@"
"""

needs_setuptools = pytest.mark.skipif(
    int(version("setuptools").partition(".")[0]) < 77, reason="an old setuptools"
)
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")


def has_libjpeg() -> bool:
    """Return whether setup.py can find libjpeg-turbo here without help."""
    headers = "#include <stdio.h>\n#include <jpeglib.h>\n"
    command = ["cc", "-x", "c", "-fsyntax-only", "-"]
    return subprocess.run(command, input=headers, text=True, capture_output=True).returncode == 0


needs_libjpeg = pytest.mark.skipif(
    shutil.which("cc") is None or not has_libjpeg(), reason="libjpeg-turbo's headers are missing"
)


@dataclass(frozen=True)
class Place:
    """A folder with setup.py and one source."""

    root: Path

    @property
    def library(self) -> Path:
        return self.root / KERNELS / "_kernels.so"

    def compiler(self, refused: str) -> str:
        """Make a compiler that fails if its arguments match a pattern of the shell."""
        path = self.root / "compiler"
        path.write_text(COMPILER.format(log=self.root / "log", refused=refused))
        path.chmod(0o755)
        return shlex.quote(str(path))

    def run(self, *command: str, **environment: str) -> str:
        """Run setup.py, which must not fail. Return the lines that are fastload's."""
        cleared = ("CC", "CFLAGS", "CPPFLAGS", "LDFLAGS", "CPATH", "LIBRARY_PATH", "CONDA_PREFIX")
        kept = {name: value for name, value in os.environ.items() if name not in cleared}
        run = subprocess.run(
            [sys.executable, "setup.py", "--quiet", *(command or ("build_ext", "--inplace"))],
            cwd=self.root,
            env=kept | environment,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert run.returncode == 0, run.stderr
        said = [line for line in run.stdout.splitlines() if line.startswith("fastload: ")]
        return "\n".join(line.removeprefix("fastload: ") for line in said)

    def wheel(self, **environment: str) -> str:
        self.run("bdist_wheel", **environment)
        (wheel,) = (self.root / "dist").iterdir()
        wheel.unlink()
        return wheel.name


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path / "a place")
    made.library.parent.mkdir(parents=True)
    shutil.copy(ROOT / "setup.py", made.root)
    (made.root / "pyproject.toml").write_text(PROJECT)
    (made.root / "fastload" / "__init__.py").write_text("")
    (made.library.parent / "source.c").write_text(SOURCE)
    return made


@needs_setuptools
@pytest.mark.parametrize("compiler", ["missing", "false"])
def test_without_a_compiler_all_but_the_kernels_is_installed(place: Place, compiler: str) -> None:
    place.library.write_text("of other sources")
    failed = "is missing" if compiler == "missing" else "failed"
    said = f"continuing without the image kernels: {compiler} {failed}"
    assert place.run(CC=compiler) == said
    assert not place.library.exists()


@pytest.mark.slow
@needs_setuptools
@needs_compiler
def test_the_wheel_is_for_every_python_and_keeps_nothing_of_an_earlier_build(place: Place) -> None:
    assert place.wheel().startswith("fastload-1-py3-none-linux_")
    assert place.wheel(CC="missing") == "fastload-1-py3-none-any.whl"


@needs_setuptools
@pytest.mark.parametrize(
    ("refused", "way", "decodes"),
    [
        pytest.param("nothing", "with libjpeg-turbo inside", True, marks=needs_libjpeg),
        pytest.param("*libjpeg.a*", "with a shared libjpeg-turbo", True, marks=needs_libjpeg),
        pytest.param("*jpeg*", "without libjpeg-turbo", False, marks=needs_compiler),
    ],
)
def test_libjpeg_is_inside_or_shared_or_missing(
    place: Place, refused: str, way: str, decodes: bool
) -> None:
    assert place.run(CC=place.compiler(refused)).startswith(f"built the image kernels, {way}")
    built = ctypes.CDLL(str(place.library))
    assert (built.decoder() > 2_000_000) == decodes
    assert way.encode() in place.library.read_bytes()
    assert not hasattr(built, "jpeg_destroy_decompress") or "shared" in way


@needs_setuptools
@needs_compiler
def test_flags_of_the_environment_are_kept_but_cannot_change_the_rounding(place: Place) -> None:
    place.run(CC=place.compiler("nothing"), CFLAGS="-Ofast -DMINE=1", LDFLAGS="-Wl,-O1")
    given = (place.root / "log").read_text().splitlines()[-1].split()
    assert {"-Ofast", "-DMINE=1", "-Wl,-O1"} <= {*given}
    own = [given.index(flag) for flag in ("-O3", "-fno-fast-math", "-ffp-contract=off")]
    assert min(own) > given.index("-Ofast")
