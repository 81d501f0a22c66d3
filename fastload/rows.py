"""The run protocol: a dataset fills the rows of a batch itself, in one call for each run of samples.

A class needs two methods, `empty_sample()` and `fill_rows(run)`. docs/rows.md says what they must do. A subclass has to
declare `fill_rows` itself, or its samples are read one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Run:
    """The samples of a batch that one call of `fill_rows` must fill: `len(run)` neighbours.

    Attributes:
        indices: what the sampler gave for each of them.
        rows: their memory in the batch, in the containers of a sample. A leaf has one dimension more than in a sample:
            `dtype[len(run), *shape]`, a tensor for a tensor and an array for an array. Numbers have arrays of int64,
            float64 or bool. An image of shape (C, H, W) may lie in memory as (H, W, C), so look at the strides.

    Args:
        indices, rows: see the attributes.
        keys: returns the keys of the samples' random streams, uint64[len(run)].

    Examples:
        >>> class Squares(torch.utils.data.Dataset):
        ...     def __len__(self): return 10
        ...     def __getitem__(self, index): return torch.tensor(float(index) ** 2)
        ...     def empty_sample(self): return torch.empty(())
        ...     def fill_rows(self, run):
        ...         run.rows[:] = torch.as_tensor(run.indices) ** 2
        >>> next(iter(DataLoader(Squares(), batch_size=4)))
        tensor([0., 1., 4., 9.])
    """

    __slots__ = ("_keys", "indices", "rows")

    def __init__(
        self, indices: Sequence[Any], rows: Any, keys: Callable[[], NDArray[np.uint64]]
    ) -> None:
        self.indices = indices
        self.rows = rows
        self._keys = keys

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def keys(self) -> NDArray[np.uint64]:
        """The keys of the samples' random streams, uint64[len(run)]: functions of seed, epoch, position and index."""
        return self._keys()

    def renamed(self, indices: Sequence[Any], rows: Any = None) -> Run:
        """Return the same samples with the indices of a wrapped dataset, and with other rows if given."""
        return Run(indices, self.rows if rows is None else rows, self._keys)
