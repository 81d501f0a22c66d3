"""How a sample lies in a batch.

The first sample fixes a `Layout`: its containers and its leaves. Its large dense tensors and arrays become rows of a
*slot*. All else is stored until the batch is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload._kit.torch_private import (
    collate_arrays,
    collate_handler,
    collate_numbers,
    collate_tensors,
    has_function_modes,
)

ROW_BYTES = 32 * 1024
"""Workers write rows of at least this size into a slot. Smaller ones go through torch.stack: a row of 3 KiB takes
it 0.2 us, and a call for each row 1.8 us. The two cost the same once copying takes microseconds."""

ALIGN = 64
"""Bytes, as in torch's own CPU allocator."""


Slot = list[Any]
"""The memory of one batch, leaf by leaf."""

# ---- the leaves ----


class _Kept:
    """A leaf that is kept as it is until the batch is complete. Its memory is a list."""

    nbytes = 0

    def __init__(self, collect: type, handler: Any, kind: type) -> None:
        self._collect, self._kind = collect, {kind}
        torchs = handler in (collate_arrays, *collate_numbers)
        self._join = _JOINS.get(kind) if torchs else None

    def fits(self, leaf: Any) -> bool:
        return True

    def memory(self, n: int, lent: np.ndarray, offset: int, **_: Any) -> list[Any]:
        return [None] * n

    def write(self, memory: list[Any], position: int, leaf: Any) -> None:
        memory[position] = leaf

    def read(self, memory: list[Any], position: int) -> Any:
        return memory[position]

    def batch(self, memory: Sequence[Any]) -> Any:
        if self._join and not has_function_modes() and {*map(type, memory)} == self._kind:
            with suppress(ValueError, OverflowError, TypeError):
                return self._join(memory)  # else torch takes these, or says what is wrong
        return default_collate(self._collect(memory))


def _array(leaves: Sequence[np.ndarray]) -> torch.Tensor:
    dtype = leaves[0].dtype
    odd = [leaf for leaf in leaves if leaf.dtype != dtype or not leaf.flags.c_contiguous]
    if odd or not dtype.isnative or not leaves[0].size:  # an empty tensor has other strides
        raise ValueError
    return torch.from_numpy(np.array(leaves))


_JOINS: dict[type, Callable[[Sequence[Any]], torch.Tensor]] = {
    np.ndarray: _array,
    float: lambda leaves: torch.from_numpy(np.array(leaves, np.float64)),
    int: lambda leaves: torch.from_numpy(np.array(leaves, np.int64)),
}
"""What makes the same of leaves of one type as torch, which takes 2 us for an array and 0.2 us for a number."""

_Memory = tuple[Any, torch.Tensor]
"""Rows of a slot, as an array and as a tensor `dtype[n, *shape]`. The array is None if NumPy lacks the dtype."""


class _ArrayRow:
    """A NumPy array of fixed dtype and shape, as a row of the slot; a tensor in the batch."""

    def __init__(self, leaf: Any) -> None:
        self.dtype = self.array_dtype = leaf.dtype
        self.shape, self.nbytes = leaf.shape, leaf.nbytes

    @staticmethod
    def suits(leaf: Any) -> bool:
        """Return whether stacking `leaf` only copies its numbers into a contiguous row."""
        if type(leaf) is not np.ndarray or not leaf.dtype.isnative:
            return False
        # A non-contiguous array suits only if torch accepts its strides.
        step = leaf.itemsize
        return leaf.flags.c_contiguous or all(s >= 0 and s % step == 0 for s in leaf.strides)

    def fits(self, leaf: Any) -> bool:
        return self.suits(leaf) and leaf.dtype == self.dtype and leaf.shape == self.shape

    def memory(self, n: int, lent: np.ndarray, offset: int, *, channels_last: bool) -> _Memory:
        """Return the memory of `n` rows, at an offset of what a pool lent."""
        shape = n, *self.shape
        interleaved = channels_last and len(shape) == 4
        if interleaved:
            shape = n, *shape[2:], shape[1]
        array: Any = None
        if self.array_dtype is None:
            tensor = torch.from_numpy(lent[offset : offset + n * self.nbytes])
            tensor = tensor.view(self.dtype).view(shape)
        else:
            array = np.ndarray(shape, self.array_dtype, buffer=lent, offset=offset)
            tensor = torch.from_numpy(array)
        # `share_memory_()` and queues exchange a storage's memory. An array of the tensor still sees this one.
        tensor.untyped_storage().loan = lent  # type: ignore[attr-defined]
        if interleaved:
            tensor = tensor.permute(0, 3, 1, 2)
            array = None if array is None else array.transpose(0, 3, 1, 2)
        return array, tensor

    def write(self, memory: _Memory, position: int, leaf: Any) -> None:
        np.copyto(memory[0][position, ...], leaf)

    def read(self, memory: _Memory, position: int) -> Any:
        return memory[0][position, ...]

    def rows(self, memory: _Memory) -> Any:
        return memory[0]

    def batch(self, memory: _Memory) -> torch.Tensor:
        return memory[1]


