"""Readers that feed the loader. Each reader is a plain map-style dataset, and works with any DataLoader.

A reader is imported at its first use: image files need Pillow, packed sets and Parquet need pyarrow.
"""

from importlib import import_module
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

_HOMES = {
    "ImageFileList": "image_files",
    "ImageFolder": "image_files",
    "MNIST": "mnist",
    "PackedDataset": "packed",
    "PackedWriter": "packed",
    "ParquetDataset": "parquet",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
