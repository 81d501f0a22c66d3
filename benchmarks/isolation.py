"""Promise: The time and memory that a worker's copy of the state of a dataset costs are measured, for several kinds
of dataset.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision import datasets, models

from benchmarks._report import Figures, Results, Row, row
from benchmarks._run import Case
from benchmarks.images import transform
from benchmarks.memory import FileNames
from fastload.isolation import Isolation

TITLE = "isolation: the walk over a dataset at iter(), and a worker's copy of its state"
REPEATS = 5
COPIES = 8


class Held(Dataset[Any]):
    """A dataset that holds what it is given, and is not read."""

    def __init__(self, **held: Any) -> None:
        vars(self).update(held)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return index


def _image_folder(scale: int) -> Any:
    """torchvision's ImageFolder of a million files in 1,000 classes, without the files."""
    folder = object.__new__(datasets.ImageFolder)
    classes = [f"n{k:08d}" for k in range(1000)]
    samples = [(f"train/{classes[k % 1000]}/{k}.JPEG", k % 1000) for k in range(scale)]
    vars(folder).update(
        root="train",
        loader=datasets.folder.default_loader,
        classes=classes,
        class_to_idx={name: k for k, name in enumerate(classes)},
        samples=samples,
        imgs=samples,
        targets=[target for _, target in samples],
        transform=transform("crop"),
        target_transform=None,
        transforms=None,
    )
    return folder


def _coco(scale: int) -> Any:
    """Annotations as pycocotools keeps them: dictionaries of dictionaries, by image and by category."""
    annotations = {
        k: {
            "id": k,
            "image_id": k // 7,
            "category_id": k % 80,
            "bbox": [1.0, 2.0, 3.0, 4.0],
            "iscrowd": 0,
        }
        for k in range(scale // 10)
    }
    images = {k: {"id": k, "file_name": f"{k:012d}.jpg"} for k in range(scale // 70)}
    by_image: dict[int, list[Any]] = {}
    for annotation in annotations.values():
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    api = Held(
        dataset={"annotations": list(annotations.values())},
        anns=annotations,
        imgs=images,
        imgToAnns=by_image,
    )
    return Held(coco=api, ids=list(images))


def _network(scale: int) -> Any:
    return Held(model=models.resnet18(weights=None))


DATASETS: dict[str, Callable[[int], Any]] = {
    "a million paths": FileNames,
    "ImageFolder, a million files, 1,000 classes": _image_folder,
    "COCO, 100,000 annotations": _coco,
    "a ResNet-18 in the dataset": _network,
}


def cases(*, smoke: bool) -> list[Case]:
    return [
        Case(name, {"name": name, "scale": 10_000 if smoke else 1_000_000}) for name in DATASETS
    ]


def measure(*, name: str, scale: int) -> Figures:
    dataset = DATASETS[name](scale)
    Isolation(dataset, None, None, copy_dataset="state").own()  # imports, caches
    began = perf_counter()
    isolation = Isolation(dataset, None, None, copy_dataset="state")
    walked = perf_counter()
    times = []
    for _ in range(COPIES):
        started = perf_counter()
        isolation.own()
        times.append(perf_counter() - started)
    return {
        "walk_ms": (walked - began) * 1e3,
        "copy_ms": median(times) * 1e3,
        "copy_mib": _bytes_of_a_copy(isolation) / 2**20,
    }


def _bytes_of_a_copy(isolation: Isolation) -> float:
    """Return what a copy takes: what Python and NumPy allocate, and the memory of its tensors."""
    tensors = sum(
        node.x.untyped_storage().nbytes()
        for i, node in isolation.plan.nodes.items()
        if isinstance(node.x, torch.Tensor) and i not in isolation.plan.shared
    )
    tracemalloc.start()
    own = isolation.own()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del own
    return held + tensors


def rows(results: Results) -> list[Row]:
    return [
        row(results, name, key, name=f"{what}: {name}", unit=unit)
        for key, what, unit in (
            ("walk_ms", "walk", "ms"),
            ("copy_ms", "copy", "ms"),
            ("copy_mib", "memory of a copy", "MiB"),
        )
        for name in DATASETS
        if name in results
    ]
