"""CPU seconds and memory of a process and its descendants, from /proc."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fastload.telemetry import recorder

_PROC = Path("/proc")
_READER_CORE_SHARE = 0.02
_READING_INTERVAL_S = 0.05


def descendants(pid: int) -> Iterator[int]:
    """Yield the pids of the children of `pid`, of their children, and so on."""
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:  # The process ended, or there is no /proc.
        return
    for task in tasks:
        try:
            children = (task / "children").read_text().split()
        except OSError:  # The thread ended after it was listed.
            continue
        for child in map(int, children):
            yield child
            yield from descendants(child)


def cpu_seconds() -> float | None:
    """Return the CPU seconds (user + system) of this process and all its descendants, also those that have ended.

    Return None if /proc does not list children. Descendants are counted in ticks of the kernel, usually 10 ms.
    """
    if not (_PROC / "self" / "task" / str(os.getpid()) / "children").exists():
        return None
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    of = (recorder.cpu_seconds(pid, ended_children=True) for pid in descendants(os.getpid()))
    return sum(of, total)


def tree_memory(pid: int) -> int | None:
    """Return the bytes that `pid` and its descendants allocated: anonymous and shared memory, without mapped files.

    If n processes share a page, each of them counts 1/n of it (PSS). Return None if they ended or the kernel is older
    than 5.4.
    """
    return _memory((pid, *descendants(pid)))


def _memory(pids: Iterable[int]) -> int | None:
    allocated = 0
    for process in pids:
        try:
            lines = (_PROC / str(process) / "smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # It ended after it was listed, or belongs to another user.
            continue
        fields = (line.partition(":") for line in lines)
        kib = {name: int(rest.split()[0]) for name, _, rest in fields}
        allocated += (kib.get("Pss_Anon", 0) + kib.get("Pss_Shmem", 0)) * 1024
    return allocated or None


class MemoryReader:
    """Reads the memory of the descendants of a process repeatedly.

    A reading walks page tables and takes time. So the next one waits until readings take at most 2 % of a core.

    Attributes:
        peak: the largest memory seen, in bytes as of `tree_memory`, or None without a reading.
    """

    def __init__(self, pid: int) -> None:
        self.peak: int | None = None
        self._pid = pid
        self._due = 0.0

    def read(self) -> None:
        """Take a reading if one is due."""
        if time.perf_counter() < self._due:
            return
        before_s = time.process_time()
        found = _memory(descendants(self._pid)) or 0
        spent_s = time.process_time() - before_s
        self._due = time.perf_counter() + max(_READING_INTERVAL_S, spent_s / _READER_CORE_SHARE)
        self.peak = max(self.peak or 0, found) or None
