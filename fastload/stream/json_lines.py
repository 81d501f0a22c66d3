"""JSON lines: messages from a pipe or a file, and answers and failures to one."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

from fastload.disk import write_all
from fastload.stream.message import Message, Poison, plain

LONGEST_LINE = 64 * 2**20
"""Bytes. A longer line is poison: it does not fill the memory."""
_CHUNK = 2**18
_SHOWN = 200
_REST_MS = 200
"""How long `stop` waits for more of a line that was read in part."""


class JSONLines:
    """Messages from lines of JSON, in a file or a pipe. Blank lines are left out.

    A line that is no JSON is a message with a `Poison`. A pipe takes nothing back: what was not answered when the
    process ends must be sent again.

    Args:
        file: a path, or an open file with a descriptor. None: standard input.
        key: of a line's object, the member that is the message's key. None: the key is "line 1", "line 2" ...
    """

    def __init__(
        self, file: str | os.PathLike[str] | IO[Any] | None = None, *, key: str | None = None
    ) -> None:
        self._key = key
        self._own = isinstance(file, str | os.PathLike)
        if isinstance(file, str | os.PathLike):
            self._descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self._descriptor = (file or sys.stdin).fileno()
        self._wake = os.eventfd(0)  # readable once `stop` was called

    def __iter__(self) -> Iterator[Message]:
        for number, line in enumerate(self._lines(), start=1):
            if isinstance(line, Poison):
                yield Message(f"line {number}", line)
            elif line.strip():
                yield self._message(number, line)

    def _message(self, number: int, line: bytes) -> Message:
        key = f"line {number}"
        try:
            value = json.loads(line)
            if self._key is not None:
                if not isinstance(value, dict) or self._key not in value:
                    raise ValueError(f"expected an object with the key {self._key!r}")
                key = str(value[self._key])
        except ValueError as error:
            found = ValueError(f"line {number} is no message: {error}")
            return Message(key, Poison(line[:_SHOWN].decode(errors="replace"), found))
        return Message(key, value)

    def _lines(self) -> Iterator[bytes | Poison]:
        held = bytearray()
        too_long: Poison | None = None
        while chunk := self._read():
            *whole, rest = chunk.split(b"\n")
            for part in whole:
                held += part
                yield too_long or bytes(held)
                held.clear()
                too_long = None
            held += rest
            if len(held) > LONGEST_LINE:
                error = ValueError(f"a line of more than {LONGEST_LINE:,} bytes")
                too_long = too_long or Poison(held[:_SHOWN].decode(errors="replace"), error)
                held.clear()
        if held and not too_long:
            held += self._rest_of_line(LONGEST_LINE - len(held))
        if held or too_long:
            yield too_long or bytes(held)

    def _read(self) -> bytes:
        """Wait for bytes. Return b"" at the end, and after `stop`."""
        both = select.poll()
        both.register(self._descriptor, select.POLLIN)
        both.register(self._wake, select.POLLIN)
        ready = {descriptor for descriptor, _ in both.poll()}
        return b"" if self._wake in ready else os.read(self._descriptor, _CHUNK)

    def _rest_of_line(self, most: int) -> bytes:
        """Return the rest of a line that was read in part before `stop`. The next line stays in the pipe."""
        rest = bytearray()
        ready = select.poll()
        ready.register(self._descriptor, select.POLLIN)
        while len(rest) < most and ready.poll(_REST_MS):
            byte = os.read(self._descriptor, 1)
            if byte in (b"", b"\n"):
                break
            rest += byte
        return bytes(rest)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Do nothing: a pipe takes nothing back."""

    def stop(self) -> None:
        """End the iteration. A line that was read in part is read to its end, if the rest comes within 0.2 s."""
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close the file, if this opened it."""
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            if self._own:
                os.close(self._descriptor)


class _Lines:
    """Appends whole lines to a file. Cuts off half a line, which a killed process left at its end."""

    def __init__(self, file: str | os.PathLike[str] | IO[Any] | None) -> None:
        self._own = isinstance(file, str | os.PathLike)
        self._name = str(file) if self._own else "standard output"
        if isinstance(file, str | os.PathLike):
            self._descriptor = os.open(
                file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
            )
            _cut_half_a_line(self._descriptor)
        else:
            self._descriptor = (file or sys.stdout).fileno()

    def append(self, lines: Sequence[Any]) -> None:
        text = "".join(json.dumps(line, default=repr) + "\n" for line in lines)
        write_all(self._descriptor, self._name, text.encode())

    def close(self) -> None:
        """Close the file, if this opened it."""
        if self._own and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _cut_half_a_line(descriptor: int) -> None:
    end = os.fstat(descriptor).st_size
    at = end
    while at > 0:
        start = max(0, at - _CHUNK)
        found = os.pread(descriptor, at - start, start).rfind(b"\n")
        if found >= 0:
            at = start + found + 1
            break
        at = start
    if at < end:
        os.ftruncate(descriptor, at)


class JSONLinesSink(_Lines):
    """Answers as lines {"key": ..., "answer": ...}, appended to a file; None: standard output.

    A line is in the operating system's hands before its message is acknowledged: the end of this process loses none.
    After such an end, messages come again, so a key may have two lines: *at least once*.
    """

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        """Append the answers of a batch."""
        self.append([{"key": message.key, "answer": plain(answer)} for message, answer in answers])


class SideList(_Lines):
    """Poison as lines {"key": ..., "error": ..., "value": ...}, appended to a file. It serves as `on_failed`.

    The value is what `decode` got, as text if it is no JSON value.
    """

    def __call__(self, message: Message, error: Exception) -> None:
        """Append a message and its error."""
        value = message.value
        if isinstance(value, Poison):
            value = value.text
        elif isinstance(value, bytes):
            value = value.decode(errors="backslashreplace")
        elif isinstance(value, os.PathLike):
            value = os.fspath(value)
        line = {"key": message.key, "error": f"{type(error).__name__}: {error}", "value": value}
        self.append([line])
