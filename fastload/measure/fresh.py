"""New processes: `run_fresh` starts one, which calls `answer`.

    python -m MODULE FOLDER

FOLDER has the input, and gets the result.
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
from collections.abc import Callable, Mapping
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
"""The guard of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Outcome of the process: its result, or an error in one line."""

    result: dict[str, Any]
    """Empty if there is an error."""
    error: str | None
    status: int
    """Exit code, or 128 + the number of the signal that ended the process."""
    peak_bytes: int | None
    """The largest memory seen of the process and its descendants, or None if it was not read."""
    messages: str
    """Standard error of the process."""


def run_fresh(
    module: str,
    content: Any,
    *,
    say: Callable[[str], None] | None = None,
    watch_memory: bool = True,
    limit_s: float = math.inf,
    environ: Mapping[str, str] = os.environ,
) -> Ended:
    """Run `python -m MODULE`, which calls `answer`, in a new process, and wait for it.

    If an exception ends this call early, KeyboardInterrupt included, it first kills the process and its children. If
    this process is killed, the guard kills them. Call this in the main thread only.

    Args:
        module: name of the module.
        content: JSON value for the function that `module` passes to `answer`.
        say: called with each line that the process prints. If None, the lines are part of the messages.
        watch_memory: measure the memory of the process while it runs.
        limit_s: seconds after which the process is killed.
        environ: environment of the process.

    Raises:
        TimeoutError: the process ran for longer than `limit_s`.
    """
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastload-")))
        result, messages = scratch / "result.json", scratch / "messages"
        (scratch / "input.json").write_text(json.dumps(content))
        with held(), messages.open("wb") as stderr:
            child = start_guarded(
                [sys.executable, "-m", module, str(scratch)],
                stdin=DEVNULL,
                stdout=stderr if say is None else PIPE,
                stderr=stderr,
                env=environ,
            )
            stack.enter_context(child)
            stack.callback(_end, child)
        memory = MemoryReader(child.pid) if watch_memory else None
        _watch(child, say, memory, limit_s)
        written = json.loads(result.read_text()) if result.exists() else {}
        error = None
        if child.returncode or not written:
            error = written.get("error") or ending(child.returncode)
        return Ended(
            result={} if error else written,
            error=error,
            status=child.returncode,
            peak_bytes=memory.peak if memory else None,
            messages=messages.read_text(errors="replace").strip(),
        )


def answer(work: Callable[[Any], dict[str, Any]]) -> int:
    """Write the result of `work`, or the error that it raises, and return the exit code.

    Call this in a process that `run_fresh` started. `work` gets the content.
    """
    folder = Path(sys.argv[1])
    try:
        content = work(json.loads((folder / "input.json").read_text()))
    except Exception as error:
        content = {"error": _sentence(error)}
        if not isinstance(error, FastloadError | OSError):
            traceback.print_exc()
    # Write it whole or not at all: the process may be killed meanwhile.
    write_file(folder / "result.json", json.dumps(content).encode(), durable=False)
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


def _end(child: Child) -> None:
    """Kill the child if it still runs, with all processes that it started, and wait for its end."""
    child.send_signal(PARENT_DIED)
    child.wait()  # After Ctrl-C, `with child` alone would wait a quarter of a second at most.


def _watch(
    child: Child, say: Callable[[str], None] | None, memory: MemoryReader | None, limit_s: float
) -> None:
    """Pass on the lines of the child and read memory until it has ended."""
    pending = b""
    until = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        if child.stdout is not None:
            selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            runs = child.poll() is None
            ready = selector.select(_LOOK_AGAIN_S if runs else 0)
            if not runs and not ready:
                return
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
            if memory is not None and runs:
                memory.read()
