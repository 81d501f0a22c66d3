"""The ranks of programs that were written for Twister2: the variables that they read, and their process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fastload import distributed

_added: dict[str, str] = {}
"""The variables that `set_variables` has set, with their values."""


def set_variables() -> None:
    """Set OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE under a launcher that does not, such as MPICH's.

    Without a launcher, set nothing, because a job that this process starts would inherit it. Raises RankError.
    """
    rank = distributed.detect_rank().rank
    if rank.launcher == "none":
        return
    for name, value in (("RANK", rank.rank), ("SIZE", rank.world_size)):
        variable = f"OMPI_COMM_WORLD_{name}"
        if variable not in os.environ:
            os.environ[variable] = _added[variable] = str(value)


@contextmanager
def _variables_of_the_launcher() -> Iterator[None]:
    """Unset in the block what `set_variables` has set. Otherwise fastload would take Open MPI for the launcher."""
    for name in _added:
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.update(_added)


def join() -> distributed.Rank:
    """Return this process's rank. The first call, which all ranks make, creates the process group over Gloo."""
    with _variables_of_the_launcher():
        return distributed.init("gloo")


def wait_for_all() -> None:
    """Wait until all ranks have called this."""
    if join().world_size > 1:
        dist.barrier()
