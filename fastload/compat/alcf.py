"""The two classes of ALCF's threaded ImageNet example, over fastload's loader.

    from fastload.compat.alcf import ImageNetDataLoader, ImageNetDataset

The example's loop runs unchanged. Four things differ. Each image of the rank's part is read once before any is read
again. Batches come in order. An image that cannot be read raises an error with its path. `stop()` returns at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import Sampler

from fastload.datasets import ImageFileList
from fastload.loader import DataLoader

__all__ = ["ImageNetDataLoader", "ImageNetDataset"]


class ImageNetDataset(ImageFileList):
    """This rank's images of a file list. Sample `i` is `(image, class number)`.

    Args:
        base_dir: folder from which relative paths of the list start.
        file_list_path: a file with a path on each line. An image's class is the name of its folder.
        id_to_index: the number of each class, from 0 without a gap.
        transform: called with the image, a PIL image of mode "RGB".
        rank, world_size: this rank reads every `world_size`-th image, starting with image number `rank`.

    Raises ValueError if a class number is missing, and what `ImageFileList` raises.
    """

    def __init__(
        self,
        base_dir: str | os.PathLike[str],
        file_list_path: str | os.PathLike[str],
        id_to_index: Mapping[str, int],
        transform: Callable[[Any], Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        classes = sorted(id_to_index, key=id_to_index.__getitem__)
        if [id_to_index[name] for name in classes] != list(range(len(classes))):
            raise ValueError(
                f"id_to_index must number the classes 0 to {len(classes) - 1}, got {dict(id_to_index)!r:.200}"
            )
        super().__init__(
            os.fspath(file_list_path),
            base_dir=os.fspath(base_dir),
            transform=transform,
            classes=classes,
            rank=rank,
            world_size=world_size,
        )


class _Endless(Sampler[int]):
    """All indices in order, repeated without end."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(self._length)


class ImageNetDataLoader:
    """Gives batches without end, in the order of the dataset: `(images[B, ...], targets int64[B])`.

    Args:
        dataset: any map-style dataset.
        batch_size, num_workers: see `fastload.DataLoader`. Workers are threads.
        cache_size: maximum number of batches that are ready for the loop.

    Use one loop at a time. Another `iter()` begins with the first sample again.

    Raises ValueError if the dataset is empty.
    """

    def __init__(self, dataset: Any, batch_size: int, num_workers: int, cache_size: int) -> None:
        if not len(dataset):
            raise ValueError(
                f"batches without end need samples, but {type(dataset).__name__} has none. The file list must have at "
                "least one image per rank"
            )
        self.dataset = dataset
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size,
            sampler=_Endless(len(dataset)),
            num_workers=num_workers,
            worker_method="thread",
            prefetch_batches=cache_size if num_workers else None,
        )

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self._loader)

    def stop(self) -> None:
        """End the threads. A running loop ends with an error."""
        self._loader.close()
