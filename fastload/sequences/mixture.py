"""`Mixture`: samples of several datasets by weight, in global batches that every rank computes for itself.

`shares` says how many samples each source gives to each global batch, and has given before. All else follows: which of
its own epochs a sample belongs to, and its index in that epoch's order.
"""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset

from fastload._kit.hashing import hash64, mix64, mix64s
from fastload._kit.integers import global_position, integer, positive
from fastload.errors import StateError
from fastload.order.batches import set_id_of
from fastload.order.sampler import RankSampler, permuted
from fastload.order.state import read_fields
from fastload.sequences.lengths import samples_in
from fastload.sequences.mixture_state import MixtureState, check_state
from fastload.sequences.shares import Point, Schedule, Shares, WeightSchedule
from fastload.sequences.windows import check_rows

# Added to the seed: keys of three purposes.
_SLOTS, _SOURCES, _NUMBERS = 0x736C_6F74, 0x736F_7572, 0x6E75_6D62
# Samples of this rank that are computed at a time, and at least for each source.
_CHUNK, _CHUNK_OF_SOURCE = 8192, 512


class Mixture(RankSampler):
    """A sampler that mixes datasets by weight.

    Use it with its `dataset`, which holds the sources one after another. Each global batch has its share of each
    source, rounded up in some batches and down in others, so that the shares are exact in the long run. Each source has
    its own epochs, each in a new order. No sample of a source comes twice before all of it came once, over the whole
    training. The global batches are the same for any number of ranks and workers.

    Args:
        sources: datasets by name, or their lengths.
        weights: numbers by name, 0 or more; their sum may be any. Or a schedule: a dict of weights by global step, in
            ascending order, the first for step 0. Or a function of the global step that returns weights. It must return
            the same on all ranks and in every run. Global steps are counted from 0, over all epochs.
        seed: selects the orders. The same on all ranks.
        on_exhausted: what happens after a source has given all its samples in an epoch of the mixture. "repeat": it
            continues with its next epoch, and the mixture's epoch has `epoch_samples`. "stop": the epoch ends with that
            global batch. "drop": it gives no more, and the epoch ends with the last source, or at a step at which none
            that is left has weight. A source's next epoch completes the batch, and continues in the mixture's next one.
        epoch_samples: samples in an epoch, for "repeat" only, rounded up to whole global batches. By default as many
            as all sources have together.
        global_batch: samples of all ranks in one global step. By default the loader's batch size x the world size. Give
            it if you accumulate gradients: then a step has several of the loader's batches.
        shuffle: give each epoch of a source its own order. If False, each source is read from first to last.
        rank, world_size: see `RankSampler`.

    A state of the loader holds what each source has given. It can be loaded with another number of ranks at the same
    global batch, with other weights, and with sources added or removed. Sources that stay continue, and new ones begin.
    The weights of this mixture hold from the first step that is read after it. So weights change in a run if its state
    is loaded with another mixture. Steps before a loaded state cannot be read again.

    Cost: about 0.6 us a sample. Any thread may call its methods while a loader uses it.

    Raises:
        ValueError: weights are not valid, or sources are `Packed` or `TokenWindows` whose rows do not fit into one
            batch.

    Examples:
        >>> sources = {"a": texts[:100], "b": texts[100:]}
        >>> mixture = fastload.sequences.Mixture(sources, weights={"a": 0.3, "b": 0.7})
        >>> loader = DataLoader(mixture.dataset, 32, sampler=mixture, collate_fn=list)
    """

    planned = sources_vary = True

    def __init__(
        self,
        sources: Mapping[str, Dataset[Any] | Sequence[Any] | int],
        *,
        weights: Schedule,
        seed: int = 0,
        on_exhausted: Literal["repeat", "stop", "drop"] = "repeat",
        epoch_samples: int | None = None,
        global_batch: int | None = None,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if on_exhausted not in ("repeat", "stop", "drop"):
            raise ValueError(
                f'on_exhausted must be "repeat", "stop" or "drop", got {on_exhausted!r}'
            )
        if epoch_samples is not None and on_exhausted != "repeat":
            raise ValueError(f'epoch_samples needs on_exhausted="repeat", got {on_exhausted!r}')
        if not isinstance(sources, Mapping) or not all(isinstance(name, str) for name in sources):
            raise TypeError(f"sources must be datasets by name, got {reprlib.repr(sources)}")
        self.sources = {name: sources[name] for name in sorted(sources)}
        self.lengths = {
            name: samples_in(f"source {name!r}", source) for name, source in self.sources.items()
        }
        """Samples of each source."""
        for name, length in self.lengths.items():
            positive(f"samples of source {name!r}", length)
        check_rows(self.sources)
        self.set_ids = {name: set_id_of(source) for name, source in self.sources.items()}
        """The set that each source reads, or the plan that it has; None if it does not say."""
        super().__init__(
            sum(self.lengths.values()), rank=rank, world_size=world_size, shuffle=shuffle, seed=seed
        )
        self.on_exhausted = on_exhausted
        self._epoch_samples = positive("epoch_samples", epoch_samples) or self.samples
        self._sizes = np.array([*self.lengths.values()], np.int64)
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._keys = [mix64(self.seed + _SOURCES) ^ hash64(name) for name in self.lengths]
        self._global_batch = positive("global_batch", global_batch)
        self._batch_size: int | None = None
        self._lock = threading.RLock()
        """Owns what follows: a loader draws in one thread, and users call in another. A handler of a signal, and a
        function of weights, may call in the middle of a draw, on the same thread."""
        self._schedule = WeightSchedule(weights, [*self.lengths])
        self._current: Shares | None = None  # until the global batch is known
        self._was_read = False

    def __repr__(self) -> str:
        sources = ", ".join(f"{name}: {length:,}" for name, length in self.lengths.items())
        return (
            f"Mixture({sources}; rank={self.rank}, world_size={self.world_size}, seed={self.seed}, "
            f"on_exhausted={self.on_exhausted!r}, epoch={self.epoch})"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy: all but the lock."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @property
    def dataset(self) -> ConcatDataset[Any]:
        """The sources, one after another. There is none if one was given by its length: AttributeError."""
        for name, source in self.sources.items():
            if not isinstance(source, Sized):
                raise AttributeError(f"source {name!r} is a length, {source}: give its dataset")
        return ConcatDataset(self.sources.values())  # type: ignore[arg-type]

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one global step. Before the loader's batch size is known: ValueError."""
        if self._global_batch is not None:
            return self._global_batch
        if self._batch_size is None:
            raise ValueError(
                "Mixture does not know the global batch yet: give it global_batch, or make the loader first"
            )
        return self._batch_size * self.world_size

    def check_loader(self, size: int | None, dataset: Any) -> None:
        """Store the batch size.

        Raises:
            ValueError: a global batch is not a whole number of batches, or a ConcatDataset has other sources.
        """
        super().check_loader(size, dataset)
        if type(dataset) is ConcatDataset and not _in_order(dataset, self):
            raise ValueError(
                f"expected the sources one after another, {self.lengths}, found datasets of "
                f"{[*map(len, dataset.datasets)]} samples, or in another order. Pass the dataset of the mixture to the "  # type: ignore[arg-type]
                "loader: mixture.dataset"
            )
        least = (size or 1) * self.world_size
        batch = least if self._global_batch is None else self._global_batch
        if batch % least:
            raise ValueError(
                f"global_batch must be a multiple of batch size x ranks, got {batch}, batch size {size} and "
                f"{self.world_size} ranks"
            )
        if self._was_read and self._current is not None and batch != self._current.batch:
            raise ValueError(
                f"a loader has read with a global batch of {self._current.batch}, and it would be {batch} now. Make a "
                "new Mixture, or give it global_batch"
            )
        self._batch_size = size or 1

    @property
    def length(self) -> int:
        """Samples of all ranks in `epoch`. Unless sources repeat, it is found by counting: 1 s for 10 million steps."""
        with self._lock:
            shares, epoch = self._shares(), self.epoch
            if self.on_exhausted == "repeat":
                return -(-self._epoch_samples // self.global_batch) * self.global_batch
            end = shares.seek(epoch, float("inf"))
            return (end.step - end.began) * self.global_batch

    def seen(self, step: int) -> dict[str, int]:
        """Return how many samples each source gives before a global step, on all ranks together."""
        with self._lock:
            return _by_name(self.lengths, self._shares().at(integer("step", step)).given)

    def epochs(self, step: int) -> dict[str, float]:
        """Return how many epochs of its own each source gives before a global step. See `seen`."""
        return {name: given / self.lengths[name] for name, given in self.seen(step).items()}

    # ---- the order ----

    def ordered(self, epoch: int, start: int = 0) -> Iterator[int]:
        """Yield this rank's indices of an epoch from local position `start` on."""
        self._warn_if_alone()
        self.check_loader(self._batch_size or 1, None)  # the world may be known only now
        share = self.global_batch // self.world_size
        chunk, most = share, max(_CHUNK, _CHUNK_OF_SOURCE * len(self.lengths))
        step, skipped = divmod(start, share)
        while True:
            with self._lock:
                rows = self._rows(self._shares().seek(epoch, step), max(1, chunk // share))
                self._was_read = True
            if not len(rows):
                return
            yield from rows.ravel()[skipped:].tolist()
            step, skipped = step + len(rows), 0
            chunk = min(4 * chunk, most)  # small at first: the first batch waits for it

    def indices_of(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return this rank's indices at local positions `start` to `stop` of an epoch: int64[stop - start]."""
        share = self.global_batch // self.world_size
        first = start // share
        with self._lock:
            rows = self._rows(self._shares().seek(epoch, first), -(-stop // share) - first)
        return rows.reshape(-1)[start - first * share : stop - first * share]

    def _shares(self) -> Shares:
        """Return what the sources give. The caller holds the lock."""
        if self._current is None or self._current.batch != self.global_batch:
            nothing = np.zeros_like(self._sizes)
            self._current = self._new_shares(Point(0, 0, nothing, 0, nothing))
        return self._current

    def _new_shares(self, point: Point) -> Shares:
        repeats = self.on_exhausted == "repeat"
        return Shares(
            self._sizes,
            self.global_batch,
            self._schedule,
            point,
            epoch_steps=-(-self._epoch_samples // self.global_batch) if repeats else None,
            drop=self.on_exhausted == "drop",
            key=mix64(self.seed + _NUMBERS),
        )

    def _rows(self, begin: Point, steps: int) -> NDArray[np.int64]:
        """Return this rank's indices at the next steps: int64[steps, share], fewer steps at the end of the epoch."""
        numbers = self._shares().numbers(begin, steps)
        steps, size = len(numbers), self.global_batch
        share = size // self.world_size
        slot = np.tile(global_position(np.arange(share), self.rank, self.world_size), steps)
        row = np.repeat(np.arange(steps), share)
        # Permute each global batch: the sources spread over its positions, and so over the ranks.
        each = np.arange(begin.step, begin.step + steps).astype(np.uint64)
        slot = permuted(slot, size, mix64s(np.uint64(mix64(self.seed + _SLOTS)) ^ each), row)
        ends = np.cumsum(numbers, axis=1)
        bounds = (ends + size * np.arange(steps)[:, None]).ravel()
        source = np.searchsorted(bounds, slot + size * row, "right") - row * len(self._sizes)
        given = begin.given + np.cumsum(numbers, axis=0) - numbers
        number = given[row, source] + slot - (ends - numbers)[row, source]
        indices = np.empty(len(slot), np.int64)
        for one in np.unique(source).tolist():
            of_it = source == one
            indices[of_it] = self._offsets[one] + self._indices_in(one, number[of_it])
        return indices.reshape(steps, share)

    def _indices_in(self, source: int, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices in a source of the samples that it gives as its `number`-th, from 0: int64[k]."""
        size = int(self._sizes[source])
        epoch, position = np.divmod(number, size)
        if not self.shuffle:
            return position
        epochs = np.arange(int(epoch.min()), int(epoch.max()) + 1)
        keys = mix64s(np.uint64(self._keys[source]) ^ mix64s(epochs.astype(np.uint64)))
        return permuted(position, size, keys, epoch - epochs[0])

    # ---- its state ----

    def plan_state(self, epoch: int, position: int) -> Any:
        """See `RankSampler`."""
        step, part = divmod(position, self.global_batch)
        with self._lock:
            point = self._shares().seek(epoch, step)
            numbers = self._shares().numbers(point, 1).sum(axis=0)
        return MixtureState(
            step=point.step,
            part=part,
            epoch_began=point.began,
            given=_by_name(self.lengths, point.given),
            given_then=_by_name(self.lengths, point.given_then),
            numbers=_by_name(self.lengths, numbers),
            lengths=dict(self.lengths),
            set_ids=dict(self.set_ids),
            global_batch=self.global_batch,
            on_exhausted=self.on_exhausted,
        )

    def load_plan(self, state: Any, epoch: int, *, ended: bool) -> None:
        """See `RankSampler`.

        Raises:
            StateError: a source has other samples, or the mixture other arguments.
        """
        found = read_fields(MixtureState, state if isinstance(state, dict) else {})
        check_state(found, self)
        given, then = (
            np.array([one.get(name, 0) for name in self.lengths], np.int64)
            for one in (found["given"], found["given_then"])
        )
        point = Point(epoch, found["epoch_began"], then, found["step"], given)
        shares = self._new_shares(point.next_epoch() if ended else point)
        rest = shares.numbers(point, min(1, found["part"])).sum(axis=0)
        if found["part"] and _by_name(self.lengths, rest) != found["numbers"]:
            raise StateError(
                f"step: the state ends within global step {found['step']}, and this Mixture has other weights or "
                "sources for the rest of it. Save the state after a whole global step to change them"
            )
        with self._lock:
            self._current, self._was_read = shares, found["step"] + found["part"] > 0


def _by_name(lengths: Mapping[str, int], counts: NDArray[np.int64]) -> dict[str, int]:
    return dict(zip(lengths, counts.tolist(), strict=True))


def _in_order(dataset: ConcatDataset[Any], mixture: Mixture) -> bool:
    """Return whether the datasets have the lengths of the sources, and no source is in the place of another."""
    sources = [*mixture.sources.values()]
    found = [len(part) for part in dataset.datasets]  # type: ignore[arg-type]
    return found == [*mixture.lengths.values()] and all(
        part is own or all(part is not source for source in sources)
        for part, own in zip(dataset.datasets, sources, strict=True)
    )
