"""A watch over state that all workers share: it reports what samples change.

Such state is the position of a file, or the elements of a large array or container. One worker looks at it before and
after each of its first samples. A change does not prove that samples are wrong, so it only causes a warning.
"""

from __future__ import annotations

import functools
import io
import mmap
import os
import pickle
import random
import stat
import types
from _thread import LockType, RLock
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

from fastload.isolation.classify import kind_of
from fastload.isolation.kinds import ATOM
from fastload.isolation.memory import ProcessMemory, extent
from fastload.isolation.rules import GENERATORS, is_global_generator, own_dict

VALUES, ELEMENTS = 1_000, 64
"""A look sees some 1,000 values below a shared container, at most 64 of each container or array."""


class Watch:
    """Looks at shared objects before and after samples, and adds what changed to `noticed`.

    Args:
        watched: the objects and their paths in code. An object may be an array or a tensor, a container, a file or
            an mmap, or an int whose name says that it is a file descriptor. Of any other object,
            this watches the attributes that are files, mmaps or descriptors. If such an object also has a lock, it is
            not watched: its class expects threads to share it.
        noticed: the set to which warnings are added, as ends of "the dataset seems to ".
    """

    def __init__(self, watched: Iterable[tuple[str, object]], noticed: set[str]) -> None:
        process = ProcessMemory()
        self._looks = [_look_at(path, x, process) for path, x in watched]
        self._noticed = noticed

    def begin(self) -> None:
        """Look before a sample is read."""
        for look in self._looks.copy():
            try:
                look.begin()
            except Exception:  # from a user's class: watching must not cost a batch
                self._looks.remove(look)

    def end(self) -> None:
        """Look again after the sample."""
        for look in self._looks.copy():
            try:
                self._noticed.update(look.end())
            except Exception:
                self._looks.remove(look)


def _look_at(path: str, x: Any, process: ProcessMemory) -> _Contents:
    if isinstance(x, np.ndarray | torch.Tensor):
        sentence = (
            f"write samples into the same elements of `{path}`, which all workers share: samples can be wrong. "
            "Create the array for each sample, or use copy_dataset=True."
        )
        return _Contents(sentence, lambda: {0: dict(_elements(x, process))})
    if isinstance(x, list | dict | set | deque):
        sentence = (
            f"change what `{path}` holds, which all workers share because it is large: samples can be wrong. "
            "Create it for each sample, or use copy_dataset=True."
        )
        return _Contents(sentence, lambda: _below(path, x, process))
    while type(x) is Subset:
        x = x.dataset
    sentence = (
        "read through its open file `<place>`, of which all workers share one position: samples can be wrong. Open "
        "the file at the first sample, not before, and do not pass copy_dataset=False. Or read with os.pread(), or "
        "slices of an mmap."
    )
    return _Contents(sentence, lambda: {0: _positions(path, x)})


# ---- positions ----


def _positions(path: str, x: Any) -> dict[Hashable, int]:
    """Return the position of a file, or of each file among the attributes of an object, by its path in code."""
    parts: dict[str, Any] = {path: x}
    own = own_dict(x)
    if own and not isinstance(x, io.IOBase):
        parts = {f"{path}.{name}".lstrip("."): value for name, value in own.items()}
        if any(isinstance(value, LockType | RLock) for value in parts.values()):
            return {}
    found = ((path, _position(path, value)) for path, value in parts.items())
    return {path: position for path, position in found if position is not None}


def _position(path: str, x: Any) -> int | None:
    if isinstance(x, io.TextIOBase):  # tell() moves its decoder, which another worker may use
        x = getattr(x, "buffer", None)
    try:
        if isinstance(x, io.RawIOBase | io.BufferedIOBase | mmap.mmap):
            return x.tell()
        if type(x) is int and is_descriptor(path, x):
            return os.lseek(x, 0, os.SEEK_CUR)
    except (OSError, ValueError):  # a pipe; a file closed meanwhile
        pass
    return None


def is_descriptor(path: str, x: int) -> bool:
    """Return whether an int is the descriptor of an open regular file. The variable's name must say so."""
    name = path.rpartition(".")[2]
    if name not in ("fd", "fileno", "file_descriptor") and not name.endswith("_fd"):
        return False
    try:
        return stat.S_ISREG(os.fstat(x).st_mode)
    except (OSError, OverflowError):
        return False


# ---- contents ----

Slots = dict[int, dict[Hashable, Any]]
"""By the id of each object: its contents, by place (index, key or name). This keeps them alive, and their ids valid."""


