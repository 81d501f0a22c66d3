"""The share of the cores of a rank, from the cores that the launcher gave it. Needs no torch."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterable
from fractions import Fraction

from fastload._kit.texts import counted
from fastload.distributed.detect import Launcher, Rank

_REMEDIES: dict[Launcher, str] = {
    "pals": "mpiexec --depth THREADS --cpu-bind depth",
    "openmpi": "mpiexec --bind-to none, or --map-by slot:PE=THREADS",
    "mpich": "mpiexec -bind-to none",
    "slurm": "srun --cpus-per-task=THREADS",
}


def share(own: Collection[int], on_node: Iterable[Collection[int]]) -> int:
    """Return the number of cores for one rank, which may run on `own`, while the node's ranks may run on `on_node`.

    `on_node` has one collection for each rank of the node, this one included. A core that k ranks may use counts 1/k.
    So four ranks that may all run on sixteen cores have four each. Four ranks that are bound to four each do too.
    """
    users = Counter(core for cores in on_node for core in cores)
    return max(1, math.floor(sum(Fraction(1, max(1, users[core])) for core in own)))


def one_core_warning(
    launcher: Launcher, own: Collection[int], machine: int, local_size: int
) -> str | None:
    """Return a warning if the launcher bound the rank to one core although the node has more, else None."""
    if launcher == "none" or len(own) != 1 or machine // local_size < 2:
        return None
    remedy = _REMEDIES.get(launcher, "taskset, or with the binding options of the launcher")
    return (
        f"fastload: this rank may run only on core {next(iter(own))}, although the node has {machine} cores for "
        f"{counted(local_size, 'rank')}. All threads of this rank share that core. Give the "
        f"rank more cores with {remedy}"
    )


def cores_of(rank: Rank, on_node: Collection[Collection[int]], *, stacklevel: int) -> int:
    """Return the number of threads that this process, which is `rank`, can keep busy; see `fastload.distributed.cores`.

    Args:
        on_node: cores of each rank of this node; empty if they are not known.
        stacklevel: that of the warning, counted from the caller.
    """
    own, machine = os.sched_getaffinity(0), os.cpu_count() or 1
    if warning := one_core_warning(rank.launcher, own, machine, rank.local_size):
        warnings.warn(warning, stacklevel=stacklevel + 1)
    return share(own, on_node) if on_node else min(len(own), max(1, machine // rank.local_size))
