"""The shards of one epoch as one worker sees them: leased, acknowledged, given back."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

from fastload.elastic.protocol import ShardRecord
from fastload.elastic.watch import Watch
from fastload.errors import LeaseLostError, ShardError, StateError

VERSION = 1
_CHUNK = 1000  # shards read in one request


@dataclass(frozen=True)
class Terms:
    """What all epochs of some leases have in common; see `Leases`."""

    length: int
    shard: int
    lease_s: float
    max_tries: int
    on_lost: Literal["raise", "warn"]

    def __len__(self) -> int:
        return -(-self.length // self.shard)

    def shared(self) -> str:
        """Return the arguments that must be equal on all workers, as a string."""
        return f"length={self.length}, shard={self.shard}, lease_s={self.lease_s:g}, max_tries={self.max_tries}"

    def rows(self, number: int, begin: int = 0) -> range:
        """Return the positions of a shard, from its row `begin` on."""
        start = number * self.shard
        return range(start + begin, min(start + self.shard, self.length))


@dataclass(frozen=True, kw_only=True)
class LeasesState:
    """The state that `Leases.state_dict` returns.

    Attributes:
        length, shard: as in `Leases`.
        order: describes the order of the samples.
        epoch: the number of the epoch.
        done: the shards that are done, as ranges [first, end).
        partial: for each shard that is partly trained, by its number: how many of its first rows are trained.
    """

    version: int = VERSION
    length: int
    shard: int
    order: str = ""
    epoch: int = 0
    done: list[list[int]] = field(default_factory=list)
    partial: dict[str, int] = field(default_factory=dict)

    def check(self, ours: Self, *names: str) -> None:
        """Raise StateError if one of the fields `names` differs from `ours`, the state of the leases that load this."""
        for name in names:
            theirs, own = getattr(self, name), getattr(ours, name)
            if theirs != own:
                raise StateError(
                    f"{name}: the state has {theirs!r:.200}, these leases {own!r:.200}. Make leases and sampler with "
                    "the arguments that they had when the state was saved"
                )


@dataclass(frozen=True)
class Lease:
    """A shard that this worker holds: the positions `rows` of the epoch's order."""

    shard: int
    rows: range
    held: ShardRecord