class _TensorRow(_ArrayRow):
    """A dense CPU tensor of fixed dtype and shape, as a row of the slot."""

    def __init__(self, leaf: torch.Tensor) -> None:
        super().__init__(leaf)
        self.array_dtype = _numpy_dtype(leaf.dtype)

    @staticmethod
    def suits(leaf: Any) -> bool:
        """See `_ArrayRow`."""
        return (
            type(leaf) is torch.Tensor
            and leaf.is_cpu
            and leaf.layout is torch.strided
            and not leaf.requires_grad
            and not leaf.is_nested
            # torch.stack keeps channels-last strides of samples with 4 dimensions and more
            and (leaf.dim() <= 3 or leaf.is_contiguous())
        )

    def write(self, memory: _Memory, position: int, leaf: Any) -> None:
        array, tensor = memory
        if array is None:
            tensor[position].copy_(leaf)
        else:
            # NumPy copies in this thread. For rows of this size, torch would use its own threads.
            np.copyto(array[position, ...], leaf.numpy())

    def read(self, memory: _Memory, position: int) -> Any:
        return memory[1][position]

    def rows(self, memory: _Memory) -> Any:
        return memory[1]


class _NumberRow(_ArrayRow):
    """A Python number in a sample of a dataset that fills rows, as an element of the slot."""

    def __init__(self, leaf: Any) -> None:
        super().__init__(np.array(leaf, _NUMBERS[type(leaf)]))
        self._type = type(leaf)

    def fits(self, leaf: Any) -> bool:
        return type(leaf) is self._type and (self._type is not int or -(2**63) <= leaf < 2**63)

    def read(self, memory: _Memory, position: int) -> Any:
        return memory[0][position].item()


_NUMBERS: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
"""The dtypes that torch's `default_collate` makes of Python's numbers."""


# ---- the containers ----

_Spec = tuple[type, list[Any] | None, list[Any]] | None
"""A container: its type, the keys of a dict, and the specs of its parts. None for a leaf."""


def _leaves(spec: _Spec, sample: Any) -> Iterable[Any] | None:
    """Return the leaves of a sample, or None if it has other containers."""
    if spec is None:
        return (sample,)
    (kind, keys, parts), its = spec, type(sample)
    if its is not kind or len(sample) != len(parts) or (keys is not None and [*sample] != keys):
        return None
    inner: Iterable[Any] = sample if keys is None else sample.values()
    if not any(parts):
        return inner
    found: list[Any] = []
    for part, one in zip(parts, inner, strict=True):
        if (below := _leaves(part, one)) is None:
            return None
        found += below
    return found


def _columns(spec: _Spec, samples: Sequence[Any]) -> list[Any]:
    """Return the leaves of samples, those at one place together. Raise LookupError for other containers."""
    if spec is None:
        return [samples]
    kind, keys, parts = spec
    alike = {*map(type, samples)} == {kind} and {*map(len, samples)} == {len(parts)}
    if not alike or (keys is not None and [*samples[0]] != keys):
        raise LookupError
    columns: Iterable[Any] = zip(*samples, strict=True)
    if keys is not None:
        columns = [[sample[key] for sample in samples] for key in keys]
    pairs = zip(parts, columns, strict=True)
    return [leaves for part, column in pairs for leaves in _columns(part, column)]


def _nested(spec: _Spec, leaves: Iterator[Any], *, batch: bool = False) -> Any:
    """Return leaves in the containers of a sample. In those of a batch, torch makes a list of a plain tuple."""
    if spec is None:
        return next(leaves)
    kind, keys, parts = spec
    made = [_nested(part, leaves, batch=batch) for part in parts]
    if keys is not None:
        return dict(zip(keys, made, strict=True))
    if hasattr(kind, "_fields"):
        return kind(*made)
    return made if batch or kind is list else kind(made)


