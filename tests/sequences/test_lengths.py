"""Promises:
- Lengths come from an array, or a function of the index.
- A length that is missing, less than 1 or no integer is named with its sample, and so is another number of samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastload.sequences import lengths_of

COUNTS = np.random.default_rng(0).integers(1, 9, 100)


@pytest.mark.parametrize(
    "source",
    [
        COUNTS,
        COUNTS.tolist(),
        torch.from_numpy(COUNTS),
        COUNTS.astype(np.uint8),
        lambda k: COUNTS[k],
    ],
    ids=["array", "list", "tensor", "bytes", "function"],
)
def test_lengths_of_arrays_and_functions(source: Any) -> None:
    for dataset in (100, [0] * 100):
        assert lengths_of(source, dataset).tolist() == COUNTS.tolist()


@pytest.mark.parametrize(
    ("source", "dataset", "error", "message"),
    [
        ([3, 0, 2], None, ValueError, "expected 1 or more, got 0 for sample 1"),
        (lambda k: k, 3, ValueError, "expected 1 or more, got 0 for sample 0"),
        (lambda k: 1.5, 3, TypeError, "the length of sample 0 must be an integer, got 1.5"),
        (lambda k: k + 1, None, TypeError, "need the dataset, or the number of its samples"),
        ([1, 2], 3, ValueError, "a length for each of 3 samples, got 2"),
        ([0.5], None, TypeError, "expected integers in one dimension, got float64"),
        ([True], None, TypeError, "got bool"),
        ([[1, 2], [3]], None, TypeError, "expected integers, got lists"),
        ("abc", None, TypeError, "expected integers in one dimension"),
        (("a.parquet", "n"), None, TypeError, "docs/tokens.md says how to read a column"),
    ],
)
def test_wrong_lengths_are_named(
    source: Any, dataset: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lengths_of(source, dataset)