class Epoch:
    """The shards of one epoch, as this worker sees them.

    Only the loop's thread calls this.
    """

    def __init__(self, terms: Terms, watch: Watch, number: int, order: str) -> None:
        self._terms = terms
        self._watch, self._connection = watch, watch.connection
        self.number = number
        self._order = order
        self._done: set[int] = set()  # shards that this worker knows to be done
        self._complete = False
        self._fresh = True  # there may be a shard that no worker has asked for
        self._seen = -1  # changes of the watch when the last scan began
        self._held: dict[int, Lease] = {}
        self._rows_trained: dict[int, int] = {}  # by number of a held shard

    # ---- leasing ----

    def lease(self) -> Lease | None:
        """Lease a shard without waiting, or return None if all are done or held.

        Raise ShardError if one has failed too often.
        """
        count = len(self._terms)
        while self._fresh:
            number = self._connection.add(self._key("next"), 1) - 1
            if number >= count:
                self._fresh = False
            elif (lease := self._try(number, "")) is not None:
                return lease
        changes = self._watch.changes
        if changes == self._seen:
            return None  # nothing has changed since the last scan of all shards
        lease = self._scan()
        if lease is None:
            self._seen = changes
        return lease

    def wait_for_lease(self) -> Lease | None:
        """Lease a shard, and wait for one if none is free. Return None once all shards are acknowledged."""
        while not self.is_complete():
            changes = self._watch.changes
            if (lease := self.lease()) is not None:
                return lease
            if not self.is_complete():
                self._watch.wait(changes)
        return None

    def is_complete(self) -> bool:
        """Return True if all shards are acknowledged."""
        count = len(self._terms)
        if not self._complete:
            self._complete = self._connection.add(self._key("done"), 0) == count
        if not self._complete and len(self._done) == count:
            # A worker was killed after it acknowledged a shard and before it counted it.
            self._complete = True
            self._watch.tell()
        return self._complete

    def _scan(self) -> Lease | None:
        """Search all shards for one that a worker gave back, or that it held or was about to lease when it died."""
        open_ = [k for k in range(len(self._terms)) if k not in self._done and k not in self._held]
        for number, text in self._read(open_):
            if (lease := self._try(number, text)) is not None:
                return lease
        return None

    def _try(self, number: int, text: str) -> Lease | None:
        """Lease a shard if it can be leased. `text` is its record in the store, as far as this worker knows."""
        while True:
            found = ShardRecord.parse(text)
            if found.status == "done":
                self._done.add(number)
            if found.status == "failed":
                raise self._failure(number, found)
            wanted = found.leased_by(
                self._watch.worker, self._watch.is_dead, max_tries=self._terms.max_tries
            )
            if wanted is None:
                return None
            text = self._connection.compare_set(self._key(number), text, str(wanted))
            if text == str(wanted) and wanted.status == "failed":
                self._watch.tell()
                raise self._failure(number, wanted)
            if text == str(wanted):
                lease = Lease(number, self._terms.rows(number, wanted.begin), wanted)
                self._held[number] = lease
                return lease

    def _failure(self, number: int, found: ShardRecord) -> ShardError:
        rows = self._terms.rows(number)
        return ShardError(
            f"shard {number} of epoch {self.number} (positions {rows.start:,} to {rows.stop - 1:,} of its order) was "
            f"leased {found.tries} times, and each time the worker died or raised. Look at the last messages of the "
            "workers that died. max_tries= allows more"
        )

    # ---- acknowledging ----

    def trained(self, lease: Lease) -> None:
        """Acknowledge a shard. If another worker has leased it meanwhile, raise LeaseLostError or warn."""
        if self._held.get(lease.shard) is not lease:
            raise LeaseLostError(
                f"shard {lease.shard} of epoch {self.number} was given back: these leases were closed, or began an "
                "epoch again, while another loop still read this one. Use one loop at a time, or other leases for each"
            )
        del self._held[lease.shard]
        self._rows_trained.pop(lease.shard, None)
        self._seen = -1  # this may be the last shard: look at all before waiting for other workers
        done = str(lease.held.acknowledged())
        found = self._connection.compare_set(self._key(lease.shard), str(lease.held), done)
        if found != done:
            self._lost(lease)
            return
        self._done.add(lease.shard)
        if self._connection.add_once(self._key("done"), 1) in (None, len(self._terms)):
            self._watch.tell()

    def progressed(self, lease: Lease, rows: int) -> None:
        """Record that the loop has received the first `rows` rows of a shard."""
        self._rows_trained[lease.shard] = rows

    def give_back(self, *, failed: bool = False) -> None:
        """Give back the shards that this worker holds."""
        held, self._held = self._held, {}
        for lease in held.values():
            free = str(lease.held.given_back(failed=failed))
            self._connection.compare_set(self._key(lease.shard), str(lease.held), free)
        if held:
            self._watch.tell()

    def _lost(self, lease: Lease) -> None:
        message = (
            f"this worker gave no sign of life for {self._terms.lease_s:g} s, and another worker has leased "
            f"shard {lease.shard} of epoch {self.number}. Both train its samples. Give Leases a longer lease_s, or "
            'on_lost="warn" if training a shard twice does no harm'
        )
        if self._terms.on_lost == "raise":
            raise LeaseLostError(message)
        warnings.warn(f"fastload: {message}", stacklevel=2)

    # ---- state ----

    def state(self) -> LeasesState:
        """Return which shards are done. A batch that the loop has received counts as trained."""
        partial: dict[str, int] = {}
        done = set(self._done)
        open_ = [k for k in range(len(self._terms)) if k not in done]
        for number, text in self._read(open_):
            found = ShardRecord.parse(text)
            begin = self._rows_trained.get(number, 0) or found.begin
            if found.status == "done" or begin == len(self._terms.rows(number)):
                done.add(number)
            elif begin:
                partial[str(number)] = begin
        return LeasesState(
            length=self._terms.length,
            shard=self._terms.shard,
            order=self._order,
            epoch=self.number,
            done=ranges(done),
            partial=partial,
        )

    def restore(self, state: LeasesState) -> None:
        """Write a state into the store. Several workers may do so at once."""
        for number in expanded(state.done):
            done = str(ShardRecord("done", self._watch.worker))
            if self._connection.compare_set(self._key(number), "", done) == done:
                self._connection.add_once(self._key("done"), 1)
            self._done.add(number)
        for key, begin in state.partial.items():
            self._connection.compare_set(self._key(int(key)), "", str(ShardRecord(begin=begin)))
        self._watch.tell()

    # ---- the store ----

    def _key(self, what: int | str) -> str:
        return f"{self.number}/{what}"

    def _read(self, numbers: list[int]) -> Iterator[tuple[int, str]]:
        """Yield each number, with the record of its shard in the store."""
        for first in range(0, len(numbers), _CHUNK):
            chunk = numbers[first : first + _CHUNK]
            texts = self._connection.read_all([self._key(number) for number in chunk])
            yield from zip(chunk, texts, strict=True)


def ranges(numbers: set[int]) -> list[list[int]]:
    """Return numbers as ranges, each [first, end)."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def expanded(found: list[list[int]]) -> list[int]:
    """Return the numbers in ranges."""
    return [number for first, end in found for number in range(first, end)]
