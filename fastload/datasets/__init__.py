"""Readers that feed the loader; each is a plain map-style dataset, good for any DataLoader."""

from fastload.datasets.image_files import ImageFileList, ImageFolder

__all__ = ["ImageFileList", "ImageFolder"]
