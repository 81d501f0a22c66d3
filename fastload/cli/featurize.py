"""`fastload featurize`: save what a network returns for each image as a set."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import click

from fastload._kit.options import Count, ExistingFolder, Option, Seed, options
from fastload._kit.texts import counted
from fastload.cli._command import Command
from fastload.cli._common import (
    Batches,
    Root,
    bad_values_are_usage_errors,
    named_as_option,
    require,
    sigterm_raises,
)
from fastload.errors import UsageError
from fastload.measure.options import ImageList
from fastload.train.recipe import OnDevice


@options
class Features(Root, Batches):
    """What is made of which images."""

    images: Annotated[ExistingFolder | None, Option("[IMAGES]")] = None
    name: str
    """Name of the set, of letters, digits and _.+=-, or a path that ends in such a name."""
    model: str = "resnet50"
    """Classification network of torchvision. Its last layer (the head) is removed."""
    weights: str = "default"
    """File with the network's state_dict, or default or random. default: torchvision's best weights, downloaded once.
    random: random weights, for tests."""
    seed: Seed = 0
    """Seed of the weights with --weights random."""
    layout: Literal["pooled", "flat"] = "pooled"
    """Features to keep. pooled: mean of the last feature map, 2,048 numbers per image for resnet50. flat: the whole
    map, 100,352 numbers."""
    size: Annotated[Count, Option(max=4096)] = 224
    """Side of the square that images are resized to, in pixels."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of the saved features."""
    parts: Count | None = None
    """Number of parts of the set, of nearly equal size. [default: one per 512 images, at most 64]"""
    version: str = ""
    """Your name for the content of the images. Change the version when they change."""
    replace: bool = False
    """Replace a set of this name that was made from other images, weights or options."""


@Command
def featurize(of: Features, listed: ImageList, on: OnDevice) -> None:
    """Run a network over images once, and save the features, to train a head on them.

    IMAGES is a folder with one folder per class, or a packed set. Alternatively, --file-list-path names a list. Each
    image is resized to a square and normalised as for ImageNet. The features are saved as a set (see `fastload set`).
    Row i has the features of image i in column x, and the class number of that image in column y.

    If a run is stopped, run the same command again. It makes only the missing parts, which are files of the set. If
    the set is complete, no image is read. If the weights, the number of images, --version or another option have
    changed, the command names the change and exits. It does not see that the content of an image has changed: then give
    another --version. Needs the extra `arrow`.

    \b
    Examples:
        fastload featurize flowers --name flowers
        fastload featurize flowers --name flowers-flat --layout flat --dtype float16 --parts 8
        fastload featurize --file-list-path train.txt --name /scratch/sets/train --weights resnet50.pt

    \b
    Then, in Python:
        features = fastload.store.get("flowers", data="x", label="y")
        loader = fastload.DataLoader(features, batch_size=256, shuffle=True, seed=0)
    """
    require("images", PIL="Pillow", torchvision="torchvision")
    began = time.perf_counter()
    with (
        sigterm_raises(),
        named_as_option(FileExistsError, "pass replace=True", "pass --replace"),
        bad_values_are_usage_errors(),
    ):
        from fastload.store.model_run import shown

        found = _features(of, listed, on)
    x, *_ = found[0]
    bytes_of_all = len(found) * x.numel() * x.dtype.itemsize
    click.echo(
        f"{len(found):,} rows of {shown(x)}, {bytes_of_all / 1e6:,.1f} MB, "
        f"{counted(len(found.classes), 'class')}, after {time.perf_counter() - began:.1f} s"
    )
    if found.made["weights"].startswith("random"):
        click.echo(f"Made with {found.made['weights']}: use these features only for tests.")
    click.echo(found.path)


def _features(of: Features, listed: ImageList, on: OnDevice) -> Any:
    import torch

    from fastload import store
    from fastload.distributed import detect_rank
    from fastload.train.devices import choose_device

    random = f"random weights, seed {of.seed}"
    images = of.images or Path(str(listed.file_list))
    made = {"network": of.model, "size": of.size, "images": str(images.absolute())}
    made |= {"weights": random if of.weights == "random" else of.weights, "layout": of.layout}
    device = choose_device(on.device, detect_rank().rank)
    return store.features(
        of.name,
        dataset=_dataset(of, listed),
        model=store.backbone(of.model, weights=of.weights, layout=of.layout, seed=of.seed),
        loader=of.loader,
        dtype=getattr(torch, of.dtype),
        device=device,
        made=made,
        progress=True,
        version=of.version,
        parts=of.parts,
        root=of.root,
        replace=of.replace,
    )


def _dataset(of: Features, listed: ImageList) -> Any:
    """Open the images. Raise UsageError unless exactly one source is given."""
    from fastload.datasets import ImageFileList, ImageFolder, PackedDataset
    from fastload.datasets.manifest import INDEX
    from fastload.image import IMAGENET_MEAN, IMAGENET_STD, Resize
    from fastload.measure.samples import find_list

    plan = Resize((of.size, of.size), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    if (of.images is None) == (listed.file_list is None):
        raise UsageError("Give either a folder of images or --file-list-path.")
    if of.images is None:
        return ImageFileList(find_list(listed), base_dir=listed.base_dir, transform=plan)
    if (of.images / INDEX).exists():
        return PackedDataset(of.images, transform=plan)
    return ImageFolder(of.images, transform=plan)
