"""Files and handles that a forked process inherits, and whose position it would share with all others."""

from __future__ import annotations

import fcntl
import io
import os
import stat
from contextlib import suppress
from typing import Any

from fastload.safety.graph import Graph
from fastload.safety.objects import is_one_of
from fastload.safety.survey import refusal

SURVIVING = {
    *("netCDF4._netCDF4.Dataset", "rasterio.io.DatasetReader", "soundfile.SoundFile"),
    *("pyarrow.parquet.core.ParquetFile", "pysam.libcalignmentfile.AlignmentFile"),
}
"""Classes whose open instances can neither be copied nor be used by several threads, but work in a fork."""

HANGING = {"decord.video_loader.VideoLoader", "decord.video_reader.VideoReader"}
"""Classes whose open instances wait in a fork for threads that it does not have."""


def inherited(graph: Graph) -> str:
    """Return a sentence that names what forks share, although each has its own position in files, or "".

    Raises `DatasetCopyError` if an open handle would hang in a fork.
    """
    if hanging := [named for named in graph.refused if is_one_of(type(named.x), HANGING)]:
        raise refusal(hanging, "it hangs in a fork, which does not have its threads")
    paths = [named.path for named in graph.refused if not is_one_of(type(named.x), SURVIVING)]
    held = [node.x for i, node in graph.nodes.items() if i not in graph.shared]
    paths += map(graph.path, filter(is_stream, held))
    if not paths:
        return ""
    return (
        f"worker processes share the open {', '.join(paths[:8])}, so samples can be wrong or fail. "
        "Open handles cannot be copied. Open them in `__getitem__`, not in `__init__`"
    )


def take_positions() -> list[str]:
    """Give this forked process its own position in each regular file that it inherited. Return those that it shares.

    Each descriptor keeps its number, position and flags, so Python and libraries in C go on with it. What is only
    written stays shared, and so do standard output and error: the processes' lines follow one another there. A file
    that is read and written and stands at its end may be a log. From now on it is written at its end only.
    """
    shared = list[str]()
    try:
        descriptors = [*map(int, os.listdir(_DESCRIPTORS))]
    except OSError as error:  # /proc is not mounted, or the program has privileges of its own
        return [f"{_DESCRIPTORS} ({error.strerror})"]
    for descriptor in descriptors:
        link = f"{_DESCRIPTORS}/{descriptor}"
        try:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            status = os.fstat(descriptor)
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
        except OSError:  # it has no position, or is the directory that was listed
            continue
        if not stat.S_ISREG(status.st_mode) or flags & (os.O_PATH | os.O_WRONLY):
            continue
        if flags & os.O_RDWR and position >= status.st_size:
            if not status.st_size:
                continue  # there is nothing to read, and a database that is written by offsets must not append
            flags |= os.O_APPEND
        try:
            new = os.open(link, flags & _KEPT)
        except OSError as error:
            shared.append(f"{os.readlink(link)} ({error.strerror})")
            continue
        with suppress(OSError):  # a file of /proc about a thread that this fork does not have
            os.lseek(new, position, os.SEEK_SET)
            os.dup2(new, descriptor, os.get_inheritable(descriptor))
        os.close(new)
    return shared


_DESCRIPTORS = "/proc/self/fd"

_KEPT = os.O_RDWR | os.O_APPEND | os.O_DIRECT | os.O_NOATIME | os.O_NONBLOCK | os.O_SYNC
"""The flags of a descriptor that a new one gets. O_TMPFILE would create a file."""


def is_stream(x: Any) -> bool:
    """Return whether `x` reads a pipe or socket, or waits for an event. Forks take turns there."""
    if not hasattr(type(x), "fileno"):
        return False
    try:
        kind = stat.S_IFMT(os.fstat(x.fileno()).st_mode)  # 0 of an event, as ZeroMQ's sockets have
        read = not issubclass(type(x), io.IOBase) or x.readable()
        return read and kind in (0, stat.S_IFIFO, stat.S_IFSOCK)
    except Exception:  # it is closed, or has no descriptor: libraries raise errors of their own
        return False
