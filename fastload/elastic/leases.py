"""`Leases`: the shards of each epoch, leased, acknowledged and taken over in a store that all workers share."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterator, Sized
from dataclasses import asdict, replace
from typing import Any, Literal, Self

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from fastload._kit.integers import integer
from fastload.elastic.epoch import Epoch, LeasesState, Terms
from fastload.elastic.stores import Connection, find_store
from fastload.elastic.watch import Watch
from fastload.errors import FastloadError, StateError, StoreLostError
from fastload.order.state import read_fields


class Leases:
    """Shards of an epoch for workers that come and go. No worker waits for another before the end of the epoch.

    An epoch's order is cut into shards of `shard` positions. A worker leases a shard, trains it, and acknowledges it.
    If a worker gives no sign of life for `lease_s`, others lease its shards. Each shard is read at least once and
    acknowledged exactly once. An epoch ends, for all workers, once all of its shards are acknowledged.

    Args:
        length: number of samples, or anything with `len()`.
        shard: samples in a shard. A worker holds the shard that it trains, and the next ones that its loader has
            prefetched. A multiple of the batch size gives full batches.
        store: a `torch.distributed.Store` that all workers share, such as `fastload.distributed.FolderStore(path)` or
            `TCPStore`. None: that of `fastload.distributed.init()`, else torchrun's, else that of the process group,
            else one in this process. A run needs a store, or a `name`, that no run has used before.
        lease_s: seconds without a sign of life after which a worker is taken for dead. A worker gives eight signs in
            this time, on a thread of its own.
        max_tries: number of workers that may fail at a shard before all workers raise `ShardError`.
        on_lost: "raise" `LeaseLostError`, or "warn", if this worker was taken for dead and another leased a shard that
            it has trained. The shard counts for the other worker alone.
        name: name of these leases. Several leases in one store need different names.

    From the first lease to `close()`, each `Leases` uses two threads and two connections to the store. A shard costs
    four requests of 20 to 40 us each, or 250 us in a `FolderStore`.

    Raises:
        StoreLostError: the store is gone. Other errors of the store are raised as they are.
        ShardError: `max_tries` workers have failed at one shard.
        LeaseLostError: see `on_lost`.

    Examples:
        >>> leases = fastload.elastic.Leases(dataset, shard=100)
        >>> sampler = fastload.elastic.LeaseSampler(leases, batch_size=50)
        >>> len([labels for images, labels in DataLoader(dataset, batch_sampler=sampler)])
        10
        >>> leases.close()
    """

    def __init__(
        self,
        length: int | Sized,
        *,
        shard: int = 512,
        store: Store | None = None,
        lease_s: float = 30.0,
        max_tries: int = 3,
        on_lost: Literal["raise", "warn"] = "raise",
        name: str = "leases",
    ) -> None:
        count = len(length) if isinstance(length, Sized) else integer("length", length)
        shard = integer("shard", shard)
        if count < 0 or shard < 1:
            raise ValueError(
                f"length must be 0 or more and shard 1 or more, got length={count} and shard={shard}"
            )
        if not 0 < lease_s < math.inf or max_tries < 1:
            raise ValueError(
                f"lease_s must be positive and finite and max_tries 1 or more, got lease_s={lease_s} and "
                f"max_tries={max_tries}"
            )
        if on_lost not in ("raise", "warn"):
            raise ValueError(f'on_lost must be "raise" or "warn", got {on_lost!r}')
        self.terms = Terms(count, shard, lease_s, max_tries, on_lost)
        self.name = name
        self._store = store
        self._watch: Watch | None = None
        self._epoch: Epoch | None = None
        self._state = LeasesState(length=count, shard=shard)  # the loaded state

    def __len__(self) -> int:
        """The number of shards in an epoch."""
        return len(self.terms)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, exc: object, trace: object) -> None:
        self.close(failed=isinstance(exc, Exception) and not isinstance(exc, FastloadError))

    def shards(self, epoch: int = 0) -> Iterator[range]:
        """Yield the positions of one shard after another. A shard is acknowledged when the next one is asked for.

        This is for work without a loader, such as the parts of a set. It ends once all shards of the epoch are
        acknowledged.
        """
        begun = self.begin(epoch)
        while (lease := begun.wait_for_lease()) is not None:
            yield lease.rows
            begun.trained(lease)

    def begin(self, number: int, *, order: str = "") -> Epoch:
        """Return a new epoch, and give back the shards of another that this worker holds. `LeaseSampler` calls this.

        Args:
            order: describes the order of the samples.

        Raises:
            ValueError: another worker gave a different `order`.
        """
        watch = self._join()
        if self._epoch is not None:
            self._epoch.give_back()
        watch.connection.agree("order", order)
        first, self._epoch = self._epoch is None, Epoch(self.terms, watch, number, order)
        if first and len(self) and not self._was_over(number) and self._epoch.is_complete():
            warnings.warn(
                f"fastload: epoch {number} of these leases had ended before this worker began, so this worker reads "
                "no sample of that epoch. A worker that joins a running job continues with the next epoch. For a new "
                "run, or to go back to a checkpoint, give the leases a new store, or another name=",
                stacklevel=2,
            )
        if number < self._state.epoch:
            self._epoch.restore(replace(self._state, done=[[0, len(self)]], partial={}))
        elif number == self._state.epoch and (self._state.done or self._state.partial):
            self._state.check(self._epoch.state(), "order")
            self._epoch.restore(self._state)
        return self._epoch

    def _was_over(self, number: int) -> bool:
        """Return True if the loaded state says that an epoch is over."""
        state = self._state
        return number < state.epoch or (number == state.epoch and state.done == [[0, len(self)]])

    def state_dict(self) -> dict[str, Any]:
        """Return which shards of the epoch are done, as JSON values. Save it with the model.

        A batch that the loop has received counts as trained. If this worker has trained half of a shard, a resumed run
        reads the other half. A shard that another worker holds is read again as a whole.
        """
        self._forget_parent()
        return asdict(self._state if self._epoch is None else self._epoch.state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. Its epoch begins with the shards that are not done. Earlier epochs are over.

        Each worker calls this, before its first epoch.

        Raises:
            StateError: the state is of a dataset of another length, or of shards of another size.
        """
        self._forget_parent()
        if self._epoch is not None:
            raise StateError(
                "epoch: these leases have already begun an epoch, and their store may count shards as done that the "
                "state does not. Make new Leases, with a store or a name= that no run has used, and load the state "
                "before the first epoch"
            )
        if not isinstance(state, dict) or "version" not in state:
            raise StateError(
                f"this is not the state of leases: {state!r:.100}. Pass what state_dict() returned"
            )
        loaded = read_fields(LeasesState, state)
        ours = LeasesState(length=self.terms.length, shard=self.terms.shard)
        loaded.check(ours, "version", "length", "shard")
        self._state = loaded

    def close(self, *, failed: bool = False) -> None:
        """Give back the shards that this worker holds, and end its threads. It may be called again.

        Args:
            failed: these leases count as tries; see `max_tries`.
        """
        self._forget_parent()
        watch, self._watch = self._watch, None
        if watch is None:
            return
        try:
            if self._epoch is not None:
                self._epoch.give_back(failed=failed)
        except StoreLostError:
            pass  # the store is gone, so the shards cannot be given back
        finally:
            watch.close()

    def _forget_parent(self) -> None:
        """Forget, in a forked process, the parent's shards and connections, because the parent still uses them."""
        if self._watch is not None and self._watch.is_forked:
            self._watch = self._epoch = None

    def _join(self) -> Watch:
        self._forget_parent()
        if self._watch is not None:
            return self._watch
        if self._store is None:
            self._store = find_store()
        connection = Connection(PrefixStore(f"fastload/{self.name}", self._store))
        connection.agree("arguments", self.terms.shared())
        worker = connection.add("workers", 1)
        self._watch = watch = Watch(connection, worker, self.terms.lease_s)
        weakref.finalize(self, watch.close).atexit = False
        return watch
