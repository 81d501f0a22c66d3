"""`Prefetched`: rows that were pulled for coming batches, and kept up to date until they are delivered.

Why no row is stale. Assume that push n of this table changed a row of a batch, and returned before `take` of the batch.

- A pull is kept from before its request. So if push n ended before that, the pulled rows include it.
- Otherwise the pull was kept when push n ended, and got its fresh rows. They replace the pulled ones, before `take`
  delivers them. `_order` is held from before a push's request until the pulls have its fresh rows. So they get them in
  the order in which the servers applied the pushes, and each includes all earlier pushes.

So a row includes every push that has returned, whatever the threads did meanwhile. A push that raised may or may not
have been applied, so it drops all pulls. Changes by other workers are as old as the pull, or as the push that replaced
the row.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastload.errors import ParametersError
from fastload.parameters.client import flat_ids
from fastload.parameters.gradients import Rows


@dataclass(eq=False)
class Pull:
    """The rows of a batch.

    Attributes:
        key: the batch's ids, as bytes.
        ids: the distinct ids in ascending order.
        places: for each id of the batch, its position in `ids`.
        rows: the rows of `ids`, or None until they arrive.
        fresh: rows of later pushes that are to replace them.
    """

    key: bytes
    ids: Tensor
    places: Tensor
    rows: Tensor | None = None
    fresh: list[Rows] = field(default_factory=list)

    @classmethod
    def of(cls, ids: Tensor) -> Pull:
        """Return a pull for the ids of a batch."""
        flat = flat_ids(ids)
        return cls(flat.numpy().tobytes(), *torch.unique(flat, return_inverse=True))

    def patch(self) -> int:
        """Replace the rows for which there are fresh ones. Return their number."""
        if self.rows is None:
            return 0
        count, fresh, self.fresh = 0, self.fresh, []
        for ids, rows in fresh if len(self.ids) else ():
            places = torch.searchsorted(self.ids, ids).clamp_(max=len(self.ids) - 1)
            found = (self.ids[places] == ids).nonzero()[:, 0]
            self.rows.index_copy_(0, places[found], rows[found])
            count += len(found)
        return count


class Prefetched:
    """The pulls of one table. All methods can be called from several threads.

    Args:
        pull: returns the rows of distinct ids. None: nothing is pulled ahead.
        kept: maximum number of kept pulls. The oldest are dropped, and their batches pull again.
    """

    def __init__(self, pull: Callable[[Tensor], Tensor] | None, kept: int) -> None:
        self._pull = pull
        self._pid = os.getpid()
        self._order = threading.Lock()
        self._lock = threading.Lock()  # owns the pulls and what is in them; not held in a request
        self._pulls: deque[Pull] = deque(maxlen=kept)
        self.counts = {"prefetched": 0, "pulled": 0, "patched": 0}

    def __reduce__(self) -> Any:
        return Prefetched, (None, 1)  # a process cannot use rows that another one pulls

    def pull_ahead(self, ids: Tensor) -> None:
        """Pull the rows of a coming batch. If this fails, `take` pulls again, and raises the error."""
        if self._pull is None or os.getpid() != self._pid:
            return
        pull = Pull.of(ids)
        with self._lock:
            self._pulls.append(pull)
        rows = None
        try:
            rows = self._pull(pull.ids)
        except ParametersError:
            pass
        finally:
            with self._lock:
                pull.rows = rows
                self.counts["patched"] += pull.patch()
                if rows is None and pull in self._pulls:
                    self._pulls.remove(pull)

    def take(self, ids: Tensor) -> Pull:
        """Return the rows of a batch, which include all pushes that have returned. They belong to the caller."""
        key = flat_ids(ids).numpy().tobytes()
        with self._lock:
            for pull in self._pulls:
                if pull.key == key and pull.rows is not None:
                    self._pulls.remove(pull)
                    self.counts["prefetched"] += 1
                    return pull
            self.counts["pulled"] += 1
        assert self._pull is not None, "a copy in another process has no rows"
        pull = Pull.of(ids)
        pull.rows = self._pull(pull.ids)
        return pull

    def push(self, push: Callable[[], Rows]) -> None:
        """Call `push`, which returns the fresh rows of the ids that it pushed."""
        with self._order:
            try:
                fresh = push()
            except BaseException:
                with self._lock:
                    self._pulls.clear()
                raise
            with self._lock:
                for pull in self._pulls:
                    pull.fresh.append(fresh)
                    self.counts["patched"] += pull.patch()


class PrefetchingCollate:
    """A `collate_fn` that also pulls a table's rows for the batch.

    Each worker of a loader has its own copy of the inner `collate_fn`. All workers share the pulls.
    """

    fastload_per_worker = ("collate_fn", "key")

    def __init__(self, pulls: Prefetched, key: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.pulls = pulls
        self.key = key
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        """Make the batch, pull its rows, and return the batch."""
        batch = self.collate_fn(samples)
        self.pulls.pull_ahead(self.key(batch) if callable(self.key) else batch[self.key])
        return batch
