"""A fingerprint: a short string that changes with a function or its source. A part is reused if it is the same."""

from __future__ import annotations

import copyreg
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from hashlib import blake2b
from typing import Any

import numpy as np


def fingerprint(*values: Any, paths: bool = False) -> str:
    """Return 32 hex digits that depend on the content of `values`.

    Args:
        paths: strings may be paths. A file counts by its size and modification time, a folder by those of its files.

    A function counts by its name, its own code, defaults and closure, but not by what it calls. A class counts by its
    name, an object by its class and by what pickle would store of it. Tensors, arrays and plain values count by their
    content.

    With `paths`, raises TypeError for an object that pickle cannot store: two of its type would look the same.
    """
    return digest_of(_Content(paths).of(values))


def digest_of(pieces: Iterable[bytes]) -> str:
    """Return 32 hex digits that depend on each piece, and on where it ends."""
    digest = blake2b(digest_size=16)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


_NUMBERS = {bool, int, float, complex}


class _Content:
    """Yields the bytes that stand for values. It visits no value twice: objects may be recursive."""

    def __init__(self, paths: bool) -> None:
        self._paths = paths
        self._met: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Iterator[bytes]:
        """Yield the bytes that stand for a value, and for all that it reaches."""
        if isinstance(value, str | os.PathLike):
            yield b"text"  # "1" is not 1
            yield from _of_path(os.fspath(value)) if self._paths else [os.fsencode(value)]
        elif isinstance(value, types.CodeType):
            yield value.co_code
            yield repr((value.co_names, value.co_varnames)).encode()
            yield from self.of(value.co_consts)
        elif _is_tensor(value):
            yield repr((value.dtype, value.shape)).encode()
            yield _of_tensor(value)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            yield repr((value.dtype, value.shape)).encode() + value.tobytes()
        elif value is None or isinstance(value, bool | int | float | complex | bytes | range):
            yield repr(value).encode()
        elif id(value) in self._met:
            yield f"met {self._met[id(value)][0]}".encode()
        else:
            # The compiler decides whether two equal tuples are one object.
            if not isinstance(value, tuple | frozenset):
                self._met[id(value)] = len(self._met), value  # so its id stays its own
            yield type(value).__qualname__.encode()
            yield from self._of_compound(value)

    def _of_compound(self, value: Any) -> Iterator[bytes]:
        """Yield what a value consists of."""
        if isinstance(value, Mapping):
            yield from self._of_all(value.items())
        elif isinstance(value, tuple | list):
            numbers = all(type(item) in _NUMBERS for item in value)
            yield from [repr([*value]).encode()] if numbers else self._of_all(value)
        elif isinstance(value, set | frozenset):
            yield from self._of_all(sorted(value, key=repr))
        elif isinstance(value, functools.partial):
            yield from self._of_all((value.func, value.args, value.keywords))
        elif isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            code = (value.__code__, value.__defaults__, value.__kwdefaults__)
            yield from self._of_all((value.__module__, value.__qualname__, *code, cells))
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            name = getattr(value, "__qualname__", value.__name__)
            yield repr((getattr(value, "__module__", ""), name)).encode()
        else:
            yield from self._of_object(value)

    def _of_all(self, values: Any) -> Iterator[bytes]:
        for value in values:
            yield from self.of(value)
        yield b"end"

    def _of_object(self, value: Any) -> Iterator[bytes]:
        """Yield an object's class, and what pickle would store of it."""
        yield from self.of(type(value))
        reduce: Callable[[Any], Any] | None = copyreg.dispatch_table.get(type(value))
        try:
            kept = value.__reduce_ex__(4) if reduce is None else reduce(value)
        except Exception as error:
            if not self._paths:
                return
            # Otherwise two open files would count as one source.
            raise TypeError(
                f"prepare() cannot tell the source {value!r:.100} from others of its type: "
                f"{type(value).__module__}.{type(value).__qualname__} cannot be pickled. "
                "Pass a path, or a value that can be pickled"
            ) from error
        for part in [kept] if isinstance(kept, str) else kept:
            yield from self.of([*part] if isinstance(part, Iterator) else part)


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor. It does not import torch: if torch is not loaded, no value is a tensor."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _of_tensor(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _of_path(text: str, above: Set[tuple[int, int]] = frozenset()) -> Iterator[bytes]:
    """Yield a path, with the size and modification time of its file, or of all files in its folder.

    Do not enter a link to a folder in `above`, which holds device and inode: its files count already.
    """
    yield os.fsencode(text)
    try:
        about = os.stat(text)
    except (OSError, ValueError):  # a string that is not a path
        return
    if not os.path.isdir(text):
        yield repr((about.st_size, about.st_mtime_ns)).encode()
        return
    folder = about.st_dev, about.st_ino
    if folder in above:
        return
    for name in sorted(os.listdir(text)):
        yield from _of_path(os.path.join(text, name), above | {folder})
