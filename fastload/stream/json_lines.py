"""JSON lines: messages from a pipe or a file, and answers and failed messages to one."""

from __future__ import annotations

import json
import math
import os
import select
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, TextIO

from fastload._kit.disk import Descriptor, write_all
from fastload.errors import StreamError
from fastload.stream.message import Message, Poison, to_json

_CHUNK = 2**18
_SHOWN = 200
_BEGINNING = b'{"key": '
"""Start of each line that a sink or a side list writes."""
_AHEAD = 4096
"""Bytes of a pipe that are read ahead. After `stop`, their lines are still answered, so that none is lost."""
_REST_MS = 200
"""Milliseconds that `stop` waits for the rest of a partly read line."""


class JSONLines:
    """Messages from lines of JSON, in a file or a pipe. Blank lines are skipped.

    A line that is not JSON becomes a message with a `Poison`. A pipe takes nothing back: lines without an answer when
    the process ends must be sent again.

    Args:
        file: a path. None: standard input. If Python has read from a pipe before, the bytes in its buffer are lost.
        key: name of the member that is the key of a line's object: text or a number. None: the key is "line 1",
            "line 2" ...

    Examples:
        >>> with open("messages.jsonl", "w") as file:
        ...     _ = file.write('{"id": 7, "x": [1, 2]}')
        >>> lines = fastload.stream.JSONLines("messages.jsonl", key="id")
        >>> [(message.key, message.value["x"]) for message in lines]
        [(7, [1, 2])]
    """

    def __init__(
        self, file: str | os.PathLike[str] | None = None, *, key: str | None = None
    ) -> None:
        self._key = key
        self._stopped = False
        descriptor = _duplicate(sys.stdin) if file is None else os.open(file, os.O_RDONLY)
        self._is_pipe = not stat.S_ISREG(os.fstat(descriptor).st_mode)
        file_and_wake = Descriptor(descriptor), Descriptor(os.eventfd(0))
        # The file, and what is readable after a call of `stop`. None: closed.
        self._opened: tuple[Descriptor, Descriptor] | None = file_and_wake

    def __iter__(self) -> Iterator[Message]:
        for number, line in enumerate(self._lines(), start=1):
            if self._stopped and not self._is_pipe:
                return
            if line.strip():
                yield self._message(number, line)

    def _message(self, number: int, line: bytes) -> Message:
        key: str | int | float = f"line {number}"
        try:
            value = json.loads(line)
            if self._key is not None:
                if not isinstance(value, dict) or self._key not in value:
                    raise ValueError(f"expected an object with the key {self._key!r}")
                own = value[self._key]
                if not _is_key(own):
                    raise ValueError(f"its {self._key!r} must be text or a number")
                key = own
        except (ValueError, RecursionError) as error:
            found = ValueError(f"line {number} is not a message: {error}")
            return Message(key, Poison(line[:_SHOWN].decode(errors="replace"), found))
        return Message(key, value)

    def _lines(self) -> Iterator[bytes]:
        held = bytearray()
        while chunk := self._read(len(held)):
            *whole, rest = chunk.split(b"\n")
            for part in whole:
                yield bytes(held + part)
                held.clear()
            held += rest
        if held:
            yield bytes(held + self._rest_of_line())

    def _read(self, held: int) -> bytes:
        """Wait for bytes. Return b"" at the end, and after `stop`. A long line comes in larger pieces.

        Args:
            held: number of bytes of a line that are read already.
        """
        if (opened := self._opened) is None:
            return b""
        file, wake = opened
        both = select.poll()
        both.register(file.fd, select.POLLIN)
        both.register(wake.fd, select.POLLIN)
        ready = {descriptor for descriptor, _ in both.poll()}
        size = min(_CHUNK, max(_AHEAD, held)) if self._is_pipe else _CHUNK
        return b"" if wake.fd in ready else os.read(file.fd, size)

    def _rest_of_line(self) -> bytes:
        """Return the rest of a line that was partly read before `stop`. The next line stays in the pipe."""
        rest = bytearray()
        if (opened := self._opened) is None:
            return b""
        file, _ = opened
        ready = select.poll()
        ready.register(file.fd, select.POLLIN)
        while ready.poll(_REST_MS):
            byte = os.read(file.fd, 1)
            if byte in (b"", b"\n"):
                break
            rest += byte
        return bytes(rest)

    def acknowledge(self, messages: Sequence[Message]) -> None:
        """Do nothing: a pipe takes nothing back."""

    def stop(self) -> None:
        """End the iteration at the next line of a file.

        For a pipe, first yield the lines that were read already, so that none is lost: up to 4 KiB, or one longer line.
        Read a partly read line to its end if the rest comes within 0.2 s.
        """
        self._stopped = True
        if (opened := self._opened) is not None:
            _, wake = opened
            os.eventfd_write(wake.fd, 1)

    def close(self) -> None:
        """Close the file. Standard input stays open."""
        self._opened = None


