"""`SetDataset`: the rows of a set of columns, read from mapped memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fastload._kit.integers import as_indices
from fastload.datasets.manifest import INDEX, Index, Shard, read_index
from fastload.datasets.sample_columns import SampleColumns
from fastload.errors import PackedDataError
from fastload.reading.rows import Gatherer
from fastload.rows import Run
from fastload.store.parts import Schema, open_part, python_value
from fastload.store.root import in_memory

_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_ROW = 2**14
"""Longest row of `_memory_rows` in bytes, because a tensor must have fewer than 2**63 elements."""
_MEMORY_BEGIN = mmap.PAGESIZE  # address 0 would be a null pointer
_MEMORY_END = 2**47  # on x86-64 and arm64, mmap returns higher addresses only on request


class SetDataset(Dataset[Any]):
    """The rows of a set of columns. Row `i` is the same sample in every process that opens the same parts.

    Args:
        path: the folder of the set.
        data: the column, or columns, of a sample. One name: a sample is its value. Several: a tuple of values.
            None: a dict of all columns except `label`.
        label: the column with the label: a sample is `(data, label)`.
        transform: called with the data of each sample. Without it, batches are gathered column by column.
        rows: the rows of the set in their order, int64[len(self)]. None: all rows.
        order: a name for this choice of `rows`. A dataset can load the state of another with the same set and `order`.
        index: index of the set, if it was read already.

    A value is a tensor with the column's dtype and shape. Plain numbers have no dimensions. Columns of strings and
    the like give a `str` or other Python value. A value is a copy. A part is mapped when it is first read. It takes
    address space, but only the pages that are read take memory, which all processes of a node share.

    Attributes:
        path, set_id: the set. `set_id` depends on the set and on `order`.
        schema: name and Arrow type of each column.
        made: how the set was made.
        classes: class names in the order of their numbers, or empty without classes.

    Raises:
        FileNotFoundError: the set does not exist.
        PackedDataError: it is damaged.
        KeyError: it lacks a column.

    Examples:
        >>> _ = fastload.store.put({"x": torch.zeros(10, 3), "y": torch.arange(10)}, "numbers")
        >>> fastload.store.get("numbers", data="x", label="y")[3]
        (tensor([0., 0., 0.]), tensor(3))
    """

    fastload_per_worker = ("transform",)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        data: str | Sequence[str] | None = None,
        label: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        rows: NDArray[np.int64] | None = None,
        order: str = "",
        index: Index | None = None,
    ) -> None:
        self.path = os.path.abspath(path)
        index = index or read_index(self.path)
        if index.mode != "columns":
            raise PackedDataError(
                self.path, "has payloads, not columns: read it with PackedDataset"
            )
        self.set_id = f"{index.id}-{order}" if order else index.id
        self.schema, self.made, self.classes = index.schema, dict(index.made), list(index.classes)
        known = [name for name, _ in index.schema]
        self._columns = SampleColumns(data, label, known=known, where=f"{self.path}: the set")
        self.data, self.label = self._columns.data, label
        self.transform = transform
        self._shards = index.shards
        self._begins = np.cumsum([0, *(shard.rows for shard in index.shards)])
        self._rows = rows
        self._length = index.rows if rows is None else len(rows)
        # The numbers of the parts that have rows of this dataset.
        self._numbers = list(range(len(index.shards)))
        if rows is not None:
            self._numbers = np.unique(self._parts_of(rows)).tolist()
        self._id = index.id
        self._seen: tuple[int, ...] = ()
        self._parts: dict[int, _Part] = {}
        self._memory: dict[str, _Memory] = {}
        self._gatherer = Gatherer()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": {}, "_memory": {}, "_seen": ()}

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        label = "" if self.label is None else f", label {self.label}"
        return f"SetDataset({self.path!r}: {len(self)} rows, data {', '.join(self._columns.data_names)}{label})"

    def column(self, name: str) -> list[Tensor]:
        """Return a column of numbers as tensors in the mapped memory, one for each part that has rows of this dataset.

        Nothing is copied. Changes to the tensors are visible only in this process, and never reach the set.
        """
        return [self._part(number).tensors[name] for number in self._numbers]

    def values(self, name: str) -> Any:
        """Return a column for all rows of this dataset, in their order: a tensor, or a list of Python values.

        Raises:
            KeyError: the column is unknown.
        """
        known = [column for column, _ in self.schema]
        SampleColumns(name, None, known=known, where=f"{self.path}: the set")
        rows = np.arange(self._length) if self._rows is None else self._rows
        return self._gathered(name, rows, self._parts_of(rows))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of `indices`."""
        rows = as_indices(indices, self._length)
        if rows is None:
            raise IndexError(
                f"{indices!r:.100} of {self!r}: expected indices from 0 to {len(self) - 1}"
            )
        if self._rows is not None:
            rows = self._rows[rows]
        numbers = self._parts_of(rows)
        columns = {name: self._gathered(name, rows, numbers) for name in self._columns.names}
        return [
            self._sample({name: values[k] for name, values in columns.items()})
            for k in range(len(rows))
        ]

    @property
    def fill_rows_only_copies(self) -> bool:
        """True if rows come from memory. Then the loop's thread may gather them, because it waits for no disk."""
        return self.transform is None and in_memory(self.path)

    def empty_sample(self) -> Any:
        """Return an empty sample, or None if `fill_rows` cannot fill these samples; see `fastload.rows`."""
        try:
            tensors = self._part(self._numbers[0]).tensors
        except (PackedDataError, OSError):
            return None  # reading a sample raises it, in its place
        if self.transform is not None or not tensors.keys() >= {*self._columns.names}:
            return None
        return self._sample(
            {name: torch.empty_like(tensors[name][0]) for name in self._columns.names}
        )

    def fill_rows(self, run: Run) -> Sequence[int]:
        """Gather the rows of a run into the batch; see `fastload.rows`."""
        rows = as_indices(run.indices, self._length)
        if rows is None or self.transform is not None:
            return range(len(run))
        if self._rows is not None:
            rows = self._rows[rows]
        numbers = self._parts_of(rows)
        try:
            for name, out in self._columns.leaves(run.rows):
                self._gather(name, rows, numbers, out)
        except (PackedDataError, OSError):
            return range(len(run))
        return ()

    def _sample(self, values: Mapping[str, Any]) -> Any:
        if self.transform is None:
            return self._columns.sample(values)
        data = self.transform(self._columns.data_of(values))
        return data if self.label is None else (data, values[self.label])

    def _gathered(self, name: str, rows: NDArray[np.int64], numbers: NDArray[np.int64]) -> Any:
        """Return the values of a column in `rows`: a tensor, or a list of Python values."""
        # Not that of another row: a damaged part leaves the rows of the others.
        tensor = self._part(int(numbers[0]) if len(numbers) else self._numbers[0]).tensors.get(name)
        if tensor is None:
            places = zip(numbers.tolist(), (rows - self._begins[numbers]).tolist(), strict=True)
            return [
                python_value(self.path, self._shards[number], self._part(number).batch, name, at)
                for number, at in places
            ]
        out = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype)
        if len(rows):
            self._gather(name, rows, numbers, out)
        return out

    def _gather(
        self, name: str, rows: NDArray[np.int64], numbers: NDArray[np.int64], out: Tensor
    ) -> None:
        """Copy the values of `rows`, in the parts `numbers`, to `out`. Very long rows are copied part by part."""
        if len(self._numbers) == 1:
            part, begin = self._part(self._numbers[0]), self._begins[self._numbers[0]]
            self._gatherer.gather(part.tensors[name], rows - begin, out)
            return
        memory = self._memory.get(name)
        if memory is None:
            memory = self._memory.setdefault(name, _Memory(out[0], len(self._shards)))
        if memory.row_bytes > MAX_ROW:
            for number in np.unique(numbers).tolist():
                at = np.flatnonzero(numbers == number)
                local = torch.from_numpy(rows[at] - self._begins[number])
                out[torch.from_numpy(at)] = self._part(number).tensors[name][local]
            return
        if memory.missing:
            for number in memory.missing.intersection(numbers.tolist()):
                memory.add(number, self._part(number).tensors[name], int(self._begins[number]))
        # All rows lie within parts: indices were checked, and parts stay mapped while the dataset lives.
        places = memory.origins[numbers] + rows * memory.row_size
        self._gatherer.gather(memory.rows, places, out, _copy_on_one_core)

    def _parts_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the part that each row lies in."""
        return self._begins.searchsorted(rows, side="right") - 1

    def _part(self, number: int) -> _Part:
        part = self._parts.get(number)
        if part is None:
            # Two threads may both open the part. The dict keeps one mapping, and nothing has used the other.
            opened = _Part(self.path, self._shards[number], self.schema)
            self._expect_same_set()
            part = self._parts.setdefault(number, opened)
        return part

    def _expect_same_set(self) -> None:
        """Raise PackedDataError if another set has taken the name, because the part just opened may be of that set.

        A set is replaced as a whole, by a rename. So if the index read after the part has our id, the part is ours.
        """
        about = os.stat(os.path.join(self.path, INDEX))
        seen = (about.st_dev, about.st_ino, about.st_mtime_ns)
        if seen != self._seen:
            found = read_index(self.path).id
            if found != self._id:
                raise PackedDataError(
                    self.path,
                    f"another set has this name now (id {found}, opened as {self._id}). Open it again with get()",
                )
            self._seen = seen


class _Part:
    """A mapped part. `batch` is its Arrow record batch. `tensors` are its columns of numbers, [rows, *shape]."""

    def __init__(self, folder: str, shard: Shard, schema: Schema) -> None:
        self.batch, arrays = open_part(folder, shard, schema)
        self.tensors = {
            name: torch.from_numpy(array).view(getattr(torch, dtype))
            for name, (dtype, array) in arrays.items()
        }


class _Memory:
    """The addresses of a column. Row `k` of the set is `rows[origins[part] + k * row_size]`.

    A part in `missing` has no origin yet.
    """

    def __init__(self, row: Tensor, parts: int) -> None:
        self.row_size, self.row_bytes = row.numel(), row.nbytes
        # Not `row`, which is the memory of a batch.
        self.rows = _memory_rows(row) if self.row_bytes <= MAX_ROW else row.new_empty(0)
        self.origins = np.zeros(parts, np.int64)
        self.missing = set(range(parts))

    def add(self, part: int, tensor: Tensor, begin: int) -> None:
        """Record where a part lies whose first row is `begin`. It must stay mapped. Two threads may add one part."""
        place = (tensor.data_ptr() - _MEMORY_BEGIN) // tensor.element_size()
        self.origins[part] = place - begin * self.row_size
        # Only after the origin is set: a thread that finds the part not missing reads the origin at once.
        self.missing.discard(part)


def _memory_rows(like: Tensor) -> Tensor:
    """Return the address space of this process as a tensor of rows, each like `like`, which is contiguous.

    A row begins at each element: row `k` lies at the address `_MEMORY_BEGIN + k * like.element_size()`. This call
    reads nothing. Callers may only read rows whose memory is mapped.
    """
    # Addresses are multiples of the element's size, as Arrow aligns each column to 8 bytes at least.
    whole: Any = (ctypes.c_char * (_MEMORY_END - _MEMORY_BEGIN)).from_address(_MEMORY_BEGIN)
    elements = torch.frombuffer(whole, dtype=torch.uint8).view(like.dtype)
    rows = len(elements) - like.numel()
    return elements.as_strided((rows, *like.shape), (1, *like.stride()))


def _copy_on_one_core(memory: Tensor, rows: NDArray[np.int64], out: Tensor) -> bool:
    """Copy `rows` of `_memory_rows` to `out` without torch's threads, and return True."""
    kind = _OF_SIZE[out.element_size()]  # NumPy lacks some of torch's dtypes
    out.view(kind).numpy()[...] = memory.view(kind).numpy()[rows]
    return True
