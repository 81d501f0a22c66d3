"""How a sample lies in a batch.

The first sample fixes a `Layout`. Its large dense tensors and arrays become rows of a `Slot`. All else is stored until
the batch is complete.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from fastload._kit.nested import map_leaves
from fastload._kit.torch_private import (
    collate_arrays,
    collate_handler,
    collate_numbers,
    collate_tensors,
)

ROW_BYTES = 32 * 1024
"""Workers write rows of at least this size into a slot. Smaller ones go through torch.stack: a row of 3 KiB takes
it 0.2 us, and a call for each row 1.8 us. The two cost the same once copying takes microseconds."""

ALIGN = 64
"""Bytes, as in torch's own CPU allocator."""


class _Kept:
    """A leaf that is kept as it is until the batch is complete."""

    def __init__(self, kept: int, collect: type) -> None:
        self._i = kept
        self._collect = collect

    def fits(self, sample: Any) -> bool:
        return True

    def write(self, slot: Slot, position: int, sample: Any) -> None:
        slot.kept[self._i][position] = sample

    def read(self, slot: Slot, position: int) -> Any:
        return slot.kept[self._i][position]

    def rows(self, slot: Slot) -> Any:
        raise TypeError("only the large leaves of a learned layout have rows")

    def batch(self, slot: Slot) -> Any:
        return default_collate(self._collect(slot.kept[self._i]))


class _TensorRow:
    """A dense CPU tensor of fixed dtype and shape, as a row of the slot."""

    def __init__(self, row: int, sample: torch.Tensor) -> None:
        self._i = row
        self.dtype = sample.dtype
        self.array_dtype = _numpy_dtype(sample.dtype)
        self.shape = sample.shape
        self.nbytes = sample.numel() * sample.element_size()

    @staticmethod
    def suits(sample: Any) -> bool:
        """Return whether stacking `sample` only copies its numbers into a contiguous row."""
        return (
            type(sample) is torch.Tensor
            and sample.is_cpu
            and sample.layout is torch.strided
            and not sample.requires_grad
            and not sample.is_nested
            # torch.stack keeps channels-last strides of samples with 4 dimensions and more
            and (sample.dim() <= 3 or sample.is_contiguous())
        )

    def fits(self, sample: Any) -> bool:
        return self.suits(sample) and sample.dtype is self.dtype and sample.shape == self.shape

    def write(self, slot: Slot, position: int, sample: torch.Tensor) -> None:
        array = slot.arrays[self._i]
        if array is None:  # a dtype that NumPy lacks
            slot.rows[self._i][position].copy_(sample)
        else:
            # NumPy copies in this thread. For rows of this size, torch would use its own threads.
            np.copyto(array[position, ...], sample.numpy())

    def read(self, slot: Slot, position: int) -> torch.Tensor:
        return slot.rows[self._i][position]

    def rows(self, slot: Slot) -> torch.Tensor:
        return slot.rows[self._i]

    batch = rows


class _ArrayRow:
    """A NumPy array of fixed dtype and shape, as a row of the slot; a tensor in the batch."""

    def __init__(self, row: int, sample: np.ndarray) -> None:
        self._i = row
        self.array_dtype = sample.dtype
        self.shape = sample.shape
        self.nbytes = sample.nbytes

    @staticmethod
    def suits(sample: Any) -> bool:
        if type(sample) is not np.ndarray or not sample.dtype.isnative:
            return False
        # A non-contiguous array suits only if torch accepts its strides.
        step = sample.itemsize
        return sample.flags.c_contiguous or all(s >= 0 and s % step == 0 for s in sample.strides)

    def fits(self, sample: Any) -> bool:
        return (
            self.suits(sample) and sample.dtype == self.array_dtype and sample.shape == self.shape
        )

    def write(self, slot: Slot, position: int, sample: np.ndarray) -> None:
        np.copyto(self.rows(slot)[position, ...], sample)

    def read(self, slot: Slot, position: int) -> np.ndarray:
        array: np.ndarray = self.rows(slot)[position, ...]
        return array

    def rows(self, slot: Slot) -> np.ndarray:
        array = slot.arrays[self._i]
        assert array is not None
        return array

    def batch(self, slot: Slot) -> torch.Tensor:
        return slot.rows[self._i]


