"""A stream, its steps, and where it is."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from fastload._kit.hashing import mix64
from fastload._kit.integers import integer, positive
from fastload.errors import StateError
from fastload.random.streams import current_stream
from fastload.sequences.packed import Packed

Element = tuple[int, Any]
"""The key of a sample, an integer that no other sample of the epoch has, and the sample."""

Mark = Any
"""Where a pass is, as JSON values. Each kind of stream has its own."""


class Pass(Iterator[Element]):
    """One reader's way through an epoch of a stream. If it raises, the next call goes on after what failed."""

    @abstractmethod
    def mark(self) -> Mark:
        """Return where the pass is. It takes microseconds, however many samples the steps hold."""


class Place(NamedTuple):
    """What a pass depends on, beside its stream: the epoch, and which reader of how many it is for."""

    epoch: int
    reader: int
    readers: int


class Stream(IterableDataset[Any]):
    """A stream of samples, whose order depends on its seed, the epoch and the number of readers.

    Each worker of each rank is a reader. `set_epoch(e)` chooses the epoch; a loader of fastload counts epochs itself.

    Examples:
        >>> [*stream.filter(lambda numbers: len(numbers) > 1).shuffle(1000).map(sum)]
        [3]
    """

    epoch = seed = 0
    partitioned_by_rank = True
    fastload_exact = True
    ups: Sequence[Stream] = ()

    # ---- what a kind of stream says ----

    @abstractmethod
    def open(self, place: Place, mark: Mark = None) -> Pass:
        """Return a pass that begins at a mark, or at the beginning."""

    @abstractmethod
    def deal(self, marks: list[Mark], readers: int) -> list[Mark]:
        """Return a mark for each of `readers` readers, for what is left of the passes that are at `marks`."""

    # ---- what users call ----

    def map(self, function: Callable[[Any], Any]) -> Stream:
        """Return a stream of `function(sample)`. What it draws depends on seed, epoch and sample alone."""
        return Mapped(self, function, keeps=False)

    def filter(self, predicate: Callable[[Any], Any]) -> Stream:
        """Return a stream of the samples of which `predicate(sample)` is true."""
        return Mapped(self, predicate, keeps=True)

    def flat_map(self, function: Callable[[Any], Iterable[Any]]) -> Stream:
        """Return a stream of what `function(sample)` yields for each sample, which may be nothing."""
        return FlatMapped(self, function)

    def shuffle(self, size: int, seed: int | None = None) -> Stream:
        """Return `Shuffled(self, size, seed)`."""
        return Shuffled(self, size, seed)

    def redealt(
        self, states: Sequence[dict[str, Any] | None], epoch: int, readers: int
    ) -> list[dict[str, Any]]:
        """Return the states of `readers` readers for what those of `states` have left in an epoch.

        The states are those of all readers in their order. None: a reader has not begun.
        """
        marks = [
            state["mark"] if state else self.open(Place(epoch, reader, len(states))).mark()
            for reader, state in enumerate(states)
        ]
        return [
            {**Place(epoch, reader, readers)._asdict(), "mark": mark}
            for reader, mark in enumerate(self.deal(marks, readers))
        ]

    def idle(self, workers: int) -> str:
        """Return a sentence that says how many of the readers have nothing to read, or ""."""
        return next(filter(None, (up.idle(workers) for up in self.ups)), "")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = integer("epoch", epoch)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return int(self._sources()[0].rank)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._sources()[0].world_size)

    @property
    def depth(self) -> int:
        """Number of steps up to the farthest source."""
        return 1 + max((up.depth for up in self.ups), default=-1)

    def _sources(self) -> list[Any]:
        return [source for up in self.ups for source in up._sources()] or [self]

    def __iter__(self) -> Reading:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world_size = self.rank, self.world_size
        # Neighbours in the order belong to different ranks, so that ranks differ by one shard at most.
        return Reading(self, Place(self.epoch, worker * world_size + rank, workers * world_size))


