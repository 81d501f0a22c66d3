"""Images with boxes, in torchvision's own types and as VOC's annotations."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.datasets import VOCDetection
from torchvision.io import ImageReadMode, read_image
from torchvision.transforms import v2

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, encoded, image_folder


class Boxes(Dataset[Any]):
    """Images with a dict of boxes and labels, as torchvision's detection tutorial has it."""

    def __init__(self, paths: list[Path], annotations: dict[str, Any], transforms: Any) -> None:
        self.paths, self.annotations = paths, annotations
        self.transforms = transforms

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, idx: int) -> Any:
        img = tv_tensors.Image(read_image(str(self.paths[idx]), mode=ImageReadMode.RGB))
        found = self.annotations[self.paths[idx].name]
        target = {}
        target["boxes"] = tv_tensors.BoundingBoxes(
            found["boxes"], format="XYXY", canvas_size=v2.functional.get_size(img)
        )
        target["labels"] = torch.tensor(found["labels"], dtype=torch.int64)
        target["image_id"] = idx
        if self.transforms is not None:
            img, target = self.transforms(img, target)
        return img, target


def collate_fn(batch: list[Any]) -> Any:
    return tuple(zip(*batch, strict=True))


def detection_dicts(folder: Path) -> Made:
    paths = sorted(image_folder(folder).rglob("*.jpg"))
    annotations = {
        path.name: {"boxes": [[2, 2, 20, 20], [4, 4, 30, 30]], "labels": [1, 2]} for path in paths
    }
    transforms = v2.Compose(
        [
            v2.RandomHorizontalFlip(p=0.5),
            v2.RandomResizedCrop(size=(24, 24), antialias=True),
            v2.SanitizeBoundingBoxes(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    return Made(Boxes(paths, annotations, transforms), collate_fn)


def annotation(index: int) -> ElementTree.Element:
    """Return what VOC says of an image with one box."""
    root = ElementTree.Element("annotation")
    ElementTree.SubElement(root, "filename").text = f"{index}.jpg"
    found = ElementTree.SubElement(root, "object")
    ElementTree.SubElement(found, "name").text = "cat"
    box = ElementTree.SubElement(found, "bndbox")
    for name, value in zip(("xmin", "ymin", "xmax", "ymax"), (1, 2, 20, 30), strict=True):
        ElementTree.SubElement(box, name).text = str(value)
    return root


def to_boxes(target: dict[str, Any]) -> torch.Tensor:
    boxes = []
    for found in target["annotation"]["object"]:
        box = found["bndbox"]
        boxes.append([float(box[name]) for name in ("xmin", "ymin", "xmax", "ymax")])
    return torch.tensor(boxes)


def voc(folder: Path) -> Made:
    base = folder / "VOCdevkit" / "VOC2012"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (base / name).mkdir(parents=True)
    for index in range(COUNT):
        (base / "JPEGImages" / f"{index}.jpg").write_bytes(encoded(index))
        tree = ElementTree.ElementTree(annotation(index))
        tree.write(base / "Annotations" / f"{index}.xml")
    names = "".join(f"{index}\n" for index in range(COUNT))
    (base / "ImageSets" / "Main" / "train.txt").write_text(names)
    to_tensor = v2.Compose([v2.ToImage(), v2.ColorJitter(0.2), v2.ToDtype(torch.float32, True)])
    return Made(
        VOCDetection(str(folder), image_set="train", transform=to_tensor, target_transform=to_boxes)
    )
