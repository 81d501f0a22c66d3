"""`TokenBatchSampler`: batches of samples of varying length, each within a budget."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload._kit.fingerprint import digest_of
from fastload._kit.hashing import mix64
from fastload._kit.integers import integer, positive
from fastload.order.sampler import PlacedBatch, RankSampler, permuted
from fastload.order.state import compare
from fastload.sequences.lengths import checked
from fastload.sequences.token_plan import TokenPlan, make_plan

_BATCHES = 128, 256  # in a pool, by default. Fewer pad more: 64 pad 4 %, 16 pad 11 to 14 %
_AT_ONCE = 1024  # batches whose places are computed together
_GROUPS = 0x6772_6F75_7073_0000  # added to an epoch's key to select the order of groups


class TokenBatchSampler(RankSampler):
    """One rank's part of a global list of batches, each of which costs at most `budget`.

    Give it to a loader as `batch_sampler`. All ranks plan the same list, and take batches by strides: local batch `k`
    of rank `r` is batch `k * world_size + r`. So they have equally many steps, and state, epochs and ranks are those of
    `RankSampler`.

    The samples are dealt to pools at random. Each pool is sorted by length, and a batch takes as many neighbours as
    the budget allows. Then groups of batches are shuffled: those of one optimizer step are neighbours and cost about
    the same. The list is a pure function of the lengths, the arguments, the seed and the epoch.

    Args:
        lengths: integers[samples], each 1 or more, of any unit: tokens, frames, pixels. See `lengths_of`. Do not
            change the array later.
        budget: the most that a batch may cost, in the same unit: its number of samples x its longest.
        max_samples: the most samples in a batch.
        buckets: integers[samples]. Samples with different numbers never share a batch: aspect ratios, languages.
        pool: samples in a pool, about: from 0.7 to 1.4 times as many. A larger pool pads less, a smaller one
            makes batches more random. By default it has about 256 batches, or a quarter of all batches if these are
            fewer, and at least 128. Then batches have 1 to 3 % of padding. All samples are one pool if they make
            fewer than about 180 batches: then epochs differ in the order of batches, and in samples of equal length.
        batches_per_step: batches of all ranks together in one optimizer step, a multiple of `world_size`, which is the
            default. To resume with another number of ranks, give the same number.
        rank, world_size, seed: see `RankSampler`.
        shuffle: False: no pool and no group is shuffled. Pools are neighbours in the dataset, each longest first.
        ends: what to do if the last group is incomplete. "pad" fills it with the first batches of the plan, which come
            twice. "drop" leaves it out.

    Cost: a plan of 100 million samples takes 8 to 11 s and 2 GB. `len()` and `useful_share` make it, too.

    Raises:
        TypeError: lengths are not integers.
        ValueError: a length is over the budget, or an argument is out of range.

    Examples:
        >>> from fastload.sequences import TokenBatchSampler
        >>> lengths = [len(text) for text in texts]
        >>> sampler = TokenBatchSampler(lengths, budget=2000, seed=0)
        >>> loader = DataLoader(texts, batch_sampler=sampler, collate_fn=list)
        >>> batch = next(iter(loader))
        >>> len(batch) * max(map(len, batch)) <= 2000
        True
    """

    planned = True

    def __init__(
        self,
        lengths: Any,
        *,
        budget: int,
        max_samples: int | None = None,
        buckets: Any = None,
        pool: int | None = None,
        batches_per_step: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        ends: Literal["pad", "drop"] = "pad",
    ) -> None:
        if ends not in ("pad", "drop"):
            raise ValueError(f'ends must be "pad" or "drop", got {ends!r}')
        self.lengths = checked(lengths)
        self._latest: tuple[int | None, TokenPlan] | None = None
        self._given_step = positive("batches_per_step", batches_per_step)
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        super().__init__(self.lengths, shuffle=shuffle, seed=seed, ends=ends, **place)
        self.budget = positive("budget", integer("budget", budget)) or 1
        longest = int(self.lengths.max(initial=0))
        if longest > self.budget:
            raise ValueError(
                f"lengths: sample {int(self.lengths.argmax())} has length {longest}, over the budget of {self.budget}. "
                "Leave it out, shorten it, or raise the budget"
            )
        self.buckets = None if buckets is None else checked(buckets, "buckets", least=0)
        if self.buckets is not None and len(self.buckets) != self.samples:
            raise ValueError(
                f"buckets: expected one for each of {self.samples} lengths, got {len(self.buckets)}"
            )
        self.max_samples = positive("max_samples", max_samples)
        self.pool = positive("pool", pool) or self._default_pool()
        _ = self.batches_per_step  # if the number of ranks does not divide it, say so now

    if TYPE_CHECKING:  # a `planned` sampler has the `__iter__` of RankSampler

        def __iter__(self) -> Iterator[list[int]]: ...  # type: ignore[override]

    def __repr__(self) -> str:
        given = {**self.plan_state(0, 0), "rank": self.rank, "world_size": self.world_size}
        given |= {name: getattr(self, name) for name in ("shuffle", "seed", "ends", "epoch")}
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"TokenBatchSampler({said})"

    def _default_pool(self) -> int:
        batch = self.budget * self.samples // max(1, int(self.lengths.sum(dtype=np.uint64)))
        batch = max(1, min(batch, self.max_samples or batch))
        least, most = _BATCHES
        return min(most * batch, max(least * batch, self.samples // 4))

    @property
    def length(self) -> int:
        """The number of batches of all ranks in `epoch`, a multiple of `batches_per_step`."""
        return self._count(self._plan(self.epoch))

    @property
    def batches_per_step(self) -> int:
        """The number of batches of all ranks in an optimizer step.

        Raises:
            ValueError: it is not a multiple of the number of ranks.
        """
        step = self._given_step or self.world_size
        if step % self.world_size:
            raise ValueError(
                f"batches_per_step must be a multiple of the number of ranks, got {step} for {self.world_size} ranks"
            )
        return step

    @property
    def useful_share(self) -> float:
        """The sum of all lengths, as a share of what the batches of `epoch` cost with their padding: from 0 to 1."""
        plan = self._plan(self.epoch)
        return plan.useful / plan.padded if plan.padded else 1.0

    def indices_of(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Return the indices of local batches `start` to `stop`, one batch after another: int64[samples]."""
        batches = islice(self.ordered(epoch, start), stop - start)
        return np.fromiter(chain.from_iterable(batches), np.int64)

    def ordered(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch from local batch `start` on, each a `PlacedBatch`."""
        self._warn_if_alone()
        plan = self._plan(epoch)
        stop = self._count(plan) // self.world_size
        for first in range(start, stop, _AT_ONCE):
            places = self._places(plan, epoch, first, min(first + _AT_ONCE, stop))
            for begin, end, position in zip(*places, strict=True):
                yield PlacedBatch(plan.order[begin:end].tolist(), position)

    def check_loader(self, size: int | None, dataset: Any) -> None:
        """See `RankSampler`.

        Raises:
            ValueError: batches of batches would be made.
        """
        super().check_loader(size, dataset)
        if size is not None:
            raise ValueError(
                "give a TokenBatchSampler to the loader as batch_sampler, not as sampler"
            )

    def plan_state(self, epoch: int, position: int) -> dict[str, Any]:
        """Return what the plan depends on beside seed, shuffle and ends, for the state of a loader."""
        sizes = {"samples": self.samples, "batches_per_step": self.batches_per_step}
        return {**sizes, **self._hashes, **self._options()}

    def load_plan(self, state: Any, epoch: int, *, ended: bool) -> None:
        """Raise StateError if `state`, from `plan_state`, is that of another plan."""
        for field, ours in self.plan_state(0, 0).items():
            compare(field, state.get(field), ours, f"give TokenBatchSampler the state's {field}")

    @cached_property
    def _hashes(self) -> dict[str, str | None]:
        return {"lengths": _hash(self.lengths), "buckets": _hash(self.buckets)}

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("budget", "max_samples", "pool")}

    def _key(self, epoch: int) -> int | None:
        return self._key_of(epoch) if self.shuffle else None

    def _count(self, plan: TokenPlan) -> int:
        batches, step = len(plan.starts) - 1, self.batches_per_step
        return (batches if self.ends == "drop" else batches + step - 1) // step * step

    def _places(
        self, plan: TokenPlan, epoch: int, start: int, stop: int
    ) -> tuple[list[int], list[int], list[int]]:
        """Return where local batches begin and end in the plan's order, and the positions of their first samples."""
        step, key = self.batches_per_step, self._key(epoch)
        places = np.arange(start, stop, dtype=np.int64) * self.world_size + self.rank
        groups, members = np.divmod(places, step)
        if key is not None:
            groups = permuted(groups, self._count(plan) // step, mix64(key ^ _GROUPS))
        # A batch that fills the last group has positions of its own: it draws other random numbers than the first time.
        times, numbers = np.divmod(groups * step + members, max(1, len(plan.starts) - 1))
        begins, ends = plan.starts[numbers].astype(np.int64), plan.starts[numbers + 1]
        return begins.tolist(), ends.tolist(), (begins + times * self.samples).tolist()

    def _plan(self, epoch: int) -> TokenPlan:
        """Return the plan of an epoch. The last one stays in memory."""
        key, latest = self._key(epoch), self._latest  # `stats()` may ask in another thread
        if latest is None or latest[0] != key:
            self._latest = latest = None  # free it before another is made
            plan = make_plan(self.lengths, self.buckets, key, **self._options())
            self._latest = latest = key, plan
        return latest[1]


def _hash(values: NDArray[Any] | None) -> str | None:
    if values is None:
        return None
    chunks = range(0, len(values), 1 << 20)
    return digest_of(values[k : k + (1 << 20)].astype("<i8").tobytes() for k in chunks)
