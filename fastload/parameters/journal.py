"""The order of synchronous pushes, as server 0 decides it: in memory, and in a file before it answers."""

from __future__ import annotations

import io
import json
import os
from typing import Any

from fastload.disk import replace_file, write_all

Entry = tuple[str, int]
"""A push: its worker and its number."""
MARK: Entry = ("", 0)
"""All servers save here."""
_NAME = "journal.jsonl"
_KEPT = 100_000
"""Entries that are kept without a folder: no server can be restarted then."""


class Journal:
    """Entries from position `base` on.

    The file begins with a line that says what was before; each other line is an entry. A last line without its end
    was never answered for, and is dropped.

    Args:
        folder: that the file lies in; "": none.
        base, pushes: position of the first entry, and how many pushes come before it.
        resume: take what is in the file.

    Attributes:
        pushes: how many were accepted, from the first one on.
    """

    def __init__(
        self, folder: str, *, base: int = 0, pushes: int = 0, resume: bool = False
    ) -> None:
        self._path = os.path.join(folder, _NAME) if folder else ""
        self._file: io.FileIO | None = None
        self.base, self.pushes = base, pushes
        self._last: dict[str, int] = {}  # by worker the number of its last push
        self._entries: list[Entry] = []
        if resume and self._path and os.path.exists(self._path):
            self._read()
        if self._path:
            self._rewrite()

    @property
    def end(self) -> int:
        """The position of the next entry."""
        return self.base + len(self._entries)

    def has(self, push: Entry) -> bool:
        """Return whether a push was accepted. A worker's pushes come in the order of their numbers."""
        worker, sequence = push
        return self._last.get(worker, 0) >= sequence

    def append(self, entry: Entry) -> None:
        """Add an entry. It survives the end of this process, and a loss of power, if there is a folder."""
        if self._file is not None:
            length = os.fstat(self._file.fileno()).st_size
            try:
                write_all(self._file.fileno(), self._path, _line(entry))
                os.fdatasync(self._file.fileno())
            except OSError:
                # The next entry must not follow half of this one.
                os.ftruncate(self._file.fileno(), length)
                raise
        self._note(entry)
        if not self._path and len(self._entries) > 2 * _KEPT:
            self.forget(self.end - _KEPT)

    def since(self, position: int) -> tuple[int, list[Entry]]:
        """Return the entries from a position on, and the position of the first: `base` if older ones are gone."""
        start = max(position, self.base)
        return start, self._entries[start - self.base :]

    def forget(self, position: int) -> None:
        """Drop the entries before a position: they are in a checkpoint of all servers."""
        gone = len(self._entries[: max(position - self.base, 0)])
        if not gone:
            return
        self.base += gone
        del self._entries[:gone]
        if self._path:
            self._rewrite()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _note(self, entry: Entry) -> None:
        self._entries.append(entry)
        if entry != MARK:
            worker, self._last[worker] = entry
            self.pushes += 1

    def _read(self) -> None:
        with open(self._path, "rb") as file:
            head, *lines = file.read().split(b"\n")[:-1]
        about = json.loads(head)
        self.base, self.pushes = about["base"], about["pushes"]
        self._last = about["last"]
        for line in lines:
            worker, sequence = json.loads(line)
            self._note((worker, sequence))

    def _rewrite(self) -> None:
        before = self.pushes - sum(entry != MARK for entry in self._entries)
        about = {"base": self.base, "pushes": before, "last": self._last}
        with replace_file(self._path) as file:
            file.write(b"".join(map(_line, [about, *self._entries])))
        self.close()  # not before: if the disk is full, the old file stays in use, and lacks nothing
        self._file = io.FileIO(self._path, "ab")


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
