"""The tripwire: what samples in threads must not change is compared around the first of them.

It finds what reading the code cannot see: code that was generated or loaded as a plug-in, and libraries that set what a
process has one of.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fastload.errors import SharedStateError, SharedStateWarning
from fastload.isolation.attributes import SCALARS
from fastload.isolation.rules import own_dict
from fastload.memory.batch import Batch
from fastload.settings import Settings

SAMPLES, EPOCHS = 64, 2
"""The samples of an epoch, and the epochs, that it looks at."""

FIRST_SECONDS = 0.05
"""How long the first sample waits for the loop."""


class Tripwire:
    """Compares process-wide state and shared data around the first samples of a loader's first epochs.

    Only the loop compares process-wide state: between two moments at which it runs no user code, because what it
    changes itself is no fault. Each worker compares the elements of shared data that belong to its samples.

    Attributes:
        armed: whether the tripwire compares in this epoch.
        whole: whether an epoch was read to its end.
    """

    def __init__(self) -> None:
        self.armed = False
        self.whole = False
        self._epochs = 0
        self._left = 0
        self._before: dict[Any, Any] = {}
        self._filters: tuple[Any, list[Any]] = [], []
        # A worker adds, and the loop takes. Both are atomic.
        self._faults: deque[str] = deque()
        self._changed: set[tuple[str, int]] = set()
        self._asked = False  # whether the loop has asked for a first batch

    def __reduce__(self) -> Any:
        return Tripwire, ()

    def begin_epoch(self, *, threads: bool) -> None:
        """Look at the next epoch, if it is one of the first, and threads read it."""
        self.armed = threads and self._epochs < EPOCHS
        self._epochs += 1
        self._left = SAMPLES if self.armed else 0
        self._modules = len(sys.modules)

    # ---- the loop ----

    def begin(self, tell: Callable[[], None]) -> None:
        """Note process-wide state, as the loop leaves it. `tell` wakes the workers' waits."""
        if self._left > 0:
            self._filters = warnings.filters, [*warnings.filters]
            self._before = _process_state()
        if not self._asked:
            self._asked = True
            tell()

    def end(
        self, batch: Batch | None, settings: Settings, warn: Callable[[type[Warning], str], None]
    ) -> None:
        """Raise `SharedStateError` for what samples have changed since `begin`, or warn if threads were asked for.

        After a fault, this looks at no more of the epoch, but at the next one.

        Args:
            batch: the batch that comes, or None at the end of an epoch.
            settings: the loader's arguments.
            warn: see `Notices.notice`.
        """
        if self._left <= 0:
            return
        self._left -= 0 if batch is None else batch.size
        if (fault := self._found()) is None:
            return
        self.armed, self._left, self._epochs, self._asked = False, 0, 0, False
        self._faults.clear()
        if not settings.worker_reason:
            warn(SharedStateWarning, fault)
            return
        raise SharedStateError(
            f"samples of {type(settings.dataset).__name__} {fault}. In threads, other samples and the training see "
            'that. Pass worker_method="process", or worker_method="thread" if it is meant'
        )

    def _found(self) -> str | None:
        before, self._before = self._before, {}
        now = _process_state()
        if before:
            sys.stdout, sys.stderr = before["sys.stdout"], before["sys.stderr"]
        # `catch_warnings` puts a copy of the list in its place for a while, as many libraries do. That is no change.
        filters, earlier = self._filters
        # A library that a sample imports may add some for itself, once.
        imported = len(sys.modules) > self._modules and all(one in filters for one in earlier)
        if filters != earlier and not imported:
            return "change the filters of warnings"
        for what, value in before.items():
            # A variable that is new may come from an import.
            after = now.get(what)
            if after is not value and after != value:
                if isinstance(what, bytes):  # its value may be a secret
                    return f"change os.environ[{os.fsdecode(what)!r}]"
                return f"change {what} from {value!r:.80} to {after!r:.80}"
        return self._faults.popleft() if self._faults else None

    # ---- a worker ----

    @contextmanager
    def around(
        self,
        watched: Sequence[tuple[str, Any]],
        position: int,
        indices: Any,
        wait: Callable[[Callable[[], bool], float], None],
    ) -> Iterator[None]:
        """Compare, around the block, the elements of shared data at the indices of samples.

        Args:
            watched: the shared objects, with their paths in code.
            position: the first sample's position in the epoch.
            indices: those of the samples that the block reads.
            wait: waits until a condition holds, see `Changes.wait`.
        """
        if not self.armed or position >= SAMPLES:
            yield
            return
        # What a first sample changes for good is seen only if the loop has noted the state before it. In a `for` loop
        # that takes some microseconds. A program that begins an epoch ahead of its use waits for 50 ms, once.
        wait(lambda: self._asked, FIRST_SECONDS)
        self._asked = True
        elements = [
            (path, index, look, look())
            for path, x in watched
            for index in indices
            if (look := _element(x, index)) is not None
        ]
        yield
        for path, index, look, before in elements:
            if look() != before:
                # An element that changes once may be a cache that is filled.
                if self.whole or (path, index) in self._changed:
                    self._faults.append(
                        f"change what they read, `{path}[{index}]`, which all workers and epochs share"
                    )
                self._changed.add((path, index))


