"""New processes: `run_fresh` starts the ranks of a run together, and each of them calls `answer`.

    python -m MODULE FOLDER RANK

FOLDER has the input, and gets the results. The ranks start together: each makes the file `ready-RANK`, and waits until
its standard input is closed, which happens when all have made theirs.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from fastload._kit.disk import write_file
from fastload._kit.guard import PARENT_DIED, held, start_guarded
from fastload.errors import FastloadError
from fastload.measure.processes import MemoryReader

_READ_BYTES = 1 << 20
_LOOK_AGAIN_S = 0.05

Child = Popen[bytes]
"""The guard of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Outcome of the processes: the result of each rank, or the error of the first rank that failed, in one line."""

    results: list[dict[str, Any]]
    error: str | None
    status: int
    """Exit code of the rank that failed first, or 128 + the number of the signal that ended it. 0 if none failed."""
    peak_bytes: int | None
    """The largest memory seen of all processes, or None if it was not read."""
    messages: str
    """Standard error of the processes."""


def run_fresh(
    module: str,
    content: Any,
    *,
    ranks: int = 1,
    say: Callable[[str], None] | None = None,
    watch_memory: bool = True,
    limit_s: float = math.inf,
    environ: Mapping[str, str] = os.environ,
) -> Ended:
    """Run `python -m MODULE`, which calls `answer`, in one process per rank, and wait for all of them.

    If a rank fails, the others are killed. If an exception ends this call early, KeyboardInterrupt included, it first
    kills the processes and their children. If this process is killed, the guards kill them. Call this in the main
    thread only.

    Args:
        module: name of the module.
        content: JSON value for the function that `module` passes to `answer`.
        ranks: number of processes.
        say: called with each line that rank 0 prints. If None, the lines are part of the messages.
        watch_memory: measure the memory of the processes while they run.
        limit_s: seconds after which the processes are killed.
        environ: environment of the processes.

    Raises:
        TimeoutError: the processes ran for longer than `limit_s`.
    """
    children: list[Child] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastload-")))
        results = [scratch / f"result-{rank}.json" for rank in range(ranks)]
        messages = [scratch / f"messages-{rank}" for rank in range(ranks)]
        (scratch / "input.json").write_text(json.dumps(content))
        try:
            with held():
                for rank in range(ranks):
                    with messages[rank].open("wb") as stderr:
                        stdout: Any = stderr
                        if say is not None:  # only rank 0 prints the lines of a run
                            stdout = DEVNULL if rank else PIPE
                        child = start_guarded(
                            [sys.executable, "-m", module, str(scratch), str(rank)],
                            stdin=PIPE,
                            stdout=stdout,
                            stderr=stderr,
                            env=environ,
                        )
                    children.append(stack.enter_context(child))
            memory = MemoryReader([child.pid for child in children]) if watch_memory else None
            failed = _watch(children, scratch, say, memory, limit_s)
        finally:
            _end(children)
        written = [json.loads(path.read_text()) if path.exists() else None for path in results]
        error, status = None, 0
        if failed is not None or None in written:
            rank = written.index(None) if failed is None else failed
            status = children[rank].returncode
            error = (written[rank] or {}).get("error") or ending(status)
            error = error if ranks == 1 else f"rank {rank} of {ranks}: {error}"
        said = [path.read_text(errors="replace").strip() for path in messages]
        return Ended(
            results=[] if error else [result for result in written if result is not None],
            error=error,
            status=status,
            peak_bytes=memory.peak if memory else None,
            messages="\n".join(dict.fromkeys(text for text in said if text)),
        )


def answer(work: Callable[[Any, int, Callable[[], None]], dict[str, Any]]) -> int:
    """Write the result of `work`, or the error that it raises, and return the exit code.

    Call this in a process that `run_fresh` started. `work` gets the content, the rank, and a barrier: a function to
    call when the rank is ready, which returns when all ranks are.
    """
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])

    def barrier() -> None:
        (folder / f"ready-{rank}").touch()
        os.read(0, 1)  # Nothing is ever written to it. All ranks return when it is closed.

    try:
        content = work(json.loads((folder / "input.json").read_text()), rank, barrier)
    except Exception as error:
        content = {"error": _sentence(error)}
        if not isinstance(error, FastloadError | OSError):
            traceback.print_exc()
    # Write it whole or not at all: if a rank fails, the others may be killed while they write.
    write_file(folder / f"result-{rank}.json", json.dumps(content).encode(), durable=False)
    return 1 if "error" in content else 0


def ending(status: int) -> str:
    """Describe how a process ended that wrote no result."""
    if status > 128:
        name = signal.Signals(status - 128).name
        hint = ": the system may be out of memory" if name == "SIGKILL" else ""
        return f"the run was ended by {name}{hint}"
    return f"the run ended with exit code {status} and left no result"


def _sentence(error: Exception) -> str:
    """Return an error in one line, with its notes. If torch passed it on from a worker, return only its last line."""
    text = str(error).strip()
    if "Original Traceback" in text:
        return text.splitlines()[-1]
    return "; ".join([f"{type(error).__name__}: {text}", *getattr(error, "__notes__", ())])


def _end(children: Sequence[Child]) -> None:
    """Kill the children that still run, with all processes that they started, and wait for their end."""
    for child in children:
        child.send_signal(PARENT_DIED)
    for child in children:
        child.wait()  # After Ctrl-C, `with child` alone would wait a quarter of a second at most.


def _let_start(children: Sequence[Child], folder: Path) -> None:
    """Let the ranks go on from the barrier if all are there."""
    if all((folder / f"ready-{rank}").exists() for rank in range(len(children))):
        for child in children:
            assert child.stdin is not None
            child.stdin.close()


def _watch(
    children: Sequence[Child],
    folder: Path,
    say: Callable[[str], None] | None,
    memory: MemoryReader | None,
    limit_s: float,
) -> int | None:
    """Pass on the lines of rank 0 and read memory until all have ended. Return the rank that failed first, or None."""
    pending = b""
    failed: int | None = None
    until = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        if children[0].stdout is not None:
            selector.register(children[0].stdout, selectors.EVENT_READ)
        while True:
            _let_start(children, folder)
            running = [child for child in children if child.poll() is None]
            if failed is None:
                failed = next(
                    (rank for rank, child in enumerate(children) if child.returncode), None
                )
            if failed is not None and running:
                _end(running)
                continue
            ready = selector.select(_LOOK_AGAIN_S if running else 0)
            if not running and not ready:
                return failed
            for key, _ in ready:
                chunk = os.read(key.fd, _READ_BYTES)
                if not chunk:
                    selector.unregister(key.fileobj)
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    assert say is not None
                    say(line.decode(errors="replace"))
            if time.monotonic() > until:
                raise TimeoutError(f"the run did not end within {limit_s:g} s, and was killed")
            if memory is not None and running:
                memory.read()
