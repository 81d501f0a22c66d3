"""Mini-batches of arrays, and their shapes.

Data and targets are batched by separate calls. Still, row i of both is at the same position in the same batch, because
rows keep their order, and only the last `rows % batch` rows are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


class DataUtil:
    """Mini-batches."""

    @staticmethod
    def generate_minibatches(data: ArrayLike, minibatch_size: int) -> Tensor:
        """Return the rows of `data`, in their order, as dtype[batches, minibatch_size, ...].

        An incomplete last batch is left out: at most `minibatch_size - 1` rows. Raises ValueError if no batch is
        complete.
        """
        rows = np.asarray(data)
        batches = len(rows) // minibatch_size if minibatch_size > 0 else 0
        if not batches:
            raise ValueError(
                f"{len(rows)} rows are too few for a batch of {minibatch_size}. The global batch must be at least the "
                "number of ranks, and each rank needs the rows of one batch"
            )
        whole = rows[: batches * minibatch_size]
        return torch.from_numpy(whole.reshape(batches, minibatch_size, *rows.shape[1:]).copy())


def tset_to_numpy(tset: Iterable[Any]) -> list[NDArray[Any]]:
    """Return the values of a TSet as arrays."""
    return [np.asarray(value) for value in tset]


def fix_array_shape(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of one dimension as a column, [n, 1], and any other as it is."""
    return array[:, None] if array.ndim == 1 else array


def generate_minibatches(
    input_data: ArrayLike, world_size: int = 4, init_batch_size: int = 128
) -> Tensor:
    """Return a rank's rows as batches. The batches of all ranks for one step have about `init_batch_size` rows.

    See `DataUtil.generate_minibatches`.
    """
    return DataUtil.generate_minibatches(input_data, max(1, init_batch_size // world_size))


def format_data(data: Tensor) -> Tensor:
    """Return square images: [batches, batch, side * side] as [batches, batch, side, side]. Raises ValueError."""
    batches, batch, pixels = data.shape
    side = math.isqrt(pixels)
    if side * side != pixels:
        raise ValueError(
            f"{pixels} pixels do not make a square image. Give a square number, such as 784"
        )
    return data.reshape(batches, batch, side, side)


def format_target(data: Tensor) -> Tensor:
    """Return labels: [batches, batch, 1] as [batches, batch]."""
    return data.reshape(data.shape[0], data.shape[1])
