"""Messages between a loader's process and one of its worker processes, over a Unix socket pair.

One side asks and the other answers, so at most one message is under way. A message may bring descriptors.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
from collections.abc import Callable, Iterable, Sequence

from fastload.telemetry.recorder import delayed_s

_HEAD = struct.Struct("=QI")  # bytes of the message, and its descriptors
_AT_ONCE, _KEPT = 16 * 1024, 1024 * 1024  # bytes of the buffer, at first and at most
_MOST_DESCRIPTORS = 16
_LEAST_DELAY_S = 0.1  # who waited for a core for less than that gets no more time
_SPACE = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)


class Wire:
    """One end of the socket pair. One thread at a time uses it.

    Args:
        end: the socket.
        watched: a descriptor that can be read once the process at the other end is dead, or None. Without it, a process
            that the dead one has started, and that still holds the socket, would hide its death.
    """

    def __init__(self, end: socket.socket, watched: int | None = None) -> None:
        self._socket = end
        self._buffer = bytearray(_AT_ONCE)
        self._poll: select.poll | None = None
        if watched is not None:
            self._poll = select.poll()
            # Poll looks at `watched` first. If that shows the death, all that was sent lies in the socket by the time
            # that poll looks there.
            self._poll.register(watched, select.POLLIN)
            self._poll.register(end, select.POLLIN)

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a message. Raise OSError if the other end is closed."""
        head = _HEAD.pack(len(message), len(descriptors))
        if descriptors:
            socket.send_fds(self._socket, [head], descriptors)
            self._socket.sendall(message)
        else:
            self._socket.sendall(head + message)

    def receive(self, seconds: float | None = None) -> tuple[memoryview, list[int]] | None:
        """Wait for the next message. It is valid until the next call. Return None after `seconds` without one.

        `seconds` needs `watched`. Raise EOFError if the other end is closed or its process is dead, and OSError with
        errno EMFILE if this process has no room for the message's descriptors.
        """
        if self._poll is not None and not self._can_read(seconds):
            return None
        head, descriptors = bytearray(_HEAD.size), list[int]()
        try:
            self._fill(memoryview(head), descriptors)
            length, count = _HEAD.unpack(head)
            if length > len(self._buffer):
                self._buffer = bytearray(length)
            message = memoryview(self._buffer)[:length]
            if length > _KEPT:
                self._buffer = bytearray(_AT_ONCE)
            self._fill(message, descriptors)
            if count != len(descriptors):
                raise OSError(
                    errno.EMFILE,
                    "too many open files: raise `ulimit -n`, or lower prefetch_batches",
                )
        except BaseException:  # the process may die within a message
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return message, descriptors

    def _can_read(self, seconds: float | None) -> bool:
        assert self._poll is not None
        ready = self._poll.poll(None if seconds is None else 1000 * seconds)
        if ready and self._socket.fileno() not in (descriptor for descriptor, _ in ready):
            raise EOFError("the process is dead")
        return bool(ready)

    def _fill(self, buffer: memoryview, descriptors: list[int]) -> None:
        """Receive as many bytes as `buffer` has. Add the descriptors that come with them."""
        while buffer:
            if self._poll is not None:
                self._can_read(None)  # the process may die within a message
            got, ancillary, _, _ = self._socket.recvmsg_into(
                [buffer], _SPACE, socket.MSG_CMSG_CLOEXEC
            )
            if not got:
                raise EOFError("the other end is closed")
            buffer = buffer[got:]
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    found = array.array("i")
                    found.frombytes(data[: len(data) // found.itemsize * found.itemsize])
                    descriptors += found


def watched(pid: int) -> int | None:
    """Return a descriptor that can be read once a process is dead, or None if this kernel has no such thing."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def can_be_read(descriptor: int, seconds: float) -> bool:
    """Return whether a descriptor can be read within `seconds`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


def with_core(ends: Callable[[float], bool], seconds: float, pids: Iterable[int]) -> bool:
    """Return whether `ends(seconds)` is true. Time in which one of the processes waited for a core does not count."""
    before = {pid: delayed_s(pid) for pid in pids}
    while not (ended := ends(seconds)) and seconds >= _LEAST_DELAY_S:
        now = {pid: delayed_s(pid) for pid in before}
        seconds, before = max([0.0, *(now[pid] - before[pid] for pid in now)]), now
    return ended


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, or 0.0 if the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
