"""A stream, and the steps that hold no samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from torch.utils.data import IterableDataset, get_worker_info

from fastload._kit.integers import integer
from fastload.errors import StateError
from fastload.streams.passes import Draws, Element, Mark, Pass, Place, Reading


class Stream(IterableDataset[Any]):
    """A stream of samples, whose order depends on its seed, the epoch and the number of readers.

    Each worker of each rank is a reader. `set_epoch(e)` chooses the epoch of this stream, not of those that it was made
    from. A loader of fastload counts epochs itself.

    Args:
        ups: the streams that it follows.

    Examples:
        >>> [*stream.filter(lambda numbers: len(numbers) > 1).shuffle(1000).map(sum)]
        [3]
    """

    epoch = seed = 0
    partitioned_by_rank = True
    fastload_exact = True
    ups: Sequence[Stream] = ()
    steps: ClassVar[dict[str, Callable[..., Stream]]] = {}
    """The classes of other files that methods of this one make, by the methods' names. Each file enters its own."""

    def __init__(self, *ups: Stream) -> None:
        """Follow these streams."""
        for up in ups:
            if not isinstance(up, Stream):
                raise TypeError(
                    f"a step follows streams, such as Shards, got a {type(up).__name__}"
                )
        self.ups = ups
        if ups:
            self.seed, self.epoch = ups[0].seed, ups[0].epoch

    # ---- what a kind of stream says ----

    @abstractmethod
    def open(self, place: Place, mark: Mark = None) -> Pass:
        """Return a pass that begins at a mark, or at the beginning."""

    @abstractmethod
    def deal(self, marks: list[Mark], place: Place) -> list[Mark]:
        """Return a mark for each of `place.readers` readers, for what is left of the passes that are at `marks`."""

    # ---- what users call ----

    def map(self, function: Callable[[Any], Any]) -> Stream:
        """Return a stream of `function(sample)`. In a loader, what it draws depends on seed, epoch and sample alone."""
        return Mapped(self, function, keeps=False)

    def filter(self, predicate: Callable[[Any], Any]) -> Stream:
        """Return a stream of the samples of which `predicate(sample)` is true."""
        return Mapped(self, predicate, keeps=True)

    def flat_map(self, function: Callable[[Any], Iterable[Any]]) -> Stream:
        """Return a stream of what `function(sample)` yields for each sample, which may be nothing."""
        return self.steps["flat_map"](self, function)

    def shuffle(self, size: int, seed: int | None = None) -> Stream:
        """Return `Shuffled(self, size, seed)`."""
        return self.steps["shuffle"](self, size, seed)

    def apply(
        self, function: Callable[[Iterator[Any]], Iterable[Any]], size: int | None = None
    ) -> Stream:
        """Return a stream of what `function(samples)` yields, which takes an iterator of samples: a generator of yours.

        With `size`, it is called for each `size` samples, and a resume is exact. Without, it is called once for an
        epoch. Then a resume is exact if what it returns has `state_dict()` and `load_state_dict(state)`. If not, a
        resume calls it for the samples that it had not taken: those that it held are lost, and loading warns.
        """
        if size is None:
            return self.steps["apply"](self, function)
        return self.steps["flat_map"](self, function, size)

    # ---- what loaders call ----

    def redealt(
        self, states: Sequence[dict[str, Any] | None], epoch: int, readers: int
    ) -> list[dict[str, Any]]:
        """Return the states of `readers` readers for what those of `states` have left in an epoch.

        The states are those of all readers in their order. None: a reader has not begun.
        """
        for state in filter(None, states):
            self.check(state)
        marks = [
            state["mark"] if state else self.open(Place(epoch, reader, len(states))).mark()
            for reader, state in enumerate(states)
        ]
        return [
            self.state_at(Place(epoch, reader, readers), mark)
            for reader, mark in enumerate(self.deal(marks, Place(epoch, 0, readers)))
        ]

    def state_at(self, place: Place, mark: Mark) -> dict[str, Any]:
        """Return the state of a reader."""
        where = {"epoch": place.epoch, "reader": place.reader, "readers": place.readers}
        return {"stream": self.form, **where, "mark": mark}

    @property
    def form(self) -> str:
        """What a state fits: the sources, and the steps that hold samples, with all that decides their order."""
        return ", ".join(up.form for up in self.ups)

    @property
    def applies(self) -> bool:
        """Whether a generator of the user's may hold samples. See `apply`."""
        return any(up.applies for up in self.ups)

    def check(self, state: dict[str, Any]) -> None:
        """Raise `StateError` if a state is not one of a stream like this."""
        theirs = state.get("stream") if isinstance(state, dict) else None
        if theirs != self.form:
            raise StateError(
                f"stream: the state is of {theirs}, this one is {self.form}. Make the stream that saved it"
            )

    def count(self, place: Place) -> int | None:
        """Return how many samples a reader has in an epoch, or None if that is not known."""
        return None

    def warning(self, workers: int) -> str:
        """Return what the user should be told of the readers before an epoch, or ""."""
        return next(filter(None, (up.warning(workers) for up in self.ups)), "")

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass."""
        self.epoch = integer("epoch", epoch)

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.ups[0].rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.ups[0].world_size

    @property
    def depth(self) -> int:
        """Number of steps up to the farthest source."""
        return 1 + max((up.depth for up in self.ups), default=-1)

    def __iter__(self) -> Reading:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        rank, world_size = self.rank, self.world_size
        # Neighbours in the order belong to different ranks, so that ranks differ by one shard at most.
        return Reading(self, Place(self.epoch, worker * world_size + rank, workers * world_size))


class Mapped(Stream):
    """A stream whose samples a function makes or keeps. See `Stream.map` and `Stream.filter`."""

    def __init__(self, up: Stream, function: Callable[[Any], Any], *, keeps: bool) -> None:
        super().__init__(up)
        self.function, self.keeps = function, keeps

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`."""
        return _MappedPass(self, self.ups[0].open(place, mark), place)

    def deal(self, marks: list[Mark], place: Place) -> list[Mark]:
        """See `Stream`."""
        return self.ups[0].deal(marks, place)

    def count(self, place: Place) -> int | None:
        """See `Stream`."""
        return None if self.keeps else self.ups[0].count(place)


class _MappedPass(Pass):
    def __init__(self, stream: Mapped, up: Pass, place: Place) -> None:
        self._up, self._function, self._keeps = up, stream.function, stream.keeps
        self._draws = Draws(stream, place)

    @property
    def exact(self) -> bool:
        """See `Pass`."""
        return self._up.exact

    def mark(self) -> Mark:
        """See `Pass`."""
        return self._up.mark()

    def __next__(self) -> Element:
        while True:
            key, sample = next(self._up)
            result = self._draws.call(self._function, key, sample)
            if not self._keeps:
                return key, result
            if result:
                return key, sample
