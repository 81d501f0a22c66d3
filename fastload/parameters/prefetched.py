"""`Prefetched`: rows that were pulled for coming batches, and kept up to date until they are delivered.

Why no row is stale. Assume that push n of this table changed a row of a batch, and returned before `take` of the batch.

- `_lock` guards the count of pushes, their fresh rows, and the pulls. It is never held during a request. A push holds
  `_order` from before its request until its fresh rows are recorded. So pushes are recorded in the order in which the
  servers applied them, and `_count` is n or more.
- A pull records the count before it sends its request. If it recorded n or more, the servers had applied push n before
  they got the request, so the pulled row includes it.
- If it recorded less, the fresh rows of push n are still kept. If they had been dropped, the pull would have been
  dropped too, under the same lock. The fresh rows replace the pulled row, then those of later pushes do. Each includes
  all earlier pushes. `Pull.lock` is held meanwhile, so two threads cannot replace rows in a different order. `take`
  repeats this with the remaining pushes. It pulls again if one of them is no longer kept.

So a row includes every push that has returned, whatever the threads did meanwhile. A push that raised may or may not
have been applied, so it drops all pulls. Changes by other workers are as old as the pull, or as the push that replaced
the row.

The thread that pushes or pulls ahead replaces rows at once. So little is left to do for `take` in the training loop,
whose many short calls would each wait for a thread that pushes at the same time.
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

Rows = tuple[Tensor, Tensor]
"""Distinct ids, ascending, and the row of each."""


@dataclass(eq=False)
class Pull:
    """The rows of a batch.

    Attributes:
        key: the batch's ids, as bytes.
        ids: the distinct ids in ascending order.
        places: for each id of the batch, its position in `ids`.
        rows: the rows of `ids`. `lock` guards them and `delivered`.
        begun: number of pushes that the rows include: those that had returned before the request was sent, and those
            whose fresh rows were copied in since.
    """

    key: bytes
    ids: Tensor
    places: Tensor
    rows: Tensor
    begun: int
    delivered: bool = False
    """True if the rows belong to the caller, and change no more."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Prefetched:
    """The pulls of one table. All methods can be called from several threads.

    Args:
        pull: returns the rows of distinct ids. None: nothing is pulled ahead.
        kept: maximum number of kept pulls, and of kept pushes. The oldest are dropped, and their batches pull again.
    """

    def __init__(self, pull: Callable[[Tensor], Tensor] | None, *, kept: int) -> None:
        self._pull = pull
        self._pid = os.getpid()
        self._order = threading.Lock()  # held by a push until its rows are recorded
        self._lock = threading.Lock()  # guards all attributes below
        self._count = 0
        self._pushes: deque[Rows] = deque(maxlen=kept)  # the newest, up to push number `_count`
        self._pulls: deque[Pull] = deque(maxlen=kept)
        self._taken: list[Pull] = []  # pulls that `take` is bringing up to date
        self._under_way: list[int] = []
        self.counts = {"prefetched": 0, "pulled": 0, "patched": 0}

    def __reduce__(self) -> Any:
        return _nowhere, ()  # a process cannot use rows that another one pulls

    def pull_ahead(self, ids: Tensor) -> None:
        """Pull the rows of a coming batch. If this fails, `take` pulls again, and raises the error."""
        if self._pull is None or os.getpid() != self._pid:
            return
        flat = flat_ids(ids)
        with self._lock:
            begun = self._count
            self._under_way.append(begun)
        pulled = None
        try:
            pulled = self._pulled(flat, begun)
        except ParametersError:
            pass
        finally:
            with self._lock:
                self._under_way.remove(begun)
                if pulled is not None:
                    self._pulls.append(pulled)
                self._drop()
        if pulled is not None:
            self._bring_up(pulled)

    def take(self, ids: Tensor) -> Pull:
        """Return the rows of a batch, which include all pushes that have returned. They belong to the caller."""
        flat = flat_ids(ids)
        key = flat.numpy().tobytes()
        with self._lock:
            begun = self._count
            pull = next((each for each in self._pulls if each.key == key), None)
            if pull is not None:
                self._pulls.remove(pull)
                self._taken.append(pull)
        if pull is not None:
            is_up = self._bring_up(pull, deliver=True)
            with self._lock:
                self._taken.remove(pull)
                self.counts["prefetched"] += is_up
                self._drop()
            if is_up:
                return pull
        with self._lock:
            self.counts["pulled"] += 1
        return self._pulled(flat, begun)

    def push(self, push: Callable[[], Rows]) -> None:
        """Call `push`, which returns the fresh rows of the ids that it pushed."""
        with self._order:
            try:
                fresh = push()
            except BaseException:
                with self._lock:
                    self._count += 1
                    self._pushes.clear()
                    self._drop()
                raise
            with self._lock:
                self._count += 1
                self._pushes.append(fresh)
                self._drop()
                waiting = list(self._pulls)
            for pull in waiting:
                self._bring_up(pull)

    def _bring_up(self, pull: Pull, *, deliver: bool = False) -> bool:
        """Replace the rows that pushes have changed. Return False if a push that the rows lack was dropped."""
        with pull.lock:
            if pull.delivered:
                return False
            pull.delivered = deliver
            with self._lock:
                count, kept = self._count, list(self._pushes)
            missing = count - pull.begun
            if missing > len(kept):
                return False
            patched = sum(_replace(pull, fresh) for fresh in kept[len(kept) - missing :])
            with self._lock:
                pull.begun = count
                self.counts["patched"] += patched
                self._drop()
            return True

    def _pulled(self, flat: Tensor, begun: int) -> Pull:
        assert self._pull is not None, "a copy in another process has no rows"
        ids, places = torch.unique(flat, return_inverse=True)
        return Pull(flat.numpy().tobytes(), ids, places, self._pull(ids), begun)

    def _drop(self) -> None:
        """Drop pulls that may lack a dropped push, and pushes that no pull lacks. The caller holds the lock."""
        oldest = self._count - len(self._pushes)
        for pull in [each for each in self._pulls if each.begun < oldest]:
            self._pulls.remove(pull)
        needed = [*self._under_way, *(each.begun for each in (*self._pulls, *self._taken))]
        begun = min(needed, default=self._count)
        while len(self._pushes) > self._count - begun:
            self._pushes.popleft()


def _nowhere() -> Prefetched:
    return Prefetched(None, kept=1)


def _replace(pull: Pull, fresh: Rows) -> int:
    """Replace the rows of a pull for which fresh rows exist. Return their number."""
    ids, rows = fresh
    if not len(pull.ids):
        return 0
    places = torch.searchsorted(pull.ids, ids).clamp_(max=len(pull.ids) - 1)
    found = (pull.ids[places] == ids).nonzero()[:, 0]
    pull.rows.index_copy_(0, places[found], rows[found])
    return len(found)


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
