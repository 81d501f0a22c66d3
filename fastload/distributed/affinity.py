"""How many threads a rank may keep busy, by the cores that the launcher gave it. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from fractions import Fraction

from fastload.distributed.detect import Launcher

_REMEDIES: dict[Launcher, str] = {
    "pals": "mpiexec --depth THREADS --cpu-bind depth",
    "openmpi": "mpiexec --bind-to none, or --map-by slot:PE=THREADS",
    "mpich": "mpiexec -bind-to none",
    "slurm": "srun --cpus-per-task=THREADS",
}


def share(own: Collection[int], on_node: Iterable[Collection[int]]) -> int:
    """Cores for one rank out of those it may run on, `own`, where the ranks of its node may run on `on_node`.

    `on_node` holds one collection for each rank of the node, this one included. A core that k of them may use counts
    1/k: four ranks that all may run on sixteen cores have four each, and four that are bound to four each as well.
    """
    users = Counter(core for cores in on_node for core in cores)
    return max(1, math.floor(sum(Fraction(1, max(1, users[core])) for core in own)))


def one_core_warning(
    launcher: Launcher, own: Collection[int], machine: int, local_size: int
) -> str | None:
    """The sentence for a rank that its launcher bound to a single core, though the node has more for it; else None."""
    if launcher == "none" or len(own) != 1 or machine // local_size < 2:
        return None
    remedy = _REMEDIES.get(launcher, "taskset, or the binding of the launcher around it")
    return (
        f"fastload: this rank may run on core {next(iter(own))} alone, of {machine} on a node with {local_size} "
        f"{'rank' if local_size == 1 else 'ranks'}: all its threads share that core. Give it more with {remedy}"
    )
