"""One reader's way through an epoch of a stream, its state, and the keys of its samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from fastload._kit.hashing import mix64
from fastload.errors import StateError
from fastload.random.streams import current_stream

Element = tuple[int, Any]
"""The key of a sample, an integer that no other sample of the epoch has, and the sample."""

Mark = Any
"""Where a pass is, as JSON values. Each kind of stream has its own."""


def folded(key: int) -> int:
    """Hash a key, which may have more than 64 bits, to 64 bits."""
    return mix64(key) ^ key >> 64


class Pass(Iterator[Element]):
    """One reader's way through an epoch of a stream. If it raises, the next call goes on after what failed."""

    def take(self, elements: list[Element], count: int) -> None:
        """Append up to `count` elements. If it raises, those before the failure are there."""
        elements += islice(self, count)

    @abstractmethod
    def mark(self) -> Mark:
        """Return where the pass is. It takes microseconds, however many samples the steps hold."""


class Place(NamedTuple):
    """What a pass depends on, beside its stream: the epoch, and which reader of how many it is for."""

    epoch: int
    reader: int
    readers: int
    branch: int = 0
    """Which of the sources of mixtures it is in."""


class Draws:
    """The random streams of a step's samples in an epoch, by their keys."""

    def __init__(self, step: Any, place: Place) -> None:
        step_of = mix64(mix64(mix64(step.seed) ^ place.epoch) ^ step.depth)
        self._salt = mix64(step_of ^ place.branch)

    def stream_key(self, at: int | None, *, seeded: bool = True) -> int:
        """See `StreamSource`."""
        return mix64(folded(at or 0) ^ self._salt)

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

    def each(self, results: Iterable[Any], base: int) -> Iterator[Any]:
        """Return an iterator whose elements each have a random stream: a generator draws when it is asked for one."""
        if isinstance(results, list | tuple):
            return iter(results)
        return self._each(iter(results), base)

    def _each(self, results: Iterator[Any], base: int) -> Iterator[Any]:
        for k in count():
            if (result := self.call(following, base ^ k, results)) is END:
                return
            yield result


END = object()


def following(iterator: Iterator[Any]) -> Any:
    """Return the next element, or `END`."""
    return next(iterator, END)


class Reading:
    """The samples of one pass of a stream. `state_dict()` says where it is."""

    def __init__(self, stream: Any, place: Place) -> None:
        self._stream, self._place = stream, place
        self._pass: Pass | None = None

    def __iter__(self) -> Reading:
        return self

    def __next__(self) -> Any:
        return next(self._opened())[1]

    def take(self, samples: list[Any], count: int) -> None:
        """Append up to `count` samples. If it raises, those before the failure are there."""
        elements: list[Element] = []
        try:
            self._opened().take(elements, count)
        finally:
            samples += [sample for _, sample in elements]

    def _opened(self) -> Pass:
        if self._pass is None:
            self._pass = self._stream.open(self._place)
        return self._pass

    def state_dict(self) -> dict[str, Any]:
        """Return where the pass is, as JSON values without any sample."""
        form = self._stream.form
        place = {name: getattr(self._place, name) for name in ("epoch", "reader", "readers")}
        state = {"stream": form, **place, "mark": self._opened().mark()}
        return {**state, "approximate": True} if self._stream.approximate else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`, which the same reader of as many saved, or that `Stream.redealt` made for it."""
        self._stream.check(state)
        for name in ("reader", "readers"):
            if state[name] != (ours := getattr(self._place, name)):
                raise StateError(
                    f"{name}: the stream's state is of {state[name]}, this one is {ours}. A loader of "
                    "fastload deals anew what is left"
                )
        self._place = self._place._replace(epoch=state["epoch"])
        self._pass = self._stream.open(self._place, state["mark"])
