"""Promises:
- Sample images have the statistics and file sizes of photographs, and ImageNet's layout.
- A sample image carries its number in its name and in its pixels.
- Sample images are the same for any number of workers, and making them can be resumed.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastload.datasets import ImageFileList, ImageFolder, synthetic
from fastload.datasets.synthetic import generate_images
from tests.children import run_python

COUNT = 32


def inner(*sides: slice) -> tuple[slice, ...]:
    """Return the inner half of a block: compression and resizing blur the border."""
    quarters = [(side.stop - side.start) / 4 for side in sides]
    return tuple(
        slice(round(side.start + quarter), round(side.stop - quarter))
        for side, quarter in zip(sides, quarters, strict=True)
    )


def read_number(image: Image.Image) -> int:
    """Return the number of a synthetic image, which may be resized, read from its pixels."""
    pixels = np.asarray(image)
    blocks = (synthetic._block(*pixels.shape[:2], bit) for bit in range(40))
    means = np.array([pixels[inner(*block)].mean() for block in blocks])
    bits = means > means[:2].mean()  # of black and of white
    number = sum(1 << position for position, bit in enumerate(bits[2:32]) if bit)
    assert np.array_equal(bits, synthetic._code(number)), "the image holds no number"
    return number


@pytest.fixture(scope="module", autouse=True)
def _fields_are_made_once() -> Iterator[None]:
    """Keep the noise of a seed: every call of `generate_images` makes it anew, which takes longer than ten images."""
    kept: dict[str, synthetic.Plane] = {}
    make = synthetic._field

    def field(rng: np.random.Generator) -> synthetic.Plane:
        key = str(rng.bit_generator.state)
        if key not in kept:
            kept[key] = make(rng)
            kept[key].flags.writeable = False
        return kept[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "_field", field)
        yield


@pytest.fixture(scope="module")
def file_list(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate_images(tmp_path_factory.mktemp("images"), count=COUNT, workers=2)


@pytest.fixture(scope="module")
def images(file_list: Path) -> list[Image.Image]:
    return [image for image, _ in ImageFileList(file_list)]


def contents(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_layout_is_that_of_imagenet_and_the_list_is_in_order_of_numbers(
    file_list: Path,
) -> None:
    lines = file_list.read_text().splitlines()
    assert lines[:2] == ["train/n00000001/n00000001_0.JPEG", "train/n00000002/n00000002_1.JPEG"]
    assert [int(Path(line).stem.split("_")[1]) for line in lines] == list(range(COUNT))
    listed = ImageFileList(file_list)
    found = ImageFolder(file_list.parent / "train")
    assert listed.classes == found.classes == [f"n{k:08d}" for k in range(1, 17)]
    assert sorted(listed.samples) == sorted(found.samples)
    assert listed.targets.tolist() == [number % 16 for number in range(COUNT)]
    assert set(contents(file_list.parent)) == {"filelist.txt", "synthetic.json", *lines}


def test_sides_and_file_sizes_are_those_of_photographs(
    file_list: Path, images: list[Image.Image]
) -> None:
    sides = np.array([image.size for image in images])
    assert sides.min() >= 300
    assert sides.max() <= 640
    assert len({image.size for image in images}) > COUNT // 2
    assert {image.width > image.height for image in images} == {True, False}
    sizes = [(file_list.parent / line).stat().st_size for line in file_list.read_text().split()]
    assert 80_000 <= np.mean(sizes) <= 110_000
    with Image.open(file_list.parent / file_list.read_text().split()[0]) as file:
        assert file.format == "JPEG"


def test_the_power_spectrum_falls_as_in_photographs(images: list[Image.Image]) -> None:
    """The power goes with frequency to about -2, measured on the upper left 256 x 256 pixels."""
    side = 256
    f = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.fftfreq(side))
    edges = np.geomspace(0.02, 0.35, 12)
    slopes = []
    for image in images:
        luma = np.asarray(image.convert("L"), dtype=float)[:side, :side]
        window = np.hanning(side)[:, None] * np.hanning(side)
        power = np.abs(np.fft.fft2((luma - luma.mean()) * window)) ** 2
        bands = [power[(f >= low) & (f < high)].mean() for low, high in itertools.pairwise(edges)]
        slopes.append(np.polyfit(np.log(edges[1:] * edges[:-1]) / 2, np.log(bands), 1)[0])
    assert -2.6 < np.mean(slopes) < -1.9
    assert min(slopes) > -3
    assert max(slopes) < -1.4


def test_colours_go_together_and_brightness_varies_more_than_colour(
    images: list[Image.Image],
) -> None:
    correlations, spreads = [], []
    for image in images:
        red, green, blue = np.moveaxis(np.asarray(image, dtype=float)[:250], -1, 0)
        correlations.append(np.corrcoef(red.ravel(), green.ravel())[0, 1])
        spreads.append((red + green + blue).std() / 3 / (red - blue).std())
    assert 0.5 < np.mean(correlations) < 0.99
    assert np.mean(spreads) > 1


def test_the_number_is_read_from_the_pixels_also_of_a_smaller_image(
    images: list[Image.Image],
) -> None:
    assert [read_number(image) for image in images] == list(range(COUNT))
    for size in ((256, 256), (300, 240)):
        assert [read_number(image.resize(size)) for image in images[:8]] == list(range(8))


@pytest.mark.parametrize("number", [2**30 - 1, 2**30 - 2, 0x2AAAAAAA, 0x15555555])
def test_large_numbers_survive_too(number: int) -> None:
    field = np.zeros((1024, 1024), dtype=np.float32)
    planes = synthetic._paint(np.random.default_rng(number), [field], number, hue=0.0)
    assert read_number(planes[0]) == number


@pytest.mark.parametrize("workers", [0, 5])
def test_the_bytes_depend_on_seed_and_number_alone(
    file_list: Path, tmp_path: Path, workers: int
) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1]
    here = contents(generate_images(tmp_path / "a", count=12, workers=workers).parent)
    there = contents(file_list.parent)
    assert all(there[name] == made for name, made in here.items() if name != "filelist.txt")
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])


@pytest.mark.parametrize("workers", [0, 3])
def test_as_many_threads_paint_as_were_asked_for(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paint, seen = synthetic._paint, set()
    together = threading.Barrier(max(1, workers))

    def painted(*arguments: Any, **options: Any) -> Any:
        together.wait(30)
        seen.add(threading.current_thread())
        return paint(*arguments, **options)

    monkeypatch.setattr(synthetic, "_paint", painted)
    generate_images(tmp_path, count=6, workers=workers)
    assert len(seen) == max(1, workers)
    assert (threading.main_thread() in seen) == (workers == 0)


def test_other_seeds_and_numbers_give_other_images(
    images: list[Image.Image], tmp_path: Path
) -> None:
    other = ImageFileList(generate_images(tmp_path, count=8, seed=1, workers=0))
    distinct = {image.resize((16, 16)).tobytes() for image in images}
    distinct |= {image.resize((16, 16)).tobytes() for image, _ in other}
    assert len(distinct) == COUNT + 8


KILLED = """
import os, signal, sys
from fastload.datasets.synthetic import generate_images

