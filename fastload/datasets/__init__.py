"""Readers that feed the loader. Each reader is a plain map-style dataset, and works with any DataLoader.

A reader is imported at its first use: image files need Pillow, packed sets and Parquet need pyarrow.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.datasets.image_files import ImageFileList, ImageFolder
    from fastload.datasets.mnist import MNIST
    from fastload.datasets.packed import PackedDataset, PackedWriter
    from fastload.datasets.parquet import ParquetDataset

__all__ = [
    "MNIST",
    "ImageFileList",
    "ImageFolder",
    "PackedDataset",
    "PackedWriter",
    "ParquetDataset",
]


if not TYPE_CHECKING:  # one that sees it takes each name for one that exists

    def __getattr__(name: str) -> Any:
        if name in ("ImageFileList", "ImageFolder"):
            from fastload.datasets import image_files as home
        elif name == "MNIST":
            from fastload.datasets import mnist as home
        elif name in ("PackedDataset", "PackedWriter"):
            from fastload.datasets import packed as home
        elif name == "ParquetDataset":
            from fastload.datasets import parquet as home
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(home, name)
