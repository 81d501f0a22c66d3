"""The lengths of samples, from an array or a function. No sample is loaded for them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload._kit.integers import integer


def lengths_of(source: Any, dataset: Sized | int | None = None, *, least: int = 1) -> NDArray[Any]:
    """Return the length of each sample: integers[samples].

    Args:
        source: an array, a tensor or a list of integers. Or a function of the index, such as `lambda i: len(texts[i])`,
            which needs `dataset`.
        dataset: the samples, or their number. Then there must be as many lengths.
        least: the least length that is allowed.

    Raises:
        TypeError: the lengths are not integers.
        ValueError: one is less than `least`, or `dataset` has another number of samples.

    Examples:
        >>> from fastload.sequences import lengths_of
        >>> lengths_of(lambda i: len(texts[i]), texts)[:3]
        array([50, 51, 52])
    """
    samples = None if dataset is None else samples_in("dataset", dataset)
    if callable(source):
        if samples is None:
            raise TypeError("lengths by a function need the dataset, or the number of its samples")
        each = (integer(f"the length of sample {k}", source(k)) for k in range(samples))
        source = np.fromiter(each, np.int64, samples)
    lengths = checked(source, least=least)
    if samples not in (None, len(lengths)):
        raise ValueError(f"expected a length for each of {samples} samples, got {len(lengths)}")
    return lengths


def samples_in(name: str, dataset: Any) -> int:
    """Return the number of samples of a dataset, which may be given instead of it. Raise TypeError otherwise."""
    return len(dataset) if isinstance(dataset, Sized) else integer(name, dataset)


def checked(values: Any, name: str = "lengths", least: int = 1) -> NDArray[Any]:
    """Return integers as an array with one dimension. Raise TypeError or ValueError, with the index of a wrong one."""
    try:
        found = np.asarray(values)
    except ValueError as error:  # lists of different lengths
        raise TypeError(f"{name}: expected integers, got lists: {error}") from error
    if not found.size and found.ndim == 1:
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: expected integers in one dimension, got {found.dtype} of shape {found.shape}. lengths_of() takes "
            "functions. docs/tokens.md says how to read a column"
        )
    if found.min(initial=least) < least:
        index = int(found.argmin())
        raise ValueError(f"{name}: expected {least} or more, got {found[index]} for sample {index}")
    return found
