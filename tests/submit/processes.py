"""What a batch system does to the processes of a job, by session; and who of a job is left, by its environment."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.distributed.launching import is_over


def signal_session(session: int, signum: signal.Signals) -> None:
    """Signal every process of a session, as PBS does."""
    for pid in _running():
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                os.kill(pid, signum)


def marked(mark: str) -> list[int]:
    """The processes with `MARK=mark` in their environment."""
    found = []
    for pid in _running():
        with suppress(OSError):
            if f"MARK={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def left(mark: str) -> list[int]:
    """Return the processes that have not ended after 10 s."""
    deadline = time.monotonic() + 10
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            os.close(descriptor)
    return marked(mark)


def kill_marked(mark: str) -> None:
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _running() -> Iterator[int]:
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and not is_over(int(path.name)):
            yield int(path.name)
