"""The image kernels: a shared library in C that fills whole runs of rows in one call, without the GIL.

The installation builds it, if it finds a C compiler. It decodes JPEGs too if libjpeg-turbo was found. Without it,
torch's own kernels give the same pixels, to the bit. `state()` and `fastload env` say what runs, and why.

`FASTLOAD_KERNELS=0` turns the kernels off, and `plain` takes those for any processor.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).with_name("_kernels.so")

Entry = Callable[..., int]

_REMEDY = "pip install --force-reinstall --no-deps --no-cache-dir FOLDER, the folder of a clone of fastload"

_ADDRESS, _COUNT = ctypes.c_void_p, ctypes.c_int64
_RUN = [_ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT]
_ENTRIES: dict[str, tuple[Any, list[Any]]] = {
    **dict.fromkeys(("raw_run", "jpeg_run", "file_run"), (_COUNT, _RUN)),
    "use_plain": (None, [ctypes.c_bool]),
    "passes_name": (ctypes.c_char_p, []),
    "jpeg_name": (ctypes.c_char_p, []),
}
"""The entry points of runs.c and passes.c: the type of the result, and those of the arguments."""


class Kernels:
    """The entry points, as functions that release the GIL. See runs.c and passes.c."""

    raw_run: Entry
    jpeg_run: Entry
    file_run: Entry

    def __init__(self, library: ctypes.CDLL) -> None:
        """Raise ValueError if the library was built from other sources than those beside it, or does not say so."""
        built_from = ctypes.c_char * 64
        built = built_from.in_dll(library, "built_from").value.decode()
        if (sources := _sources()) and built != sources:
            raise ValueError("built from other sources")
        for name, (result, arguments) in _ENTRIES.items():
            entry = getattr(library, name)
            entry.restype, entry.argtypes = result, arguments
            setattr(self, name, entry)
        if os.environ.get("FASTLOAD_KERNELS") == "plain":
            library.use_plain(True)
        self.passes: str = library.passes_name().decode()
        """The instructions that the inner loops use."""
        self.libjpeg: str | None = (library.jpeg_name() or b"").decode() or None
        """The library that decodes JPEGs, or None if there is none."""


@lru_cache(maxsize=1)
def _loaded() -> Kernels | str:
    """Return the kernels, or why there are none."""
    if (switch := os.environ.get("FASTLOAD_KERNELS", "1")) in ("0", "off", "no", "false"):
        return f"off: FASTLOAD_KERNELS={switch}"
    if not LIBRARY.exists():
        return (
            "off: fastload was installed without a C compiler that works. With one (Debian: gcc "
            f"libc6-dev libjpeg-dev): {_REMEDY}"
        )
    try:
        return Kernels(ctypes.CDLL(str(LIBRARY)))
    except (OSError, AttributeError, ValueError) as error:
        return f"off: {error}. To build them again: {_REMEDY}"


def kernels() -> Kernels | None:
    """Return the kernels, or None if they cannot run here. Never raise."""
    found = _loaded()
    return None if isinstance(found, str) else found


def state() -> str:
    """Return a line that says which kernels run, or why none do."""
    found = _loaded()
    return found if isinstance(found, str) else f"on ({found.passes}: {LIBRARY})"


def decoder_state() -> str:
    """Return a line that says whether the kernels decode JPEGs, or why not."""
    found = _loaded()
    if isinstance(found, str):
        return "off without the image kernels"
    if found.libjpeg is None:
        return (
            "off: fastload was installed without the headers of libjpeg-turbo. With them (Debian: "
            f"libjpeg-dev): {_REMEDY}"
        )
    return f"on ({found.libjpeg})"


def _sources() -> str:
    """Return the hash of the sources that setup.py writes into the library, or "" in a wheel, which has none."""
    paths = sorted(path for path in LIBRARY.parent.iterdir() if path.suffix in (".c", ".h"))
    return sha256(b"".join(path.read_bytes() for path in paths)).hexdigest() if paths else ""
