"""What /proc says about a process and its descendants. Linux only: elsewhere the figures are None, never a guess."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_READER_CORE_SHARE = 0.02
_READING_INTERVAL_S = 0.05


def descendants(pid: int) -> Iterator[int]:
    """The pids of the children of `pid`, of their children, and so on, as they are now."""
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
    """CPU seconds (user + system) of this process and of all its descendants, those that have ended included.

    Descendants are counted in the kernel's ticks, usually 10 ms. None where /proc does not list children.
    """
    if not (_PROC / "self" / "task" / str(os.getpid()) / "children").exists():
        return None
    ended = os.times()
    total = time.process_time() + ended.children_user + ended.children_system
    for pid in descendants(os.getpid()):
        try:
            stat = (_PROC / str(pid) / "stat").read_text()
        except OSError:  # Ended since it was listed.
            continue
        # The command, field 2, stands in parentheses and may hold spaces. User and system ticks, and those of its
        # ended children, are fields 14 to 17.
        total += sum(map(int, stat.rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def machine_cpu_seconds() -> float | None:
    """CPU seconds that all cores of the machine together have spent on anything since it started; None if unknown.

    Time that a hypervisor gave to other machines is in it, as it is lost to this one.
    """
    try:
        with open(_PROC / "stat") as file:
            ticks = [int(field) for field in file.readline().split()[1:9]]
    except OSError:  # There is no /proc.
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Memory:
    """Proportional set size, in bytes: of a page that n processes share, each of them counts 1/n."""

    allocated: int
    """Anonymous and shared memory: what the processes asked for themselves. No process outside changes it."""
    total: int
    """Mapped files too, such as torch's libraries: smaller where any other process maps the same files."""


def tree_memory(pid: int) -> Memory | None:
    """PSS of `pid` and its descendants now; None if they ended, or the kernel (before 5.4) does not tell."""
    allocated = total = 0
    for process in (pid, *descendants(pid)):
        try:
            lines = (_PROC / str(process) / "smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # Ended since it was listed, or not ours to look at.
            continue
        fields = (line.partition(":") for line in lines)
        kib = {name: int(rest.split()[0]) for name, _, rest in fields}
        if "Pss_Anon" in kib:
            allocated += (kib["Pss_Anon"] + kib["Pss_Shmem"]) * 1024
            total += kib["Pss"] * 1024
    return Memory(allocated, total) if total else None


@dataclass(slots=True, kw_only=True)
class PeakMemory:
    """The largest memory seen of some processes and their children; bytes of PSS, each maximum on its own."""

    allocated: int = 0
    total: int = 0
    readings: int = 0
    reader_cpu_s: float = 0.0
    """CPU seconds that the readings cost, in the reading process; at most 2 % of one core."""


class MemoryReader:
    """Reads the memory of some processes and their descendants again and again, and keeps the largest seen.

    A reading walks the page tables of what it reads, so the next one is due when the last has cost no more than a
    fiftieth of a core.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self.peak = PeakMemory()
        self._pids = pids
        self._due = 0.0

    def read(self) -> None:
        """Take a reading if one is due; none of processes that have ended."""
        if time.perf_counter() < self._due:
            return
        before_s = time.process_time()
        found = [memory for pid in self._pids if (memory := tree_memory(pid)) is not None]
        spent_s = time.process_time() - before_s
        self._due = time.perf_counter() + max(_READING_INTERVAL_S, spent_s / _READER_CORE_SHARE)
        peak = self.peak
        peak.reader_cpu_s += spent_s
        if found:
            peak.readings += 1
            peak.allocated = max(peak.allocated, sum(memory.allocated for memory in found))
            peak.total = max(peak.total, sum(memory.total for memory in found))
