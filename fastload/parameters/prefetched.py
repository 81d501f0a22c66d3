"""`Prefetched`: rows that were pulled for coming batches, and kept up to date until they are delivered.

Why no row is stale. Let push n of this table have returned before a batch's rows are taken, and name one of them.

- `_lock` owns the count of pushes, their fresh rows, and the pulls. It is never held during a request. `_order` is held
  by a push from before its request until its fresh rows are noted, so pushes are noted in the order in which the
  servers applied them, and `_count` is n or more.
- A pull notes the count before it sends its request. If it noted n or more, the servers had applied push n before they
  got the request: the pulled row has it.
- If it noted less, the fresh rows of push n are still kept: a pull is dropped, under the same lock, as soon as a push
  that it may lack is. They replace the pulled row, then those of the pushes after n. Each has all pushes before it.
  `Pull.lock` is held meanwhile, so two threads cannot replace rows in another order. `take` does this once more with
  the pushes that are left, and pulls again if one of them is no longer kept.

So a row lacks no push that has returned, whatever the threads did meanwhile. A push that raised may have been applied
or not: it drops all pulls. Changes by other workers are as old as the pull, or as the push that replaced the row.

A thread that pushes, or pulls ahead, replaces rows at once. So the training loop, which takes them, has little to do:
its many short calls would each wait for the thread that pushes meanwhile.
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
        ids: the distinct ones, ascending.
        places: of each id of the batch its place in `ids`.
        rows: of `ids`. `lock` owns them and `delivered`.
        begun: how many pushes the rows have: those that had returned before the request was sent, and those whose rows
            have replaced them.
    """

    key: bytes
    ids: Tensor
    places: Tensor
    rows: Tensor
    begun: int
    delivered: bool = False
    """The rows are the caller's, and change no more."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Prefetched:
    """The pulls of one table. All methods can be called from several threads.

    Args:
        pull: returns the rows of distinct ids. None: nothing is pulled ahead.
        kept: pulls, and pushes, that are kept at most. The oldest are dropped, and their batches pull once more.
    """

    def __init__(self, pull: Callable[[Tensor], Tensor] | None, *, kept: int) -> None:
        self._pull = pull
        self._pid = os.getpid()
        self._order = threading.Lock()  # held by a push until its rows are noted
        self._lock = threading.Lock()  # owns all below
        self._count = 0
        self._pushes: deque[Rows] = deque(maxlen=kept)  # the newest, up to push number `_count`
        self._pulls: deque[Pull] = deque(maxlen=kept)
        self._taken: list[Pull] = []  # those that `take` brings up to date
        self._under_way: list[int] = []
        self.counts = {"prefetched": 0, "pulled": 0, "patched": 0}

    def __reduce__(self) -> Any:
        return _nowhere, ()  # a process has no use for rows that another pulls

    def pull_ahead(self, ids: Tensor) -> None:
        """Pull the rows of a coming batch. If the servers give none, the batch pulls again, and raises."""
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
        """Return the rows of a batch, with all pushes that have returned. They are the caller's."""
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
        """Call `push`, which returns the fresh rows of the ids that it named."""
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
        """Replace the rows that pushes have changed. Return False if a push that the rows lack is not kept."""
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
        """Drop pulls that may lack a push that is not kept, and pushes that no pull lacks. The caller has the lock."""
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
    """Replace the rows of a pull that are among the fresh ones; return how many."""
    ids, rows = fresh
    if not len(pull.ids):
        return 0
    places = torch.searchsorted(pull.ids, ids).clamp_(max=len(pull.ids) - 1)
    found = (pull.ids[places] == ids).nonzero()[:, 0]
    pull.rows.index_copy_(0, places[found], rows[found])
    return len(found)


class PrefetchingCollate:
    """A `collate_fn` that pulls a table's rows for the batch that it has made.

    Each worker of a loader has its own copy of the `collate_fn` within; all share the pulls.
    """

    fastload_per_worker = ("collate_fn", "key")

    def __init__(self, pulls: Prefetched, key: Any, collate_fn: Callable[[Any], Any]) -> None:
        self.pulls = pulls
        self.key = key
        self.collate_fn = collate_fn

    def __call__(self, samples: Any) -> Any:
        """Return the batch of samples, once its rows are pulled."""
        batch = self.collate_fn(samples)
        self.pulls.pull_ahead(self.key(batch) if callable(self.key) else batch[self.key])
        return batch
