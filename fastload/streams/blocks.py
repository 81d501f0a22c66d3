"""Steps that hold samples, a block at a time."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from fastload._kit.integers import integer, positive
from fastload.errors import StateError
from fastload.streams.chain import Stream
from fastload.streams.passes import Draws, Element, Mark, Pass, Place, Run, folded


class Blocks(Stream):
    """A stream that takes `size` samples of another, makes others of them, and gives these before it takes more.

    So where it is follows from where it took the present block, and how many of it were given. To resume, it takes the
    block again. While it gives one block it takes the next, evenly: only the first step waits for a whole block.
    """

    def __init__(self, up: Stream, size: int) -> None:
        super().__init__(up)
        self.size = positive("size", size) or 1

    @property
    def form(self) -> str:
        """See `Stream`."""
        return f"{self.ups[0].form}.{type(self).__name__}({self.size}, seed={self.seed})"

    @abstractmethod
    def made(self, keys: list[int], samples: list[Any], draws: Draws) -> Iterable[Element]:
        """Yield what a block of samples gives, which depends on the arguments alone. It may empty the lists."""

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`. The mark has each block that was begun, where the next begins, and what has failed in that."""
        return _BlocksPass(self, place, *(mark or ((), None, ())))

    def deal(self, marks: list[Mark], place: Place) -> list[Mark]:
        """See `Stream`. A block goes to one reader whole."""
        begun = [block for blocks, _, _ in marks for block in blocks]
        rest = self.ups[0].deal([after for _, after, _ in marks], place)
        return [[begun[i :: place.readers], at, []] for i, at in enumerate(rest)]


class Begun(NamedTuple):
    """A block in a mark."""

    start: Mark
    given: int
    failed: list[int]
    """Before which samples of it the stream below has raised."""
    check: int
    """The checksum of its keys."""


_AHEAD = 64
"""How many samples of the next block are taken at a time, after as many of this one were given."""


class _BlocksPass(Run):
    """If the stream below raises, or what a block gives, this is left as it was but for what failed."""

    def __init__(
        self, stream: Blocks, place: Place, begun: Iterable[Any], after: Mark, failed: Iterable[int]
    ) -> None:
        self._stream, self._place, self._draws = stream, place, Draws(stream, place)
        self._up = stream.ups[0].open(place, after)
        self._begun = deque(Begun(*block) for block in begun)  # blocks that another pass had begun
        self._present: Begun | None = None  # the present block, as it was begun
        self._given = 0
        self._made: Iterator[Element] = iter(())
        # The part of the next block that was taken. Not as pairs, which the garbage collector would look through.
        self._next: Held = [], []
        self._start: Mark = None  # where that begins
        self._known = [*failed]  # failures in it that another pass has raised, and this has not met
        self._failed = [*failed]

    @property
    def exact(self) -> bool:
        """See `Pass`."""
        return self._up.exact

    def mark(self) -> Mark:
        """See `Pass`."""
        blocks = [[*block] for block in self._begun]
        if self._present:
            blocks.insert(0, [*self._present._replace(given=self._given)])
        if self._next[0]:
            return [blocks, self._start, [*self._failed]]
        return [blocks, self._up.mark(), [*self._known]]

    def take(self, elements: list[Element], count: int) -> None:
        """See `Pass`."""
        wanted = len(elements) + count
        while len(elements) < wanted:
            before, over = len(elements), self._given % _AHEAD
            if self._given and not over and self._stream.size > 1:
                # At most as many as were given, so that memory holds one block. After a resume it must catch up.
                self._take(min(self._given, len(self._next[0]) + 2 * _AHEAD))
            count = min(wanted - before, _AHEAD - over)
            try:
                elements += islice(self._made, count)
            except BaseException:
                self._made, self._present, self._given = iter(()), None, 0
                raise
            given = len(elements) - before
            self._given += given
            if given < count and not self._begin():
                return

    def _begin(self) -> bool:
        """Begin a block: one that was begun before, or the next. Return whether there is one."""
        self._present, self._given = None, 0
        if self._begun:
            present = self._begun.popleft()
            held = self._read_again(present)
        else:
            self._take(self._stream.size)
            held, self._next = self._next, ([], [])
            if not held[0]:
                return False
            present = Begun(self._start, 0, self._failed, _checksum(held))
        self._made = islice(self._stream.made(*held, self._draws), present.given, None)
        self._present, self._given = present, present.given
        return True

    def _read_again(self, begun: Begun) -> Held:
        held: Held = [], []
        error: Exception | None = None
        up = None
        try:
            up = self._stream.ups[0].open(self._place, begun.start)
            _fill(up, self._stream.size, held, [*begun.failed])
        except Exception as raised:
            error = raised
        if error or (up and up.exact and _checksum(held) != begun.check):
            raise StateError(
                f"a block of {self._stream.size} samples, of which {begun.given} were given, is not what it was when "
                "the state was saved. A file has changed, or cannot be read, or a function gives something else than "
                "before. The next call continues after it"
            ) from error
        return held

    def _take(self, count: int) -> None:
        """Take of the next block until `count` are there."""
        if not self._next[0]:
            self._start, self._failed = self._up.mark(), [*self._known]
        try:
            _fill(self._up, min(count, self._stream.size), self._next, self._known)
        except Exception:
            self._failed.append(len(self._next[0]))
            raise


