"""How each loader of `peers` does the same work, by the recipe that its own documents recommend.

    python -m benchmarks.recipes ROOT OUT GROUP      packs the images below ROOT for FFCV

A recipe returns the passes of a `Task` in a context: an iterable whose every pass is an epoch of `Batch`. The work is
RandomResizedCrop(224) with torchvision's defaults and a random flip, shuffled.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks._data import sample_images
from benchmarks._measure import open_readers

Batch = tuple[torch.Tensor, torch.Tensor]
"""uint8[B, 3, 224, 224] in any memory format, and the images' numbers, int64[B]."""
Passes = AbstractContextManager[Iterable[Batch]]

SIZE = 224
PACKED_SIDE = 256
"""The longer side, in pixels, of images that are made smaller when they are packed."""
QUALITY = 90


@dataclass(frozen=True, slots=True)
class Task:
    """What a recipe is to do."""

    source: Path
    """`tree(count)`, or what `packed` returned."""
    group: str
    """What is read: "files", or a mode of `fastload set pack`."""
    how: str
    """For `plan` "planes", or "whole" (whole JPEGs are decoded); for `loose` LOADER-DECODER."""
    batch: int
    workers: int

    def read(self, kind: str, dataset: Any, **options: Any) -> Passes:
        options |= {"batch_size": self.batch, "shuffle": True, "persistent_workers": True}
        return open_readers(kind, dataset, self.workers, **options)


def plan(task: Task) -> Passes:
    """fastload's plan: header, box, scaled decode, resize and flip in one step."""
    from fastload.datasets import ImageFileList, PackedDataset
    from fastload.image import RandomResizedCrop

    crop = RandomResizedCrop(SIZE, flip=0.5, region_decode=task.how != "whole")
    files = task.group == "files"
    dataset: Any = (ImageFileList if files else PackedDataset)(
        task.source / "filelist.txt" if files else task.source, transform=crop
    )
    return task.read("auto", dataset)


def loose(task: Task) -> Passes:
    """A user's unmodified ImageFolder, by torch's DataLoader ("torch") or fastload's ("auto").

    The decoder is "pillow" (with transforms v1) or "torchvision" (with v2, on uint8 tensors).
    """
    from torchvision import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    kind, decoder = task.how.split("-")
    if decoder == "pillow":
        flip = transforms.RandomHorizontalFlip()
        crop = [transforms.RandomResizedCrop(SIZE), flip, transforms.PILToTensor()]
        dataset = ImageFolder(str(task.source), transforms.Compose(crop))
    else:
        crop = [v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()]
        decode: Any = partial(decode_image, mode=ImageReadMode.RGB)
        dataset = ImageFolder(str(task.source), v2.Compose(crop), loader=decode)
    return task.read(kind, dataset)


def ffcv(task: Task) -> Passes:
    """FFCV: one file, its compiled crop and flip. It writes into its batches, channels-last, again a few later."""
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

    image = [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip()]
    number = [IntDecoder(), ToTensor(), Squeeze(1)]
    loader = Loader(
        str(task.source),
        batch_size=task.batch,
        num_workers=task.workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        pipelines={"image": [*image, ToTensor(), ToTorchImage()], "number": number},
    )
    return nullcontext(loader)


RECIPES = {"plan": plan, "loose": loose, "ffcv": ffcv}


def pack_for_ffcv(root: str, out: str, group: str) -> None:
    """JPEG or pixels, of at most 256 px."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    images = RGBImageField(
        write_mode="raw" if group == "raw" else "jpg",
        max_resolution=PACKED_SIDE,
        jpeg_quality=QUALITY,
    )
    writer = DatasetWriter(out, {"image": images, "number": IntField()}, num_workers=2)
    writer.from_indexed_dataset(ImageFolder(root))


def tree(count: int) -> Path:
    """Return the folder of `count` generated JPEGs, each in a folder that is named by its number.

    Beside these folders is filelist.txt, with the paths in that order. All are kept between runs.
    """
    images = sample_images(count)
    root = Path(os.path.commonpath(images)).parent.parent / f"peers-{count}-images" / "images"
    root.parent.mkdir(exist_ok=True)
    if not root.exists():
        with TemporaryDirectory(dir=root.parent) as folder:
            made = Path(folder, "images")
            for number, image in enumerate(images):
                (made / f"{number:05d}").mkdir(parents=True)
                os.link(image, made / f"{number:05d}" / "image.jpg")
            lines = [f"{number:05d}/image.jpg\n" for number in range(count)]
            (made / "filelist.txt").write_text("".join(lines))
            made.rename(root)
    return root


def packed(recipe: str, group: str, root: Path) -> Path:
    """Return the packed set that a process made of a tree for a recipe. It is kept beside the tree between runs.

    Raise subprocess.CalledProcessError if that process fails. Its message is on standard error.
    """
    out = root.parent / f"{recipe}-{group}"
    if not out.exists():
        with TemporaryDirectory(dir=root.parent) as folder:
            made = Path(folder, "made")
            command = ["benchmarks.recipes", root, made, group]
            if recipe == "plan":
                command = ["fastload", "set", "pack", root / "filelist.txt", made, "--mode", group]
                command += ["--max-size", str(PACKED_SIDE)]
                command += ["--quality", str(QUALITY)] * (group == "jpeg")
            stdout = sys.stderr.fileno()
            subprocess.run([sys.executable, "-m", *command], check=True, stdout=stdout)
            made.rename(out)
    return out


if __name__ == "__main__":
    pack_for_ffcv(*sys.argv[1:])
