"""Texts of a stream, packed into rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from fastload.errors import SequenceError
from fastload.sequences.packed import Packed
from fastload.streams.blocks import Blocks
from fastload.streams.chain import Stream
from fastload.streams.passes import Draws, Element, folded


class PackedStream(Blocks):
    """A stream of rows of `length` tokens, into which texts are packed: best-fit decreasing, `size` texts at a time.

    The rows are those of `fastload.sequences.Packed` for each block of `size` texts, in an order of its seed.

    Args:
        up: a stream of texts, as `Packed` takes them.
        length: tokens of a row.
        size: texts that are packed together, which memory holds. The last row of a block is partly padding.
        key, also, long, pad, seed, max_segments: those of `Packed`.

    Examples:
        >>> [row] = fastload.streams.PackedStream(stream, length=4)
        >>> row["segments"].tolist()
        [1, 1, 2, 0]
    """

    def __init__(
        self,
        up: Stream,
        length: int = 4096,
        size: int = 10_000,
        *,
        key: Any = None,
        also: Mapping[str, int] | None = None,
        long: Literal["split", "truncate", "error"] = "split",
        pad: int = 0,
        seed: int = 0,
        max_segments: int | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "long": long,
            "pad": pad,
            "seed": seed,
            "max_segments": max_segments,
        }
        Packed([[0]], length, **options)  # it raises for a wrong argument
        arrays = _Arrays(length, key, also, long)
        super().__init__(up.map(arrays).filter(arrays.has_tokens), size)
        self.length, self.options = length, {**options, "key": key, "also": also}

    @property
    def form(self) -> str:
        """See `Stream`."""
        long, seed = self.options["long"], self.options["seed"]
        return f"{self.ups[0].form}.PackedStream({self.length}, {self.size}, {long}, seed={seed})"

    def made(self, keys: list[int], samples: list[Any], draws: Draws) -> Iterable[Element]:
        """See `Blocks`."""
        rows = Packed(samples, self.length, **self.options)
        base = folded(keys[0])
        return ((base ^ row, rows[row]) for row in range(len(rows)))


class _Arrays:
    """Makes arrays of a text, so that one that cannot be packed fails alone, before it is in a block."""

    def __init__(self, length: int, key: Any, also: Any, long: str) -> None:
        self._length, self._key, self._also, self._long = length, key, [*(also or ())], long

    def __call__(self, text: Any) -> Any:
        names = (self._key, *self._also)
        arrays = {name: np.asarray(text if name is None else text[name]) for name in names}
        for name, array in arrays.items():
            if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
                raise TypeError(
                    f"a text must be integers in one dimension, found {array.dtype}{[*array.shape]} at {name!r}"
                )
        tokens = len(arrays[self._key])
        if any(len(array) != tokens for array in arrays.values()):
            raise SequenceError(
                f"a text has {tokens} tokens, but other lengths at one of {self._also}"
            )
        if self._long == "error" and tokens > self._length:
            raise ValueError(
                f'a text has {tokens} tokens, but rows have {self._length}. Pass long="split" or "truncate"'
            )
        return arrays[None] if self._key is None else arrays

    def has_tokens(self, arrays: Any) -> bool:
        return len(arrays if self._key is None else arrays[self._key]) > 0