class Layout:
    """How a sample lies in a batch: which of its leaves are rows of a slot, and which are kept.

    Args:
        sample: an example of the samples.
        filled: the dataset fills the rows, so every leaf is a row, however small.

    Attributes:
        nbytes: the bytes of a sample's rows.

    With `filled`, raises TypeError if a leaf cannot be a row, and LookupError if a user's function collates it.
    """

    def __init__(self, sample: Any, *, filled: bool = False) -> None:
        self._filled = filled
        self._leaves: list[Any] = []
        self._spec = self._found(sample, list)
        self.nbytes = sum(leaf.nbytes for leaf in self._leaves)

    def _found(self, sample: Any, collect: type) -> _Spec:
        """Store the leaves of `sample`, and return its spec. Torch collects a leaf's samples in a `collect`."""
        kind = type(sample)
        handler = collate_handler(kind)
        if handler is None and kind is dict:
            return kind, [*sample], [self._found(part, list) for part in sample.values()]
        if handler is None and (
            kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
        ):
            return kind, None, [self._found(part, tuple) for part in sample]
        self._leaves.append(self._row(sample, kind, handler) or _Kept(collect, handler, kind))
        return None

    def _row(self, leaf: Any, kind: type, handler: Any) -> _ArrayRow | None:
        """Return the row that a leaf is, or None to keep it."""
        filled = self._filled
        if kind is torch.Tensor and handler is collate_tensors and _TensorRow.suits(leaf):
            if filled or (leaf.nbytes >= ROW_BYTES and _numpy_dtype(leaf.dtype)):
                return _TensorRow(leaf)
        elif kind is np.ndarray and handler is collate_arrays and _ArrayRow.suits(leaf):
            if (filled or leaf.nbytes >= ROW_BYTES) and _torch_takes(leaf.dtype):
                return _ArrayRow(leaf)
        elif filled and kind in _NUMBERS and handler in collate_numbers:
            return _NumberRow(leaf)
        if filled and handler not in (None, collate_tensors, collate_arrays, *collate_numbers):
            raise LookupError(f"a collate function is registered for {kind.__name__}")
        if filled:
            raise TypeError(f"a leaf of type {kind.__name__} cannot be a row of a batch")
        return None

    def slot_bytes(self, n: int) -> int:
        """Return the bytes of a slot for `n` samples."""
        return sum(aligned(n * leaf.nbytes) for leaf in self._leaves)

    def slot(self, n: int, lent: np.ndarray, *, channels_last: bool) -> Slot:
        """Return a slot for `n` samples in the memory that a pool lent."""
        slot, offset = [], 0
        for leaf in self._leaves:
            slot.append(leaf.memory(n, lent, offset, channels_last=channels_last))
            offset += aligned(n * leaf.nbytes)
        return slot

    def fits(self, sample: Any) -> bool:
        """Return whether `sample` can be put into a slot of this layout."""
        found = _leaves(self._spec, sample)
        return found is not None and all(
            leaf.fits(one) for leaf, one in zip(self._leaves, found, strict=True)
        )

    def put(self, slot: Slot, position: int, sample: Any) -> bool:
        """Write a sample into a slot. Return False, perhaps after some leaves of it, if it does not fit."""
        found = (sample,) if self._spec is None else _leaves(self._spec, sample)
        if found is None:
            return False
        for leaf, memory, one in zip(self._leaves, slot, found):  # noqa: B905  # a keyword costs 0.1 us
            if not leaf.fits(one):
                return False
            leaf.write(memory, position, one)
        return True

    def read(self, slot: Slot, position: int) -> Any:
        """Return the sample at `position`. Its large leaves are views of the slot."""
        parts = [
            leaf.read(memory, position) for leaf, memory in zip(self._leaves, slot, strict=True)
        ]
        return _nested(self._spec, iter(parts))

    def rows(self, slot: Slot, where: slice | None) -> Any:
        """Return the rows of all samples, or of some. A dataset fills them; see `fastload.rows`."""
        rows = [leaf.rows(memory) for leaf, memory in zip(self._leaves, slot, strict=True)]
        return _nested(self._spec, iter(rows if where is None else [row[where] for row in rows]))

    def columns(self, samples: Sequence[Any]) -> Slot:
        """Return a slot with small samples, or [] if one does not fit, or has large leaves."""
        with suppress(Exception):  # torch raises it too, or takes these samples
            columns = _columns(self._spec, samples)
            if not self.nbytes and all(getattr(c[0], "nbytes", 0) < ROW_BYTES for c in columns):
                return columns
        return []

    def batch(self, slot: Slot) -> Any:
        """Return the batch that `default_collate` would make of the samples in the slot."""
        made = [leaf.batch(memory) for leaf, memory in zip(self._leaves, slot, strict=True)]
        return _nested(self._spec, iter(made), batch=True)


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """Return NumPy's dtype of the same name, or None if it has none (bfloat16 and the like)."""
    try:
        found: np.dtype[Any] = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None
    return found


def _torch_takes(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError:  # strings, objects, dates
        return False
    return True


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN
