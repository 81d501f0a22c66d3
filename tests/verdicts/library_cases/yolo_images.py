"""Images and boxes in the layout of YOLO, read by ultralytics.

With augmentation, `load_image` stores its newest images in `ims`, a list with one element for each file, and their
numbers in `buffer`. Threads share `ims` if it has more than 1,000 elements, but each has a `buffer` of its own. In the
second epoch a thread finds images in `ims` and none in `buffer`. Mosaic chooses from `buffer`, and raises IndexError.
"""

from __future__ import annotations

from pathlib import Path

from ultralytics.cfg import get_cfg
from ultralytics.data.dataset import YOLODataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import encoded

IMAGES = 1_001


def yolo(folder: Path) -> Made:
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    image = encoded(0)
    for index in range(IMAGES):
        (folder / "images" / f"{index}.jpg").write_bytes(image)
        (folder / "labels" / f"{index}.txt").write_text(f"{index % 2} 0.5 0.5 0.25 0.25\n")
    dataset = YOLODataset(
        img_path=str(folder / "images"),
        imgsz=32,
        augment=True,
        hyp=get_cfg(),
        data={"names": {0: "cat", 1: "dog"}, "channels": 3},
        task="detect",
    )
    return Made(dataset, dataset.collate_fn)
