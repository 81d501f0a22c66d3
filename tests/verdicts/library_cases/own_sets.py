"""fastload's own datasets, with plans and with other transforms, and torch's TensorDataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from fastload.datasets import MNIST, ImageFolder, PackedDataset, ParquetDataset
from fastload.image import RandomResizedCrop, ResizeCenterCrop
from tests.verdicts.library_cases import Made, files
from tests.verdicts.library_cases.files import COUNT


def image_files(folder: Path) -> Made:
    return Made(ImageFolder(str(files.image_folder(folder)), transform=RandomResizedCrop(24)))


def file_list_with_torchvision(folder: Path) -> Made:
    from torchvision import transforms

    from fastload.datasets import ImageFileList

    root = files.image_folder(folder)
    names = [str(path.relative_to(root)) for path in sorted(root.rglob("*.jpg"))]
    (root / "list.txt").write_text("\n".join(names) + "\n")
    transform = transforms.Compose([transforms.RandomCrop(24), transforms.ToTensor()])
    return Made(ImageFileList(root / "list.txt", transform=transform))


def packed(folder: Path) -> Made:
    from fastload.datasets.packed.packing import pack

    pack(files.image_folder(folder), folder / "packed", workers=0)
    return Made(PackedDataset(folder / "packed", transform=ResizeCenterCrop(24, 24)))


def parquet(folder: Path) -> Made:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"x": [float(index) for index in range(COUNT)], "y": list(range(COUNT))}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return Made(ParquetDataset(folder / "rows.parquet", label="y"))


def mnist(folder: Path) -> Made:
    from fastload.datasets.idx import write_idx

    images = np.arange(COUNT * 28 * 28).reshape(COUNT, 28, 28).astype(np.uint8)
    labels = np.arange(COUNT).astype(np.uint8)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        with open(folder / f"train-{name}-ubyte", "wb") as file:
            write_idx(file, array)
    return Made(MNIST(folder, tensors=True))


def set_of_columns(folder: Path) -> Made:
    from fastload import store

    store.put({"x": torch.arange(COUNT).float(), "y": np.arange(COUNT)}, "rows", root=folder)
    return Made(store.get("rows", root=folder))


def tensors(folder: Path) -> Made:
    return Made(TensorDataset(torch.rand(COUNT, 3, 8, 8), torch.arange(COUNT)))