class Reading:
    """The samples of one pass of a stream. `state_dict()` says where it is."""

    def __init__(self, stream: Stream, place: Place) -> None:
        self._stream, self._place = stream, place
        self._pass: Pass | None = None

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Any:
        return next(self._opened())[1]

    def _opened(self) -> Pass:
        if self._pass is None:
            self._pass = self._stream.open(self._place)
        return self._pass

    def state_dict(self) -> dict[str, Any]:
        """Return where the pass is, as JSON values without any sample."""
        return {**self._place._asdict(), "mark": self._opened().mark()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`, which the same reader of as many saved, or that `Stream.redealt` made for it."""
        for name in ("reader", "readers"):
            if state[name] != (ours := getattr(self._place, name)):
                raise StateError(
                    f"{name}: the stream's state is of {state[name]}, this one is {ours}. A loader of "
                    "fastload deals anew what is left"
                )
        self._place = self._place._replace(epoch=state["epoch"])
        self._pass = self._stream.open(self._place, state["mark"])


# ---- steps that hold no samples ----


class Mapped(Stream):
    """A stream whose samples a function makes or keeps. See `Stream.map` and `Stream.filter`."""

    def __init__(self, up: Stream, function: Callable[[Any], Any], *, keeps: bool) -> None:
        self.ups, self.seed = (up,), up.seed
        self.function, self.keeps = function, keeps

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`."""
        return _MappedPass(self, self.ups[0].open(place, mark), place.epoch)

    def deal(self, marks: list[Mark], readers: int) -> list[Mark]:
        """See `Stream`."""
        return self.ups[0].deal(marks, readers)


class _MappedPass(Pass):
    def __init__(self, stream: Mapped, up: Pass, epoch: int) -> None:
        self._up, self._function, self._keeps = up, stream.function, stream.keeps
        self._keys = Keys(stream, epoch)

    def mark(self) -> Mark:
        """See `Pass`."""
        return self._up.mark()

    def __next__(self) -> Element:
        while True:
            key, sample = next(self._up)
            result = self._keys.call(self._function, key, sample)
            if not self._keeps:
                return key, result
            if result:
                return key, sample


class Keys:
    """The random streams of a step's samples in an epoch, by their keys."""

    def __init__(self, step: Stream, epoch: int) -> None:
        self._salt = mix64(mix64(mix64(step.seed) ^ epoch) ^ step.depth)

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        """See `StreamSource`."""
        return mix64(mix64(at or 0) ^ self._salt)

    def call(self, function: Callable[[Any], Any], key: int, sample: Any) -> Any:
        """Return `function(sample)`. In a loader, what it draws comes from the sample's own stream."""
        stream = current_stream()
        if stream is None:
            return function(sample)
        before = stream.source, stream.at
        stream.move(self, key)
        try:
            return function(sample)
        finally:
            stream.move(*before)


# ---- steps that hold samples, a block at a time ----


class Blocks(Stream):
    """A stream that takes `size` samples of another, makes others of them, and gives these before it takes more.

    So where it is follows from where it took the present block, and how many of it were given. To resume, it takes the
    block again. While it gives one block it takes the next, evenly, so that no step waits for a whole block.
    """

    def __init__(self, up: Stream, size: int) -> None:
        self.ups, self.seed = (up,), up.seed
        self.size = positive("size", size) or 1

    @abstractmethod
    def made(self, keys: list[int], samples: list[Any], epoch: int) -> Iterable[Element]:
        """Yield what a block of samples gives, which depends on the arguments alone. It may empty the lists."""

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`. The mark has [start, given] of each block that was begun, and where the next begins."""
        return _BlocksPass(self, self.ups[0], place, *(mark or ((), None)))

    def deal(self, marks: list[Mark], readers: int) -> list[Mark]:
        """See `Stream`. A block goes to one reader whole."""
        begun = [block for blocks, _ in marks for block in blocks]
        rest = self.ups[0].deal([after for _, after in marks], readers)
        return [[begun[i::readers], after] for i, after in enumerate(rest)]


_AHEAD = 64
"""How many samples of the next block are taken at a time, while as many of this one are given."""


class _BlocksPass(Pass):
    """If the stream below raises, or what a block gives, this is left as it was but for what failed."""

    def __init__(
        self, stream: Blocks, up: Stream, place: Place, begun: Iterable[Any], after: Mark
    ) -> None:
        self._stream, self._below, self._place = stream, up, place
        self._up = up.open(place, after)
        self._begun = deque(begun)  # blocks that another pass had begun: [start, given]
        self._start: Mark = None  # where the present block begins. None: there is none
        self._given = 0
        self._made: Iterator[Element] = iter(())
        # The part of the next block that was taken. Not as pairs, which the garbage collector would look through.
        self._next: tuple[list[int], list[Any]] = [], []
        self._after: Mark = None  # where that begins

    def mark(self) -> Mark:
        """See `Pass`."""
        present = [] if self._start is None else [[self._start, self._given]]
        return [[*present, *self._begun], self._after if self._next[0] else self._up.mark()]

    def __next__(self) -> Element:
        while True:
            if self._given % _AHEAD == 1 and len(self._next[0]) < self._stream.size > 1:
                self._take(2 * _AHEAD)  # half would do, but after a resume it must catch up
            try:
                element = next(self._made)
            except StopIteration:
                self._begin()
            except BaseException:
                self._made, self._start, self._given = iter(()), None, 0
                raise
            else:
                self._given += 1
                return element

    def _begin(self) -> None:
        """Begin a block: one that was begun before, or the next. Raise StopIteration if there is none."""
        self._start, self._given = None, 0
        if self._begun:
            start, given = self._begun[0]
            block: tuple[list[int], list[Any]] = [], []
            _move(self._below.open(self._place, start), self._stream.size, block)
            self._begun.popleft()
        else:
            self._take(self._stream.size)
            block, start, given = self._next, self._after, 0
            self._next = [], []
            if not block[0]:
                raise StopIteration
        self._made = islice(self._stream.made(*block, self._place.epoch), given, None)
        self._start, self._given = start, given

    def _take(self, count: int) -> None:
        """Take more of the next block."""
        if not self._next[0]:
            self._after = self._up.mark()
        _move(self._up, min(count, self._stream.size - len(self._next[0])), self._next)


def _move(elements: Iterator[Element], count: int, into: tuple[list[int], list[Any]]) -> None:
    """Take elements. If one raises, those before it were taken."""
    taken: list[Element] = []
    try:
        taken += islice(elements, count)
    finally:
        into[0].extend([key for key, _ in taken])
        into[1].extend([sample for _, sample in taken])


class FlatMapped(Blocks):
    """A stream of all that a function yields for each sample. See `Stream.flat_map`."""

    def __init__(self, up: Stream, function: Callable[[Any], Iterable[Any]]) -> None:
        super().__init__(up, 1)
        self.function = function

    def made(self, keys: list[int], samples: list[Any], epoch: int) -> Iterable[Element]:
        """See `Blocks`."""
        base = mix64(keys[0])
        results = Keys(self, epoch).call(self.function, keys[0], samples[0])
        return ((base ^ k, result) for k, result in enumerate(results))


class Shuffled(Blocks):
    """A stream whose samples come in a random order, `size` at a time.

    The samples of a block of `size` come in an order that depends on the seed, the epoch and the block. Memory holds
    `size` samples at once. A sample moves by a third of `size` on average, and never out of its block: a buffer of as
    many from which each step draws one moves it by `size`. The state has no samples, and no keys of them: it has where
    the block began, and how many were given.

    Args:
        up: the stream.
        size: number of samples.
        seed: makes the order, with the epoch. None: that of `up`.

    Examples:
        >>> sorted(fastload.streams.Shuffled(stream, 10_000))
        [[1, 2], [3]]
    """

    def __init__(self, up: Stream, size: int, seed: int | None = None) -> None:
        super().__init__(up, size)
        self.seed = up.seed if seed is None else integer("seed", seed)

    def made(self, keys: list[int], samples: list[Any], epoch: int) -> Iterable[Element]:
        """See `Blocks`. The list is emptied, so that memory need not hold two blocks."""
        seed = mix64(mix64(mix64(self.seed) ^ epoch) ^ mix64(keys[0]))
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(keys)).tolist()
        rest = [samples[k] for k in reversed(order)]
        samples.clear()
        return ((keys[k], rest.pop()) for k in order)


class PackedStream(Blocks):
    """A stream of rows of `length` tokens, into which texts are packed: best-fit decreasing, `size` texts at a time.

    The rows are those of `fastload.sequences.Packed` for each block of `size` texts, in an order of its seed.

    Args:
        up: a stream of texts, as `Packed` takes them.
        length: tokens of a row.
        size: texts that are packed together, which memory holds. The last row of a block is partly padding.
        options: `key`, `also`, `long`, `pad`, `seed` and `max_segments` of `Packed`.

    Examples:
        >>> [row] = fastload.streams.PackedStream(stream, length=4)
        >>> row["segments"].tolist()
        [1, 1, 2, 0]
    """

    def __init__(self, up: Stream, length: int = 4096, size: int = 10_000, **options: Any) -> None:
        super().__init__(up, size)
        self.length, self.options = length, options
        Packed(
            [[0]], length, **{**options, "key": None, "also": None}
        )  # raises for a wrong argument

    def made(self, keys: list[int], samples: list[Any], epoch: int) -> Iterable[Element]:
        """See `Blocks`."""
        name = self.options.get("key")
        texts = [x for x in samples if len(x if name is None else x[name])]
        if not texts:
            return ()
        rows = Packed(texts, self.length, **self.options)
        base = mix64(keys[0])
        return ((base ^ row, rows[row]) for row in range(len(rows)))
