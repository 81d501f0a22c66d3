"""A short text that changes if a function or its source does: a part with the same one need not be made again."""

from __future__ import annotations

import functools
import os
import pickle
import types
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch


def fingerprint(*values: Any, paths: bool = False) -> str:
    """Return 32 hex digits that depend on the content of `values`.

    Args:
        paths: texts may be paths. Of a file its size and time of change count, of a folder those of all its files.

    Of a function count its code, its defaults, its closure, and what it names of its own package: functions, classes,
    values. What it reaches through other modules counts by name only. Of tensors, arrays and plain values the content
    counts; of other objects, their pickle. An object with a text `fastload_fingerprint` counts by that text.
    """
    digest = blake2b(digest_size=16)
    for piece in _Content(paths).of(values):
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


class _Content:
    """Yields the bytes that stand for values. What was met before is not entered again: functions may be recursive."""

    def __init__(self, paths: bool) -> None:
        self._paths = paths
        self._met: dict[int, Any] = {}

    def of(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, str | os.PathLike):
            yield from _of_path(os.fspath(value)) if self._paths else [os.fsencode(value)]
        elif isinstance(value, types.CodeType):
            yield value.co_code
            yield repr((value.co_names, value.co_varnames)).encode()
            yield from self.of(value.co_consts)
        elif isinstance(value, torch.Tensor):
            yield repr((value.dtype, value.shape)).encode()
            yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            yield repr((value.dtype, value.shape)).encode() + value.tobytes()
        elif value is None or isinstance(value, bool | int | float | complex | bytes | range):
            yield repr(value).encode()
        elif id(value) in self._met:
            yield b"met"
        elif isinstance(text := getattr(value, "fastload_fingerprint", None), str):
            yield text.encode()
        else:
            self._met[id(value)] = value  # which keeps its id its own
            yield type(value).__qualname__.encode()
            yield from self._of_compound(value)

    def _of_compound(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, Mapping):
            yield from self._of_all(value.items())
        elif isinstance(value, tuple | list):
            yield from self._of_all(value)
        elif isinstance(value, set | frozenset):
            yield from self._of_all(sorted(value, key=repr))
        elif isinstance(value, functools.partial):
            yield from self._of_all((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            yield from self._of_all((value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value)
        elif is_dataclass(value) and not isinstance(value, type):
            yield from self._of_all([getattr(value, field.name) for field in fields(value)])
            yield from self.of(type(value))
        elif isinstance(value, type):
            yield value.__qualname__.encode()
            members = (vars(value)[name] for name in sorted(vars(value)))
            yield from self._of_all(m for m in members if isinstance(m, types.FunctionType))
        else:
            yield _pickled(value, needed=self._paths)
            if callable(value):
                yield from self.of(type(value))

    def _of_all(self, values: Any) -> Iterator[bytes]:
        for value in values:
            yield from self.of(value)
        yield b"end"

    def _of_function(self, function: types.FunctionType) -> Iterator[bytes]:
        yield function.__qualname__.encode()
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        yield from self._of_all((function.__code__, function.__defaults__, function.__kwdefaults__))
        yield from self._of_all(cells)
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                yield name.encode()
                yield from self._of_global(function.__globals__[name], of=function)

    def _of_global(self, value: Any, *, of: types.FunctionType) -> Iterator[bytes]:
        foreign = isinstance(value, type | types.FunctionType) and _package(value) != _package(of)
        if foreign or isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            yield repr((getattr(value, "__module__", ""), value.__name__)).encode()
        else:
            yield from self.of(value)


def _package(of: Any) -> str:
    return str(of.__module__).partition(".")[0]


def _names(code: types.CodeType) -> set[str]:
    """Return the names that code and the functions within it look up."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_names(part) for part in inner))


def _of_path(text: str) -> Iterator[bytes]:
    yield os.fsencode(text)
    try:
        about = os.stat(text)
    except (OSError, ValueError):  # a text that is no path
        return
    if not os.path.isdir(text):
        yield repr((about.st_size, about.st_mtime_ns)).encode()
        return
    for name in sorted(os.listdir(text)):
        yield from _of_path(os.path.join(text, name))


def _pickled(value: Any, *, needed: bool) -> bytes:
    """Return the pickle of a value. If it has none: its type's name, or, if `needed`, raise TypeError."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if needed:  # two open files have one type, and would be one source
            raise TypeError(
                f"the source {value!r:.100} cannot be told from others of its type: {name} cannot be pickled. "
                "Give prepare() a path, or another value that can be"
            ) from error
        return name.encode()
