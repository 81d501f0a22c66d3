"""Synchronous pushes on one server: the staged gradients, the order that server 0 decides, and the steps.

Each entry of the order is a push or the mark of a checkpoint. All servers read the same entries in the same order. So
each step has the same pushes on all servers, and all servers save the same version at a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastload.errors import ParametersError
from fastload.parameters.gradients import Gradients
from fastload.parameters.journal import MARK, Entry, Journal


class Steps:
    """Makes each step as soon as all of its pushes are decided and staged. Not thread-safe.

    Args:
        pushes: number of pushes in a step.
        position: position of the first entry that is not in a step yet. Entries are counted from 0.
        journal: the order, on server 0. None: this is another server, which learns the order by `take`.
        save: called at the mark of a checkpoint.
        apply: called with the pushes and gradients of each step.
        oldest: returns the oldest version that gradients may have.
        may_lack: True: this server was killed, so it lacks gradients that were staged before.
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
        may_lack: bool = False,
    ) -> None:
        self._pushes = pushes
        self.position = position
        self._journal = journal
        self._may_lack = may_lack
        self._save, self._apply, self._oldest = save, apply, oldest
        self._entries: list[Entry] = []
        self._marked = position  # the marks before this position are done
        self._staged: dict[Entry, Gradients] = {}

    @property
    def next(self) -> int:
        """The position of the next entry that this server needs."""
        return self.position + len(self._entries)

    @property
    def journal(self) -> Journal:
        """The journal of server 0."""
        if self._journal is None:
            raise ValueError("only server 0 decides the order of pushes, if grads_to_wait is given")
        return self._journal

    def decided(self) -> int:
        """Return the number of steps of all decided pushes since the first one. Only server 0 can."""
        return self.journal.pushes // self._pushes

    def stage(self, push: Entry, gradients: Gradients) -> None:
        """Keep this server's gradients of a push."""
        self._staged[push] = gradients
        self.advance()

    def decide(self, entry: Entry) -> None:
        """Give a push or a mark its position in the order, as server 0."""
        self.journal.append(entry)
        self.advance()

    def take(self, start: int, entries: Sequence[Entry], discarded: Entry | None) -> None:
        """Learn the order from position `start` on, and drop a push that was rejected.

        Raises ParametersError if the order has a push that was never staged here. It would wait for its gradients
        forever.
        """
        if self._journal is None:
            known = self._staged.keys() | {MARK}
            unknown = [push for push in entries[max(self.next - start, 0) :] if push not in known]
            if unknown and not self._may_lack:
                raise ParametersError(
                    f"push {unknown[0][1]} of worker {unknown[0][0]!r} was not staged on this server, so server 0 "
                    "cannot have accepted it. If this server replaces a killed one, start it with the same --store"
                )
            self._add(start, entries)
        if discarded is not None:
            self._staged.pop(discarded, None)
        self.advance()

    def has_staged(self, push: Entry) -> bool:
        """Return True if this server has the gradients of a push."""
        return push in self._staged

    def since(self, position: int) -> dict[str, Any]:
        """Return the entries that were decided from a position on, as server 0."""
        start, entries = self.journal.since(position)
        return {"start": start, "entries": entries, "end": self.journal.end}

    def missing(self) -> list[Entry]:
        """Return the decided pushes of the next step whose gradients this server lacks."""
        step, _ = self._following()
        return [push for push in step if push not in self._staged]

    def advance(self) -> None:
        """Save at each mark, and make each step whose gradients are complete, in their order."""
        if self._journal is not None:
            self._add(*self._journal.since(self.next))
        while True:
            step, end = self._following()
            for number, entry in enumerate(self._entries[:end], self.position):
                if entry == MARK and number >= self._marked:
                    self._marked = number + 1
                    self._save()
            if len(step) < self._pushes or not self._staged.keys() >= set(step):
                break
            gradients = [self._staged.pop(push) for push in step]
            del self._entries[:end]
            self.position += end
            self._apply(step, gradients)
        self._drop_stale()

    def forget(self, position: int) -> None:
        """Drop the entries before a position, because a complete checkpoint has them."""
        if self._journal is not None:
            self._journal.forget(position)

    def close(self) -> None:
        """Close the file of the journal."""
        if self._journal is not None:
            self._journal.close()

    def _add(self, start: int, entries: Sequence[Entry]) -> None:
        """Add entries from position `start` on. Skip known entries. If there is a gap before `start`, add none."""
        if start <= self.next:
            self._entries += entries[self.next - start :]

    def _drop_stale(self) -> None:
        """Drop pushes that are too old and not decided, because server 0 will reject them."""
        oldest, decided = self._oldest(), set(self._entries)
        stale = [push for push, found in self._staged.items() if found.version < oldest]
        for push in stale:
            if push not in decided:
                del self._staged[push]

    def _following(self) -> tuple[list[Entry], int]:
        """Return the known pushes of the next step, and how many entries of the order they span."""
        step: list[Entry] = []
        for number, entry in enumerate(self._entries, 1):
            if entry != MARK:
                step.append(entry)
            if len(step) == self._pushes:
                return step, number
        return step, len(self._entries)
