"""The order of the samples, a pure function of (seed, epoch), and each rank's part of it.

No order is ever stored. A keyed permutation gives the sample at any position. So an epoch of a billion samples starts
as fast as one of ten samples. It needs no memory, and resumes in the middle by slicing.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, Sampler

from fastload._kit.hashing import MASK, finalized, mix64, mix64s
from fastload._kit.integers import global_position, integer
from fastload.order.state import known_length

_CHUNK = 8192  # positions computed at a time: large enough to hide NumPy's call overhead, small enough for the cache
_Words = npt.NDArray[np.uint64]
_Ints = npt.NDArray[np.int64]
_ROUNDS = np.array([mix64(i + 1) for i in range(24)], np.uint64)
_LARGEST = 1 << 62  # window or run: beyond any length, and an int64
# Added to a key to select the order of runs, and the position of the short run. The order in window w adds w itself.
_RUNS, _LAST_RUN = 0x7275_6E73_0000_0000, 0x6C61_7374_0000_0000


def epoch_number(value: object) -> int:
    """Return `value` as the number of an epoch. Raise TypeError or ValueError if it is not one."""
    epoch = integer("epoch", value)
    if epoch < 0:
        raise ValueError(f"epoch must be 0 or more, got {epoch}")
    return epoch


def permuted(positions: _Ints, n: int, key: int | _Words, which: _Ints | None = None) -> _Ints:
    """Return the images of `positions` under the permutation of 0..n-1 that `key` selects.

    Args:
        positions: int64[k], each in 0..n-1.
        key: an int for all positions, or uint64[m].
        which: the key of each position: int64[k]. By default each has its own.

    Returns int64[k].

    A generalised Feistel network (Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
    CT-RSA 2002) on a * b >= n pairs with a = ceil(sqrt(n)), walked until the image lies below n. As
    a * b < n + 2 * sqrt(n) + 1, a few walks are enough for n > 4. It is pure 64-bit integer arithmetic, so the
    result is the same on every machine and in every version.
    """
    if n <= 1:
        return np.zeros(len(positions), dtype=np.int64)
    root = math.isqrt(n - 1) + 1
    a, b = (np.array(side, np.uint64) for side in (root, -(-n // root)))
    # A Feistel network mixes few values slowly. With 8 rounds, some of the 720 orders of 6 samples are four times as
    # likely as others; with 24 they are not (chi-square in the tests). For thousands of samples, 8 are plenty.
    rounds = 24 if n <= 4096 else 8
    keys = np.array([key & MASK], np.uint64) if isinstance(key, int) else key
    # One pass over all pairs makes a table. It is shorter than walks, each of which is a pass.
    pairs = int(a * b)
    tabled = len(keys) == 1 and pairs <= 2 * len(positions)
    out: _Words = (np.arange(pairs) if tabled else positions).astype(np.uint64)
    todo = np.arange(len(out))
    few = len(keys) <= 1024  # mixed once for all rounds; more would not stay in the cache
    if not few and which is not None:
        keys, which = keys[which], None
    of_rounds = mix64s(keys ^ _ROUNDS[:rounds, None]) if few else _ROUNDS[:rounds]
    while len(todo):
        x = out[todo]
        left = x // b
        right = x - left * b
        mine = slice(1) if len(keys) == 1 else todo if which is None else which[todo]
        own = keys[mine]
        for k in of_rounds:
            total = finalized(right + (k[mine] if few else mix64s(own ^ k)))
            # NumPy takes three times as long for `%`, unless the calls cost more than the arithmetic.
            total = left + (total % a if len(x) < 256 else total - total // a * a)
            # Not `% a` once more. Below 0, the difference is a huge number.
            left, right, a, b = right, np.minimum(total, total - a), b, a
        x = left * b + right
        out[todo] = x
        todo = todo[x >= (pairs if tabled else n)]
    if tabled:
        table, out = out, out[positions]
        while len(outside := np.flatnonzero(out >= n)):
            out[outside] = table[out[outside]]
    return out.astype(np.int64)


def permuted_by_window(positions: _Ints, n: int, key: int, *, window: int, run: int) -> _Ints:
    """Return the images of `positions` under a permutation of 0..n-1 that shuffles within windows.

    The permutation permutes whole runs of `run` neighbours, cuts the result into windows, and permutes each window.

    Args:
        positions: int64[k], each in 0..n-1.
        key: selects the permutation.

    Returns int64[k]. All windows of equal length go through the network in one call: a rank among many has at most
    one position in each, and one call for each would cost more than the arithmetic.
    """
    number = positions // window
    places = number * window
    tail = n // window  # the number of the last window, if that is shorter
    for length, here in ((window, number < tail), (n % window, number == tail)):
        # A key for each run of positions in one window. They ascend, so it is a key for each window.
        numbers = number[here].astype(np.uint64)
        first = np.diff(numbers, prepend=~numbers[:1]) != 0
        keys = mix64s(np.uint64(key & MASK) ^ mix64s(numbers[first]))
        places[here] += permuted(positions[here] % window, length, keys, np.cumsum(first) - 1)
    # The last run may be shorter. It lands at any position among the others with equal probability.
    full, rest = n // run, n % run
    begin = mix64(key ^ _LAST_RUN) % (full + 1) * run if rest else n
    images = np.empty_like(places)
    short = (places >= begin) & (places < begin + rest)
    images[short] = places[short] - begin + full * run
    whole = np.where(places < begin, places, places - rest)[~short]
    images[~short] = permuted(whole // run, full, mix64(key ^ _RUNS)) * run + whole % run
    return images


class RankSampler(Sampler[int]):
    """One rank's part of a global order of samples, by strides.

    Local position k of rank r is global position `k * world_size + r` (see `block`). So local batch k of all ranks
    together is one contiguous global batch, for any world size that divides the global batch, and the sampler need not
    know the batch size. The global order is the same on all ranks: a pure function of (seed, epoch), or 0, 1, 2, ...
    without shuffle.

    Args:
        length_or_dataset: number of samples of the whole dataset, or anything with `len()`.
        rank, world_size: this process, and the number of processes. Give both or neither. By default they come
            from `torch.distributed` while it is initialised, which may be after the sampler is made. Until then they
            are 0 and 1 (`iter()` warns if the environment variable WORLD_SIZE says that there are more).
        shuffle: give a new permutation each epoch. It needs no memory, whatever the length.
        seed: selects the permutations; the same on all ranks.
        ends: what to do if the length is not a multiple of the world size. "pad" repeats samples from the start of
            the order, "drop" leaves out the last ones: all ranks get the same number of samples. "uneven" gives
            every sample exactly once, so that ranks differ by one sample. It is for evaluation; in DDP
            training it hangs the last step.
        window, run: shuffle by windows, for storage that is slow at random access. Give both, in samples. The sampler
            shuffles runs of `run` neighbours (the last one may be shorter), and then the samples in each
            piece of `window` samples. So the samples of a window lie in about `window / run` stretches of the
            dataset. If `window` is at least the dataset's length, the order is as random as without windows.
            This window is not the loader's: it has nothing to do with batches in flight.
        block: deal blocks of this many neighbours to the ranks in turn, rather than single samples. If it is the batch
            size, the batches of all ranks, one after another, are in the global order, as Accelerate wants them. "pad"
            and "drop" then make the length a multiple of `block * world_size`. The batch size must be a multiple of it.

    `iter()` gives the indices of `epoch`. A `fastload.DataLoader` advances to the next epoch by itself each time that
    `iter(loader)` is called. In any other loop, call `set_epoch(e)` before each epoch, as with torch's
    DistributedSampler.

    Raises:
        ValueError: an argument is out of range, or only one of a pair is given.

    Examples:
        >>> sampler = fastload.RankSampler(dataset, rank=1, world_size=4, seed=0)
        >>> loader = DataLoader(dataset, batch_size=50, sampler=sampler)
        >>> len(sampler), len(loader)
        (125, 3)
    """

    planned: ClassVar[bool] = False
    """Whether a subclass gives its own pure order. Its `ordered`, `plan_state` and `load_plan` must agree."""
    sources_vary: ClassVar[bool] = False
    """Whether a state may be loaded with another dataset, because `load_plan` checks what must be equal."""

    def __init__(
        self,
        length_or_dataset: int | Sized,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        ends: Literal["pad", "drop", "uneven"] = "pad",
        window: int | None = None,
        run: int | None = None,
        block: int = 1,
    ) -> None:
        if isinstance(length_or_dataset, Sized):
            length = len(length_or_dataset)
        else:
            length = integer("length_or_dataset, which has no len(),", length_or_dataset)
        seed = integer("seed", seed)
        if length < 0:
            raise ValueError(f"length must be 0 or more, got {length}")
        if (rank is None) != (world_size is None):
            raise ValueError(
                f"give rank and world_size both or neither, got rank={rank}, world_size={world_size}"
            )
        self._asks = rank is None  # torch.distributed
        self._given: tuple[int, int] | None = None  # rank and world size, once they are known
        if rank is not None and world_size is not None:
            rank, world_size = integer("rank", rank), integer("world_size", world_size)
            if world_size < 1 or not 0 <= rank < world_size:
                raise ValueError(
                    f"expected 0 <= rank < world_size, got rank={rank}, world_size={world_size}"
                )
            self._given = rank, world_size
        if ends not in ("pad", "drop", "uneven"):
            raise ValueError(f'ends must be "pad", "drop" or "uneven", got {ends!r}')
        if not isinstance(shuffle, bool | int | np.bool_):
            raise ValueError(f"shuffle must be True or False, got {shuffle!r}")
        if (window is None) != (run is None):
            raise ValueError(f"give window and run both or neither, got {window=}, {run=}")
        if window is not None and run is not None:
            window, run = integer("window", window), integer("run", run)
            if not shuffle:
                raise ValueError("window and run need shuffle=True, got shuffle=False")
            if not 1 <= run <= window:
                raise ValueError(f"expected 1 <= run <= window, got {run=}, {window=}")
            window, run = min(window, _LARGEST), min(run, _LARGEST)
        if integer("block", block) < 1:
            raise ValueError(f"block must be 1 or more, got {block}")
        self.samples = length
        """The number of samples of the dataset."""
        self.shuffle = bool(shuffle)
        self.seed = seed
        self.ends = ends
        self.window = window
        self.run = run
        self.block = integer("block", block)
        self.epoch = 0
        self.is_set = True
        """Whether no fastload loader has begun `epoch` since it was set."""

    def __repr__(self) -> str:
        by = "" if self.window is None else f"window={self.window}, run={self.run}, "
        by += "" if self.block == 1 else f"block={self.block}, "
        return (
            f"RankSampler(length={self.length}, rank={self.rank}, world_size={self.world_size}, "
            f"shuffle={self.shuffle}, seed={self.seed}, ends={self.ends!r}, {by}epoch={self.epoch})"
        )

    @property
    def length(self) -> int:
        """The number of samples of `epoch` on all ranks, without padding."""
        return self.samples

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._place()[0]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._place()[1]

    def _place(self) -> tuple[int, int]:
        if self._asks and dist.is_available() and dist.is_initialized():
            self._given = dist.get_rank(), dist.get_world_size()
        return self._given or (0, 1)

    def __len__(self) -> int:
        rounds, rest = divmod(self.length, self.world_size * self.block)
        last = {"drop": 0, "pad": rest and self.block, "uneven": rest - self.rank * self.block}
        return rounds * self.block + min(max(last[self.ends], 0), self.block)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that the next `iter()` gives."""
        self.epoch = epoch_number(epoch)
        self.is_set = True

    @property
    def next_epoch(self) -> int:
        """The epoch that a fastload loader begins next: the one that was set, else the one after `epoch`."""
        return self.epoch if self.is_set else self.epoch + 1

    def begin_epoch(self) -> None:
        """Advance to `next_epoch`. A fastload loader calls this at `iter()`."""
        self.epoch = self.next_epoch
        self.is_set = False

    def indices(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return the dataset indices at local positions `start` to `stop` of `epoch`: int64[stop - start].

        Positions run from 0 to `len(self)`.
        """
        return self.indices_of(self.epoch, start, stop)

    def indices_of(self, epoch: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return `indices` of an epoch: int64[stop - start]."""
        local = np.arange(start, stop, dtype=np.int64)
        positions = global_position(local, self.rank, self.world_size, self.block)
        positions %= max(1, self.length)
        if not self.shuffle:
            return positions
        key = self._key_of(epoch)
        if self.window is not None and self.run is not None:
            return permuted_by_window(positions, self.length, key, window=self.window, run=self.run)
        return permuted(positions, self.length, key)

    def _key_of(self, epoch: int) -> int:
        return mix64(self.seed) ^ mix64(epoch ^ (1 << 63))

    def __iter__(self) -> Iterator[int]:
        return self.ordered(self.epoch)  # a later `set_epoch` does not change this iterator

    def ordered(self, epoch: int, start: int = 0) -> Iterator[int]:
        """Yield the indices of an epoch from local position `start` on."""
        n = len(self)
        self._warn_if_alone()
        for first in range(start, n, _CHUNK):
            yield from self.indices_of(epoch, first, min(first + _CHUNK, n)).tolist()

    def _warn_if_alone(self) -> None:
        if self._given is None and os.environ.get("WORLD_SIZE", "1") not in ("0", "1"):
            warnings.warn(
                f"fastload: WORLD_SIZE is {os.environ['WORLD_SIZE']} in the environment, but torch.distributed is "
                f"not initialised: this {type(self).__name__} gives every rank all samples. Call "
                "torch.distributed.init_process_group() first, or give rank and world_size",
                stacklevel=3,
            )

    def check_loader(self, size: int | None, dataset: Any) -> None:
        """Raise ValueError if a loader cannot have this batch size, or a plan is for another number of samples.

        The end of a batch inside a block has no position in the order of all ranks. The size is None if the sampler's
        items are not put into batches, and the dataset None if it is not known. A subclass may store the size.
        """
        if self.planned and known_length(dataset) not in (None, self.samples):
            raise ValueError(
                f"the sampler's plan is for {self.samples} samples, and the dataset has {len(dataset)}"
            )
        if (size or 1) % self.block:
            raise ValueError(
                f"the batch size must be a multiple of the sampler's block, got batch size {size} and "
                f"block={self.block}"
            )

    def arguments(self) -> dict[str, Any]:
        """Return what a loader needs again to resume: fields of its state, beside those of a plan."""
        length = None if self.planned else self.length
        own = {name: getattr(self, name) for name in ("shuffle", "ends", "window", "run")}
        return {**own, "sampler_seed": self.seed, "sampler_length": length}

    def plan_state(self, epoch: int, position: int) -> Any:
        """Return what a state must know of a planned order after global `position`, as JSON values."""

    def load_plan(self, state: Any, epoch: int, *, ended: bool) -> None:
        """Resume from what `plan_state` returned.

        Raises:
            StateError: it is of another plan.
        """


class PlacedBatch(list[int]):
    """Indices from a batch sampler that does not give an epoch's samples from first to last.

    Args:
        indices: of neighbouring samples of the epoch's order.
        position: the global position of the first. It is part of the keys of their random streams.
    """

    def __init__(self, indices: Iterable[int], position: int) -> None:
        super().__init__(indices)
        self.position = position


def random_batches(sampler: BatchSampler) -> Iterator[list[int]]:
    """Yield the batches of a BatchSampler of a RandomSampler without replacement. Draw the same at the same times.

    Torch's own passes each index through two generators, which costs 0.3 us an index.
    """
    single: Any = sampler.sampler
    n, size = len(single.data_source), sampler.batch_size
    generator = single.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    rest: list[int] = []
    # Torch draws another order at the end, even if nothing is left to take of it.
    for count in [n] * (single.num_samples // n) + [single.num_samples % n]:
        rest += torch.randperm(n, generator=generator).tolist()[:count]
        full = len(rest) - len(rest) % size
        for start in range(0, full, size):
            yield rest[start : start + size]
        del rest[:full]
    if rest and not sampler.drop_last:
        yield rest
