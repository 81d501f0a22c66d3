"""The record of a shard in the store, and the changes that each worker may make to it. Nothing here uses a store.

A shard is free, leased, done or failed. Each change is one compare-and-set against the record that was read. If two
workers try the same change, one succeeds. Nothing leaves `done` or `failed`, so a shard is acknowledged once.

    from            to       by
    free            leased   a worker that asks for a shard
    leased          done     the worker that holds it, once it is trained
    leased          free     the worker that holds it, when it gives the shard back
    leased          leased   another worker, if the one that holds it has died
    free, leased    failed   a worker that would lease it, if too many leases of it have failed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Status = Literal["free", "leased", "done", "failed"]


@dataclass(frozen=True)
class ShardRecord:
    """The record of a shard in the store.

    Attributes:
        worker: the number of the worker that leased it last, or 0 if none did.
        tries: how many leases of it began, except those that a worker gave back without an error.
        begin: index of the first row to read. The rows before it were trained before the loaded state was saved.
    """

    status: Status = "free"
    worker: int = 0
    tries: int = 0
    begin: int = 0

    @classmethod
    def parse(cls, text: str) -> ShardRecord:
        """Parse the `str()` of a shard. An empty string stands for a free shard."""
        if not text:
            return cls()
        status, worker, tries, begin = text.split()
        return cls(status, int(worker), int(tries), int(begin))  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self == ShardRecord():
            return ""
        return f"{self.status} {self.worker} {self.tries} {self.begin}"

    def leased_by(
        self, worker: int, is_dead: Callable[[int], bool], *, max_tries: int
    ) -> ShardRecord | None:
        """Return the shard as leased by `worker`, or as failed. Return None if it cannot be leased now."""
        if self.status == "leased" and not is_dead(self.worker):
            return None
        if self.status in ("done", "failed"):
            return None
        if self.tries >= max_tries:
            return replace(self, status="failed")
        return ShardRecord("leased", worker, self.tries + 1, self.begin)

    def acknowledged(self) -> ShardRecord:
        """Return a leased shard as done."""
        return replace(self, status="done")

    def given_back(self, *, failed: bool) -> ShardRecord:
        """Return a leased shard as free. The lease counts as a try if it `failed`."""
        return replace(self, status="free", tries=self.tries if failed else self.tries - 1)
