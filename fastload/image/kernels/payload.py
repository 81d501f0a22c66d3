"""The bytes of an image: read from its file, compared with their checksum, and timed."""

from __future__ import annotations

from numba import njit, types

from fastload.image.kernels.checksum import crc32
from fastload.image.kernels.memory import (
    IMAGE_AT,
    OPTIONS,
    add_time,
    function,
    load_i64,
    nanoseconds,
    read_all,
    store_i64,
)
from fastload.image.kernels.tables import DAMAGED, DONE, TOO_LARGE, UNREADABLE

EXTERNALS = ("close", "lseek", "open")
"""The C functions that only this file calls."""

_O_RDONLY_CLOEXEC = 0o2000000
_SEEK_END = 2
_MOST_FILE_BYTES = 1 << 30  # Python reads a larger file, or a directory, whose end is beyond this

_open = function("open", types.int32, types.int64, types.int32)
_close = function("close", types.int32, types.int32)
_seek = function("lseek", types.int64, types.int32, types.int64, types.int32)


@njit(**OPTIONS)
def read_payload(image: int, source: int, length: int, arena: int) -> int:
    """Read the payload's bytes, if it is in a file, and check them. Return their address, or 0 if the state is bad."""
    began = nanoseconds()
    file, payload = load_i64(image + IMAGE_AT.file), source
    state = DONE
    if file >= 0:
        payload = arena
        if not read_all(file, arena, length, source):
            state = UNREADABLE
    expected = load_i64(image + IMAGE_AT.checksum)
    if state == DONE and expected >= 0 and crc32(payload, length, 0) != expected:
        state = DAMAGED
    store_i64(image + IMAGE_AT.state, state)
    add_time(image + IMAGE_AT.read_ns, began)
    return payload if state == DONE else 0


@njit(**OPTIONS)
def read_file(image: int, arena: int, arena_bytes: int) -> int:
    """Read the file named at `source`, and set length and state. Return the bytes that are needed, or 0 if they fit."""
    began = nanoseconds()
    file = _open(load_i64(image + IMAGE_AT.source), _O_RDONLY_CLOEXEC)
    if file < 0:
        store_i64(image + IMAGE_AT.state, UNREADABLE)
        return 0
    length = _seek(file, 0, _SEEK_END)
    state, needed = DONE, 0
    if length < 1 or length > _MOST_FILE_BYTES:
        state = UNREADABLE
    elif length > arena_bytes:
        state, needed = TOO_LARGE, length
    elif not read_all(file, arena, length, 0) or _seek(file, 0, _SEEK_END) != length:
        state = UNREADABLE
    _close(file)
    store_i64(image + IMAGE_AT.length, length)
    store_i64(image + IMAGE_AT.state, state)
    add_time(image + IMAGE_AT.read_ns, began)
    return needed