Held = tuple[list[int], list[Any]]
"""Keys and samples."""


def _fill(elements: Pass, count: int, held: Held, known: list[int]) -> None:
    """Take elements until `count` are held, and pass over the failures that are known. If one raises, those before
    it were taken.
    """
    while known and known[0] < count:
        _move(elements, known[0] - len(held[0]), held)
        if len(held[0]) < known.pop(0):
            break
        with suppress(Exception):
            next(elements)
    _move(elements, count - len(held[0]), held)


def _move(elements: Pass, count: int, held: Held) -> None:
    taken: list[Element] = []
    try:
        elements.take(taken, max(0, count))
    finally:
        held[0].extend([key for key, _ in taken])
        held[1].extend([sample for _, sample in taken])


def _checksum(held: Held) -> int:
    return zlib.crc32(repr(held[0]).encode())


class FlatMapped(Blocks):
    """A stream of all that a function yields for each sample, or for `size` of them. See `flat_map` and `apply`."""

    def __init__(
        self, up: Stream, function: Callable[[Any], Iterable[Any]], size: int | None = None
    ) -> None:
        super().__init__(up, 1 if size is None else size)
        self.function, self.takes_one = function, size is None

    def made(self, keys: list[int], samples: list[Any], draws: Draws) -> Iterable[Element]:
        """See `Blocks`."""
        base = folded(keys[0])
        given = samples[0] if self.takes_one else iter(samples)
        results = draws.each(draws.call(self.function, keys[0], given), base)
        return ((base ^ k, result) for k, result in enumerate(results))


class Shuffled(Blocks):
    """A stream whose samples come in a random order, `size` at a time.

    The samples of a block of `size` come in an order that depends on the seed, the epoch and the block. Memory holds
    `size` samples and a hundred more. A sample moves by a third of `size` on average, and never out of its block: a
    buffer of as many from which each step draws one moves it by `size`. The state has no samples, and no keys of
    them: it has where the block began, and how many were given.

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

    def count(self, place: Place) -> int | None:
        """See `Stream`."""
        return self.ups[0].count(place)

    def made(self, keys: list[int], samples: list[Any], draws: Draws) -> Iterable[Element]:
        """See `Blocks`. The list is emptied, so that memory need not hold two blocks."""
        random = np.random.Generator(np.random.Philox(key=draws.stream_key(keys[0])))
        order = random.permutation(len(keys)).tolist()
        rest = [samples[k] for k in reversed(order)]
        samples.clear()
        return ((keys[k], rest.pop()) for k in order)


Stream.steps.update(flat_map=FlatMapped, shuffle=Shuffled)
