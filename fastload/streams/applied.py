"""A step that a generator of the user's takes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from fastload.streams.chain import STEPS, Stream
from fastload.streams.passes import END, Draws, Element, Mark, Pass, Place, folded, following


class Applied(Stream):
    """A stream of what `function(samples)` yields, called once for an epoch. See `Stream.apply`."""

    def __init__(self, up: Stream, function: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        self.ups, self.seed, self.function = (up,), up.seed, function
        self._forgets = False

    @property
    def form(self) -> str:
        """See `Stream`."""
        return f"{self.ups[0].form}.apply"

    @property
    def approximate(self) -> bool:
        """See `Stream`. It is known once a pass has begun."""
        return self._forgets or super().approximate

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`. The mark has that of `up`, the state of what the function returned, and the last key."""
        opened = _AppliedPass(self, place, *(mark or (None, None, 0, 0)))
        self._forgets = not opened.keeps_state
        return opened

    def deal(self, marks: list[Mark], place: Place) -> list[Mark]:
        """See `Stream`. States of what the functions returned serve only the readers that saved them."""
        if any(state for _, state, *_ in marks):
            warnings.warn(
                "fastload: .apply() goes to other readers without the states of what its function returned, so samples "
                "that these held are lost. Give .apply() a size",
                stacklevel=5,
            )
        return [[up, None, 0, 0] for up in self.ups[0].deal([up for up, *_ in marks], place)]


class _AppliedPass(Pass):
    def __init__(
        self, stream: Applied, place: Place, up: Mark, state: Any, base: int, k: int
    ) -> None:
        self._up, self._function = stream.ups[0].open(place, up), stream.function
        self._draws = Draws(stream, place)
        # The keys of what it yields: that of the last sample that it took, and how many it has yielded since.
        self._base, self._k = base, k
        self._begin()
        if state is not None:
            self._returned.load_state_dict(state)

    def _begin(self) -> None:
        self._returned: Any = self._function(_Taken(self))
        self.keeps_state = hasattr(self._returned, "load_state_dict")
        self._results: Iterator[Any] | None = None

    def mark(self) -> Mark:
        """See `Pass`."""
        state = copy.deepcopy(self._returned.state_dict()) if self.keeps_state else None
        return [self._up.mark(), state, self._base, self._k]

    def __next__(self) -> Element:
        if self._results is None:
            self._results = iter(self._returned)
        try:
            result = self._draws.call(following, self._base ^ self._k, self._results)
        except BaseException:
            if not self.keeps_state:
                self._begin()  # a generator that has raised has ended
            raise
        if result is END:
            raise StopIteration
        key = self._base ^ self._k
        self._k += 1
        return key, result

    def next_sample(self) -> Any:
        """Return the next sample of the stream below."""
        key, sample = next(self._up)
        self._base, self._k = folded(key), 0
        return sample


class _Taken(Iterator[Any]):
    """The samples of the stream below. Not a generator, which would end with the first sample that raises."""

    def __init__(self, taken_by: _AppliedPass) -> None:
        self._taken_by = taken_by

    def __next__(self) -> Any:
        return self._taken_by.next_sample()


STEPS["apply"] = Applied
