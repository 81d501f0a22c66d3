"""Texts of a stream, packed into rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fastload.errors import SequenceError
from fastload.sequences.packed import Packed
from fastload.streams.blocks import Blocks
from fastload.streams.chain import Stream
from fastload.streams.passes import Element, Place, folded


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
        # It raises for a wrong argument.
        Packed([[0]], length, **{**options, "key": None, "also": None})
        arrays = _Arrays(length, **options)
        super().__init__(up.map(arrays).filter(arrays.has_tokens), size)
        self.length, self.options = length, options

    @property
    def form(self) -> str:
        """See `Stream`."""
        return f"{self.ups[0].form}.PackedStream({self.length}, {self.size}, {self.options})"

    def made(self, keys: list[int], samples: list[Any], place: Place) -> Iterable[Element]:
        """See `Blocks`."""
        rows = Packed(samples, self.length, **self.options)
        base = folded(keys[0])
        return ((base ^ row, rows[row]) for row in range(len(rows)))


class _Arrays:
    """Makes arrays of a text, so that one that cannot be packed fails alone, before it is in a block."""

    def __init__(
        self, length: int, key: Any = None, also: Any = None, long: str = "split", **_: Any
    ) -> None:
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
