"""Messages between a loader's process and one of its worker processes, over a Unix socket pair.

Each message is one packet, so several threads may send, and a process that dies leaves no part of a message. A message
may bring descriptors. A large one lies in memory whose descriptor comes along.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence

from fastload.telemetry.recorder import delayed_s

_MOST = 32 * 1024  # bytes of a packet: far below what a socket takes by default
_MOST_DESCRIPTORS = 16
_LEAST_DELAY_S = 0.1  # who waited for a core for less than that gets no more time
_SPACE = socket.CMSG_SPACE((_MOST_DESCRIPTORS + 1) * array.array("i").itemsize)
TOO_MANY = "too many open files: raise `ulimit -n`, or lower prefetch_batches"
_INLINE, _APART = b"\0", b"\1"
_AT_ONCE = int(socket.MSG_DONTWAIT)  # plain numbers: an operation on flags takes a microsecond
_SENDING, _RECEIVING = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC)
_SOCKET, _RIGHTS, _CUT = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS), int(socket.MSG_CTRUNC)


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new wire."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Packet:
    """A message as it is sent. Raise OSError if it is large and memory or descriptors run out."""

    def __init__(self, message: bytes, descriptors: Sequence[int]) -> None:
        self.parts, self.descriptors = [_INLINE, message], list(descriptors)
        if len(message) > _MOST:
            apart = os.memfd_create("fastload-message", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, apart).atexit = False
            with open(apart, "wb", buffering=0, closefd=False) as file:
                left = memoryview(message)
                while left:
                    left = left[file.write(left) :]
            self.parts = [_APART]
            self.descriptors.append(apart)


class Wire:
    """One end of the socket pair. Any thread may send, one at a time may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray(_MOST + 1)

    def send(self, message: bytes, descriptors: Sequence[int] = (), *, waits: bool = True) -> bool:
        """Send a message. Raise OSError if the other end is closed.

        Return False if there is no room for it and this must not wait.
        """
        return self.send_packet(Packet(message, descriptors), waits=waits)

    def send_packet(self, packet: Packet, *, waits: bool) -> bool:
        """See `send`."""
        descriptors = packet.descriptors
        rights = [(_SOCKET, _RIGHTS, array.array("i", descriptors))] if descriptors else ()
        try:
            self._socket.sendmsg(packet.parts, rights, _SENDING if waits else _SENDING | _AT_ONCE)
        except BlockingIOError:
            return False
        return True

    def has_more(self) -> bool:
        """Return whether `receive` would not wait."""
        return can_be_read(self._socket.fileno(), 0)

    def receive(self, *, waits: bool = True) -> tuple[memoryview, list[int]] | None:
        """Return the next message, which is valid until the next call. Return None if none came and this must not wait.

        It lacks descriptors for which this process has no room. Raise EOFError if the other end is closed, and OSError
        if the message cannot be read.
        """
        flags = _RECEIVING if waits else _RECEIVING | _AT_ONCE
        try:
            got, ancillary, said, _ = self._socket.recvmsg_into([self._buffer], _SPACE, flags)
        except BlockingIOError:
            return None
        descriptors: list[int] = []
        for level, kind, data in ancillary:
            if (level, kind) == (_SOCKET, _RIGHTS):
                found = array.array("i")
                found.frombytes(data[: len(data) // found.itemsize * found.itemsize])
                descriptors += found
        if not got:
            raise EOFError("the other end is closed")
        if self._buffer[0] == _APART[0]:
            if said & _CUT:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise OSError(errno.EMFILE, TOO_MANY)
            with open(descriptors.pop(), "rb", buffering=0) as file:
                file.seek(0)
                return memoryview(file.readall()), descriptors
        return memoryview(self._buffer)[1:got], descriptors


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
