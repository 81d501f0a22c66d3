"""Promises:
- `put` never stores another value or fewer rows than it was given.
- `put` refuses a null within a row, a masked value, a tensor that is not row-major, and a text as a column.
- `put` refuses a table that is too large for one part.
"""

import numpy as np
import pyarrow as pa
import pytest
import torch

from fastload.store import put

_PAIR = pa.list_(pa.int32(), 2)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([[3, 4], [1, None]], _PAIR),
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int32(), [2]), pa.array([[3, 4], [1, None]], _PAIR)
        ),
        pa.array([[9, 9], [3, 4], [1, None]], _PAIR).slice(1),
        pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([7, None])),
        np.ma.array([1, 2], mask=[False, True]),
    ],
    ids=["list", "tensor", "slice", "dictionary", "masked"],
)
def test_a_null_within_a_row_is_refused(column, tmp_path):
    with pytest.raises(ValueError, match=r"column 'x', row 1.* a set has no nulls"):
        put({"x": column}, "a", root=tmp_path)


def test_tensors_in_another_order_are_refused(tmp_path):
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0])
    rows = pa.array([[1, 2, 3, 4, 5, 6]], pa.list_(pa.int32(), 6))
    with pytest.raises(ValueError, match="row-major"):
        put({"x": pa.ExtensionArray.from_storage(kind, rows)}, "a", root=tmp_path)


def test_a_text_is_no_column_of_letters(tmp_path):
    with pytest.raises(ValueError, match=r"column 'y': expected a row for each sample, got one"):
        put({"x": torch.arange(3), "y": "cat"}, "a", root=tmp_path)


def test_a_table_that_is_too_large_for_one_part_is_refused(tmp_path):
    """A column of texts has offsets of 32 bits, so Arrow leaves such a table in chunks. These share their bytes."""
    size = 2**30 + 2**29
    offsets = pa.py_buffer(np.array([0, size], np.int32))
    chunk = pa.StringArray.from_buffers(1, offsets, pa.py_buffer(np.zeros(size, np.uint8)))
    with pytest.raises(ValueError, match=r"2 rows has more than 2 GiB in a column of texts"):
        put(pa.table({"x": pa.chunked_array([chunk, chunk])}), "a", root=tmp_path)
    pa.default_memory_pool().release_unused()  # Arrow keeps 3 GB for later, which other tests may lack
