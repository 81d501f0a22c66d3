"""`LeaseSampler`: batches of the shards that this worker leases, for a loader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NoReturn

from torch.utils.data import BatchSampler

from fastload._kit.integers import integer
from fastload.elastic.epoch import Epoch, Lease
from fastload.elastic.leases import Leases
from fastload.errors import StateError
from fastload.memory.batch import Batch
from fastload.order.sampler import PlacedBatch, RankSampler


class LeaseSampler(BatchSampler):
    """Gives a loader the batches of the shards that this worker leases.

    The order of an epoch is that of `RankSampler` for one rank, cut into shards. A sample's random stream is that of
    its position in this order. So an epoch's samples, and what is drawn for them, do not depend on the workers. No
    batch has samples of two shards.

    A batch counts as trained when the loop asks for the batch after it. A shard is acknowledged when all of its batches
    are trained. The loop's epoch ends once the shards of all workers are acknowledged. A worker that starts late gets
    no batch in the epochs that have ended.

    Args:
        leases: leases whose length is that of the dataset.
        batch_size: samples in a batch; the last batch of a shard may have fewer.
        shuffle, seed, window, run: see `RankSampler`. All workers give the same values.

    `len()` is the number of batches of all workers together. `loader.state_dict()` raises StateError: the state is that
    of the leases.

    Examples:
        >>> leases = fastload.elastic.Leases(len(dataset), shard=100)
        >>> sampler = fastload.elastic.LeaseSampler(leases, batch_size=64, seed=0)
        >>> loader = DataLoader(dataset, batch_sampler=sampler, seed=0)
        >>> for images, labels in loader:
        ...     pass
        >>> state = {"leases": leases.state_dict()}
        >>> leases.close()
    """

    def __init__(
        self,
        leases: Leases,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        window: int | None = None,
        run: int | None = None,
    ) -> None:
        order = RankSampler(
            leases.terms.length,
            rank=0,
            world_size=1,
            shuffle=shuffle,
            seed=seed,
            window=window,
            run=run,
        )
        super().__init__(order, integer("batch_size", batch_size), drop_last=False)
        self.leases = leases
        self.sampler: RankSampler = order
        self._about = f"{shuffle=}, {seed=}, {window=}, {run=}"

    def __iter__(self) -> Iterator[list[int]]:
        """Return the batches of the sampler's epoch. No shard is leased before the first batch is requested."""
        return LeasedBatches(self, self.sampler.epoch)

    def __len__(self) -> int:
        whole, rest = divmod(self.leases.terms.length, self.leases.terms.shard)
        return whole * -(-self.leases.terms.shard // self.batch_size) + -(-rest // self.batch_size)

    def begin(self, epoch: int) -> Epoch:
        """Return a new epoch of the leases."""
        return self.leases.begin(epoch, order=self._about)

    def state_dict(self) -> NoReturn:
        """Raise StateError: the state of leases is saved by `Leases.state_dict`."""
        raise StateError(
            "sampler: a loader of leased shards has no state of its own. Save leases.state_dict() with the model, and "
            "load it with leases.load_state_dict()"
        )

    def load_state_dict(self, state: Any) -> NoReturn:
        """Raise StateError, as `state_dict` does."""
        self.state_dict()


class LeasedBatches(Iterator[list[int]]):
    """The batches of one epoch that this worker reads. All methods run on the loop's thread.

    The loader calls `is_ready` before it asks for a batch, and `delivered` for each that the loop has received.
    """

    def __init__(self, sampler: LeaseSampler, epoch: int) -> None:
        self._sampler = sampler
        self._number = epoch
        self._epoch: Epoch | None = None
        self._given = 0  # number of given batches that the loop has not received
        self._rows = range(0)  # rows of the latest lease that were not given yet
        self._indices: list[int] = []  # of these rows
        self._leases: dict[int, Lease] = {}  # by shard, those with batches in flight
        self._ends: dict[int, int] = {}  # by shard: all rows before this position were received
        self._early: dict[int, int] = {}  # [first, end) of rows received before earlier rows
        self._trained: deque[Lease] = deque()  # acknowledged once the loop asks for more

    def is_ready(self) -> bool:
        """Return True if `next()` would give a batch, or end the epoch, without waiting for other workers."""
        if self._rows:
            return True
        epoch = self._begun()
        lease = epoch.lease()
        if lease is not None:
            self._take(lease)
            return True
        # Batches in flight must be acknowledged first, even if other workers took their shards and ended the epoch.
        return not self._given and not self._trained and epoch.is_complete()

    def __next__(self) -> list[int]:
        if not self._rows and not self.is_ready():
            # The loader waits here only if no batch is in flight: the loop has received all, and asks for more.
            self._acknowledge()
            if self._given:
                raise RuntimeError(
                    "LeaseSampler waits for batches that the loop has not received. Only fastload.DataLoader tells "
                    "LeaseSampler which batches were received. With another loader, use leases.shards()"
                )
            lease = self._begun().wait_for_lease()
            if lease is None:
                raise StopIteration
            self._take(lease)
        if not self._rows:
            raise StopIteration
        size = self._sampler.batch_size
        batch = PlacedBatch(self._indices[:size], self._rows.start)
        self._indices, self._rows = self._indices[size:], self._rows[size:]
        self._given += 1
        return batch

    def delivered(self, batch: Batch) -> None:
        """Record that the loop has received a batch, and so has trained those before it."""
        if not batch.size:  # an error of this iterator, delivered instead of a batch
            return
        self._given -= 1
        self._acknowledge()
        size = self._sampler.leases.terms.shard
        shard = batch.position // size
        self._early[batch.position] = batch.position + batch.size
        while (end := self._early.pop(self._ends[shard], None)) is not None:
            self._ends[shard] = end
        lease, end = self._leases[shard], self._ends[shard]
        self._begun().progressed(lease, end - shard * size)
        if end == lease.rows.stop:
            del self._ends[shard]
            self._trained.append(self._leases.pop(shard))

    def _begun(self) -> Epoch:
        if self._epoch is None:
            self._epoch = self._sampler.begin(self._number)
        return self._epoch

    def _take(self, lease: Lease) -> None:
        rows = self._rows = lease.rows
        order = self._sampler.sampler
        self._indices = order.indices_of(self._number, rows.start, rows.stop).tolist()
        self._leases[lease.shard] = lease
        self._ends[lease.shard] = lease.rows.start

    def _acknowledge(self) -> None:
        while self._trained:
            self._begun().trained(self._trained.popleft())
