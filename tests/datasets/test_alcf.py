"""Promise: The loop of ALCF's example runs with its imports changed. Each image of a rank is read once before any
again, in order.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from PIL import Image

from fastload.compat.alcf import ImageNetDataLoader, ImageNetDataset
from fastload.errors import DecodeError
from tests.children import run_python
from tests.fakes import fastload_threads

ROOT = Path(__file__).parent.parent.parent
"""Of the repository."""


IDS = {"class0": 0, "class1": 1, "class2": 2}


@pytest.fixture
def file_list(tmp_path: Path) -> Path:
    """Twelve images of three classes, one after another."""
    for name in IDS:
        (tmp_path / name).mkdir()
    paths = [tmp_path / f"class{number % 3}" / f"{number}.jpg" for number in range(12)]
    for number, path in enumerate(paths):
        Image.new("RGB", (40 + number, 30), (20 * number, 10, 10)).save(path)
    (tmp_path / "list.txt").write_text("".join(f"{path}\n" for path in paths) + "\n")
    return tmp_path / "list.txt"


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_each_image_is_read_once_before_any_again(workers: int, file_list: Path) -> None:
    read: list[int] = []
    dataset = ImageNetDataset(
        file_list.parent, file_list, IDS, transform=lambda image: torch.zeros(1)
    )
    loader = ImageNetDataLoader(dataset, 4, workers, 2)
    for _, targets in itertools.islice(loader, 6):
        read += targets.tolist()
    loader.stop()
    assert read == [0, 1, 2] * 8
    assert not fastload_threads()


def test_ranks_have_parts_of_their_own(file_list: Path) -> None:
    parts = [ImageNetDataset(file_list.parent, file_list, IDS, None, rank, 5) for rank in range(5)]
    assert [len(part) for part in parts] == [3, 3, 2, 2, 2]
    image, target = parts[1].load_image(2)
    assert (image.mode, target) == ("RGB", 11 % 3)


def test_what_is_wrong_is_named(file_list: Path) -> None:
    with pytest.raises(ValueError, match="must number the classes 0 to 2"):
        ImageNetDataset(file_list.parent, file_list, {"class0": 0, "class1": 1, "class2": 5})
    broken = file_list.parent / "class1" / "4.jpg"
    broken.write_bytes(b"no image")
    loader = ImageNetDataLoader(
        ImageNetDataset(file_list.parent, file_list, IDS, lambda image: torch.zeros(1)), 4, 2, 2
    )
    with pytest.raises(DecodeError, match=str(broken)):
        list(itertools.islice(loader, 3))
    loader.stop()


@pytest.mark.slow
def test_the_loop_of_the_example_runs(file_list: Path) -> None:
    pytest.importorskip("torchvision")
    command = [ROOT / "examples" / "alcf.py", "-b", "4", "-s", "10", "-w", "2"]
    command += ["--base-dir", file_list.parent, "--file-list-path", file_list]
    done = run_python(*command, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "num workers: 2"
    assert [line.split(":")[0] for line in lines[1:]] == [
        "step_img_rate",
        "step_img_rate",
        "Stopping data loader",
        "All Done",
    ]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="need samples, but list has none"):
        ImageNetDataLoader([], batch_size=2, num_workers=0, cache_size=1)
