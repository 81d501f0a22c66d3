"""Rows in the memory of all ranks, read without the owner's help, by MPI's one-sided communication.

This is for MPICH and MPIs like it (Intel MPI, Cray MPICH). On one node the wheel of Open MPI 5.0 works as well, though
its UCX prints an error. On a busy two-core machine, reading a row of 784 bytes from another rank took 0.01 to
0.06 ms with either MPI when a call read 64 rows. It took 0.2 to 0.7 ms when a call read one row. If all ranks share a
node, a set in shared memory (`fastload.store`) needs no MPI and no copy of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fastload.distributed.detect import check_world

Sample = dict[str, Tensor]


class WindowDataset(Dataset[Sample]):
    """The rows of all ranks, a map-style dataset: those of rank 0, then those of rank 1, and so on.

    A sample is a dict with a tensor for each column. A row is copied from the memory of its rank (`MPI_Get`), and that
    rank need not take part. `__getitems__` fetches a batch, with one wait per rank that has rows of it. Any number of
    threads may read, so `fastload.DataLoader` shares the dataset among its workers. Processes cannot read it.

    Args:
        columns: this rank's rows, by name: tensors on the CPU or arrays, dtype[rows, ...], of dtypes that NumPy has.
            Names, dtypes and shapes of a row are the same on all ranks. A rank may have more rows than another, or
            none. The rows are copied.
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
        counts, self._layout = _agreed(columns, comm)
        self._byte, self._row_bytes = MPI.BYTE, self._layout.itemsize
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts
        own = counts[comm.Get_rank()]
        # Ranks of one node share memory that MPI allocates, so rows are copied without the owner's help.
        self._window: Any = MPI.Win.Allocate(own * self._row_bytes, self._row_bytes, comm=comm)
        if own:
            memory = np.frombuffer(self._window.tomemory(), self._layout)
            for name, array in _arrays(columns).items():
                memory[name] = array
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
        values = {name: torch.from_numpy(rows[name].copy()) for name in self._layout.names or ()}
        return [{name: value[k] for name, value in values.items()} for k in range(len(found))]

    def _fetched(self, indices: NDArray[np.int64]) -> NDArray[Any]:
        """Return these rows."""
        rows = np.empty((len(indices), self._row_bytes), np.uint8)
        ranks = np.searchsorted(self._ends, indices, side="right")
        places = indices - self._firsts[ranks]
        try:
            for row, rank, place in zip(rows, ranks.tolist(), places.tolist(), strict=True):
                there = [place, self._row_bytes, self._byte]
                self._window.Get([row, self._row_bytes, self._byte], rank, there)
        finally:  # MPI writes into `rows` until the wait ends, even after Ctrl-C
            for rank in set(ranks.tolist()):
                self._window.Flush(rank)
        return rows.view(self._layout)[:, 0]

    def close(self) -> None:
        """Free the memory when all ranks have called this. Close the loader first. Further calls do nothing."""
        window, self._window = self._window, None
        if window is None:
            return
        window.Unlock_all()
        window.Free()

    def __reduce__(self) -> Any:
        raise TypeError(
            "WindowDataset reads through the MPI of this process, so it cannot be pickled. Load it in threads, with "
            'worker_method="thread"'
        )

    def __repr__(self) -> str:
        return f"WindowDataset({len(self)} rows of {len(self._ends)} ranks: {self._layout})"


def _agreed(columns: Mapping[str, Any], comm: Any) -> tuple[list[int], np.dtype[Any]]:
    """Return the number of rows of each rank, and their layout. Raise ValueError on all ranks, or on none."""
    try:
        said: Any = _layout_of(_arrays(columns))
    except ValueError as error:
        said = str(error)
    of_ranks = comm.allgather(said)
    for rank, theirs in enumerate(of_ranks):
        if isinstance(theirs, str):
            raise ValueError(f"rank {rank}: {theirs}")
        if theirs[1] != of_ranks[0][1]:
            raise ValueError(
                f"all ranks must have the same columns: rank {rank} has {theirs[1]}, rank 0 has {of_ranks[0][1]}"
            )
    return [rows for rows, _ in of_ranks], of_ranks[0][1]


def _layout_of(arrays: Mapping[str, NDArray[Any]]) -> tuple[int, np.dtype[Any]]:
    """Return the number of rows, and the layout of a row. Raise ValueError if the columns do not fit."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"columns must have the same number of rows, got {lengths or 'no column'}")
    layout = np.dtype([(name, array.dtype, array.shape[1:]) for name, array in arrays.items()])
    if not layout.itemsize:
        raise ValueError(f"the rows of {', '.join(arrays)} have no numbers")
    return next(iter(lengths.values())), layout


def _arrays(columns: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return columns as arrays, without a copy. Raise ValueError if one is none."""
    arrays = {}
    for name, values in columns.items():
        try:
            tensor = torch.as_tensor(values)
            arrays[name] = tensor.numpy(force=True)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"column {name!r} is not a tensor or an array of numbers that NumPy has: {error}"
            ) from error
        if not tensor.dim() or not tensor.is_cpu:
            raise ValueError(
                f"column {name!r} must have at least one dimension and be on the CPU, got {tensor.dim()} dimensions on "
                f"{tensor.device}"
            )
    return arrays
