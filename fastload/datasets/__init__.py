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


def __getattr__(name: str) -> Any:
    if name in ("ImageFileList", "ImageFolder"):
        from fastload.datasets import image_files

        return getattr(image_files, name)
    if name == "MNIST":
        from fastload.datasets import mnist

        return mnist.MNIST
    if name in ("PackedDataset", "PackedWriter"):
        from fastload.datasets import packed

        return getattr(packed, name)
    if name == "ParquetDataset":
        from fastload.datasets.parquet import ParquetDataset

        return ParquetDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