class _NumberRow(_ArrayRow):
    """A Python number in a sample of a dataset that fills rows, as an element of the slot."""

    def __init__(self, row: int, sample: float) -> None:
        super().__init__(row, np.array(sample, _NUMBERS[type(sample)]))
        self._type = type(sample)

    def fits(self, sample: Any) -> bool:
        return type(sample) is self._type and (self._type is not int or -(2**63) <= sample < 2**63)

    def write(self, slot: Slot, position: int, sample: Any) -> None:
        self.rows(slot)[position] = sample

    def read(self, slot: Slot, position: int) -> Any:
        return self.rows(slot)[position].item()


_NUMBERS: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
"""The dtypes that torch's `default_collate` makes of Python's numbers."""


class _Sequence:
    """A tuple, list or named tuple of fixed length."""

    def __init__(self, kind: type, parts: list[_Node]) -> None:
        self._kind = kind
        self._parts = parts
        self._named = hasattr(kind, "_fields")

    def fits(self, sample: Any) -> bool:
        kind: Any = type(sample)  # Any: mypy would narrow `sample` to an object without length
        return (
            kind is self._kind
            and len(sample) == len(self._parts)
            and all(part.fits(s) for part, s in zip(self._parts, sample, strict=True))
        )

    def write(self, slot: Slot, position: int, sample: Any) -> None:
        for part, s in zip(self._parts, sample, strict=True):
            part.write(slot, position, s)

    def read(self, slot: Slot, position: int) -> Any:
        parts = [part.read(slot, position) for part in self._parts]
        return self._kind(*parts) if self._named else self._kind(parts)

    def rows(self, slot: Slot) -> Any:
        parts = [part.rows(slot) for part in self._parts]
        return self._kind(*parts) if self._named else self._kind(parts)

    def batch(self, slot: Slot) -> Any:
        parts = [part.batch(slot) for part in self._parts]
        return self._kind(*parts) if self._named else parts  # a tuple becomes a list, as in torch


class _Mapping:
    """A dict with fixed keys in a fixed order."""

    def __init__(self, parts: dict[Any, _Node]) -> None:
        self._keys = list(parts)
        self._parts = parts

    def fits(self, sample: Any) -> bool:
        return (
            type(sample) is dict
            and list(sample) == self._keys
            and all(part.fits(sample[key]) for key, part in self._parts.items())
        )

    def write(self, slot: Slot, position: int, sample: Any) -> None:
        for key, part in self._parts.items():
            part.write(slot, position, sample[key])

    def read(self, slot: Slot, position: int) -> Any:
        return {key: part.read(slot, position) for key, part in self._parts.items()}

    def rows(self, slot: Slot) -> Any:
        return {key: part.rows(slot) for key, part in self._parts.items()}

    def batch(self, slot: Slot) -> Any:
        return {key: part.batch(slot) for key, part in self._parts.items()}


_Node = _Kept | _TensorRow | _ArrayRow | _Sequence | _Mapping


