"""The number of cores for this process, and for this rank."""

import os

_LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cores_of_rank() -> int:
    """Return how many cores this rank has: those that it may run on, and at most its even share of the machine's."""
    sizes = (os.environ.get(name, "") for name in _LOCAL_SIZE)
    ranks = next((int(size) for size in sizes if size.isdecimal()), 1)
    return min(usable_cores(), max(1, (os.cpu_count() or 1) // max(1, ranks)))
