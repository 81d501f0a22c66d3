"""Steps that hold samples, a block at a time."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from fastload._kit.hashing import mix64
from fastload._kit.integers import integer, positive
from fastload.errors import StateError
from fastload.streams.chain import STEPS, Stream
from fastload.streams.passes import Draws, Element, Mark, Pass, Place, folded


class Blocks(Stream):
    """A stream that takes `size` samples of another, makes others of them, and gives these before it takes more.

    So where it is follows from where it took the present block, and how many of it were given. To resume, it takes the
    block again. While it gives one block it takes the next, evenly: only the first step waits for a whole block.
    """

    def __init__(self, up: Stream, size: int) -> None:
        self.ups, self.seed = (up,), up.seed
        self.size = positive("size", size) or 1

    @property
    def form(self) -> str:
        """See `Stream`."""
        return f"{self.ups[0].form}.{type(self).__name__}({self.size}, seed={self.seed})"

    @abstractmethod
    def made(self, keys: list[int], samples: list[Any], place: Place) -> Iterable[Element]:
        """Yield what a block of samples gives, which depends on the arguments alone. It may empty the lists."""

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`. The mark has each block that was begun, where the next begins, and what has failed in that.

        A block is [start, given, what has failed, checksum of its keys]. What has failed are the numbers of samples
        that were taken before. Where the next begins is None after a block of one sample: it follows from the block's
        own start. If both were saved, marks of nested steps would double with each.
        """
        return _BlocksPass(self, self.ups[0], place, *(mark or ((), None, ())))

    def deal(self, marks: list[Mark], place: Place) -> list[Mark]:
        """See `Stream`. A block goes to one reader whole."""
        begun = [block for blocks, _, _ in marks for block in blocks]
        after = [
            self._after(blocks[0], place) if at is None and blocks else at
            for blocks, at, _ in marks
        ]
        rest = self.ups[0].deal(after, place)
        return [[begun[i :: place.readers], at, []] for i, at in enumerate(rest)]

    def _after(self, block: Any, place: Place) -> Mark:
        """Return where the next block begins after one of one sample."""
        up = self.ups[0].open(place, block[0])
        _fill(up, 1, ([], []), [*block[2]])
        return up.mark()


_AHEAD = 64
"""How many samples of the next block are taken at a time, while as many of this one are given."""