class Layout:
    """How a sample lies in a batch: which of its leaves are rows of a slot, and which are kept.

    Args:
        sample: an example of the samples.
        filled: the dataset fills the rows, so every leaf is a row, however small.

    With `filled`, raises TypeError if a leaf cannot be a row, and LookupError if a user's function collates it.
    """

    def __init__(self, sample: Any, *, filled: bool = False) -> None:
        self.filled = filled
        self.rows: list[_TensorRow | _ArrayRow] = []
        self.kept = 0
        self._root = self._node(sample, list)

    def _node(self, sample: Any, collect: type) -> _Node:
        """Return the node for `sample`. Torch collects the samples of a leaf in a `collect`: list or tuple."""
        kind = type(sample)
        handler = collate_handler(kind)
        if kind is torch.Tensor and handler is collate_tensors and _TensorRow.suits(sample):
            nbytes = sample.numel() * sample.element_size()
            if self.filled or (nbytes >= ROW_BYTES and _numpy_dtype(sample.dtype)):
                return self._row(_TensorRow(len(self.rows), sample))
        elif kind is np.ndarray and handler is collate_arrays and _ArrayRow.suits(sample):
            if (self.filled or sample.nbytes >= ROW_BYTES) and _torch_takes(sample.dtype):
                return self._row(_ArrayRow(len(self.rows), sample))
        elif self.filled and kind in _NUMBERS and handler in collate_numbers:
            return self._row(_NumberRow(len(self.rows), sample))
        elif handler is None and (
            kind in (tuple, list) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
        ):
            return _Sequence(kind, [self._node(s, tuple) for s in sample])
        elif handler is None and kind is dict:
            return _Mapping({key: self._node(s, list) for key, s in sample.items()})
        if self.filled and handler not in (None, collate_tensors, collate_arrays, *collate_numbers):
            raise LookupError(f"a collate function is registered for {kind.__name__}")
        if self.filled:
            raise TypeError(f"a leaf of type {kind.__name__} cannot be a row of a batch")
        self.kept += 1
        return _Kept(self.kept - 1, collect)

    def _row(self, row: _TensorRow | _ArrayRow) -> _TensorRow | _ArrayRow:
        self.rows.append(row)
        return row

    @property
    def nbytes(self) -> int:
        """The bytes of a sample's rows."""
        return sum(row.nbytes for row in self.rows)

    def slot_bytes(self, n: int) -> int:
        """Return the bytes of a slot for `n` samples."""
        return sum(aligned(n * row.nbytes) for row in self.rows)

    def runs(self, slot: Slot, start: int, stop: int) -> Any:
        """Return the rows of samples `start` to `stop`. A dataset fills them; see `fastload.rows`."""
        rows = self._root.rows(slot)
        return rows if stop - start == slot.n else map_leaves(rows, lambda leaf: leaf[start:stop])

    def fits(self, sample: Any) -> bool:
        """Return whether `sample` can be written into a slot of this layout."""
        return self._root.fits(sample)

    def write(self, slot: Slot, position: int, sample: Any) -> None:
        """Write a sample that fits."""
        self._root.write(slot, position, sample)

    def read(self, slot: Slot, position: int) -> Any:
        """Return the sample at `position`. Its large leaves are views of the slot."""
        return self._root.read(slot, position)

    def batch(self, slot: Slot) -> Any:
        """Return the batch that `default_collate` would make of the samples in the slot."""
        return self._root.batch(slot)


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


class Slot:
    """The memory of one batch of `n` samples.

    Each row leaf has a tensor `dtype[n, *shape]`, and an array over the same memory if NumPy has the dtype. Each kept
    leaf has a list.
    """

    def __init__(self, layout: Layout, n: int, memory: np.ndarray, *, channels_last: bool) -> None:
        self.n = n
        self.kept: list[list[Any]] = [[None] * n for _ in range(layout.kept)]
        self.arrays: list[np.ndarray | None] = []
        self.rows: list[torch.Tensor] = []
        offset = 0
        for row in layout.rows:
            shape = n, *row.shape
            interleaved = channels_last and len(shape) == 4
            if interleaved:
                shape = n, *row.shape[1:], row.shape[0]
            array, rows = _memory(row, shape, memory, offset)
            # `share_memory_()` and queues exchange a storage's memory. An array of the tensor still sees this one.
            rows.untyped_storage().loan = memory  # type: ignore[attr-defined]
            if interleaved:
                rows = rows.permute(0, 3, 1, 2)
                array = None if array is None else array.transpose(0, 3, 1, 2)
            self.arrays.append(array)
            self.rows.append(rows)
            offset += aligned(n * row.nbytes)


def _memory(
    row: _TensorRow | _ArrayRow, shape: tuple[int, ...], memory: np.ndarray, offset: int
) -> tuple[np.ndarray | None, torch.Tensor]:
    """Return the memory of a row leaf at an offset, as an array and as a tensor. No array if NumPy lacks the dtype."""
    if row.array_dtype is not None:
        array = np.ndarray(shape, row.array_dtype, buffer=memory, offset=offset)
        return array, torch.from_numpy(array)
    assert isinstance(row, _TensorRow)
    flat = torch.from_numpy(memory[offset : offset + shape[0] * row.nbytes])
    return None, flat.view(row.dtype).view(shape)


def aligned(nbytes: int) -> int:
    """Return `nbytes` rounded up to `ALIGN`."""
    return -(-nbytes // ALIGN) * ALIGN
