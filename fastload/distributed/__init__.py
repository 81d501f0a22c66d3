"""Ranks: which one this process is, the process group of all of them, and the cores that each one has.

    from fastload import distributed

    rank = distributed.init()          # under torchrun, mpiexec, srun; alone it is rank 0 of 1
    ...                                # DistributedDataParallel, RankSampler, all_reduce
    distributed.shutdown()             # also done at exit

`detect_rank` tells the rank alone; `init` meets the other ranks at a free port that rank 0 opens.

    detect.py     which rank this is, by the variables of its launcher, mpi4py, or the node file
    group.py      the process group: init, shutdown, end_job, cores
    control.py    what ranks tell each other on the CPU
    rendezvous.py how the ranks agree on a place to meet
    folder_store.py  what processes share by a folder, whichever of them is killed
    addresses.py  the address by which other nodes reach this one
    flight_access.py  which calls a server of Arrow Flight answers
    affinity.py   a rank's share of the cores: pure
    average.py    gradients averaged by hand
    windows.py    rows in the memory of all ranks, read by MPI's one-sided communication
    launch.py     host files to command lines and job scripts: pure
    execute.py    which launcher is here, and running it
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


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first used: launchers do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastload.distributed import average, control, folder_store, group, windows

    homes = (average, control, folder_store, group, windows)
    return next(vars(home)[name] for home in homes if name in vars(home))
