"""How a dataset makes a picture directly in its batch: a protocol that a class declares.

A row is the memory of one sample in a batch. The loop owns the batch and may write into it, so only the loader
may see a tensor that lies in a row. A class whose samples only the loader sees declares this:

    fastload_fills_row = (_load_offered, __getitem__, load_image)

`_load_offered(self, index, offer)` returns what `self[index]` returns. It may make the first element of the sample,
and nothing else, in `offer.take(shape, dtype)`. The other functions are those that it
replaces. If the type has another function under one of these names, the loader offers no row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from numpy.typing import NDArray
from torch.utils.data import Subset


class RowOffer:
    """Holds the row for the first element of one sample, until the dataset takes it."""

    __slots__ = ("row",)

    def __init__(self) -> None:
        self.row: NDArray[Any] | None = None

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any] | None:
        """Return the row, or None if there is none of this shape and dtype. Only the first call gets it."""
        row, self.row = self.row, None
        return row if row is not None and row.shape == shape and row.dtype == dtype else None


def row_reader(dataset: Any) -> Callable[[Any, RowOffer], Any] | None:
    """Return the function that reads a sample with an offer, or None if samples of `dataset` may get no row.

    Ask the type and not the instance, which may delegate to another dataset. Refuse one with a patched method.
    """
    kind: Any = type(dataset)
    if kind is Subset:
        read = row_reader(dataset.dataset)
        return read and (lambda index, offer: read(dataset.indices[index], offer))
    functions = getattr(kind, "fastload_fills_row", None)
    if type(functions) is not tuple:
        return None
    for function in functions:
        if getattr(kind, function.__name__, None) is not function:
            return None
    return partial(functions[0], dataset) if _methods(kind).isdisjoint(vars(dataset)) else None


@lru_cache(maxsize=64)
def _methods(kind: type) -> frozenset[str]:
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))