def _process_state() -> dict[Any, Any]:
    # Of `os.environ.items()` most of the time would be spent on decoding.
    state: dict[Any, Any] = os.environ._data.copy()  # type: ignore[attr-defined]
    try:
        state["the working directory"] = os.getcwd()
    except FileNotFoundError:  # it was deleted
        state["the working directory"] = None
    state["sys.stdout"], state["sys.stderr"] = sys.stdout, sys.stderr
    for name, number in _SIGNALS.items():
        state[name] = signal.getsignal(number)
    state["torch's default dtype"] = torch.get_default_dtype()
    state["torch's number of threads"] = torch.get_num_threads()
    return state


_SIGNALS = {f"the handler of {number.name}": number.value for number in signal.Signals}


def _element(x: Any, index: Any) -> Callable[[], Any] | None:
    """Return what looks at the element of a shared array or container at an index, or None if it has none.

    No code of the user runs.
    """
    if type(index) is not int:
        return None
    kind = type(x)
    if kind in _ARRAYS:
        if x.ndim == 0 or not -len(x) <= index < len(x):
            return None
        return lambda: _content(x[index])
    found: Any = None
    for base in (list, tuple, deque):
        if issubclass(kind, base) and -base.__len__(x) <= index < base.__len__(x):
            found = base.__getitem__(x, index)
    if issubclass(kind, dict):
        found = dict.get(x, index)
    return None if found is None else lambda: _content(found)


_ARRAYS = {np.ndarray, torch.Tensor}  # of a subclass, methods could be the user's


def _content(x: Any, depth: int = 4) -> Any:
    """Return something that differs if what an element holds has changed."""
    if type(x) in _ARRAYS:
        try:
            array = np.asarray(x.detach() if type(x) is torch.Tensor else x)
            return array.shape, zlib.crc32(np.ascontiguousarray(array).view(np.uint8))  # type: ignore[arg-type]
        except (RuntimeError, TypeError, ValueError):  # a layout or type that NumPy does not know
            return None
    if type(x) in SCALARS:
        return (x,)  # so that NaN is equal to itself
    if depth == 0:
        return id(x)
    kind = type(x)
    held: list[Any] = [*own_dict(x).items()]
    if base := next((b for b in (dict, list, tuple, deque, set) if issubclass(kind, b)), None):
        try:
            held += [*(base.items(x) if base is dict else enumerate(base.__iter__(x)))]
        except RuntimeError:  # without the GIL, another worker may change it meanwhile
            return object()
    below = [
        (key if type(key) in SCALARS else id(key), _content(value, depth - 1))
        for key, value in held[:256]
    ]
    return kind, below
