"""ElasticDL's names for leased shards: a service that gives the next index to read, and an image folder that uses it.

from fastload.compat.elasticdl import ElasticImageFolder, RecordIndexService

They suit a plain loop in one thread. A loader of `fastload.elastic.LeaseSampler` reads with many, and resumes exactly.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fastload.datasets import ImageFolder
from fastload.elastic import Leases
from fastload.elastic.epoch import Epoch, Lease
from fastload.order.sampler import RankSampler

__all__ = ["ElasticImageFolder", "RecordIndexService"]


@dataclass
class _Begun:
    """A lease, and how many of its records are not reported yet."""

    epoch: Epoch
    lease: Lease
    left: int


class RecordIndexService:
    """Gives the indices of the shards that this worker leases, one by one, for all epochs.

    Args:
        leases: leases whose length is that of the dataset. The caller closes them at the end.
        epochs: number of epochs whose indices `fetch_record_index` returns.
        shuffle, seed: the order of each epoch, as in `fastload.RankSampler`. All workers give the same values.

    Only the thread that created it may use it.
    """

    def __init__(
        self, leases: Leases, *, epochs: int = 1, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._leases = leases
        self._order = RankSampler(
            leases.terms.length, rank=0, world_size=1, shuffle=shuffle, seed=seed
        )
        self._thread = threading.get_ident()
        self._about = f"{shuffle=}, {seed=}"
        self._epochs = iter(range(epochs))
        self._epoch: Epoch | None = None
        self._indices: Iterator[int] = iter(())  # the indices of the latest lease
        self._begun: deque[_Begun] = deque()
        self._fetched = 0  # records that were fetched but not reported

    def fetch_record_index(self) -> int:
        """Return the next index. Raise StopIteration once all workers have reported all epochs.

        At the end of an epoch, this waits for other workers. Report trained records first, or it raises RuntimeError.
        """
        self._check_thread()
        while (index := next(self._indices, None)) is None:
            if self._epoch is None:
                self._epoch = self._leases.begin(next(self._epochs), order=self._about)
            self._lease(self._epoch)
        self._fetched += 1
        return index

    def report_batch_done(self, batch_size: int) -> None:
        """Count the next `batch_size` fetched indices as trained. Acknowledge the shards that this completes."""
        self._check_thread()
        if not 0 <= batch_size <= self._fetched:
            raise ValueError(
                f"{batch_size} records were reported, but only {self._fetched} were fetched and not yet reported. "
                "Report each batch once, after training on it"
            )
        self._fetched -= batch_size
        while batch_size:
            first = self._begun[0]
            lease = first.lease
            taken = min(batch_size, first.left)
            batch_size -= taken
            first.left -= taken
            start = self._leases.terms.rows(lease.shard).start
            first.epoch.progressed(lease, lease.rows.stop - first.left - start)
            if not first.left:
                self._begun.popleft()
                first.epoch.trained(lease)

    def _lease(self, epoch: Epoch) -> None:
        lease = epoch.lease()
        if lease is None and self._fetched:
            raise RuntimeError(
                f"all shards of epoch {epoch.number} are leased, but this worker has not reported {self._fetched} "
                "records that it fetched. So it would wait for itself. End the batch here, call report_batch_done, "
                "and continue"
            )
        lease = lease or epoch.wait_for_lease()
        if lease is None:
            self._epoch = None
            return
        self._begun.append(_Begun(epoch, lease, len(lease.rows)))
        rows = lease.rows
        self._indices = iter(self._order.indices_of(epoch.number, rows.start, rows.stop).tolist())

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "RecordIndexService was called from a thread that did not create it. Read with one thread, or give "
                "fastload.DataLoader a fastload.elastic.LeaseSampler"
            )


class ElasticImageFolder(ImageFolder):
    """`fastload.datasets.ImageFolder` whose samples a `RecordIndexService` chooses, if it has one.

    With a service, `dataset[any]` is the sample at `fetch_record_index()`, and `len()` is `sys.maxsize`, as in
    ElasticDL. The service decides when the data end.

    Args:
        root, transform, options: see `ImageFolder`.
        data_shard_service: service that gives the indices. None: this works as an `ImageFolder`.
    """

    def __init__(
        self,
        root: str,
        transform: Callable[[Any], Any] | None = None,
        *,
        data_shard_service: RecordIndexService | None = None,
        **options: Any,
    ) -> None:
        super().__init__(root, transform=transform, **options)
        self._service = data_shard_service

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if self._service is not None:
            index = self._service.fetch_record_index()
        return self.load_image(index)

    def __len__(self) -> int:
        return super().__len__() if self._service is None else sys.maxsize
