"""Flat binary files of tokens, here or at URLs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from tokenize import TokenError
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from fastload._kit.disk import Descriptor, identity, open_file, preadv
from fastload.errors import SequenceError
from fastload.remote.files import apart, is_url, open_binary, store_of

Path = str | os.PathLike[str]


class Part(NamedTuple):
    """A file of tokens. `identity` tells if it is replaced, and `offset` is the byte of its first token."""

    path: str
    identity: tuple[Any, ...]
    """`fastload._kit.disk.identity` of a local file. ETag and size of an object."""
    dtype: np.dtype[Any]
    offset: int
    tokens: int

    @property
    def is_remote(self) -> bool:
        """Whether it is at a URL."""
        return is_url(self.path)

    def span(self, first: int, count: int) -> tuple[int, int]:
        """Return begin and end of the bytes of tokens."""
        begin = self.offset + first * self.dtype.itemsize
        return begin, begin + count * self.dtype.itemsize

    def check_object(self) -> None:
        """Raise SequenceError if this process has read another object than the dataset was created with."""
        now, then = store_of(self.path).etag(self.path), self.identity[0]
        if None not in (now, then) and now != then:
            raise SequenceError(
                f"{self.path}: the object was replaced since the dataset was created: its ETag was {then}, and is "
                f"{now}. Create the dataset again"
            )


class OpenFile(Descriptor):
    """An open file of tokens."""

    def __init__(self, part: Part) -> None:
        self.part = part
        super().__init__(os.open(part.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        if identity(self.fd) != part.identity:
            raise self._changed()

    def read(self, begin: int, end: int) -> bytearray:
        """Return a range of the file's bytes."""
        found = bytearray(end - begin)
        try:
            if preadv(self.fd, memoryview(found), begin) < end - begin:
                raise self._changed()
        except OSError as error:
            error.filename = self.part.path  # unlike open(), a read does not name it
            raise
        return found

    def _changed(self) -> SequenceError:
        now = os.fstat(self.fd).st_size
        return SequenceError(
            f"{self.part.path}: the file was cut off, replaced or changed since the dataset was created. The file has "
            f"{now:,} bytes now, and had {self.part.identity[2]:,} then. Create the dataset again"
        )


def parts_of(files: Sequence[Path], dtypes: Sequence[Any]) -> list[Part]:
    """Return files of tokens, which must be of whole tokens."""
    paths = [path if is_url(path) else os.path.abspath(path) for path in files]
    asked = [*zip(paths, dtypes, strict=True)]
    remote = [file for file in asked if is_url(file[0])]
    found = iter(apart(_objects, remote) if remote else ())
    return [next(found) if is_url(path) else _part(path, dtype) for path, dtype in asked]


def _objects(files: Sequence[tuple[str, Any]]) -> list[Part]:
    return [_part(url, dtype) for url, dtype in files]


def _part(path: str, dtype: Any) -> Part:
    offset, kind, count = 0, None if dtype is None else _integers(path, dtype), 0
    with open_binary(path) if is_url(path) else open_file(path) as file:
        found, size = _identity(path, file)
        if path.endswith(".npy"):
            try:
                old = npy.read_magic(file) == (1, 0)
                header = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
                (count,), _, stored = header(file)
            except (ValueError, SyntaxError, TokenError) as error:
                raise SequenceError(
                    f"{path}: expected a NumPy file of one dimension: {error}"
                ) from error
            if kind not in (None, stored):
                raise ValueError(f"{path}: dtype is {kind}, but the file has {stored}")
            offset, kind = file.tell(), _integers(path, stored)
    if kind is None:
        raise ValueError(f'{path}: expected the dtype of its tokens: pass dtype, such as "uint16"')
    size -= offset
    if not size or size % kind.itemsize or (count or size // kind.itemsize) * kind.itemsize != size:
        expected = f"{count:,} tokens" if count else "tokens"
        raise SequenceError(
            f"{path}: expected {expected} of {kind.itemsize} bytes each ({kind}), found {size:,} bytes"
        )
    return Part(path, found, kind, offset, size // kind.itemsize)


def _identity(path: str, file: BinaryIO) -> tuple[tuple[Any, ...], int]:
    """Return what changes if a file is replaced, and its size."""
    if is_url(path):
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        return (store_of(path).etag(path), size), size
    found = identity(file.fileno())
    return found, found[2]


def _integers(path: str, dtype: Any) -> np.dtype[Any]:
    """Return a dtype. Raises ValueError unless it is one of integers."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{path}: dtype {dtype!r} is unknown: {error}") from error
    if found.kind not in "iu":
        raise ValueError(f"{path}: expected a dtype of integers, found {found}")
    return found
