"""Synchronous pushes as one server sees them: the parts that are staged, and the order that server 0 decided.

Pure: no clock, no lock, no file. Each entry of the order is a push, [worker, sequence number], or the mark of a
checkpoint, ["", 0]. All servers read the same entries in the same order. So all take the same pushes into the same
step, and all save the same version at a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastload.parameters.part import Gradients

Entry = tuple[str, int]
MARK: Entry = ("", 0)


class Steps:
    """What a server has of the steps to come.

    Args:
        pushes: how many make a step.
        position: of the first entry that is not in a step yet. Entries are counted from 0.
    """

    def __init__(self, pushes: int, *, position: int = 0) -> None:
        self._pushes = pushes
        self.position = position
        self._entries: list[Entry] = []
        self._marked = position  # the marks before this one are dealt with
        self._staged: dict[Entry, Gradients] = {}

    @property
    def end(self) -> int:
        """The position of the next entry that this server needs."""
        return self.position + len(self._entries)

    def stage(self, push: Entry, gradients: Gradients) -> None:
        """Keep this server's part of a push."""
        self._staged[push] = gradients

    def discard(self, push: Entry) -> None:
        """Drop a push that was rejected."""
        self._staged.pop(push, None)

    def add(self, start: int, entries: Sequence[Entry]) -> None:
        """Take entries from position `start` on. Those that are known are skipped; after a gap, all of them."""
        if start <= self.end:
            self._entries += entries[self.end - start :]

    def missing(self) -> list[Entry]:
        """Return the pushes of the next step that are decided, and of which this server lacks its part."""
        step, _ = self._next()
        return [push for push in step if push not in self._staged]

    def advance(
        self, save: Callable[[], object], apply: Callable[[list[Entry], list[Gradients]], None]
    ) -> None:
        """Call `save` for each mark, and `apply` for each step of which all is there, in their order."""
        while True:
            step, end = self._next()
            for number, entry in enumerate(self._entries[:end], self.position):
                if entry == MARK and number >= self._marked:
                    self._marked = number + 1
                    save()
            if len(step) < self._pushes or not self._staged.keys() >= set(step):
                return
            parts = [self._staged.pop(push) for push in step]
            del self._entries[:end]
            self.position += end
            apply(step, parts)

    def drop_stale(self, version: int) -> None:
        """Drop pushes that were computed with an older version, unless they are decided: they cannot be any more."""
        decided = set(self._entries)
        stale = [push for push, part in self._staged.items() if part.version < version]
        for push in stale:
            if push not in decided:
                del self._staged[push]

    def _next(self) -> tuple[list[Entry], int]:
        """Return the pushes of the next step, as far as they are known, and how many entries that takes."""
        step: list[Entry] = []
        for number, entry in enumerate(self._entries, 1):
            if entry != MARK:
                step.append(entry)
            if len(step) == self._pushes:
                return step, number
        return step, len(self._entries)