class _BlocksPass(Pass):
    """If the stream below raises, or what a block gives, this is left as it was but for what failed."""

    def __init__(
        self,
        stream: Blocks,
        up: Stream,
        place: Place,
        begun: Iterable[Any],
        after: Mark,
        failed: Iterable[int],
    ) -> None:
        self._stream, self._below, self._place = stream, up, place
        self._begun = deque(begun)  # blocks that another pass had begun
        self._first_is_next = after is None and bool(
            self._begun
        )  # the first of these comes next in `_up`
        self._up = up.open(place, self._begun[0][0] if self._first_is_next else after)
        self._present: list[Any] = []  # the present block, as in the mark. Empty: there is none
        self._given = 0
        self._is_own = False  # whether it came out of `_up`
        self._made: Iterator[Element] = iter(())
        # The part of the next block that was taken. Not as pairs, which the garbage collector would look through.
        self._next: Block = [], []
        self._after: Mark = None  # where that begins
        self._known = [*failed]  # failures in it that another pass has raised, and this has not met
        self._failed = [*failed]

    def mark(self) -> Mark:
        """See `Pass`."""
        blocks = [*self._begun]
        if self._present:
            start, _, failed, check = self._present
            blocks.insert(0, [start, self._given, failed, check])
        if self._next[0]:
            return [blocks, self._after, [*self._failed]]
        follows = self._first_is_next or (self._present and self._is_own and self._stream.size == 1)
        return [blocks, None if follows else self._up.mark(), [*self._known]]

    def __next__(self) -> Element:
        elements: list[Element] = []
        self.take(elements, 1)
        if not elements:
            raise StopIteration
        return elements[0]

    def take(self, elements: list[Element], count: int) -> None:
        """See `Pass`."""
        wanted = len(elements) + count
        while len(elements) < wanted:
            before = len(elements)
            to_next = (
                _AHEAD - (self._given - 1) % _AHEAD
            )  # how many until the next block is taken from
            if to_next == _AHEAD and self._stream.size > 1 and self._given:
                # At most as many as were given, so that memory holds one block. After a resume it must catch up.
                self._take(min(self._given + _AHEAD, len(self._next[0]) + 2 * _AHEAD))
            count = min(wanted - before, to_next)
            try:
                elements += islice(self._made, count)
            except BaseException:
                self._made, self._present, self._given = iter(()), [], 0
                raise
            given = len(elements) - before
            self._given += given
            if given < count and not self._begin():
                return

    def _begin(self) -> bool:
        """Begin a block: one that was begun before, or the next. Return whether there is one."""
        self._present, self._given = [], 0
        if self._begun:
            present = self._begun.popleft()
            block = self._read_again(*present)
        else:
            self._take(self._stream.size)
            block, self._next = self._next, ([], [])
            if not block[0]:
                return False
            present = [self._after, 0, self._failed, _checksum(block)]
            self._is_own = True
        given = present[1]
        self._made = islice(self._stream.made(*block, self._place), given, None)
        self._present, self._given = present, given
        return True

    def _read_again(self, start: Mark, given: int, failed: list[int], check: int) -> Block:
        block: Block = [], []
        error: Exception | None = None
        try:
            up = self._up if self._first_is_next else self._below.open(self._place, start)
            self._is_own, self._first_is_next = self._first_is_next, False
            _fill(up, self._stream.size, block, [*failed])
        except Exception as raised:
            error = raised
        if error or _checksum(block) != check:
            raise StateError(
                f"a block of {self._stream.size} samples, of which {given} were given, is not what it was when the "
                "state was saved. A file has changed, or cannot be read, or a function gives something else than "
                "before. The next call continues after it"
            ) from error
        return block

    def _take(self, count: int) -> None:
        """Take of the next block until `count` are there."""
        if not self._next[0]:
            self._after, self._failed = self._up.mark(), [*self._known]
        try:
            _fill(self._up, min(count, self._stream.size), self._next, self._known)
        except Exception:
            self._failed.append(len(self._next[0]))
            raise


Block = tuple[list[int], list[Any]]
"""Keys and samples."""


def _fill(elements: Pass, count: int, block: Block, known: list[int]) -> None:
    """Take elements until a block has `count`, and pass over the failures that are known. If one raises, those before
    it were taken.
    """
    while known and known[0] < count:
        _move(elements, known[0] - len(block[0]), block)
        if len(block[0]) < known.pop(0):
            break
        with suppress(Exception):
            next(elements)
    _move(elements, count - len(block[0]), block)


def _move(elements: Pass, count: int, block: Block) -> None:
    taken: list[Element] = []
    try:
        elements.take(taken, max(0, count))
    finally:
        block[0].extend([key for key, _ in taken])
        block[1].extend([sample for _, sample in taken])


def _checksum(block: Block) -> int:
    return zlib.crc32(repr(block[0]).encode())


class FlatMapped(Blocks):
    """A stream of all that a function yields for each sample, or for `size` of them. See `flat_map` and `apply`."""

    def __init__(
        self, up: Stream, function: Callable[[Any], Iterable[Any]], size: int | None = None
    ) -> None:
        super().__init__(up, size or 1)
        self.function, self.takes_one = function, size is None

    def made(self, keys: list[int], samples: list[Any], place: Place) -> Iterable[Element]:
        """See `Blocks`."""
        base, draws = folded(keys[0]), Draws(self, place)
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

    def made(self, keys: list[int], samples: list[Any], place: Place) -> Iterable[Element]:
        """See `Blocks`. The list is emptied, so that memory need not hold two blocks."""
        seed = mix64(mix64(mix64(self.seed) ^ place.epoch) ^ folded(keys[0]))
        order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(keys)).tolist()
        rest = [samples[k] for k in reversed(order)]
        samples.clear()
        return ((keys[k], rest.pop()) for k in order)


STEPS.update(flat_map=FlatMapped, shuffle=Shuffled)
