"""Promises:
- Sample images have the statistics and file sizes of photographs, and ImageNet's layout.
- Sample images are the same for any number of workers, and making them can be resumed.
- Synthetic digits are marked as such, learnable and the same for a seed. They exist whole or not at all. See
  also `tests/parameters/test_parameters_examples.py`.
- Synthetic digits never overwrite a file that fastload did not make.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload.datasets import MNIST, ImageFileList, ImageFolder, digits, synthetic
from fastload.datasets.synthetic import generate_digits, generate_images

COUNT = 32
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")


@pytest.fixture(scope="module", autouse=True)
def _fields_are_made_once() -> Iterator[None]:
    """Keep the noise of a seed: every call of `generate_images` makes it anew, which takes longer than ten images."""
    kept: dict[str, synthetic.Floats] = {}
    make = synthetic._field

    def field(rng: np.random.Generator) -> synthetic.Floats:
        key = str(rng.bit_generator.state)
        if key not in kept:
            kept[key] = make(rng)
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "_field", field)
        yield


@pytest.fixture(scope="module")
def file_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_images(tmp_path_factory.mktemp("images"), count=COUNT, workers=2)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    generate_digits(root, train=1200, test=70)
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


# ---- images ----


def test_the_layout_is_that_of_imagenet_and_the_list_is_in_order_of_numbers(
    file_list: Path,
) -> None:
    lines = file_list.read_text().splitlines()
    assert lines[:2] == ["train/n00000001/n00000001_0.JPEG", "train/n00000002/n00000002_1.JPEG"]
    assert [int(Path(line).stem.split("_")[1]) for line in lines] == list(range(COUNT))
    listed, found = ImageFileList(file_list), ImageFolder(file_list.parent / "train")
    assert listed.classes == found.classes == [f"n{k:08d}" for k in range(1, 17)]
    assert sorted(listed.samples) == sorted(found.samples)
    assert listed.targets.tolist() == [number % 16 for number in range(COUNT)]
    assert set(contents(file_list.parent)) == {"filelist.txt", "synthetic.json", *lines}


def test_images_have_the_sizes_and_the_spectrum_of_photographs(file_list: Path) -> None:
    """The power goes with frequency to about -2, measured on the upper left 256 x 256 pixels."""
    images = [image for image, _ in ImageFileList(file_list)]
    sides = np.array([image.size for image in images])
    assert (sides.min(), sides.max()) >= (300, 400)
    assert sides.max() <= 640
    assert {image.width > image.height for image in images} == {True, False}
    sizes = [(file_list.parent / line).stat().st_size for line in file_list.read_text().split()]
    assert 80_000 <= np.mean(sizes) <= 110_000
    side, slopes, spreads = 256, [], []
    f = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side))
    edges = np.geomspace(0.02, 0.35, 12)
    window = np.hanning(side)[:, None] * np.hanning(side)
    for image in images:
        luma = np.asarray(image.convert("L"), dtype=float)[:side, :side]
        power = np.abs(np.fft.fft2((luma - luma.mean()) * window)) ** 2
        bands = [power[(f >= low) & (f < high)].mean() for low, high in itertools.pairwise(edges)]
        slopes.append(np.polyfit(np.log(edges[1:] * edges[:-1]) / 2, np.log(bands), 1)[0])
        red, green, blue = np.moveaxis(np.asarray(image, dtype=float), -1, 0)
        spreads.append((red + green + blue).std() / 3 / (red - blue).std())
    assert -2.6 < np.mean(slopes) < -1.9
    assert np.mean(spreads) > 1, "brightness varies more than colour"


def test_the_bytes_depend_on_seed_and_number_alone(file_list: Path, tmp_path: Path) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1]
    there = contents(file_list.parent)
    for workers in (0, 5):
        here = contents(generate_images(tmp_path / str(workers), count=6, workers=workers).parent)
        assert all(there[name] == made for name, made in here.items() if name != "filelist.txt")
    other = contents(generate_images(tmp_path / "other", count=6, seed=1, workers=0).parent)
    assert not {*other.values()} & {*there.values()}
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])


def test_a_stopped_run_leaves_no_half_file_and_the_next_completes_it(
    file_list: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint, painted = synthetic._paint, []

    def stopping(*arguments: Any, **options: Any) -> Any:
        painted.append(1)
        if len(painted) == 4:
            raise KeyboardInterrupt
        return paint(*arguments, **options)

    monkeypatch.setattr(synthetic, "_paint", stopping)
    with pytest.raises(KeyboardInterrupt):
        generate_images(tmp_path, count=6, workers=0)
    left = contents(tmp_path)
    assert len(left) == 3 + 1
    assert "filelist.txt" not in left
    for count in (6, 6, 8):
        generate_images(tmp_path, count=count, workers=0)
    assert len(painted) == 4 + 3 + 2
    whole = contents(file_list.parent)
    assert {**contents(tmp_path), "filelist.txt": b""}.items() <= {
        **whole,
        "filelist.txt": b"",
    }.items()


def test_images_that_were_not_made_so_are_left_alone(tmp_path: Path) -> None:
    generate_images(tmp_path, count=1, seed=1, workers=0)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r'"seed": 1.*"seed": 0'):
        generate_images(tmp_path, count=1, seed=0, workers=0)
    with pytest.raises(FileExistsError, match=r'"classes": 16.*"classes": 4'):
        generate_images(tmp_path, count=1, seed=1, classes=4, workers=0)
    assert contents(tmp_path) == before
    (tmp_path / "synthetic.json").unlink()
    with pytest.raises(FileExistsError, match="not made by fastload"):
        generate_images(tmp_path, count=1, seed=1, workers=0)
    shutil.rmtree(tmp_path / "train")
    with pytest.raises(
        FileExistsError, match=r"filelist.txt \(\d+ bytes\) was not made by fastload"
    ):
        generate_images(tmp_path, count=1, seed=1, workers=0)


def test_an_argument_out_of_range_is_named(tmp_path: Path) -> None:
    for argument in ({"count": 0}, {"seed": -1}, {"classes": 0}, {"workers": -1}):
        with pytest.raises(ValueError, match=f"^{next(iter(argument))} must be in "):
            generate_images(tmp_path / "out", **argument)
    for argument in ({"train": 0}, {"test": 10_000_001}, {"seed": -1}):
        with pytest.raises(ValueError, match=f"^{next(iter(argument))} must be in "):
            generate_digits(tmp_path / "out", **argument)
    assert not (tmp_path / "out").exists()


# ---- digits ----


def test_a_synthetic_set_says_so_in_a_file_an_attribute_and_its_repr(small: Path) -> None:
    folder = small / "MNIST" / "raw"
    text, made = (folder / "SYNTHETIC.txt").read_text().splitlines()
    assert "not MNIST" in text
    assert json.loads(made) == {"format": 2, "seed": 0, "train": 1200, "test": 70}
    dataset = MNIST(small)
    assert dataset.synthetic
    assert (
        repr(dataset) == f"MNIST({str(small)!r}: 1200 samples for training, synthetic: not MNIST)"
    )
    assert digits.generate_digits is generate_digits


def test_a_set_depends_on_its_seed_alone_and_begins_with_a_smaller_one(
    small: Path, tmp_path: Path
) -> None:
    generate_digits(tmp_path / "less", train=1001, test=3)
    generate_digits(tmp_path / "other", train=30, test=30, seed=1)
    whole, less, other = (MNIST(root) for root in (small, tmp_path / "less", tmp_path / "other"))
    assert torch.equal(less.data, whole.data[:1001])
    assert torch.equal(less.targets, whole.targets[:1001])
    assert not torch.equal(other.data, whole.data[:30])
    assert not torch.equal(MNIST(tmp_path / "other", False).data, other.data)
    counts = whole.targets.bincount(minlength=10)
    assert (len(counts), counts.min() >= 80, counts.max() <= 160) == (10, True, True)
    assert len(whole.data.reshape(1200, -1).unique(dim=0)) == 1200


def test_a_stopped_run_leaves_no_half_file_of_digits_and_the_next_completes_it(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, drawn = synthetic._draw, []

    def stopping(rng: np.random.Generator) -> Any:
        drawn.append(1)
        if len(drawn) == 3:
            raise KeyboardInterrupt
        return draw(rng)

    monkeypatch.setattr(synthetic, "_draw", stopping)
    with pytest.raises(KeyboardInterrupt):
        generate_digits(tmp_path, train=1200, test=70)
    folder = tmp_path / "MNIST" / "raw"
    assert {path.name for path in folder.iterdir()} == {*NAMES, "SYNTHETIC.txt"}
    for _ in range(2):
        generate_digits(tmp_path, train=1200, test=70)
    assert len(drawn) == 4
    assert contents(tmp_path) == contents(small)


def test_digits_that_were_not_made_so_are_left_alone(small: Path, tmp_path: Path) -> None:
    before = contents(small)
    with pytest.raises(
        FileExistsError, match=r'made with .*"seed": 0.* but .*"seed": 3.* was requested'
    ):
        generate_digits(small, train=1200, test=70, seed=3)
    with pytest.raises(FileExistsError, match='"train": 1300'):
        generate_digits(small, train=1300, test=70)
    assert contents(small) == before
    for number, name in enumerate((f"MNIST/raw/{NAMES[0]}", "t10k-labels-idx1-ubyte")):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"real")
        with pytest.raises(
            FileExistsError, match=r"\(4 bytes\) was not made by fastload, so it will not"
        ):
            generate_digits(tmp_path / str(number), train=5, test=5)
        assert list(contents(tmp_path / str(number)).values()) == [b"real"]