class _Contents:
    """The contents of an object. A place that changes in two samples is state. One that changes once may be a cache."""

    def __init__(self, sentence: str, look: Callable[[], Slots]) -> None:
        # `<place>` in the sentence stands for the place that changed.
        self._sentence, self._look = sentence, look
        self._changes: Counter[tuple[int, Hashable]] = Counter()
        self._before: Slots = {}

    def begin(self) -> None:
        self._before = self._looked()

    def end(self) -> Iterator[str]:
        after = self._looked()
        for i in self._before.keys() & after.keys():
            changed = {(i, place) for place in _changes(self._before[i], after[i])}
            self._changes.update(changed)
            for place in changed:
                if self._changes[place] >= 2:
                    yield self._sentence.replace("<place>", str(place[1]))
        self._before = {}

    def _looked(self) -> Slots:
        try:
            return self._look()
        except RuntimeError:  # another worker changed the size of a container meanwhile
            return {}


def _changes(before: dict[Hashable, Any], after: dict[Hashable, Any]) -> Iterator[Hashable]:
    """Yield the places whose contents were replaced or removed. An added place is no change: caches and logs grow."""
    for place, a in before.items():
        b = after.get(place, _GONE)
        if place == _LENGTH:
            if b < a:
                yield place
        elif b is _GONE:
            if type(place) is not int:  # otherwise the length tells
                yield _GONE
        elif not (a is b or (type(a) is type(b) and type(a) in _SCALARS and a == b)):
            yield place


_GONE, _LENGTH = object(), ("length",)
_SCALARS = {types.NoneType, bool, int, float, complex, str, bytes}


def _below(name: str, x: Any, process: ProcessMemory) -> Slots:
    """Return the contents of a shared container and of all below it."""
    todo, seen = [x], 0
    slots: Slots = {0: {name: x}}
    while todo and seen < VALUES:
        x = todo.pop()
        if id(x) in slots or _is_stateless(type(x)) or is_global_generator(x):
            continue
        slots[id(x)] = dict(places(x, process))
        seen += 1 + len(slots[id(x)])
        todo += [value for value in slots[id(x)].values() if type(value) not in _SCALARS]
    return slots


@functools.lru_cache(256)
def _is_stateless(cls: type) -> bool:
    """Return whether samples cannot change an instance, or threads may share it."""
    kind = kind_of(cls)
    # Data may have a position, and a "closed" handle may be opened.
    return kind is ATOM or kind.shared not in (None, "data", "closed")


def places(x: Any, process: ProcessMemory) -> Iterator[tuple[Hashable, Any]]:
    """Yield the places and contents of an object, without running code of its class."""
    kind = type(x)
    if issubclass(kind, list | tuple | deque):
        base: Any = list if issubclass(kind, list) else tuple if issubclass(kind, tuple) else deque
        length = base.__len__(x)
        yield _LENGTH, length
        # Steps of powers of two: while a list grows, the same places are watched for long.
        for k in range(0, length, 1 << max(0, (length - 1) // ELEMENTS).bit_length()):
            yield k, base.__getitem__(x, k)
    elif issubclass(kind, dict):
        for key, value in list(islice(dict.items(x), ELEMENTS)):
            yield ("[]", key if type(key) in _SCALARS else id(key)), value
    elif issubclass(kind, set):
        yield _LENGTH, set.__len__(x)
        for value in list(set.__iter__(x)) if set.__len__(x) <= ELEMENTS else ():
            yield ("in", value if type(value) in _SCALARS else id(value)), value
    elif issubclass(kind, np.ndarray | torch.Tensor):
        yield from _elements(x, process)
    elif issubclass(kind, GENERATORS):
        yield "state", _state(x)
    elif issubclass(kind, io.IOBase | mmap.mmap):
        yield "position", _position("", x)
    yield from list(own_dict(x).items())


def _elements(x: Any, process: ProcessMemory) -> Iterator[tuple[Hashable, Any]]:
    """Yield some elements of an array or tensor that samples may write to. Skip memory that processes share as well."""
    if process.is_shared(extent(x)[0]):
        return
    try:
        x = np.asarray(x.detach() if isinstance(x, torch.Tensor) else x)
    except (RuntimeError, TypeError):  # a layout or type that NumPy does not know
        return
    if x.flags.writeable and x.size and not x.dtype.hasobject:
        some = x.flat[:: max(1, x.size // ELEMENTS)]
        yield from enumerate(element.tobytes() for element in some)


def _state(generator: Any) -> Hashable:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return hash(random.Random.getstate(generator))
    if isinstance(generator, np.random.RandomState):
        generator = generator._bit_generator
    elif isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    return pickle.dumps(generator.state)
