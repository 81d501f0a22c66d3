"""`torch.distributed` for programs that were written for its backend "mpi", which torch's wheels lack, or for mpi4py.

    import fastload.compat.twister2deepnet.distributed as dist

The process group uses Gloo, and the ranks connect as in `fastload.distributed.init`. The first call that needs the
group creates it, so a program need not. All other names are those of `torch.distributed`.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_distributed
from torch import Tensor
from torch.distributed import ReduceOp

from fastload.compat.ranks import join
from fastload.errors import RankError


def __getattr__(name: str) -> Any:
    return getattr(torch_distributed, name)


def init_process_group(
    backend: str = "mpi", *, rank: int | None = None, world_size: int | None = None
) -> None:
    """Create the process group, over Gloo for any `backend`. All ranks call this.

    Raises RankError if `rank` or `world_size` differs from the launcher's, and RendezvousError if the ranks cannot
    connect.
    """
    joined = join()
    if (rank, world_size) not in ((None, None), (joined.rank, joined.world_size)):
        raise RankError(
            f"The program says rank {rank} of {world_size}, but the launcher ({joined.launcher}) says {joined}. "
            f"Start {world_size} ranks: mpiexec -n {world_size} python PROGRAM"
        )


def get_rank() -> int:
    """Return this process's rank."""
    return join().rank


def get_world_size() -> int:
    """Return the number of ranks."""
    return join().world_size


def all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
    """Reduce a tensor over all ranks in place, and return it."""
    if get_world_size() > 1:
        torch_distributed.all_reduce(tensor, op)
    return tensor