def _duplicate(file: TextIO) -> int:
    """Return a duplicate of the descriptor of standard input or output."""
    descriptor = file.fileno()
    file.flush()
    if file.readable() and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.lseek(descriptor, file.tell(), os.SEEK_SET)  # Python may have read ahead
    return os.dup(descriptor)


def _is_key(value: Any) -> bool:
    if type(value) is str:
        value.encode()  # raises ValueError for half of a surrogate pair
    return type(value) in (str, int) or (type(value) is float and math.isfinite(value))


class _Lines:
    """Appends whole lines to a file. Removes an incomplete last line, left by a killed process."""

    def __init__(self, file: str | os.PathLike[str] | None) -> None:
        if file is None:
            self._name, self._descriptor = "standard output", _duplicate(sys.stdout)
            return
        self._name = os.fspath(file)
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _end_with_a_line(self._descriptor, self._name)
        except BaseException:
            os.close(self._descriptor)
            raise

    def append(self, lines: Sequence[str]) -> None:
        write_all(self._descriptor, self._name, "".join(f"{line}\n" for line in lines).encode())

    def close(self) -> None:
        """Close the file. Standard output stays open."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _end_with_a_line(descriptor: int, name: str) -> None:
    """Remove an incomplete last line of `_Lines`, or add a missing newline. Raise StreamError for any other ending."""
    end = os.fstat(descriptor).st_size
    at = end
    while at > 0:
        start = max(0, at - _CHUNK)
        found = os.pread(descriptor, at - start, start).rfind(b"\n")
        if found >= 0:
            at = start + found + 1
            break
        at = start
    if at == end:
        return
    last = os.pread(descriptor, end - at, at)
    with suppress(ValueError, RecursionError):
        json.loads(last)
        write_all(descriptor, name, b"\n")
        return
    if not last.startswith(_BEGINNING[: len(last)]):
        raise StreamError(
            f"{name} is not a file of JSON lines: it ends with {last[:_SHOWN].decode(errors='replace')!r}. Give "
            "another file"
        )
    os.ftruncate(descriptor, at)


class JSONLinesSink(_Lines):
    """Answers as lines {"key": ..., "answer": ...}, appended to a file. None: standard output.

    The operating system has a line before its message is acknowledged, so a killed process loses none. After a restart,
    unacknowledged messages come again, so a key may have two lines: *at least once*.

    Args:
        file: a path. None: standard output.

    Examples:
        >>> sink = fastload.stream.JSONLinesSink("answers.jsonl")
        >>> sink.write([(fastload.stream.Message("a", None), 0.5)])
        >>> sink.close()
    """

    def write(self, answers: Sequence[tuple[Message, Any]]) -> None:
        """Append the answers of a batch."""
        self.append(
            [
                f'{{"key": {json.dumps(message.key)}, "answer": {to_json(message, answer)}}}'
                for message, answer in answers
            ]
        )


class SideList(_Lines):
    """Failed messages as lines {"key": ..., "error": ..., "value": ...}, appended to a file. Use it as `on_failed`.

    The value is the input of `decode`, as text if it is not a JSON value.

    Args:
        file: a path. None: standard output.

    Examples:
        >>> failed = fastload.stream.SideList("failed.jsonl")
        >>> failed(fastload.stream.Message("a", "text"), ValueError("is not a number"))
        >>> failed.close()
    """

    def __call__(self, message: Message, error: Exception) -> None:
        """Append a message and its error."""
        value = message.value.text if isinstance(message.value, Poison) else message.value
        line = {"key": message.key, "error": f"{type(error).__name__}: {error}", "value": value}
        self.append([json.dumps(line, default=str)])
