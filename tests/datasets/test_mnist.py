"""Promises:
- `MNIST` gives torchvision's samples and attributes from the same files.
- A file of MNIST that is cut off, damaged or another one is named.
- A download that fails leaves no file, and its error names `fastload mnist --synthetic`. torchvision's download is a
  fake here.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from fastload import DataLoader
from fastload.cli import main
from fastload.datasets import MNIST
from fastload.datasets.idx import read_idx, write_idx
from fastload.datasets.synthetic import generate_digits
from fastload.errors import IdxError, NoDatasetError
from tests.contracts.filled_rows import FilledRows, Source

NAMES = [
    f"{split}-{kind}-ubyte"
    for split in ("train", "t10k")
    for kind in ("images-idx3", "labels-idx1")
]


def idx(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    write_idx(file, array)
    return file.getvalue()


def numbered(root: Path, count: int, split: str = "train") -> Path:
    """Write a pair of files in which image k holds the number k, and label k is k % 10."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    images = np.zeros((count, 28, 28), np.uint8)
    images.reshape(count, -1)[:, :4] = (
        np.arange(count, dtype=">u4").view(np.uint8).reshape(count, 4)
    )
    labels = (np.arange(count) % 10).astype(np.uint8)
    (folder / f"{split}-images-idx3-ubyte").write_bytes(idx(images))
    (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    generate_digits(root, train=1200, test=70)
    return root


# ---- IDX files ----


def test_an_array_comes_back(tmp_path: Path) -> None:
    array = np.arange(120, dtype=np.uint8).reshape(2, 3, 4, 5)
    path = tmp_path / "any name"
    path.write_bytes(idx(array))
    found = read_idx(path, 4)
    assert found.flags.writeable
    assert np.array_equal(found, array)


def test_only_bytes_are_written() -> None:
    with pytest.raises(ValueError, match="expected uint8 values, got int64"):
        idx(np.zeros(3, np.int64))


@pytest.mark.parametrize("array", [np.zeros((0, 28, 28), np.uint8), np.uint8(7).reshape(())])
def test_no_values_and_no_dimensions_are_arrays_too(
    tmp_path: Path, array: np.ndarray[Any, Any]
) -> None:
    (tmp_path / "a").write_bytes(idx(array))
    assert np.array_equal(read_idx(tmp_path / "a", array.ndim), array)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "ends within its header"),
        (b"\0\0\x08", "ends within its header"),
        (b"\0\0\x08\x01\0\0\0", "ends within its header"),
        (b"<html>", "in 1 dimensions: it begins with 3c 68 74 6d. Expected 00 00 08 01"),
        (b"\0\0\x0a\x01\0\0\0\0", "it begins with 00 00 0a 01"),
        (b"\0\0\x08\x03" + 12 * b"\0", "it begins with 00 00 08 03"),
        (b"\0\0\x08\x01\0\0\0\x05abcd", r"expected 5 bytes .* uint8\[5\], and found 4"),
        (b"\0\0\x08\x01\0\0\0\x04abcde", r"expected 4 bytes .* uint8\[4\], and found 5"),
        (b"\0\0\x08\x01\xff\xff\xff\xff", "and found 0"),
    ],
    ids=range(9),
)
def test_what_is_no_idx_file_is_named_with_what_was_expected(
    tmp_path: Path, content: bytes, told: str
) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(IdxError, match=told) as caught:
        read_idx(path, 1)
    assert str(path) in str(caught.value)


def test_a_file_that_is_cut_off_anywhere_is_an_error(tmp_path: Path) -> None:
    content = idx(np.arange(12, dtype=np.uint8).reshape(3, 4))
    path = tmp_path / "a"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(IdxError, match=f"^{path}: "):
            read_idx(path, 2)


# ---- the dataset ----


