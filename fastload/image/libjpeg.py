"""The libjpeg-turbo inside Pillow's wheel, found and checked for the kernel that decodes only the box of a JPEG.

The kernel calls libjpeg by addresses and reads its structs. So it uses only libraries that it was tested with. Before,
a child process on this machine checks the library: decode, fail and decode again (`libjpeg_check`).
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fastload.image import kernels as compiled
from fastload.image.kernels import Kernels, cache
from fastload.image.kernels.jpeg_layout import AT, DECODER, EMIT_MESSAGE, ERROR_EXIT, FUNCTIONS

TESTED_BUILDS = {
    "95aaa53bd33b0c0c6b7b92f81f4dbe29cfe10b650237f5d6efa4c0cd8f7bdd50": "Pillow 10.3.0, libjpeg-turbo 3.0.2",
    "62b943777f60e38f6dfca369c9698af2a6726061edde023d624cae1e01d188dd": "Pillow 10.4.0, libjpeg-turbo 3.0.3",
    "1e7818d0aa22603ed6642d3971c282beaa6901a958333b5ff2303b8b5ffe4a0a": "Pillow 11.0.0, libjpeg-turbo 3.0.4",
    "3e3fe395026427a38fa590d99e96c6162c51f9bc03e27c16790f724a9777a4c9": "Pillow 11.1.0, libjpeg-turbo 3.1.0",
    "267551247c7d2c7cef4f20a0bc82dc7e9757b870789bd99f27a20a9d009c802f": "Pillow 11.2.1, libjpeg-turbo 3.1.0",
    "2fd2cd3b79617a40ff920815e83ae0b25788fe05df97711f5b0029891c31cbd9": "Pillow 11.3.0, libjpeg-turbo 3.1.1",
    "9ccc476f7c4678d1e7fda0baf0fefff933fffd1754bc9a284a5ffb24415ad665": "Pillow 12.0.0, libjpeg-turbo 3.1.2",
    "8f4a84dae496ad34a13bdf0a7319d33969e93cf41f0da5e15a989404b5d9c01c": "Pillow 12.1.0, libjpeg-turbo 3.1.3",
    "debdae3aabf89e399ed90be4cddc23a5bbca7a3ad3c8e2104cbcfe4782030c33": "Pillow 12.1.1, libjpeg-turbo 3.1.3",
    "7d756b9abefcfaffa6e0958931332c1a066f060931e311c811f6a4dff801bdf2": "Pillow 12.2.0, libjpeg-turbo 3.1.4.1",
    "6d7c754529b30aff22efaaf88ba02061714591702c03f297f00ccb32ee6d9d9a": "Pillow 12.3.0, libjpeg-turbo 3.1.4.1",
    "cc04bc42fd6296e81d24d13955fb95bd829624f6c74105eaf4a7fcf2ce42e048": "Pillow 13.0.0, libjpeg-turbo 3.2.0",
}
"""SHA-256 of `pillow.libs/libjpeg-*.so` in the wheels for manylinux x86-64: the same file for every Python."""

_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}

CHECK_S = 120
"""The longest that a check may take."""


class Library(NamedTuple):
    """A loaded libjpeg."""

    path: Path
    sha256: str
    functions: tuple[int, ...]  # addresses of `FUNCTIONS`


class Unusable(Exception):
    """The region decoder cannot be used here. The message says why."""


class Decoder:
    """A thread's memory to decode boxes, at `address`: one decompressor at a time."""

    def __init__(self, kernels: Kernels, library: Library) -> None:
        room = np.zeros(DECODER.itemsize + 64, np.uint8)
        self.address = -(-room.ctypes.data // 64) * 64
        begin = self.address - room.ctypes.data
        self.fields = room[begin : begin + DECODER.itemsize].view(DECODER)
        self.fields["functions"] = library.functions
        _standard_errors()(self.address + AT.error_manager)
        pointers = self.fields["error_manager"][0].view(np.int64)
        pointers[ERROR_EXIT // 8] = _address(kernels.jpeg_error)
        pointers[EMIT_MESSAGE // 8] = _address(kernels.jpeg_message)


def region_decoder() -> Callable[[], Decoder] | None:
    """Return the function that creates a thread's decoder, or None if it may not be used yet. Never wait, never raise.

    The first calls start what is missing: compiling the kernels, and the check in a child process.
    """
    state = _state
    if state.factory is None and not state.given_up:
        if not state.lock.acquire(blocking=False):
            return None  # another thread advances the state
        try:
            state.advance()
        except Unusable as error:
            state.give_up(str(error))
        except Exception as error:
            state.give_up(f"{type(error).__name__}: {error}")
        finally:
            state.lock.release()
    return state.factory


def wait() -> None:
    """Wait until the check has found whether regions can be decoded here."""
    compiled.wait()
    while region_decoder() is None and not _state.given_up and _state.check is not None:
        _state.check.wait(CHECK_S)


def state() -> str:
    """Return a line that says whether boxes can be decoded here, as far as that is known. Start nothing."""
    if _state.factory is not None or _state.given_up:
        return _state.text
    try:
        found = library()
    except Unusable as error:
        return f"off: {error}"
    if importlib.util.find_spec("simplejpeg") is None:
        return "off: simplejpeg is not installed"
    if not compiled.state().startswith("compiled"):
        return "off without the image kernels"
    return f"{TESTED_BUILDS[found.sha256]} is a tested build; the first use checks it"


@lru_cache(maxsize=1)
def library() -> Library:
    """Return the libjpeg that Pillow uses. Raises Unusable if it was not tested."""
    functions, paths = [], set()
    for name in FUNCTIONS:
        try:
            function = getattr(_pillow(), name)
        except AttributeError:
            raise Unusable(f"Pillow's libjpeg has no {name}") from None
        functions.append(_address(function))
        paths.add(_file_of(functions[-1]))
    path = paths.pop()
    if paths or path is None:
        raise Unusable("Pillow's libjpeg cannot be found among the loaded libraries")
    digest = sha256(path.read_bytes()).hexdigest()
    if digest not in TESTED_BUILDS:
        raise Unusable(f"{path} is not one of the tested libraries (SHA-256 {digest})")
    return Library(path, digest, tuple(functions))


def verdict_name(kernels: Kernels, library: Library) -> str:
    """Return the name, in the cache, of the result of the check of these two."""
    parts = (kernels.path.name, library.sha256, importlib.metadata.version("simplejpeg"))
    return f"libjpeg-{sha256(' '.join(parts).encode()).hexdigest()[:32]}"


# ---- the way to a decoder ----


class _State:
    """How far this process has come towards a decoder."""

    def __init__(self) -> None:
        # Owns the other fields. One thread advances them, and the others do not wait.
        self.lock = threading.Lock()
        self.factory: Callable[[], Decoder] | None = None
        self.given_up = False
        self.text = "not asked for"
        self.check: subprocess.Popen[bytes] | None = None

    def give_up(self, reason: str) -> None:
        """Store the reason, and never try again in this process."""
        self.text, self.given_up = f"off: {reason}", True

    def advance(self) -> None:
        """Advance as far as possible without waiting. Raises Unusable if the library cannot be used."""
        if importlib.util.find_spec("simplejpeg") is None:
            # Then Pillow decodes the other images, at other scales.
            raise Unusable("simplejpeg is not installed")
        found = library()
        kernels = compiled.kernels()
        if kernels is None:
            self.text = f"waits for the kernels ({compiled.state()})"
            return
        verdict = self._verdict(verdict_name(kernels, found))
        if verdict is None:
            self.text = f"being checked in a child process ({found.path})"
            return
        if verdict:
            raise Unusable(verdict)
        self.text = f"on ({TESTED_BUILDS[found.sha256]}: {found.path})"
        self.factory = lambda: Decoder(kernels, found)

    def _verdict(self, name: str) -> str | None:
        """Return the result of the check: "" if all is well, a reason if not, or None if it is not known yet."""
        if self.check is not None and self.check.poll() is None:
            return None
        if cached := cache.find(name):
            return cached[1].decode()
        if self.check is None:
            self.check = _start_check(name)
            return None
        verdict = f"the check ended with status {self.check.returncode}"
        # If anything else ended it, the next process checks again.
        if -self.check.returncode in _CRASHES:
            with suppress(OSError):
                cache.store(name, verdict.encode())
        return verdict


_state = _State()


def _forget() -> None:
    """Start again in a forked process if there is no decoder yet: the checking child belongs to the parent."""
    global _state
    if _state.factory is None:
        _state = _State()


os.register_at_fork(after_in_child=_forget)


def _start_check(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"{__package__}.libjpeg_check", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        start_new_session=True,  # so that Ctrl-C does not reach it
    )


# ---- the loaded library ----


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@lru_cache(maxsize=1)
def _pillow() -> ctypes.CDLL:
    """Return a handle that finds the symbols that Pillow's decoders find."""
    from PIL import _imaging

    return ctypes.CDLL(_imaging.__file__)


def _standard_errors() -> Any:
    function = _pillow().jpeg_std_error
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    return function


def _file_of(address: int) -> Path | None:
    """Return the file from which the memory at `address` was loaded."""
    lookup = ctypes.CDLL(None).dladdr
    lookup.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
    symbol = _Symbol()
    if not lookup(address, ctypes.byref(symbol)) or not symbol.file:
        return None
    return Path(os.fsdecode(symbol.file)).resolve()


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
