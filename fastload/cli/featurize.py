"""`fastload featurize`: save what a network returns for each image as a set."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from fastload.cli import options as opt
from fastload.cli._common import (
    bad_values_are_usage_errors,
    device_option,
    list_options,
    loader_of,
    named_as_option,
    require,
    root_option,
    sigterm_raises,
)
from fastload.errors import UsageError

_DTYPES = ("float32", "float16", "bfloat16")


@click.command()
@click.argument(
    "images",
    required=False,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="[IMAGES]",
)
@list_options
@click.option(
    "--name",
    required=True,
    help="Name of the set, of letters, digits and _.+=-, or a path that ends in such a name.",
)
@click.option(
    "--model",
    default="resnet50",
    help="Classification network of torchvision. Its last layer (the head) is removed.",
)
@click.option(
    "--weights",
    default="default",
    help="File with the network's state_dict, or default or random. default: torchvision's best weights, downloaded "
    "once. random: random weights, for tests.",
)
@opt.count(
    "--seed", within=(0, 2**63 - 1), default=0, help="Seed of the weights with --weights random."
)
@opt.choice(
    "--layout",
    ["pooled", "flat"],
    help="Features to keep. pooled: mean of the last feature map, 2,048 numbers per image for resnet50. flat: the "
    "whole map, 100,352 numbers.",
)
@opt.count(
    "--size",
    within=(1, 4096),
    default=224,
    help="Side of the square that images are resized to, in pixels.",
)
@opt.count("-b --batch-size", default=64, help="Images per batch.")
@opt.count(
    "-w --num-workers",
    within=(0, 1024),
    help="Number of threads that load.  [default: one per core]",
)
@opt.choice("--dtype", _DTYPES, help="Type of the saved features.")
@root_option
@device_option
@opt.count(
    "--parts",
    help="Number of parts of the set, of nearly equal size.  [default: one per 512 images, at most 64]",
)
@click.option(
    "--version",
    default="",
    show_default=False,
    help="Your name for the content of the images. Change the version when they change.",
)
@opt.flag(
    "--replace",
    help="Replace a set of this name that was made from other images, weights or options.",
)
def featurize(**options: Any) -> None:
    """Run a network over images once, and save the features, to train a head on them.

    IMAGES is a folder with one folder per class, or a packed set. Alternatively, --file-list-path names a list. Each
    image is resized to a square and normalised as for ImageNet. The features are saved as a set (see `fastload store`).
    Row i has the features of image i in column x, and the class number of that image in column y.

    If a run is stopped, run the same command again. It makes only the missing parts, which are files of the set. If
    the set is complete, no image is read. If the weights, the number of images, --version or another option have
    changed, the command names the change and exits. It does not see that the content of an image has changed: then give
    another --version. Needs pip install '.[arrow]' in the clone.

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
    require("arrow", pyarrow="pyarrow")
    require("images", PIL="Pillow", torchvision="torchvision")
    began = time.perf_counter()
    with (
        sigterm_raises(),
        named_as_option(FileExistsError, "pass replace=True", "pass --replace"),
        bad_values_are_usage_errors(),
    ):
        from fastload.store.model_run import shown

        found = _features(options)
    x, *_ = found[0]
    bytes_of_all = len(found) * x.numel() * x.dtype.itemsize
    click.echo(
        f"{len(found):,} rows of {shown(x)}, {bytes_of_all / 1e6:,.1f} MB, {len(found.classes)} classes, after "
        f"{time.perf_counter() - began:.1f} s"
    )
    if found.made["weights"].startswith("random"):
        click.echo(f"Made with {found.made['weights']}: use these features only for tests.")
    click.echo(found.path)


def _features(options: dict[str, Any]) -> Any:
    import torch

    from fastload import store
    from fastload.distributed import detect_rank
    from fastload.train.devices import choose_device

    dataset = _dataset(*(options[name] for name in ("images", "file_list", "base_dir", "size")))
    model, of = options["model"], {name: options[name] for name in ("weights", "layout")}
    network = store.backbone(model, **of, seed=options["seed"])
    if of["weights"] == "random":
        of["weights"] = f"random weights, seed {options['seed']}"
    images = (options["images"] or options["file_list"]).absolute()
    return store.features(
        options["name"],
        dataset=dataset,
        model=network,
        loader=loader_of(options),
        dtype=getattr(torch, options["dtype"]),
        device=choose_device(options["device"], detect_rank().rank),
        made={"network": model, "size": options["size"], "images": str(images), **of},
        progress=True,
        **{name: options[name] for name in ("version", "parts", "root", "replace")},
    )


def _dataset(images: Path | None, file_list: Path | None, base_dir: Path | None, size: int) -> Any:
    """Open the images. Raise UsageError unless exactly one source is given."""
    from fastload.datasets import ImageFileList, ImageFolder, PackedDataset
    from fastload.datasets.manifest import INDEX
    from fastload.image import IMAGENET_MEAN, IMAGENET_STD, Resize
    from fastload.measure.samples import find_list

    plan = Resize((size, size), mean=IMAGENET_MEAN, std=IMAGENET_STD)
    if (images is None) == (file_list is None):
        raise UsageError("Give either a folder of images or --file-list-path.")
    if images is None:
        listed = find_list(file_list, base_dir)
        return ImageFileList(listed, base_dir=base_dir, transform=plan)
    if (images / INDEX).exists():
        return PackedDataset(images, transform=plan)
    return ImageFolder(images, transform=plan)
