"""FFCV: one file, its compiled crop and flip, from the page cache.

Variants: "encoded", JPEG at full size; "jpeg" and "raw", JPEG and pixels of at most 256 px.

Its batches are channels-last in memory, and it writes into them again a few batches later. "encoded" is no copy of the
original bytes: FFCV encodes every image again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage
from ffcv.writer import DatasetWriter
from torchvision.datasets import ImageFolder

from benchmarks.recipes import PACKED_SIDE, QUALITY, SIZE, Batch, Task


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    yield Loader(
        str(task.source / "images.beton"),
        batch_size=task.batch,
        num_workers=task.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder((SIZE, SIZE)),
                RandomHorizontalFlip(),
                ToTensor(),
                ToTorchImage(),
            ],
            "number": [IntDecoder(), ToTensor(), Squeeze(1)],
        },
    )


def pack(root: Path, out: Path, variant: str) -> None:
    images = RGBImageField(
        write_mode="raw" if variant == "raw" else "jpg",
        max_resolution=None if variant == "encoded" else PACKED_SIDE,
        jpeg_quality=QUALITY,
    )
    fields = {"image": images, "number": IntField()}
    DatasetWriter(str(out / "images.beton"), fields, num_workers=2).from_indexed_dataset(
        ImageFolder(str(root))
    )
