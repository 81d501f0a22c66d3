"""The order of synchronous pushes, which server 0 decides. It is in memory, and in a file before server 0 answers."""

from __future__ import annotations

import io
import json
import os
from typing import Any

from fastload._kit.disk import replace_file, write_all

Entry = tuple[str, int]
"""A push: its worker and its number."""
MARK: Entry = ("", 0)
"""The entry at which all servers save."""
_NAME = "journal.jsonl"
_KEPT = 100_000
"""Number of entries to keep if there is no folder. Without a folder, servers cannot be restarted."""


class Journal:
    """Entries from position `base` on.

    The first line of the file summarises earlier entries. Each other line is an entry. An incomplete last line is
    dropped, because no client has an answer to it.

    Args:
        folder: folder of the file. "": no file.
        base, pushes: position of the first entry, and the number of pushes before it.
        resume: begin with the content of the file.

    Attributes:
        pushes: number of accepted pushes since the first one.
    """

    def __init__(
        self, folder: str, *, base: int = 0, pushes: int = 0, resume: bool = False
    ) -> None:
        self._path = os.path.join(folder, _NAME) if folder else ""
        self._file: io.FileIO | None = None
        self.base, self.pushes = base, pushes
        self._last: dict[str, int] = {}  # number of the last push, by worker
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
        """Return True if a push was accepted. A worker's pushes arrive in the order of their numbers."""
        worker, sequence = push
        return self._last.get(worker, 0) >= sequence

    def append(self, entry: Entry) -> None:
        """Add an entry. With a folder, it survives the end of this process and a power loss."""
        if self._file is not None:
            length = os.fstat(self._file.fileno()).st_size
            try:
                write_all(self._file.fileno(), self._path, _line(entry))
                os.fdatasync(self._file.fileno())
            except OSError:
                # Remove a partly written entry, so that the next one begins a line.
                os.ftruncate(self._file.fileno(), length)
                raise
        self._note(entry)
        if not self._path and len(self._entries) > 2 * _KEPT:
            self.forget(self.end - _KEPT)

    def since(self, position: int) -> tuple[int, list[Entry]]:
        """Return (position, entries from there on): the given position, or `base` if older entries were dropped."""
        start = max(position, self.base)
        return start, self._entries[start - self.base :]

    def forget(self, position: int) -> None:
        """Drop the entries before a position, because a checkpoint of all servers has them."""
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
        self.close()  # only now: if the disk is full, the complete old file stays in use
        self._file = io.FileIO(self._path, "ab")


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
