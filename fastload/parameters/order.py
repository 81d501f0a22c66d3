"""`Order`: the order of synchronous pushes on one server, with the parts that are staged. Server 0 decides it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastload.parameters.journal import Journal
from fastload.parameters.part import Gradients
from fastload.parameters.steps import Entry, Steps


class Order:
    """Makes the steps that can be made, whenever something has come. Not thread-safe.

    Args:
        pushes: how many make a step.
        journal: of server 0; None: of another, which is told by `take`.
        save: is called at the mark of a checkpoint.
        apply: makes a step.
        oldest: returns the oldest version that gradients may have.
    """

    def __init__(
        self,
        pushes: int,
        *,
        position: int,
        journal: Journal | None,
        save: Callable[[], object],
        apply: Callable[[list[Entry], list[Gradients]], None],
        oldest: Callable[[], int],
    ) -> None:
        self._pushes = pushes
        self._steps = Steps(pushes, position=position)
        self._journal = journal
        self._save, self._apply, self._oldest = save, apply, oldest

    @property
    def position(self) -> int:
        """The position of the first entry that is not in a step that was made."""
        return self._steps.position

    @property
    def next(self) -> int:
        """The position of the next entry that this server needs."""
        return self._steps.end

    @property
    def journal(self) -> Journal:
        """The journal of server 0."""
        if self._journal is None:
            raise ValueError("only server 0 decides the order of pushes, if grads_to_wait is given")
        return self._journal

    def steps_decided(self) -> int:
        """Return how many steps the decided pushes make, from the first one on, as server 0."""
        return self.journal.pushes // self._pushes

    def stage(self, push: Entry, gradients: Gradients) -> None:
        """Keep this server's part of a push."""
        self._steps.stage(push, gradients)
        self.advance()

    def decide(self, entry: Entry) -> None:
        """Give a push, or a mark, its place, as server 0."""
        self.journal.append(entry)
        self.advance()

    def take(self, start: int, entries: Sequence[Entry], discarded: Entry | None) -> None:
        """Learn the order from position `start` on, and drop a push that was rejected."""
        if discarded is not None:
            self._steps.discard(discarded)
        self._steps.add(start, entries)
        self.advance()

    def since(self, position: int) -> dict[str, Any]:
        """Return what was decided from a position on, as server 0."""
        start, entries = self.journal.since(position)
        return {"start": start, "entries": entries, "end": self.journal.end}

    def missing(self) -> list[Entry]:
        """Return the pushes of the next step that are decided, and of which this server lacks its part."""
        return self._steps.missing()

    def advance(self) -> None:
        """Make the steps that can be made."""
        if self._journal is not None:
            self._steps.add(*self._journal.since(self._steps.end))
        self._steps.advance(self._save, self._apply)
        self._steps.drop_stale(self._oldest())

    def forget(self, position: int) -> None:
        """Drop what was decided before a position: it is in a complete checkpoint."""
        if self._journal is not None:
            self._journal.forget(position)

    def close(self) -> None:
        """Close the file of the journal."""
        if self._journal is not None:
            self._journal.close()
