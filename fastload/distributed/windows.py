"""Rows in the memory of all ranks, read without the owner's help, by MPI's one-sided communication.

This is for MPICH and MPIs like it (Intel MPI, Cray MPICH). On one node the wheel of Open MPI 5.0 works as well, though
its UCX prints an error. On a busy two-core machine, reading a row of 784 bytes from another rank took 0.01 to
0.06 ms with either MPI when a call read 64 rows. It took 0.2 to 0.7 ms when a call read one row. If all ranks share a
node, a set in shared memory (`fastload.store`) needs no MPI and no copy of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fastload.distributed.detect import check_world

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class _Column:
    """The position of a column's values within the bytes of a row."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.dtype.itemsize

    def write(self, values: Tensor | NDArray[Any], rows: Tensor) -> None:
        """Copy the values of this column into rows, uint8[n, row bytes]."""
        tensor = torch.as_tensor(values).detach()
        if tensor.numel():
            flat = tensor.reshape(len(tensor), math.prod(self.shape)).contiguous()
            rows[:, self.begin : self.end].copy_(flat.view(torch.uint8))

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy of the values of this column, dtype[n, *shape], in rows."""
        own = rows[:, self.begin : self.end]
        if not own.numel():
            return torch.empty((len(own), *self.shape), dtype=self.dtype)
        # Not `contiguous()`: for one row it may return a view, at an address that is not aligned for the dtype.
        copied = own.clone(memory_format=torch.contiguous_format)
        return copied.view(self.dtype).view(-1, *self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {str(self.dtype).removeprefix('torch.')}{[*self.shape]}"


class WindowDataset(Dataset[Sample]):
    """The rows of all ranks, a map-style dataset: those of rank 0, then those of rank 1, and so on.

    A sample is a dict with a tensor for each column. A row of another rank is copied from its memory (`MPI_Get`), and
    that rank need not take part. `__getitems__` fetches a batch, with one wait per rank that has rows of it. Any number
    of threads may read, so `fastload.DataLoader` shares the dataset among its workers. Processes cannot read it.

    Args:
        columns: this rank's rows, by name: tensors on the CPU or arrays, dtype[rows, ...]. Names, dtypes and shapes of
            a row are the same on all ranks. A rank may have more rows than another, or none. The rows are copied.
        comm: an mpi4py communicator, such as `MPI.COMM_WORLD`. All its ranks make the dataset together.

    `close()` waits until all ranks call it. While a rank waits there, the others can still read its rows. If a rank
    ends without it, the others wait or fail at the end of MPI. After `fastload.distributed.init()`, an uncaught
    exception ends all ranks. Between nodes without RDMA, MPICH serves a rank's rows only while that rank is in an MPI
    call.

    Memory: a copy of this rank's rows, until `close()`.

    Raises:
        ValueError: the columns of one rank break these rules. All ranks raise it.
        RuntimeError: MPI was not started for several threads.
        RankError: MPI does not know the ranks that the launcher has started.
    """

    fastload_per_worker = ()

    def __init__(self, columns: Mapping[str, Tensor | NDArray[Any]], comm: Any) -> None:
        from mpi4py import MPI

        check_world(MPI)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "MPI was started without support for several threads, but loaders read in threads. Set "
                'mpi4py.rc.thread_level = "multiple" before the first import of mpi4py.MPI'
            )
        rows, layout = _agreed(columns, comm)
        self._byte = MPI.BYTE
        self._columns = layout
        self._row_bytes = max(1, layout[-1].end)
        self._own = range(sum(rows[: comm.Get_rank()]), sum(rows[: comm.Get_rank() + 1]))
        self._ends = np.cumsum(rows)
        # Ranks of one node share memory that MPI allocates, so rows are copied without the owner's help.
        self._window: Any = MPI.Win.Allocate(
            len(self._own) * self._row_bytes, self._row_bytes, comm=comm
        )
        self._memory = _as_rows(self._window.tomemory(), self._row_bytes)
        for column in layout:
            column.write(columns[column.name], self._memory)
        self._window.Lock_all()
        self._window.Sync()
        comm.Barrier()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch. Raises IndexError, and ValueError after `close()`."""
        if self._window is None:
            raise ValueError("WindowDataset is closed")
        found = np.asarray(indices, np.int64)
        outside = (found < -len(self)) | (found >= len(self))
        if outside.any():
            raise IndexError(
                f"expected indices of -{len(self)} to {len(self) - 1}, got {found[outside][0]}"
            )
        rows = self._fetched(np.where(found < 0, found + len(self), found))
        values = {column.name: column.read(rows) for column in self._columns}
        return [{name: value[k] for name, value in values.items()} for k in range(len(found))]

    def _fetched(self, indices: NDArray[np.int64]) -> Tensor:
        """Return the bytes of these rows, uint8[len(indices), row bytes]. Consecutive rows are one request."""
        rows = torch.empty((len(indices), self._row_bytes), dtype=torch.uint8)
        ranks = np.searchsorted(self._ends, indices, side="right")
        breaks = np.flatnonzero((np.diff(indices) != 1) | (np.diff(ranks) != 0)) + 1
        asked, array = set(), rows.numpy()
        try:
            for piece in np.split(np.arange(len(indices)), breaks) if len(indices) else ():
                start, stop, first = int(piece[0]), int(piece[-1]) + 1, int(indices[piece[0]])
                if first in self._own:
                    begin = first - self._own.start
                    rows[start:stop] = self._memory[begin : begin + stop - start]
                    continue
                rank = int(ranks[start])
                place = first - (int(self._ends[rank - 1]) if rank else 0)
                here = [array[start:stop], (stop - start) * self._row_bytes, self._byte]
                asked.add(rank)
                self._window.Get(here, rank, [place, here[1], self._byte])
        finally:  # MPI writes into `rows` until the wait ends, even after Ctrl-C
            for rank in asked:
                self._window.Flush(rank)
        return rows

    def close(self) -> None:
        """Free the memory when all ranks have called this. Close the loader first. Further calls do nothing."""
        window, self._window = self._window, None
        if window is None:
            return
        window.Unlock_all()
        self._memory = torch.empty((0, self._row_bytes), dtype=torch.uint8)
        window.Free()

    def __reduce__(self) -> Any:
        raise TypeError(
            "WindowDataset reads through the MPI of this process, so it cannot be pickled. Load it in threads, with "
            'worker_method="thread"'
        )

    def __repr__(self) -> str:
        return (
            f"WindowDataset({len(self)} rows of {len(self._ends)} ranks: {_shown(self._columns)})"
        )


