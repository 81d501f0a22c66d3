"""Ranks: detecting the rank of this process, forming the process group, and counting the cores of each rank.

    from fastload import distributed

    rank = distributed.init()          # under torchrun, mpiexec, srun; alone it is rank 0 of 1
    ...                                # DistributedDataParallel, RankSampler, all_reduce
    distributed.shutdown()             # also done at exit

`detect_rank` only detects the rank. `init` also connects to the other ranks, at a port that rank 0 opens.

    detect.py     the rank of this process, from the variables of its launcher
    group.py      the process group: init, shutdown, end_job, cores
    control.py    values that ranks exchange on the CPU
    rendezvous.py how the ranks find each other
    folder_store.py  a store in a folder that survives killed processes
    addresses.py  the address by which other nodes reach this one
    arrow_memory.py  bytes from other processes, checked before they are read
    flight.py  the base of Arrow Flight servers and clients: tokens, certificates, limits, errors
    affinity.py   the share of cores of a rank
    average.py    averaging gradients without DistributedDataParallel
    windows.py    rows in the memory of all ranks, read by MPI's one-sided communication
    launch.py     command lines and job scripts from host files, as pure functions
    execute.py    finding and running a launcher
"""

from typing import TYPE_CHECKING, Any

from fastload.distributed.detect import Detected, Launcher, Rank, detect_rank

if TYPE_CHECKING:
    from fastload.distributed.average import average_gradients
    from fastload.distributed.control import Control, Vote
    from fastload.distributed.folder_store import FolderStore
    from fastload.distributed.group import (
        backend_for,
        cores,
        device_of,
        end_job,
        init,
        met_by,
        shutdown,
    )
    from fastload.distributed.windows import WindowDataset

__all__ = [
    "Control",
    "Detected",
    "FolderStore",
    "Launcher",
    "Rank",
    "Vote",
    "WindowDataset",
    "average_gradients",
    "backend_for",
    "cores",
    "detect_rank",
    "device_of",
    "end_job",
    "init",
    "met_by",
    "shutdown",
]


if not TYPE_CHECKING:  # one that sees it takes each name for one that exists

    def __getattr__(name: str) -> Any:
        """Import names that need torch at their first use, because launchers do not need it."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fastload.distributed import average, control, folder_store, group, windows

        homes = (average, control, folder_store, group, windows)
        return next(vars(home)[name] for home in homes if name in vars(home))
