"""`fastload.prefetch_to`: the batches of any iterable, on a device, copied while the loop computes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from fastload._kit.integers import integer
from fastload._kit.nested import map_tensors

T = TypeVar("T")


def prefetch_to(
    loader: Iterable[T], device: torch.device | str | int, *, depth: int = 1
) -> DeviceLoader[T]:
    """Return the batches of `loader` on `device`, each copied while the loop computes on the previous one.

    The copies run on their own stream. You can use a batch at once in the stream that is current when you get it: that
    stream waits for the copy, and the batch's memory is not reused before that stream is done with it. Only pinned
    memory (`pin_memory=True`) is copied asynchronously. Other memory is safe too, but the loop waits for it.

    Tensors are found in tuples, named tuples, lists, mappings and packed sequences, nested in any way. All else in a
    batch is passed on. A batch that is already on the device is handed on, not copied.

    Args:
        loader: a `fastload.DataLoader`, torch's, or any iterable of batches. Each `iter()` begins an epoch of it.
        device: the device to copy to. "cuda" is the current device at `iter()`.
        depth: batches on the device, or on their way to it, beside the one in the loop. Looking ahead never waits for
            a `fastload.DataLoader` and never makes it read samples: if the next batch is not ready, it is copied when
            the loop asks for it. It waits for any other iterable, but not before the first batch.

    Memory on the device: at most (depth + batches kept by the loop + 1) x bytes of a batch.

    An error of the loader arrives after the batches before it. `next()` continues after it if the loader does. The
    loader's iterator ends with this one. Attributes (`sampler`, `set_epoch`, `stats`, ...) are the loader's.

    For a `fastload.DataLoader`, `state_dict()` counts the batches that the loop received, not those copied ahead.
    For any other iterable, and for a subclass whose `__iter__` returns an iterator of its own, `state_dict()` and
    `load_state_dict()` raise AttributeError if you call them, at the latest once an epoch has begun.

    Raises:
        ValueError: `depth` is below 1, or torch finds no such device.

    Examples:
        >>> for images, labels in fastload.prefetch_to(loader, "cpu"):
        ...     loss = images.float().mean()
    """
    if integer("depth", depth) < 1:
        raise ValueError(f"depth must be 1 or more, got {depth}")
    found = torch.device(device)
    module = getattr(torch, found.type, None)
    if found.type != "cpu" and module is not None and not module.is_available():
        raise ValueError(
            f"device: torch finds no {found.type!r} here. Use another device, such as 'cpu'"
        )
    return DeviceLoader(loader, found, depth)


class DeviceLoader(Generic[T]):
    """What `prefetch_to` returns: a loader around a loader. All other attributes are the loader's."""

    def __init__(self, loader: Iterable[T], device: torch.device, depth: int) -> None:
        self.loader = loader
        self.device = device
        self.depth = depth
        # The `received` of the latest epoch. Empty if `loader` itself has the state.
        self._received: list[Any] = []

    def __iter__(self) -> Iterator[T]:
        """Begin the next epoch."""
        module = getattr(torch, self.device.type, None)
        if self.device.type != "cpu" and hasattr(module, "Stream"):
            epoch = _Epoch(self.loader, _SideStream(self.device, module), self.depth)
        else:
            epoch = _Epoch(self.loader, _InPlace(self.device), depth=0)
        # A loader that torch's iterator reads has no state, and warns of that itself.
        warns = getattr(self.loader, "worker_method", None) == "torch"
        self._received = [] if warns else epoch.received
        return epoch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_received": []}  # a copy begins as its loader does

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:  # it is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __repr__(self) -> str:
        return f"prefetch_to({self.loader!r}, {str(self.device)!r}, depth={self.depth})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self.loader, "close"):
            self.loader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state after the last batch that the loop received; see `DataLoader.state_dict`."""
        for state in self._received:
            if isinstance(state, Exception):
                raise state
            return dict(copy.deepcopy(state))
        return self.loader.state_dict()  # type: ignore[attr-defined, no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `iter()` resume after the last batch that `state` counts; see `DataLoader.load_state_dict`."""
        if self._received and isinstance(self._received[0], _NoState):
            raise self._received[0]
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._received = []


class _NoState(AttributeError):
    """The loader's iterator does not count the batches that it gives."""


class _Pending:
    """A batch, an error or the end, on its way to the loop."""

    def __init__(self) -> None:
        self.batch: list[Any] = []  # the loader's batch, which is dropped as its copy begins
        self.copied: Any = None  # what `start` returned
        self.error: Any = None  # the class StopIteration at the end
        self.state: Any = None  # the loader's after it, once it is fetched, or its error