def _agreed(
    columns: Mapping[str, Tensor | NDArray[Any]], comm: Any
) -> tuple[list[int], tuple[_Column, ...]]:
    """Return the number of rows of each rank, and the common columns. Raise ValueError on all ranks, or on none."""
    try:
        said: Any = _layout_of(columns)
    except ValueError as error:
        said = str(error)
    of_ranks = comm.allgather(said)
    for rank, theirs in enumerate(of_ranks):
        if isinstance(theirs, str):
            raise ValueError(f"rank {rank}: {theirs}")
        if theirs[1] != of_ranks[0][1]:
            raise ValueError(
                f"all ranks must have the same columns: rank {rank} has {_shown(theirs[1])}, "
                f"rank 0 has {_shown(of_ranks[0][1])}"
            )
    return [rows for rows, _ in of_ranks], of_ranks[0][1]


def _layout_of(columns: Mapping[str, Tensor | NDArray[Any]]) -> tuple[int, tuple[_Column, ...]]:
    """Return the number of rows, and the position of each column in a row. Raise ValueError if they do not fit."""
    layout: list[_Column] = []
    lengths: dict[str, int] = {}
    for name, values in columns.items():
        try:
            tensor = torch.as_tensor(values)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"column {name!r} is not a tensor or an array of numbers: {error}"
            ) from error
        if not tensor.dim() or not tensor.is_cpu:
            raise ValueError(
                f"column {name!r} must have at least one dimension and be on the CPU, got {tensor.dim()} dimensions on "
                f"{tensor.device}"
            )
        lengths[name] = len(tensor)
        begin = layout[-1].end if layout else 0
        layout.append(_Column(name, tensor.dtype, tuple(tensor.shape[1:]), begin))
    if len(set(lengths.values())) != 1:
        raise ValueError(f"columns must have the same number of rows, got {lengths or 'no column'}")
    return next(iter(lengths.values())), tuple(layout)


def _as_rows(memory: Any, row_bytes: int) -> Tensor:
    """Return memory as uint8[rows, row_bytes], without a copy."""
    if not len(memory):
        return torch.empty((0, row_bytes), dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8).view(-1, row_bytes)


def _shown(columns: Sequence[_Column]) -> str:
    return ", ".join(map(str, columns))
