"""Starts the ranks of a run as processes, together; passes the first one's lines on; watches their memory."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastload.bench.figures import PeakMemory
from fastload.bench.plan import Run
from fastload.cores import usable_cores
from fastload.measure.processes import MemoryReader

_READ_BYTES = 1 << 20
_READING_INTERVAL_S = 0.1

Child = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Ended:
    """What the processes of a run left: a result of each rank, or of the first that failed an error in one line."""

    results: list[dict[str, Any]]
    error: str | None
    memory: PeakMemory | None
    messages: str


def run_ranks(module: str, run: Run, *, say: Callable[[str], None]) -> Ended:
    """Run `python -m MODULE RUN.json RESULT.json RANK READY GO` once for each rank, and wait for all of them.

    Each process writes a byte to READY when it can start, and starts when GO is closed, which is when all have. One
    that fails ends the others. Whatever ends this call early, KeyboardInterrupt included, ends them and their children
    first. In the main thread alone. `say` gets what rank 0 prints, a line at a time.
    """
    children: list[Child] = []
    with ExitStack() as open_files:
        scratch = Path(
            open_files.enter_context(tempfile.TemporaryDirectory(prefix="fastload-bench-"))
        )
        ranks = range(run.ranks)
        results = [scratch / f"result-{rank}.json" for rank in ranks]
        messages = [scratch / f"messages-{rank}" for rank in ranks]
        plan = scratch / "run.json"
        plan.write_text(json.dumps(run.to_json()))
        barrier = open_files.enter_context(_Barrier(run.ranks))
        try:
            with _signals_held():
                for rank in ranks:
                    with messages[rank].open("wb") as stderr:
                        arguments = [str(plan), str(results[rank]), str(rank), *barrier.arguments]
                        # Sessions of their own: Ctrl-C in the terminal reaches us alone, and one signal ends all of a
                        # rank.
                        child = subprocess.Popen(
                            [sys.executable, "-m", module, *arguments],
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE,
                            stderr=stderr,
                            start_new_session=True,
                            pass_fds=barrier.passed,
                            env=_environment(run.ranks),
                        )
                    children.append(open_files.enter_context(child))
            memory, failed = _watch(children, barrier, say)
        finally:
            _end(children)
        written = [json.loads(path.read_text()) if path.exists() else None for path in results]
        error = None
        if failed is not None or None in written:
            rank = written.index(None) if failed is None else failed
            error = (written[rank] or {}).get("error") or ending(children[rank].wait())
            error = error if run.ranks == 1 else f"rank {rank} of {run.ranks}: {error}"
        said = [path.read_text(errors="replace").strip() for path in messages]
        return Ended(
            results=[] if error else [result for result in written if result is not None],
            error=error,
            memory=memory,
            messages="\n".join(dict.fromkeys(text for text in said if text)),
        )


def _environment(ranks: int) -> dict[str, str] | None:
    """Of several ranks, each has its part of the cores for torch's operations, unless the user says how many."""
    if ranks == 1 or "OMP_NUM_THREADS" in os.environ:
        return None
    return {**os.environ, "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks))}


class _Barrier:
    """Two pipes: one that ranks write a byte to when they are ready, one that is closed when all may start."""

    def __init__(self, ranks: int) -> None:
        self._missing = ranks
        self.ready, ready = os.pipe()
        go, self._go = os.pipe()
        self.passed = (ready, go)
        self._open = {self.ready, ready, go, self._go}

    @property
    def arguments(self) -> list[str]:
        return [str(descriptor) for descriptor in self.passed]

    @property
    def is_down(self) -> bool:
        """Whether the ranks may start."""
        return self._missing == 0

    def arrive(self) -> None:
        """Take note of the ranks that have written; with the last one, let all start."""
        self._missing -= len(os.read(self.ready, _READ_BYTES))
        if self._missing == 0:
            self._close(self._go)

    def _close(self, descriptor: int) -> None:
        self._open.remove(descriptor)
        os.close(descriptor)

    def __enter__(self) -> _Barrier:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in tuple(self._open):
            self._close(descriptor)


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait in the block: a process just started must not be left behind."""
    waiting: list[int] = []
    before = {
        number: signal.signal(number, lambda arrived, _: waiting.append(arrived))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        while waiting:
            signal.raise_signal(waiting.pop())


def _end(children: Sequence[Child]) -> None:
    """Kill those that still run, with all that they started, and wait until they are gone."""
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
    for child in children:
        child.wait()  # `with child` alone waits a quarter of a second at most where Ctrl-C ends it.


def _watch(
    children: Sequence[Child], barrier: _Barrier, say: Callable[[str], None]
) -> tuple[PeakMemory | None, int | None]:
    """Pass the first one's lines on until all have closed their output; meanwhile read how much memory they hold.

    Returns the peak, and the rank that failed first.
    """
    pending = b""
    memory = MemoryReader([child.pid for child in children], interval_s=_READING_INTERVAL_S)
    failed: int | None = None
    with selectors.DefaultSelector() as selector:
        for rank, child in enumerate(children):
            assert child.stdout is not None
            selector.register(child.stdout.fileno(), selectors.EVENT_READ, rank)
        selector.register(barrier.ready, selectors.EVENT_READ, None)
        running = len(children)
        while running:
            for key, _ in selector.select(memory.due_in_s()):
                rank = key.data
                if rank is None:
                    barrier.arrive()
                    if barrier.is_down:
                        selector.unregister(barrier.ready)
                    continue
                chunk = os.read(key.fd, _READ_BYTES)
                if chunk and rank:
                    continue  # What a library prints: the lines of a run are rank 0's.
                if chunk:
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        say(line.decode(errors="replace"))
                    continue
                selector.unregister(key.fd)
                running -= 1
                if children[rank].wait() != 0 and failed is None:
                    failed = rank
                    _end(children)
            if running and not memory.due_in_s():
                memory.read()
    if not memory.readings:
        return None, failed
    peak = PeakMemory(
        allocated=memory.peak.allocated,
        total=memory.peak.total,
        readings=memory.readings,
        reader_cpu_s=memory.cpu_s,
    )
    return peak, failed


def ending(status: int) -> str:
    """How a process ended that left no result, in words."""
    if status < 0:
        name = signal.Signals(-status).name
        hint = ": the system may be out of memory" if name == "SIGKILL" else ""
        return f"the run was ended by {name}{hint}"
    return f"the run ended with exit code {status} and left no figures"
