"""MNIST, and the rows of each rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload import datasets
from fastload.order.sampler import RankSampler

Rows = tuple[NDArray[np.uint8], NDArray[np.int64], int]
"""Images uint8[n, 784], labels int64[n], and the number of rows in a batch on this rank."""


class MNIST:
    """A split of MNIST in a folder. See `fastload.datasets.MNIST` for the files."""

    def __init__(
        self,
        source_dir: str | os.PathLike[str],
        train: bool = True,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        self.source_dir = source_dir
        self.train = train
        self.transform = transform

    def download(self) -> datasets.MNIST:
        """Download MNIST unless the split exists, and return the split. Raises NoDatasetError."""
        return datasets.MNIST(self.source_dir, self.train, self.transform, download=True)


class MnistDistributed:
    """A rank's rows of MNIST, in a random order that is always the same.

    All ranks have the same number of rows, because they make their steps together. Each row is on one rank. If the rows
    do not divide evenly, at most `parallelism - 1` of them are on two ranks.

    Args:
        source_dir: the folder with the folders "train" and "test", in which `MNIST` has put the splits.
        parallelism, world_rank: the number of ranks, and the rank of this process.
    """

    def __init__(
        self, source_dir: str | os.PathLike[str], parallelism: int, world_rank: int
    ) -> None:
        self._folder = source_dir
        self._world_size = parallelism
        self._rank = world_rank

    @property
    def train_data(self) -> Rows:
        """The training rows, read at each access. The batch size is 128 divided by the number of ranks, at least 1.

        Raises NoDatasetError.
        """
        return self._rows("train", 128)

    @property
    def test_data(self) -> Rows:
        """The test rows, read at each access. The batch size is 16 divided by the number of ranks, at least 1.

        Raises NoDatasetError.
        """
        return self._rows("test", 16)

    def _rows(self, split: str, batch_size: int) -> Rows:
        mnist = datasets.MNIST(os.path.join(self._folder, split), train=split == "train")
        sampler = RankSampler(mnist, rank=self._rank, world_size=self._world_size, seed=1234)
        own = list(sampler)
        images = mnist.data[own].reshape(len(own), -1)
        return images.numpy(), mnist.targets[own].numpy(), max(1, batch_size // self._world_size)
