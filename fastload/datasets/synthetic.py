"""Data for measurements and trials, from a seed: JPEG files as large as photographs, and digits in MNIST's files.

An image is a texture with an amplitude spectrum of about 1/f, as photographs have (Field, "Relations between the
statistics of natural images and the response properties of cortical cells", J. Opt. Soc. Am. A, 1987), in which
brightness varies more than colour. A digit is a glyph that is moved, turned, stretched and bent on a noisy ground.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from fastload._kit.disk import replace_file, write_file
from fastload._kit.pool import in_order
from fastload.datasets.idx import write_idx

Floats = NDArray[np.float32]

_FORMAT = 2  # raise it when the same seed gives other data: no set mixes two formats
_QUALITY = 92  # of the JPEGs; with _CONTRAST it sets their size, 80 to 110 KB on average
_CONTRAST = 32.0
_FIELDS, _FIELD_SIDE = 12, 1024
_SIDE = 28  # pixels of a digit, as in MNIST
_BLOCK = 1000  # digits that are drawn at once, each block from a random stream of its own
_GLYPHS = (
    "0e11111111110e 040c040404040e 0e11010204081f 1f02040201110e 02060a121f0202 "
    "1f101e0101110e 0608101e11110e 1f010204080808 0e11110e11110e 0e11110f01020c"
)
"""The digits on 5 x 7 cells: a byte for each row."""


def generate_images(
    out: str | os.PathLike[str],
    *,
    count: int = 2048,
    seed: int = 0,
    classes: int = 16,
    workers: int | None = None,
    progress: bool = False,
) -> Path:
    """Write `count` JPEG files below `out`, and return the path of their list.

    The layout is ImageNet's: `train/n00000011/n00000011_42.JPEG` is image number 42, of class `42 % classes` (ids count
    from n00000001). Line k (from 0) of `filelist.txt` is the relative path of number k. Sides are 300 to 640 pixels,
    files 80 to 110 KB on average.

    An image is a function of (seed, classes, number) and the versions of NumPy and Pillow, not of `count` or `workers`.
    Each file exists completely or not at all, and the list is written last. After a killed run, the same call writes
    the missing images. A larger `count` adds images.

    Args:
        workers: threads that paint. None: one for each CPU that this process may use. 0: only the calling thread.
        progress: show a bar on standard error if that is a terminal.

    Raises ValueError for arguments out of range. Raises FileExistsError if `out` holds images of another seed or number
    of classes, or images that fastload did not write.
    """
    from fastload.image.encode import encode_jpeg

    limits = {"count": (count, 1, 2**30), "seed": (seed, 0, 2**63 - 1)}
    _check(**limits, classes=(classes, 1, 99_999_999), workers=(workers or 0, 0, 1024))
    out = Path(out)
    file_list = out / "filelist.txt"
    made = {"format": _FORMAT, "seed": seed, "classes": classes}
    _claim(out / "synthetic.json", made, [out / "train", file_list])
    ids = [f"n{number % classes + 1:08d}" for number in range(count)]
    paths = [out / f"train/{of}/{of}_{number}.JPEG" for number, of in enumerate(ids)]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True, exist_ok=True)
    missing = [number for number, path in enumerate(paths) if not path.exists()]
    fields = [_field(np.random.default_rng([seed, 0, k])) for k in range(_FIELDS if missing else 0)]

    def make(number: int) -> None:
        rng = np.random.default_rng([seed, 1, number])
        planes = _paint(rng, fields, hue=2 * np.pi * (number % classes) / classes)
        write_file(paths[number], encode_jpeg(planes, quality=_QUALITY), durable=False)

    bar = {"total": count, "initial": count - len(missing), "disable": None if progress else True}
    with in_order(make, missing, workers) as images:
        for _ in tqdm(images, unit="image", **bar):  # type: ignore[call-overload]
            pass
    listed = "".join(f"{path.relative_to(out)}\n" for path in paths)
    write_file(file_list, listed.encode(), durable=False)
    return file_list


def generate_digits(
    root: str | os.PathLike[str],
    *,
    train: int = 60_000,
    test: int = 10_000,
    seed: int = 0,
    progress: bool = False,
) -> Path:
    """Write a synthetic set in MNIST's layout below `root`, and return the folder of its files, `root/MNIST/raw`.

    It writes four IDX files, as MNIST has them, and SYNTHETIC.txt, which says that they are not MNIST. Labels are drawn
    evenly from 0 to 9. Image k is a function of (seed, split, k) and the version of NumPy: a larger set begins with the
    images of a smaller one. Each file exists completely or not at all. After a killed run, the same call writes the
    missing files.

    Args:
        root: the folder to pass to `fastload.datasets.MNIST`.
        train, test: number of images for training and for testing.
        seed: same seed, same digits.
        progress: show a bar on standard error if that is a terminal.

    Raises ValueError for arguments out of range, and FileExistsError if the folder has a set that fastload did not
    write, or wrote with other arguments. Nothing is overwritten.
    """
    from fastload.datasets.mnist import MARKER, raw_folder, split_files

    _check(train=(train, 1, 10_000_000), test=(test, 1, 10_000_000), seed=(seed, 0, 2**31 - 1))
    folder = Path(raw_folder(root))
    splits = {True: train, False: test}
    names = [name for split in splits for name in split_files(split)]
    others = [place / name for place in (folder, Path(root).expanduser()) for name in names]
    said = "SYNTHETIC: these images are not MNIST. `fastload mnist --synthetic` drew them, with\n"
    made = {"format": _FORMAT, "seed": seed, "train": train, "test": test}
    bar = tqdm(total=train + test, unit="image", disable=None if progress else True)
    folder.mkdir(parents=True, exist_ok=True)
    with bar:
        _claim(folder / MARKER, made, others, said)
        for split, count in splits.items():
            paths = [folder / name for name in split_files(split)]
            if not all(path.exists() for path in paths):
                arrays = np.empty((count, _SIDE, _SIDE), np.uint8), np.empty(count, np.uint8)
                for begin in range(0, count, _BLOCK):
                    rng = np.random.default_rng([seed, split, begin // _BLOCK])
                    for array, drawn in zip(arrays, _draw(rng), strict=True):
                        array[begin : begin + _BLOCK] = drawn[: count - begin]
                    bar.update(min(_BLOCK, count - begin))
                for path, array in zip(paths, arrays, strict=True):
                    with replace_file(path) as file:
                        write_idx(file, array)
    return folder


def _check(**limits: tuple[int, int, int]) -> None:
    for name, (value, low, high) in limits.items():
        if not low <= value <= high:
            raise ValueError(f"{name} must be in {low}..{high}, got {value}")


def _claim(marker: Path, made: dict[str, Any], others: Iterable[Path], said: str = "") -> None:
    """Write how a set is made, before its first file. Raise FileExistsError if another set is there."""
    wanted = json.dumps(made)
    if not marker.exists():
        for path in filter(Path.exists, others):
            raise FileExistsError(
                f"{path} ({path.stat().st_size:,} bytes) was not made by fastload, so it will not be overwritten. "
                "Choose another folder"
            )
        marker.parent.mkdir(parents=True, exist_ok=True)
        write_file(marker, f"{said}{wanted}\n".encode())
    found = marker.read_text().splitlines()
    if wanted not in found:
        raise FileExistsError(
            f"{marker.parent} holds images made with {found[-1:]}, but {wanted} was requested. Choose another folder"
        )


def _paint(rng: np.random.Generator, fields: list[Floats], *, hue: float) -> NDArray[np.uint8]:
    """Return an image as uint8[3, H, W], luma and two chroma planes. `hue`, in radians, tints it."""
    long = int(rng.integers(400, 640, endpoint=True))
    short = max(300, round(long / rng.choice([4 / 3, 4 / 3, 3 / 2, 5 / 4, 1.0, 16 / 9])))
    height, width = (short, long) if rng.random() < 0.7 else (long, short)
    contrast = _CONTRAST * rng.uniform(0.6, 1.3)
    hue, saturation = hue + rng.normal(0, 0.8), rng.uniform(0, 30)
    mixes = (
        (rng.uniform(70, 180), (0.8, 0.6)),
        (128 + saturation * np.cos(hue), (0.2,)),
        (128 + saturation * np.sin(hue), (0.2,)),
    )
    planes = np.empty((3, height, width), np.float32)
    for plane, (mean, weights) in zip(planes, mixes, strict=True):
        plane[:] = mean
        for weight in weights:
            top, left = rng.integers(_FIELD_SIDE - height), rng.integers(_FIELD_SIDE - width)
            field = fields[rng.integers(_FIELDS)]
            plane += np.float32(weight * contrast) * field[top : top + height, left : left + width]
    return planes.clip(0, 255).astype(np.uint8)


def _field(rng: np.random.Generator) -> Floats:
    """Return float32[side, side] of periodic noise with an amplitude spectrum of about 1/f."""
    y, x = np.fft.fftfreq(_FIELD_SIDE)[:, None], np.fft.rfftfreq(_FIELD_SIDE)
    frequency = np.hypot(x, y * rng.uniform(0.5, 2))
    frequency[0, 0] = np.inf
    spectrum = rng.standard_normal((2, *frequency.shape)) * frequency ** -rng.uniform(0.95, 1.25)
    field = np.fft.irfft2(spectrum[0] + 1j * spectrum[1], s=(_FIELD_SIDE, _FIELD_SIDE))
    return np.asarray(field / field.std(), np.float32)


def _draw(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return a block of digits, uint8[n, 28, 28], and their labels, uint8[n]."""

    def uniform(low: float, high: float) -> Floats:
        return rng.uniform(low, high, (_BLOCK, 1, 1)).astype(np.float32)

    rows = np.frombuffer(bytes.fromhex(_GLYPHS), np.uint8).reshape(10, 7, 1)
    glyphs = np.pad(np.unpackbits(rows, axis=2)[:, :, 3:], ((0, 0), (2, 2), (2, 2)))
    labels = rng.integers(10, size=_BLOCK, dtype=np.uint8)
    # From pixels back to the cells of a glyph: move, turn, stretch, slant, bend.
    y, x = np.indices((_SIDE, _SIDE), np.float32) - np.float32((_SIDE - 1) / 2)
    x, y = x - uniform(-2.8, 2.8), y - uniform(-2.8, 2.8)
    turn, size, aspect = uniform(-0.4, 0.4), uniform(2.0, 3.0), uniform(0.8, 1.25)
    u = (np.cos(turn) * x + np.sin(turn) * y) / (size * aspect)
    v = (np.cos(turn) * y - np.sin(turn) * x) / (size / aspect)
    u += uniform(-0.4, 0.4) * v + uniform(0, 0.6) * np.sin(uniform(0.4, 1.2) * v + uniform(0, 6.3))
    u, v = np.clip(u + 4, 0, 7.99), np.clip(v + 5, 0, 9.99)
    left, top = u.astype(np.intp), v.astype(np.intp)
    u, v, of = u - left, v - top, labels[:, None, None]
    upper = glyphs[of, top, left] * (1 - u) + glyphs[of, top, left + 1] * u
    lower = glyphs[of, top + 1, left] * (1 - u) + glyphs[of, top + 1, left + 1] * u
    ink = upper * (1 - v) + lower * v
    ink = np.clip((ink - uniform(0.25, 0.5)) * uniform(2, 5) + 0.5, 0, 1) * uniform(150, 255)
    ink += rng.standard_normal(ink.shape, np.float32) * uniform(0, 30)
    return ink.clip(0, 255).astype(np.uint8), labels