class _Epoch(Iterator[T]):
    """One epoch. All runs in the loop's thread, as samplers do.

    A class and not a generator: an error, or Ctrl-C during a copy, would end a generator. Here the next `next()`
    continues.
    """

    def __init__(self, loader: Iterable[T], copier: _SideStream | _InPlace, depth: int) -> None:
        self._source: Any = iter(loader)
        # Whether it is the iterator of a `fastload.DataLoader`, which counts the batches that it has given.
        self._counts = all(hasattr(self._source, name) for name in ("is_ready", "state_dict"))
        self._no_state = _NoState(
            "prefetch_to has no state_dict() here. It keeps the state only of a fastload.DataLoader without an __iter__"
            f" of its own, and got {type(loader).__name__!r}. Pass such a loader, or count the batches in your loop "
            "and save the number."
        )
        self._copier = copier
        self._depth = depth
        self._pending: deque[_Pending] = deque()
        self._begun = False
        # The loader's state after the last batch that the loop received, or what it raised. The `DeviceLoader` holds
        # this list, and not the iterator, which ends with the loop.
        self.received = [self._state()]

    def __next__(self) -> T:
        # A user may keep an error, and with it these frames. They drop their variables in the end, so that the error
        # is in no reference cycle and does not keep this iterator and its threads.
        one: _Pending | None = None
        batch: Any = None
        try:
            for one in self._pending or self._new():
                self._advance(one)
            while len(self._pending) <= self._depth and self._looks_ahead():
                self._advance(self._new()[-1])
            self._begun = True
            # It stays in the deque until it is done: Ctrl-C during a copy loses no batch.
            one = self._pending[0]
            if one.error is None:
                batch = self._copier.finish(one.copied)
            self.received[0] = one.state
            if one.error is not StopIteration:  # the end stays for the next call
                self._pending.popleft()
            if one.error is not None:
                raise one.error
            return batch  # type: ignore[no-any-return]
        finally:
            del one, batch, self

    def _new(self) -> deque[_Pending]:
        self._pending.append(_Pending())
        return self._pending

    def _looks_ahead(self) -> bool:
        if self._pending[-1].error is not None:
            return False  # the loader may stop at the error
        return self._source.is_ready() if self._counts else self._begun

    def _advance(self, one: _Pending) -> None:
        """Get the loader's next batch, its error or its end, and begin to copy, unless Ctrl-C came only after that."""
        try:
            if not one.batch and one.error is None:
                # One call of C: no signal is handled between the loader's count of the batch and its storage here.
                one.batch.extend(islice(self._source, 1))
                if not one.batch:
                    one.error = StopIteration
            one.state = one.state or self._state()
            if one.error is None and one.copied is None:
                one.copied = self._copier.start(one.batch[0])
                one.batch[0] = None
        except Exception as exc:
            one.error = exc
            one.state = one.state or self._state()
        finally:
            del one, self

    def _state(self) -> Any:
        """Return the loader's state after the last batch that was fetched, or what `state_dict()` raised.

        Only a loop that asks for the state gets the error.
        """
        try:
            return self._source.state_dict() if self._counts else self._no_state
        except Exception as exc:
            return exc.with_traceback(None)  # its frames would keep the iterator alive


# ---- the copies ----


class _SideStream:
    """Copies on its own stream, to a device whose torch module has streams (CUDA, XPU)."""

    def __init__(self, device: torch.device, module: Any) -> None:
        if device.index is None:
            device = torch.device(device.type, module.current_device())  # type: ignore[unreachable]
        self._device = device
        self._module = module
        self._stream = module.Stream(device=device)

    def start(self, batch: Any) -> tuple[Any, Any]:
        """Begin to copy. Return what `finish` takes."""
        with self._module.stream(self._stream):
            return map_tensors(batch, self._copy), self._stream.record_event()

    def finish(self, started: tuple[Any, Any]) -> Any:
        """Return the batch, ready for the current stream."""
        batch, copied = started
        current = self._module.current_stream(self._device)
        current.wait_event(copied)

        def take_over(tensor: Tensor) -> Tensor:
            if tensor.device != self._device:
                return tensor.to(self._device)
            if _is_plain(tensor):
                # The side stream allocated it, and could write the next copy into it while the current stream
                # still reads.
                tensor.record_stream(current)
            return tensor

        return map_tensors(batch, take_over)

    def _copy(self, tensor: Tensor) -> Tensor:
        # Streams that we do not know may use a tensor on a device. Sparse and nested ones cannot move between streams.
        # `finish` copies all of these, in the current stream.
        if tensor.device.type != "cpu" or not _is_plain(tensor):
            return tensor
        # The owner of unpinned memory may overwrite it as soon as we drop it. CUDA has read it by then, but not every
        # device has.
        return tensor.to(self._device, non_blocking=tensor.is_pinned())


class _InPlace:
    """Copies in the loop's own stream, to the CPU and to devices without streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, batch: Any) -> Any:
        return map_tensors(batch, lambda tensor: tensor.to(self._device))

    def finish(self, started: Any) -> Any:
        return started


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested
