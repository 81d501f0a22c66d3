"""Executes runs: prepares the page cache, starts a fresh process for each, passes its lines on, watches its memory."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fastload.datasets import ImageFileList
from fastload.harness.figures import BenchError, Figures, Outcome, PeakMemory
from fastload.harness.plan import CacheState, Run, sample_order
from fastload.harness.processes import machine_cpu_seconds, tree_memory

_READ_BYTES = 1 << 20
_MIN_READING_INTERVAL_S = 0.1
_READER_CORE_SHARE = 0.02


def files_of(runs: Sequence[Run]) -> tuple[int, list[str]]:
    """How many samples the runs' file list has, and the files that the longest of the runs reads, each once.

    The order of a shorter run is a prefix of the longest one's, so these files serve every run of one workload.
    """
    work = runs[0].workload
    listed = ImageFileList(work.file_list, base_dir=work.base_dir)
    order = sample_order(len(listed), max(run.ordered_samples for run in runs), seed=work.seed)
    files = [listed.locate(index) for index in dict.fromkeys(order)]
    for path in files:
        if not os.path.exists(path):
            raise BenchError(
                f"{path}: no such file; it is listed in {work.file_list}, whose relative paths start from "
                f"{listed.base_dir or '.'} (--base-dir names another folder)"
            )
    return len(listed), files


def execute(run: Run, *, files: Sequence[str], say: Callable[[str], None]) -> Outcome:
    """Measure one run in a fresh process; `say` gets the lines that it prints, as they come. In the main thread alone.

    Args:
        run: what to measure.
        files: the files that the run reads, to be brought into or out of the page cache first.
        say: called on this thread with each line.

    Whatever ends this call early, KeyboardInterrupt included, ends the process and its children first.
    """
    prepare_cache(files, run.workload.cache)
    cached = cached_share(files)
    others = _Others()
    with tempfile.TemporaryDirectory(prefix="fastload-bench-") as scratch:
        plan, result, messages = (
            Path(scratch, name) for name in ("run.json", "result.json", "messages")
        )
        plan.write_text(json.dumps(run.to_json()))
        with messages.open("wb") as stderr, _signals_held() as release:
            # A session of its own: Ctrl-C in the terminal reaches us alone, and one signal ends all of the run.
            child = subprocess.Popen(
                [sys.executable, "-m", "fastload.harness.measure", str(plan), str(result)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
            with child:
                try:
                    release()
                    memory = _watch(child, say)
                    status = child.wait()
                finally:
                    if child.poll() is None:
                        os.killpg(child.pid, signal.SIGKILL)
        written: dict[str, Any] = (
            json.loads(result.read_text()) if result.exists() else {"error": _ending(status)}
        )
        return Outcome(
            run=run,
            figures=Figures(**written["figures"]) if "figures" in written else None,
            error=written.get("error"),
            memory=memory,
            cached_share=cached,
            others_share=others.share(),
            messages=messages.read_text(errors="replace").strip(),
        )


@contextmanager
def _signals_held() -> Iterator[Callable[[], None]]:
    """Let SIGINT and SIGTERM wait until the function is called: a process just started must not be left behind."""
    waiting: list[int] = []
    before = {
        number: signal.signal(number, lambda arrived, _: waiting.append(arrived))
        for number in (signal.SIGINT, signal.SIGTERM)
    }

    def release() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        before.clear()
        while waiting:
            signal.raise_signal(waiting.pop())

    try:
        yield release
    finally:
        release()


def _watch(child: subprocess.Popen[bytes], say: Callable[[str], None]) -> PeakMemory | None:
    """Pass the child's lines on until it closes its output; meanwhile read how much memory it and its children hold.

    A reading walks the page tables of what it reads, so the next one waits until the last has cost no more than a
    fiftieth of a core.
    """
    assert child.stdout is not None
    output = child.stdout.fileno()
    pending = b""
    readings = allocated = total = 0
    due = cost_s = 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if selector.select(max(0.0, due - time.perf_counter())):
                chunk = os.read(output, _READ_BYTES)
                if not chunk:
                    break
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    say(line.decode(errors="replace"))
            if time.perf_counter() < due:
                continue
            before_s = time.process_time()
            memory = tree_memory(child.pid)
            spent_s = time.process_time() - before_s
            cost_s += spent_s
            due = time.perf_counter() + max(_MIN_READING_INTERVAL_S, spent_s / _READER_CORE_SHARE)
            if memory is not None:
                readings += 1
                allocated, total = max(allocated, memory.allocated), max(total, memory.total)
    if not readings:
        return None
    return PeakMemory(allocated=allocated, total=total, readings=readings, reader_cpu_s=cost_s)


class _Others:
    """What processes other than this one and its children take of the machine's cores, from now on."""

    def __init__(self) -> None:
        self._began = self._now()

    def share(self) -> float | None:
        """Share (0 to 1) of all cores' time since the beginning; None where the machine does not tell."""
        at, busy_s, ours_s = (
            now - then for now, then in zip(self._now(), self._began, strict=True)
        )
        if math.isnan(busy_s):
            return None
        return min(1.0, max(0.0, busy_s - ours_s) / (at * (os.cpu_count() or 1)))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        busy_s = machine_cpu_seconds()
        return time.perf_counter(), math.nan if busy_s is None else busy_s, sum(os.times()[:4])


def _ending(status: int) -> str:
    """How a process ended that left no result, in words."""
    if status < 0:
        name = signal.Signals(-status).name
        hint = ": the system may be out of memory" if name == "SIGKILL" else ""
        return f"the run was ended by {name}{hint}"
    return f"the run ended with exit code {status} and left no figures"


def prepare_cache(files: Sequence[str], state: CacheState) -> None:
    """Bring the files into the page cache ("warm"), or ask the kernel to drop them from it ("cold").

    Raises OSError for a file that cannot be read, BenchError where the kernel has no way to drop one.
    """
    if state == "cold" and not hasattr(os, "posix_fadvise"):
        raise BenchError(
            "--cache cold needs posix_fadvise, which this system does not have; use --cache warm"
        )
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            if state == "warm":
                while os.read(descriptor, _READ_BYTES):
                    pass
            else:
                os.fsync(descriptor)  # Pages that are not on the disk yet cannot be dropped.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(files: Sequence[str]) -> float | None:
    """Share (0 to 1) of the files' pages that are in the page cache, by mincore(2); None where that is not known."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    pages = resident = 0
    for path in files:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                continue
            mapping = np.frombuffer(
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8
            )
        present = np.zeros(-(-mapping.size // mmap.PAGESIZE), dtype=np.uint8)
        address, size = ctypes.c_void_p(mapping.ctypes.data), ctypes.c_size_t(mapping.size)
        if libc.mincore(address, size, ctypes.c_void_p(present.ctypes.data)) != 0:
            return None
        pages += present.size
        resident += int(np.count_nonzero(present & 1))
    return resident / pages if pages else None
