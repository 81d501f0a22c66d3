"""Datasets that hold, leave or end their worker process at known indices, and what tests see of processes.

All of it can be pickled and imported, so that every way to start a worker can use it. Order is forced by a named
pipe, in which workers say where they are, and by a lock, which holds them until the test opens it. Both are known by
their paths.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import multiprocessing
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import fastload
from fastload.errors import LoaderClosedError
from tests.fakes import Numbers

LIMIT_S = 30.0  # only a hang waits that long
contexts = pytest.mark.parametrize(
    "context", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)]
)

# ---- what the workers call ----


def say(pipe: Path, *words: object) -> None:
    """Write a line into a test's named pipe. Lines of several processes do not mix."""
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    os.write(descriptor, (" ".join(map(str, words)) + "\n").encode())
    os.close(descriptor)


def pass_gate(lock: Path) -> None:
    """Wait until the test has opened the gate."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def segfault() -> None:
    """End this process by SIGSEGV, without a word and without a core file."""
    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)


def killed() -> None:
    """End this process by SIGKILL, as the kernel does if memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def leaves() -> None:
    """End this process with code 3."""
    os._exit(3)


class Dies(Numbers):
    """Its own indices. Reading one of `deadly` writes the moment into `note`, and ends the process in its way."""

    def __init__(self, length: int, deadly: dict[int, Callable[[], None]], note: Path) -> None:
        super().__init__(length)
        self.deadly, self.note = deadly, note

    def __getitem__(self, index: int) -> int:
        if index in self.deadly:
            self.note.write_text(str(time.monotonic()))
            self.deadly[index]()
        return index


class Held(Numbers):
    """Its own indices. Before one of `held` is read, a worker says its process id and the index, and waits."""

    def __init__(self, length: int, held: tuple[int, ...], pipe: Path, gate: Path) -> None:
        super().__init__(length)
        self.held, self.pipe, self.gate = held, pipe, gate

    def __getitem__(self, index: int) -> int:
        if index in self.held:
            say(self.pipe, os.getpid(), index)
            pass_gate(self.gate)
        return index


class Computes(Numbers):
    """A sample says its process id, and then calls C that does not let go of the GIL. It has named semaphores."""

    def __init__(self, length: int, pipe: Path, context: str) -> None:
        super().__init__(length)
        self.pipe, self.lock = pipe, multiprocessing.get_context(context).Lock()

    def __getitem__(self, index: int) -> int:
        say(self.pipe, os.getpid())
        return sum(range(10**12))


class Says(Numbers):
    """Its own indices; each worker says its process id before the first of them."""

    said = False

    def __init__(self, length: int, pipe: Path) -> None:
        super().__init__(length)
        self.pipe = pipe

    def __getitem__(self, index: int) -> int:
        if not self.said:
            self.said = True
            say(self.pipe, os.getpid())
        return index


class DyingLane(IterableDataset[Any]):
    """Samples (number, random number); those of a worker begin at 1,000 times its id.

    Worker 1 ends itself before its sample `at`, as long as there is no file `note`.
    """

    def __init__(self, length: int, at: int, note: Path) -> None:
        self.length, self.at, self.note = length, at, note

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        for k in range(self.length):
            if (worker, k) == (1, self.at) and not self.note.exists():
                self.note.write_text(str(time.monotonic()))
                killed()
            yield torch.tensor([1000 * worker + k, torch.rand(()).item()])


# ---- what the tests call ----


def processes(
    dataset: Any,
    batch_size: int | None = 4,
    *,
    workers: int = 2,
    context: Any = None,
    **options: Any,
) -> fastload.DataLoader[Any]:
    """Return a loader with worker processes."""
    options |= {"worker_method": "process", "multiprocessing_context": context}
    return fastload.DataLoader(dataset, batch_size, num_workers=workers, **options)


class Pipe:
    """The test's end of a named pipe."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path, self._fd, self._read = path, os.open(path, os.O_RDWR | os.O_NONBLOCK), b""

    def hear(self, seconds: float = LIMIT_S) -> list[str]:
        """Return the words of the next line."""
        while b"\n" not in self._read:
            assert select.select([self._fd], [], [], seconds)[0], f"no line within {seconds} s"
            self._read += os.read(self._fd, 4096)
        line, _, self._read = self._read.partition(b"\n")
        return line.decode().split()

    def numbers(self, count: int = 1) -> list[int]:
        """Return the first number of each of the next lines."""
        return [int(self.hear()[0]) for _ in range(count)]

    def close(self) -> None:
        """Close the test's end."""
        os.close(self._fd)


class Gate:
    """The test's end of a lock that workers wait for."""

    def __init__(self, path: Path) -> None:
        self.path, self._fd = path, os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def open(self) -> None:
        """Let all workers pass. Forks share the lock, so it is given back and not only closed."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Open the gate, and close the test's end."""
        self.open()
        os.close(self._fd)


class Watch:
    """Processes that a test watches by their pidfds, which also hold for those that are not its children."""

    def __init__(self, *pids: int) -> None:
        self.pids = list(pids)
        self._fds = [os.pidfd_open(pid) for pid in pids]

    def alive(self, seconds: float) -> list[int]:
        """Return which of them have not ended within `seconds`."""
        deadline = time.monotonic() + seconds
        left = []
        for pid, fd in zip(self.pids, self._fds, strict=True):
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                left.append(pid)
        return left

    def close(self) -> None:
        """Kill what is left of them."""
        for fd in self._fds:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            os.close(fd)


def outcomes(iterator: Iterator[Any]) -> list[Any]:
    """Return what each `next()` gave until the end: batches, and errors as they are."""
    got: list[Any] = []
    while len(got) < 10_000:
        try:
            got.append(next(iterator))
        except StopIteration:
            return got
        except Exception as error:
            got.append(error)
            if isinstance(error, LoaderClosedError):
                return got
    raise AssertionError("the epoch does not end")


def plain(got: list[Any]) -> list[Any]:
    """Return batches as lists, and errors as the names of their types."""
    return [type(b).__name__ if isinstance(b, Exception) else b.tolist() for b in got]


def parents() -> dict[int, int]:
    """Return the parent of each process that runs."""
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):
            found[int(name)] = int(
                Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]
            )
    return found


def descendants() -> set[int]:
    """Return the processes that come of this one, except multiprocessing's two servers, which stay."""
    above, found = parents(), {os.getpid()}
    while new := {pid for pid, parent in above.items() if parent in found} - found:
        found |= new
    servers = (forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    return found - {os.getpid(), *servers}


def memfds() -> list[str]:
    """Return the memory files that this process has mapped or holds a descriptor of, one entry for each."""
    with open("/proc/self/maps") as maps:
        found = [line.strip() for line in maps if "/memfd:" in line]
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            if (name := os.readlink(f"/proc/self/fd/{fd}")).startswith("/memfd:"):
                found.append(f"{fd} {name}")
    return found
