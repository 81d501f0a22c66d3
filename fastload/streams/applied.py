"""A step that a generator of the user's takes."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastload._kit.hashing import mix64
from fastload.streams.chain import Stream
from fastload.streams.passes import END, Draws, Element, Mark, Pass, Place, folded


class Applied(Stream):
    """A stream of what `function(samples)` yields, called once for an epoch. See `Stream.apply`."""

    applies = True

    def __init__(self, up: Stream, function: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        super().__init__(up)
        self.function = function

    @property
    def form(self) -> str:
        """See `Stream`."""
        return f"{self.ups[0].form}.apply"

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`. The mark has that of `up`, the state of what the function returned, and the next key.

        That key is the hash of the latest sample that was taken, and how many were yielded since.
        """
        return _AppliedPass(self, place, *(mark or (None, None, mix64(~place.reader), 0)))

    def deal(self, marks: list[Mark], place: Place) -> list[Mark]:
        """See `Stream`. States of what the functions returned serve only the readers that saved them."""
        rest = self.ups[0].deal([up for up, *_ in marks], place)
        return [[up, None, mix64(~reader), 0] for reader, up in enumerate(rest)]


class _AppliedPass(Pass):
    def __init__(
        self, stream: Applied, place: Place, up: Mark, state: Any, base: int, k: int
    ) -> None:
        self._up, self._function = stream.ups[0].open(place, up), stream.function
        self._draws = Draws(stream, place)
        self._state, self._base, self._k = state, base, k
        self._returned: Any = None  # by the function, once it was called
        self._keeps = True  # whether what it returned keeps a state, if it was called
        self._results: Iterator[Any] | None = None
        self._asked = False  # whether the present call has asked the stream below

    @property
    def exact(self) -> bool:
        """See `Pass`."""
        return self._up.exact and self._keeps

    def mark(self) -> Mark:
        """See `Pass`."""
        state = self._state
        if self._returned is not None and self._keeps:
            state = copy.deepcopy(self._returned.state_dict())
        return [self._up.mark(), state, self._base, self._k]

    def __next__(self) -> Element:
        self._asked = False
        try:
            result = self._draws.call(_following, self._base ^ self._k, self)
        except BaseException:
            self._results = None  # a generator that has raised has ended
            if not self._keeps:
                self._returned = None
            if not self._asked:
                next(self._up, None)  # or it might raise for ever
            raise
        if result is END:
            raise StopIteration
        key = self._base ^ self._k
        self._k += 1
        return key, result

    def following(self) -> Any:
        """Return what the function gives next, or `END`."""
        if self._returned is None:
            # Not a circle: an epoch that is left closes its files at once, not at the next garbage collection.
            self._returned = self._function(_Taken(weakref.proxy(self)))
            names = "state_dict", "load_state_dict"
            self._keeps = all(hasattr(self._returned, name) for name in names)
            if self._state is not None:
                self._returned.load_state_dict(self._state)
                self._state = None
        if self._results is None:
            self._results = iter(self._returned)
        return next(self._results, END)

    def next_sample(self) -> Any:
        """Return the next sample of the stream below. What is drawn from now on belongs to it."""
        self._asked = True
        key, sample = next(self._up)
        self._base, self._k = folded(key), 0
        self._draws.enter(self._base)
        return sample


def _following(applied: _AppliedPass) -> Any:
    return applied.following()


class _Taken(Iterator[Any]):
    """The samples of the stream below. Not a generator, which would end with the first sample that raises."""

    def __init__(self, taken_by: _AppliedPass) -> None:
        self._taken_by = taken_by

    def __next__(self) -> Any:
        return self._taken_by.next_sample()


Stream.steps["apply"] = Applied