@pytest.mark.parametrize("train", [True, False])
def test_samples_and_attributes_are_torchvision_s(small: Path, train: bool) -> None:
    theirs = pytest.importorskip("torchvision").datasets.MNIST(small, train=train)
    ours = MNIST(small, train=train)
    assert len(ours) == len(theirs) == (1200 if train else 70)
    for name in ("data", "targets"):
        found, expected = getattr(ours, name), getattr(theirs, name)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    for name in ("classes", "class_to_idx", "raw_folder", "train"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for index in (*range(0, len(ours), 9), -1):
        (image, label), (expected_image, expected_label) = ours[index], theirs[index]
        assert (type(image), image.mode, image.size) == (type(expected_image), "L", (28, 28))
        assert image.tobytes() == expected_image.tobytes()
        assert (type(label), label) == (int, expected_label)
    with pytest.raises(IndexError):
        ours[len(ours)]


def test_transforms_get_what_torchvision_s_get(small: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    arguments = {
        "transform": torchvision.transforms.ToTensor(),
        "target_transform": lambda label: -label,
    }
    ours = MNIST(small, False, **arguments)
    theirs = torchvision.datasets.MNIST(small, False, **arguments)
    for mine, expected in zip(
        DataLoader(ours, batch_size=32, num_workers=2),
        torch.utils.data.DataLoader(theirs, 32),
        strict=True,
    ):
        assert all(map(torch.equal, mine, expected))


@pytest.mark.parametrize("place", [".", "MNIST/raw"])
def test_files_lie_in_the_root_or_in_torchvision_s_place(
    small: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        shutil.copy(small / "MNIST" / "raw" / name, tmp_path / place)
    found = MNIST(tmp_path, False)
    assert torch.equal(found.data, MNIST(small, False).data)
    assert Path(found.folder) == tmp_path / place
    assert not found.synthetic
    assert "synthetic" not in repr(found)


def test_tensors_are_samples_that_may_be_written_into(small: Path) -> None:
    dataset = MNIST(small, False, tensors=True)
    image, label = dataset[3]
    assert (image.dtype, image.shape, type(label)) == (torch.uint8, (1, 28, 28), int)
    assert torch.equal(image[0], dataset.data[3])
    image.zero_()
    assert dataset.data[3].any()
    doubled = MNIST(small, False, lambda image: image.float() * 2, tensors=True)
    assert torch.equal(doubled[3][0], dataset[3][0].float() * 2)


class TestRows(FilledRows):
    @pytest.fixture
    def source(self, small: Path) -> Source:
        return lambda: MNIST(small, False, tensors=True)


def replace_data(dataset: MNIST) -> None:
    dataset.data = dataset.data.float()


def replace_targets(dataset: MNIST) -> None:
    dataset.targets = dataset.targets[:40]


def give_transform(dataset: MNIST) -> None:
    dataset.transform = torch.Tensor.float


@pytest.mark.parametrize("change", [replace_data, replace_targets, give_transform])
def test_what_is_replaced_while_a_loader_runs_is_seen(
    small: Path, change: Callable[[MNIST], None]
) -> None:
    dataset = MNIST(small, False, tensors=True)
    batches = iter(DataLoader(dataset, batch_size=35, num_workers=0))
    first = next(batches)
    assert torch.equal(first[0][:, 0], dataset.data[:35])
    change(dataset)
    if change is replace_targets:
        with pytest.raises(IndexError):
            next(batches)
    else:
        images, _ = next(batches)
        assert images.dtype == torch.float32
        assert torch.equal(images[:, 0], dataset.data[35:].float())


def test_a_transform_or_pil_images_are_read_sample_by_sample(small: Path) -> None:
    assert MNIST(small, tensors=True).empty_sample() is not None
    for other in (
        {},
        {"tensors": True, "transform": torch.clone},
        {"tensors": True, "target_transform": float},
    ):
        assert MNIST(small, **other).empty_sample() is None


# ---- what is wrong with the files ----


def test_a_set_that_is_not_there_says_where_it_is_looked_for_and_how_to_get_one(
    tmp_path: Path,
) -> None:
    with pytest.raises(NoDatasetError, match=f"fastload mnist --synthetic {tmp_path}") as caught:
        MNIST(tmp_path)
    assert str(tmp_path / "MNIST" / "raw") in str(caught.value)
    assert isinstance(caught.value, RuntimeError)  # as of torchvision
    numbered(tmp_path, 5)
    with pytest.raises(NoDatasetError, match="t10k-images-idx3-ubyte and t10k-labels"):
        MNIST(tmp_path, train=False)
    (tmp_path / "MNIST" / "raw" / NAMES[1]).unlink()
    with pytest.raises(NoDatasetError):
        MNIST(tmp_path)


def test_files_that_are_not_what_their_names_say_are_named(tmp_path: Path) -> None:
    folder = numbered(tmp_path, 5)
    images, labels = (folder / name for name in NAMES[:2])
    labels.write_bytes(idx(np.zeros(4, np.uint8)))
    with pytest.raises(IdxError, match=f"{images} has 5 images, but {labels} has 4 labels"):
        MNIST(tmp_path)
    shutil.copy(labels, images)
    with pytest.raises(IdxError, match=f"{images}: this is not .* 3 dimensions: .* 00 00 08 01"):
        MNIST(tmp_path)
    labels.write_bytes(bytes([0, 0, 0x0C, 1, 0, 0, 0, 0]))  # int32, as QMNIST's labels
    numbered(tmp_path / "other", 5)
    shutil.copy(tmp_path / "other" / "MNIST" / "raw" / NAMES[0], images)
    with pytest.raises(IdxError, match=f"{labels}: this is not .* 1 dimensions: .* 00 00 0c 01"):
        MNIST(tmp_path)


# ---- downloads (torchvision's download is a fake: no test needs a network) ----


class FakeDownload:
    """Writes a small set as torchvision's MNIST does, and counts."""

    def __init__(self, log: Path, error: Exception | None = None) -> None:
        self.log, self.error = log, error

    def __call__(self, root: str, download: bool) -> None:
        assert download
        with self.log.open("a") as file:
            file.write("download\n")
        folder = numbered(Path(root), 20)
        if self.error:
            (folder / NAMES[0]).write_bytes(b"half")
            raise self.error
        numbered(Path(root), 10, "t10k")
        (folder / f"{NAMES[0]}.gz").write_bytes(b"the archive")


@pytest.mark.parametrize(
    "error", [RuntimeError("Error downloading:\nTried a"), TimeoutError("timed out")]
)
def test_without_a_network_the_error_names_the_synthetic_set_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setattr(torchvision.datasets, "MNIST", FakeDownload(tmp_path / "log", error))
    with pytest.raises(NoDatasetError, match=f"fastload mnist --synthetic {tmp_path}") as caught:
        MNIST(tmp_path, download=True)
    assert " ".join(str(error).split()) in str(caught.value)
    assert list((tmp_path / "MNIST" / "raw").iterdir()) == []
    with pytest.raises(NoDatasetError):
        MNIST(tmp_path)


def test_a_full_disk_is_no_lack_of_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchvision = pytest.importorskip("torchvision")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(torchvision.datasets, "MNIST", FakeDownload(tmp_path / "log", full))
    with pytest.raises(OSError, match="No space left") as caught:
        MNIST(tmp_path, download=True)
    assert caught.value is full


def test_a_download_leaves_the_four_files_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchvision = pytest.importorskip("torchvision")
    monkeypatch.setattr(torchvision.datasets, "MNIST", FakeDownload(tmp_path / "log"))
    assert len(MNIST(tmp_path, download=True)) == 20
    assert sorted(path.name for path in (tmp_path / "MNIST" / "raw").iterdir()) == sorted(NAMES)
    assert len(MNIST(tmp_path, download=True)) == 20
    assert (tmp_path / "log").read_text() == "download\n"


def test_a_download_without_torchvision_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)
    with pytest.raises(NoDatasetError, match="needs torchvision.*--synthetic"):
        MNIST(tmp_path, download=True)


def test_a_download_does_not_take_synthetic_digits_for_mnist(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    with pytest.warns(
        UserWarning, match="synthetic digits, which are not MNIST. Nothing was downloaded"
    ):
        MNIST(small, download=True)
    shutil.copytree(small, tmp_path / "part")
    (tmp_path / "part" / "MNIST" / "raw" / NAMES[0]).unlink()
    with pytest.raises(NoDatasetError, match="part of a synthetic set"):
        MNIST(tmp_path / "part", download=True)


# ---- the command ----


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, ["mnist", *map(str, arguments)])


def test_the_command_writes_a_set_and_says_that_it_is_not_mnist(tmp_path: Path) -> None:
    result = call("--synthetic", tmp_path / "out", "--train", "30", "--test", "12", "--seed", "4")
    assert result.exit_code == 0, result.output
    assert "Synthetic digits, not MNIST: 30 for training, 12 for testing" in result.output
    assert f"fastload.datasets.MNIST('{tmp_path / 'out'}', train=True)" in result.output
    generate_digits(tmp_path / "same", train=30, test=12, seed=4)
    assert torch.equal(MNIST(tmp_path / "out").data, MNIST(tmp_path / "same").data)
    assert len(MNIST(tmp_path / "out", train=False)) == 12


def test_the_command_refuses_in_one_line(tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).write_bytes(b"real")
    result = call("--synthetic", tmp_path)
    assert result.exit_code == 1
    assert result.output.startswith(
        f"Error: {tmp_path / NAMES[0]} (4 bytes) was not made by fastload"
    )
    assert result.output.count("\n") == 1
    assert "--synthetic" in call().output