def report(done, count):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)

generate_images(sys.argv[1], count=12, workers=2, progress=report)
"""


def test_a_killed_run_leaves_no_half_file_and_the_next_completes_it(
    file_list: Path, tmp_path: Path
) -> None:
    assert run_python("-c", KILLED, tmp_path).returncode == -9
    whole = contents(file_list.parent)
    left = {name: made for name, made in contents(tmp_path).items() if name.startswith("train/")}
    assert 5 <= len(left) < 12
    assert all(whole[name] == made for name, made in left.items())
    assert not (tmp_path / "filelist.txt").exists()
    (tmp_path / ".partial" / "n00000001_0.JPEG").write_bytes(b"half an image")

    told: list[tuple[int, int]] = []
    generate_images(tmp_path, count=12, workers=2, progress=lambda *done: told.append(done))
    assert told == [(done, 12) for done in range(len(left) + 1, 13)]
    done = contents(tmp_path)
    assert len(done) == 12 + 2
    assert all(whole[name] == made for name, made in done.items() if name.startswith("train/"))


def test_a_full_disk_leaves_no_half_file_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(descriptor: int, name: str, content: bytes) -> int:
        if "_2.JPEG" not in name:
            return os.write(descriptor, content)
        os.write(descriptor, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", name)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("fastload._kit.disk.write_all", fill_up)
        generate_images(tmp_path, count=5, workers=0)
    names = [f"train/n{k + 1:08d}/n{k + 1:08d}_{k}.JPEG" for k in range(2)]
    assert set(contents(tmp_path)) == {*names, "synthetic.json"}
    completed = ImageFileList(generate_images(tmp_path, count=5, workers=0))
    assert [read_number(image) for image, _ in completed] == list(range(5))


def test_a_second_call_makes_nothing_and_a_larger_count_makes_the_rest(tmp_path: Path) -> None:
    told: list[int] = []
    calls = [
        generate_images(
            tmp_path, count=count, workers=0, progress=lambda done, _: told.append(done)
        )
        for count in (3, 3, 5)
    ]
    assert told == [1, 2, 3, 4, 5]
    assert len(set(calls)) == 1
    assert len(calls[0].read_text().split()) == 5


def test_a_run_holds_the_directory_against_a_second_one(tmp_path: Path) -> None:
    def try_to_claim(done: int, count: int) -> None:
        with (tmp_path / "synthetic.json").open() as marker, pytest.raises(BlockingIOError):
            fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)

    generate_images(tmp_path, count=2, workers=1, progress=try_to_claim)
    with (tmp_path / "synthetic.json").open() as marker:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert json.load(marker)["seed"] == 0


def test_images_of_another_seed_are_not_mixed_in(tmp_path: Path) -> None:
    generate_images(tmp_path, count=1, seed=1, workers=0)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError, match=r'"seed": 1.*"seed": 0'):
        generate_images(tmp_path, count=1, seed=0, workers=0)
    with pytest.raises(FileExistsError, match=r'"classes": 16.*"classes": 4'):
        generate_images(tmp_path, count=1, seed=1, classes=4, workers=0)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["train/n01440764/n01440764_1.JPEG", "filelist.txt"])
def test_a_dataset_that_was_not_made_here_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("real")
    with pytest.raises(FileExistsError, match="not made by fastload"):
        generate_images(tmp_path, count=1, workers=0)
    assert contents(tmp_path) == {name: b"real"}


@pytest.mark.parametrize("argument", [{"count": 0}, {"seed": -1}, {"classes": 0}, {"workers": -1}])
def test_an_argument_out_of_range_is_named(tmp_path: Path, argument: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(argument))} must be in "):
        generate_images(tmp_path / "out", **argument)
    assert not (tmp_path / "out").exists()


def test_a_bar_is_shown_on_a_terminal_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate_images(tmp_path / "a", count=2, workers=0, progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    generate_images(tmp_path / "b", count=2, workers=0)
    assert capsys.readouterr() == ("", "")
    generate_images(tmp_path / "b", count=3, workers=0, progress=True)
    assert "3/3" in capsys.readouterr().err
