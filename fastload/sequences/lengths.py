"""The lengths of samples, from an array, a column or a function. No sample is loaded for them."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from fastload._kit.integers import integer


def lengths_of(source: Any, dataset: Sized | int | None = None, *, least: int = 1) -> NDArray[Any]:
    """Return the length of each sample: integers[samples].

    Args:
        source: one of

            - an array, a tensor or a list of integers.
            - `(where, column)`. `where` is a Parquet file, a folder or a list of them, a `ParquetDataset` or a set from
              `fastload.store.get`, and its rows are the samples. A column of integers has the lengths. The length of a
              list in a Parquet file is the number of its values. Other columns are not read.
            - a function of the index, such as `lambda i: len(texts[i])`. It needs `dataset`.

        dataset: the samples, or their number. Then there must be as many lengths.
        least: the least length that is allowed.

    Raises:
        TypeError: the lengths are not integers.
        ValueError: one is less than `least`, a column has nulls, or `dataset` has another number of samples.
        KeyError: a column is unknown.

    Examples:
        >>> from fastload.sequences import lengths_of
        >>> lengths_of(lambda i: len(texts[i]), texts)[:3]
        array([50, 51, 52])
    """
    samples = None if dataset is None else samples_in("dataset", dataset)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], str):
        found = _column(*source)
    elif callable(source):
        if samples is None:
            raise TypeError("lengths by a function need the dataset, or the number of its samples")
        found = _called(source, samples)
    else:
        found = source
    lengths = checked(found, least=least)
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
        raise TypeError(
            f"{name}: expected integers in one dimension, got lists: {error}"
        ) from error
    if not found.size and found.ndim == 1:
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise TypeError(
            f"{name}: expected integers in one dimension, got {found.dtype} of shape {found.shape}. lengths_of() takes "
            "functions and columns"
        )
    if found.min(initial=least) < least:
        index = int(found.argmin())
        raise ValueError(f"{name}: expected {least} or more, got {found[index]} for sample {index}")
    return found


def _called(function: Callable[[int], Any], samples: int) -> NDArray[np.int64]:
    bar = tqdm(range(samples), unit="length", delay=5, leave=False, disable=None)
    found = (integer(f"the length of sample {k}", function(k)) for k in bar)
    return np.fromiter(found, np.int64, samples)


def _column(where: Any, column: str) -> NDArray[Any]:
    """Return the lengths in a column of a set or of Parquet files."""
    from fastload.datasets.parquet import ParquetDataset  # it says how to get pyarrow
    from fastload.store.dataset import SetDataset

    import pyarrow as pa  # isort: skip
    import pyarrow.compute as pc
    import pyarrow.dataset as pads
    import pyarrow.parquet as pq

    if isinstance(where, SetDataset):
        return np.asarray(where.values(column))
    files, kept = where, None
    if isinstance(where, ParquetDataset):
        files, kept = where.files, where.filters
    rows = ParquetDataset(files, columns=column, filters=kept)
    if kept is not None and not isinstance(kept, pads.Expression):
        kept = pq.filters_to_expression(kept)
    scanner = pads.dataset(rows.files, schema=rows.schema).scanner(columns=[column], filter=kept)
    parts = []
    with tqdm(total=len(rows), unit="length", delay=5, leave=False, disable=None) as bar:
        for batch in scanner.to_batches():
            values = batch.column(0)
            if values.null_count:
                raise ValueError(
                    f"column {column!r} of {rows!r}: expected a length in each row, found null. Leave such rows out "
                    "with filters="
                )
            lists = pa.types.is_nested(values.type)
            parts.append((pc.list_value_length(values) if lists else values).to_numpy(False))
            bar.update(len(batch))
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
