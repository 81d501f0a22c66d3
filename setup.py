"""Builds the image kernels as one plain shared library, which serves every Python. pyproject.toml has all else.

Without a C compiler, or if it fails, fastload is installed without them, and torch's kernels do their work.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

LIBRARY = Path("fastload/image/kernels/_kernels.so")
SOURCES = sorted(map(str, LIBRARY.parent.glob("*.c")))

# They come after the flags of the environment, so that none of those changes a bit of an image.
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-fvisibility=hidden"]
FLAGS += ["-fno-fast-math", "-ffp-contract=off"]

# Says in the library what it was built from. In a clone, other sources may lie beside it by now.
BUILT = '__attribute__((visibility("default"))) const char built_from[] = "{digest} {way}";\n'

# Ends with status 0 if header and library are those of libjpeg-turbo, and fit each other.
PROBE = """#include <stdio.h>
#include <jpeglib.h>
int main(int count, char **arguments)
{
    struct jpeg_error_mgr errors;
    struct jpeg_decompress_struct decoder = {.err = jpeg_std_error(&errors)};
    jpeg_create_decompress(&decoder);
    if (count > 1)
        jpeg_crop_scanline(&decoder, NULL, NULL);
    return LIBJPEG_TURBO_VERSION_NUMBER < 2000000;
}
"""


def words(variable: str) -> list[str]:
    """Return the words of an environment variable."""
    return shlex.split(os.environ.get(variable, ""))


def run(*command: str, text: str = "") -> str:
    """Run a command and return what it prints. RuntimeError says which program is missing or failed."""
    try:
        done = subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise RuntimeError(f"{command[0]} {'is missing' if missing else 'failed'}") from error
    return done.stdout


def ways() -> dict[str, tuple[list[str], list[str]]]:
    """Return the ways to build, the best first, with options for the compiler and for the linker."""
    includes, folders = [], []
    with contextlib.suppress(RuntimeError):
        includes = run("pkg-config", "--cflags-only-I", "--silence-errors", "libjpeg").split()
        folders = run("pkg-config", "--libs-only-L", "libjpeg").split()
    for prefix in (os.environ.get("CONDA_PREFIX"), sys.base_prefix):
        if prefix and all(
            Path(prefix, name).exists() for name in ("conda-meta", "include/jpeglib.h")
        ):
            includes.append(f"-I{prefix}/include")
            folders.append(f"-L{prefix}/lib")
    named = [word[2:] for word in words("LDFLAGS") + folders if word.startswith("-L")]
    named += filter(None, os.environ.get("LIBRARY_PATH", "").split(":"))
    rpath = [f"-Wl,-rpath,{folder}" for folder in named if Path(folder, "libjpeg.so").exists()]
    jpeg = ["-DFASTLOAD_JPEG", *includes]
    return {
        "with libjpeg-turbo inside": (jpeg, [*folders, "-l:libjpeg.a", "-Wl,--exclude-libs,ALL"]),
        "with a shared libjpeg-turbo": (jpeg, [*folders, *rpath[:1], "-ljpeg"]),
        "without libjpeg-turbo": ([], []),
    }


def build(way: str, options: list[str], libraries: list[str], library: str) -> None:
    """Compile and link the library."""
    compiler = words("CC") or [next(filter(shutil.which, ("cc", "gcc", "clang")), "cc")]
    command = [*compiler, *words("CPPFLAGS"), *words("CFLAGS"), *FLAGS, *options, "-o", library]
    text, link = ["-x", "c", "-", "-x", "none"], [*words("LDFLAGS"), *libraries, "-lm"]
    if libraries:
        run(*command, *text, *link, text=PROBE)
        try:
            run(library)
        except RuntimeError as error:
            if not isinstance(
                error.__cause__, OSError
            ):  # no programs run in this /tmp, or none of that processor
                raise
    content = b"".join(path.read_bytes() for path in sorted(LIBRARY.parent.glob("*.[ch]")))
    built = BUILT.format(digest=sha256(content).hexdigest(), way=way)
    run(*command, "-shared", "-Wl,-z,defs,-z,text", *SOURCES, *text, *link, text=built)


class BuildKernels(build_ext):
    """Builds the library in the best way that works, or not at all."""

    def run(self) -> None:
        target = LIBRARY if self.inplace else Path(self.build_lib, LIBRARY)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            made = f"{folder}/{LIBRARY.name}"
            for way, (options, libraries) in ways().items():
                try:
                    build(way, options, libraries, made)
                except RuntimeError as error:
                    reason = error
                    continue
                part = shutil.copy(made, f"{target}.{os.getpid()}")
                os.replace(part, target)  # processes may have mapped the old one
                print(f"fastload: built the image kernels, {way}", flush=True)
                return
        target.unlink(missing_ok=True)  # an old one is of other sources
        print(f"fastload: continuing without the image kernels: {reason}", flush=True)

    def get_ext_filename(self, name: str) -> str:
        return str(LIBRARY)


class Wheel(bdist_wheel):
    """A wheel for each Python: of this platform if it has the library, and else of any."""

    def run(self) -> None:
        folder = self.get_finalized_command("build").build_lib
        shutil.rmtree(folder, ignore_errors=True)  # an earlier version left files there
        self.run_command("build")
        self.skip_build = True
        self.root_is_pure = not Path(folder, LIBRARY).exists()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


Path("build").mkdir(exist_ok=True)
setup(
    ext_modules=[Extension("fastload.image.kernels._kernels", SOURCES)],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": Wheel},
    # In the root, Python would take the metadata of the last build for an installation.
    options={"egg_info": {"egg_base": "build"}},
)
