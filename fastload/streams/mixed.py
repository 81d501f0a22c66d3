"""Several streams in given shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from fastload._kit.hashing import mix64
from fastload.streams.chain import Stream
from fastload.streams.passes import Element, Mark, Pass, Place

Weights = Sequence[float] | Callable[[int], Sequence[float]]


class Mixed(Stream):
    """A stream of several others. Each gives its share of any run of samples, rounded up or down.

    Args:
        streams: the streams.
        weights: their shares, in any unit. Or a function of the number of samples that this reader has given, whose
            shares may change: it is called for each sample.
        until: "all" ends when all streams with a share have ended, and "first" when one has.

    Examples:
        >>> [*fastload.streams.Mixed([stream, stream], weights=[0.5, 0.5])]
        [[1, 2], [1, 2], [3], [3]]
    """

    def __init__(self, streams: Sequence[Stream], weights: Weights, *, until: str = "all") -> None:
        if until not in ("all", "first"):
            raise ValueError(f'until must be "all" or "first", got {until!r}')
        if not streams:
            raise ValueError("streams must have at least one stream, got none")
        if not callable(weights) and (
            len(weights) != len(streams) or not min(weights) >= 0 or not 0 < sum(weights) < inf
        ):
            raise ValueError(
                f"weights must be {len(streams)} numbers, one for each stream, none below 0 and not all 0, got "
                f"{weights!r}"
            )
        super().__init__(*streams)
        self.weights, self.until = weights, until

    @property
    def form(self) -> str:
        """See `Stream`. The weights may be others when it is resumed."""
        return f"Mixed([{super().form}], until={self.until!r})"

    def open(self, place: Place, mark: Mark = None) -> Pass:
        """See `Stream`. The mark has the number of samples, the credit of each stream or None, and their marks."""
        n = len(self.ups)
        return _MixedPass(self, place, *(mark or (0, [0.0] * n, [None] * n)))

    def count(self, place: Place) -> int | None:
        """See `Stream`."""
        weights = [1] * len(self.ups) if callable(self.weights) else self.weights
        counts = [up.count(place) for up, weight in zip(self.ups, weights, strict=True) if weight]
        return None if self.until == "first" or None in counts else sum(filter(None, counts))

    def deal(self, marks: list[Mark], place: Place) -> list[Mark]:
        """See `Stream`. The credits begin anew."""
        given = sum(number for number, _, _ in marks) // place.readers
        each = zip(*(ups for _, _, ups in marks), strict=True)
        dealt = zip(
            *(up.deal(list(m), place) for up, m in zip(self.ups, each, strict=True)), strict=True
        )
        return [[given, [0.0] * len(self.ups), list(ups)] for ups in dealt]


class _MixedPass(Pass):
    def __init__(
        self, stream: Mixed, place: Place, given: int, credits: Sequence[Any], marks: Sequence[Mark]
    ) -> None:
        self._stream, self._given, self._credits = stream, given, list(credits)
        self._ups = [
            up.open(place._replace(branch=mix64(place.branch ^ mix64(k + 1))), mark)
            for k, (up, mark) in enumerate(zip(stream.ups, marks, strict=True))
        ]

    @property
    def exact(self) -> bool:
        """See `Pass`."""
        return all(up.exact for up in self._ups)

    def mark(self) -> Mark:
        """See `Pass`."""
        return [self._given, list(self._credits), [up.mark() for up in self._ups]]

    def __next__(self) -> Element:
        credits = self._credits
        shares = self._shares()
        while active := [k for k, c in enumerate(credits) if c is not None and shares[k]]:
            total = sum(shares[k] for k in active)
            due = max(active, key=lambda k: (credits[k] + shares[k] / total, -k))
            element = next(self._ups[due], None)
            if element is None:
                credits[due] = None
                if self._stream.until == "first":
                    self._credits[:] = [None] * len(credits)
                shares = self._shares()
                continue
            for k in active:
                credits[k] += shares[k] / total
            credits[due] -= 1
            self._given += 1
            return element[0] * len(credits) + due, element[1]
        raise StopIteration

    def _shares(self) -> Sequence[float]:
        """Return the shares of now. If those that change are all 0 for the streams that are left, these are alike."""
        weights = self._stream.weights
        if not callable(weights):
            return weights
        try:
            shares = weights(self._given)
            if len(shares) != len(self._ups) or not min(shares) >= 0:
                raise ValueError(
                    f"weights({self._given}) must give {len(self._ups)} numbers, none below 0, got {shares!r}"
                )
        except BaseException:
            self._given += 1  # the next call asks for the next number
            raise
        left = [k for k, credit in enumerate(self._credits) if credit is not None]
        return shares if any(shares[k] for k in left) else [1.0] * len(shares)
