"""A fingerprint: a short string that changes with a function or its source. A part is reused if it is the same."""

from __future__ import annotations

import copyreg
import functools
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from hashlib import blake2b
from typing import Any

import numpy as np


def fingerprint(*values: Any, paths: bool = False) -> str:
    """Return 32 hex digits that depend on the content of `values`.

    Args:
        paths: strings may be paths. A file counts by its size and modification time, a folder by those of its files.

    A function counts by its code, defaults, closure and attributes, and by the functions, classes and values that it
    names. A class counts by its members and bases, an object by its class and by what pickle would store of it.
    Installed code counts by its name, unless one of `values` belongs to the same package. Tensors, arrays and plain
    values count by their content.

    With `paths`, raises TypeError for an object that pickle cannot store: two of its type would look the same.
    """
    followed = {_package(_root(value)) for value in values}
    return digest_of(Content(paths=paths, followed=followed).of(values))


def digest_of(pieces: Iterable[bytes]) -> str:
    """Return 32 hex digits that depend on each piece, and on where it ends."""
    digest = blake2b(digest_size=16)
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def _is_installed(value: Any) -> bool:
    """Return whether code belongs to Python, an installed package or fastload, so that its name identifies it."""
    module = str(getattr(value, "__module__", None) or "builtins")
    if _package(value) == "fastload" or _package(value) in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _root(value: Any) -> Any:
    """Return the function or class that tells which package a value belongs to."""
    while isinstance(value, functools.partial):
        value = value.func
    value = getattr(value, "__wrapped__", getattr(value, "__func__", value))
    return value if isinstance(value, types.FunctionType | type) else type(value)


_NUMBERS = {bool, int, float, complex}


class Content:
    """Yields the bytes that stand for values. It visits no value twice: functions may be recursive.

    Args:
        paths: see `fingerprint`.
        followed: packages whose code counts by its content although they are installed.
    """

    def __init__(self, *, paths: bool = False, followed: Set[str] = frozenset()) -> None:
        self.paths = paths
        self._followed = followed
        self._met: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any) -> Iterator[bytes]:
        """Yield the bytes that stand for a value, and for all that it reaches."""
        if isinstance(value, str | os.PathLike):
            yield b"text"  # "1" is not 1
            yield from self.of_text(value)
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
            yield from self.of_compound(value)

    def of_text(self, value: str | os.PathLike[str]) -> Iterator[bytes]:
        """Yield a string and, if it may be a path, its file or folder."""
        yield from of_path(os.fspath(value)) if self.paths else [os.fsencode(value)]

    def of_compound(self, value: Any) -> Iterator[bytes]:
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
        elif isinstance(value, types.MethodType):
            yield from self._of_all((value.__func__, value.__self__))
        elif isinstance(value, staticmethod | classmethod):
            yield from self.of(value.__func__)
        elif isinstance(value, property):
            yield from self._of_all((value.fget, value.fset, value.fdel))
        elif isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            yield repr((getattr(value, "__module__", ""), value.__name__)).encode()
        elif isinstance(value, types.FunctionType | type):
            yield from self._of_code(value)
        elif isinstance(wrapped := getattr(value, "__wrapped__", None), types.FunctionType):
            yield from self.of(wrapped)  # by functools.lru_cache
        else:
            yield from self.of_object(value)

    def _of_all(self, values: Any) -> Iterator[bytes]:
        for value in values:
            yield from self.of(value)
        yield b"end"

    def _of_code(self, value: types.FunctionType | type) -> Iterator[bytes]:
        if _is_installed(value) and _package(value) not in self._followed - sys.stdlib_module_names:
            yield repr((value.__module__, value.__qualname__)).encode()
        elif isinstance(value, type):
            yield from self._of_class(value)
        else:
            yield from self._of_function(value)

    def _of_function(self, function: types.FunctionType) -> Iterator[bytes]:
        yield function.__qualname__.encode()
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        yield from self._of_all((function.__code__, function.__defaults__, function.__kwdefaults__))
        yield from self._of_all((cells, vars(function)))
        for name in sorted(_names(function.__code__)):
            if name in function.__globals__:
                yield name.encode()
                yield from self.of(function.__globals__[name])

    def _of_class(self, kind: type) -> Iterator[bytes]:
        yield kind.__qualname__.encode()
        yield from self._of_all(kind.__bases__)
        for name, member in sorted(vars(kind).items()):
            code = isinstance(member, types.FunctionType | staticmethod | classmethod | property)
            if code or not (name.startswith("__") or name == "_abc_impl" or _is_slot(member)):
                yield name.encode()
                yield from self.of(member)

    def of_object(self, value: Any, without: Sequence[str] = ()) -> Iterator[bytes]:
        """Yield an object's class, and what pickle would store of it, except the attributes named in `without`."""
        yield from self.of(type(value))
        kept = self.kept(value)
        if isinstance(kept, str):
            yield kept.encode()
            return
        for part in kept:
            if isinstance(part, dict):
                part = {name: part[name] for name in sorted(part, key=repr) if name not in without}
            yield from self.of(list(part) if isinstance(part, Iterator) else part)

    def kept(self, value: Any) -> Any:
        """Return what pickle would store of an object, or "" if pickle cannot store it."""
        try:
            return reduced(value)
        except Exception as error:
            if self.paths:  # otherwise two open files would count as one source
                raise TypeError(
                    f"prepare() cannot tell the source {value!r:.100} from others of its type: "
                    f"{type(value).__module__}.{type(value).__qualname__} cannot be pickled. "
                    "Pass a path, or a value that can be pickled"
                ) from error
            return ""


def reduced(value: Any) -> Any:
    """Return what pickle would store of an object. Raises what pickle raises."""
    reduce: Callable[[Any], Any] | None = copyreg.dispatch_table.get(type(value))
    return value.__reduce_ex__(4) if reduce is None else reduce(value)


def _is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor. It does not import torch: if torch is not loaded, no value is a tensor."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def _of_tensor(tensor: Any) -> bytes:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def _is_slot(member: Any) -> bool:
    return isinstance(member, types.MemberDescriptorType | types.GetSetDescriptorType)


def _package(of: Any) -> str:
    return str(getattr(of, "__module__", None) or "builtins").partition(".")[0]


def _names(code: types.CodeType) -> set[str]:
    """Return the names that code and the functions within it look up."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*(_names(part) for part in inner))


def of_path(text: str, above: Set[tuple[int, int]] = frozenset()) -> Iterator[bytes]:
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
        yield from of_path(os.path.join(text, name), above | {folder})
