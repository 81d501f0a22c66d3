"""Images and boxes in the layout of YOLO, read by ultralytics."""

from __future__ import annotations

from pathlib import Path

from ultralytics.cfg import get_cfg
from ultralytics.data.dataset import YOLODataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, encoded


def yolo(folder: Path) -> Made:
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for index in range(COUNT):
        (folder / "images" / f"{index}.jpg").write_bytes(encoded(index))
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
