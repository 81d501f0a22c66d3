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
"""The key of a sample, which tells it from all others of the epoch, and the sample.

After `flat_map`, `apply` and packing, a key is a hash of 64 bits.
"""

Mark = Any
"""Where a pass is, as JSON values. Each kind of stream has its own."""


def folded(key: int) -> int:
    """Hash a key, which may have more than 64 bits, to 64 bits."""
    return mix64(key) ^ key >> 64


class Pass(Iterator[Element]):
    """One reader's way through an epoch of a stream. If it raises, the next call goes on after what failed."""

    @property
    def exact(self) -> bool:
        """Whether the mark tells all. It does not if a generator of the user's may hold samples. See `Stream.apply`."""
        return True

    def take(self, elements: list[Element], count: int) -> None:
        """Append up to `count` elements. If it raises, those before the failure are there."""
        elements += islice(self, count)

    @abstractmethod
    def mark(self) -> Mark:
        """Return where the pass is. It takes microseconds, however many samples the steps hold, but for `apply`, which
        asks the user's code.
        """


class Run(Pass):
    """A pass that takes several elements at less cost than one after another."""

    def __next__(self) -> Element:
        elements: list[Element] = []
        self.take(elements, 1)
        if not elements:
            raise StopIteration
        return elements[0]

    @abstractmethod
    def take(self, elements: list[Element], count: int) -> None:
        """See `Pass`."""


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

    def enter(self, key: int) -> None:
        """Let what is drawn now come from the stream of a key, in a loader."""
        if (stream := current_stream()) is not None:
            stream.move(self, key)

    def call(self, function: Callable[[Any], Any], key: int, given: Any) -> Any:
        """Return `function(given)`. In a loader, what it draws comes from the stream of the key."""
        stream = current_stream()
        try:
            if stream is None:
                return function(given)
            before = stream.source, stream.at
            stream.move(self, key)
            try:
                return function(given)
            finally:
                stream.move(*before)
        except StopIteration as error:  # it would end the stream
            raise RuntimeError("a function of a stream raised StopIteration") from error

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
        state: dict[str, Any] = self._stream.state_at(self._place, self._opened().mark())
        return state if self._opened().exact else {**state, "approximate": True}

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
