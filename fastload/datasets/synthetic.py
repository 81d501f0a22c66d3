"""Sample images from a seed: JPEG files that cost as much to read and decode as photographs.

An image is laid out as photographs are. It has surfaces in front of each other, each with its own colour, brightness
and texture. Borders are sharp or out of focus. Textures have an amplitude spectrum of about 1/f (Field, "Relations
between the statistics of natural images and the response properties of cortical cells", J. Opt. Soc. Am. A, 1987),
stretched in a random direction. Brightness varies more than colour. A strip at the bottom shows the image's number in
black and white.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from fastload._kit.disk import locked, write_file
from fastload._kit.pool import in_order
from fastload.image.encode import encode_jpeg

Plane = NDArray[np.float32]

SIDES = (300, 640)  # pixels, both inclusive
QUALITY = 92  # of the JPEGs; with _CONTRAST it sets their size, 80 to 110 KB on average

_FORMAT = 1  # raise it when the same seed gives other images: no set mixes two formats
_FIELDS, _FIELD_SIDE = 12, 1024
_ASPECTS = (4 / 3, 4 / 3, 3 / 2, 5 / 4, 1.0, 16 / 9)
_CONTRAST = 34.0

_STRIP = 1 / 12  # the strip's share of the height
# Blocks in the strip: one is black, one white, 30 are the bits of the number, and 8 those of its checksum.
_ROWS, _COLUMNS = 2, 20


def generate_images(
    out: str | os.PathLike[str],
    *,
    count: int = 2048,
    seed: int = 0,
    classes: int = 16,
    workers: int | None = None,
    progress: bool | Callable[[int, int], None] = False,
) -> Path:
    """Write `count` JPEG files below `out`, and return the path of their list.

    The layout is ImageNet's: `train/n00000011/n00000011_42.JPEG` is image number 42, of class `42 % classes` (ids count
    from n00000001). Line k (from 0) of `filelist.txt` is the relative path of number k. Sides are 300 to 640 pixels,
    files 80 to 110 KB on average.

    An image is a function of (seed, classes, number) and the versions of NumPy and Pillow, not of `count` or `workers`.
    Each file exists completely or not at all, and the list is written last. After a killed run, the same call writes
    the missing images. A larger `count` adds images. If two runs start at once, the second waits for the first.

    Args:
        workers: threads that paint. None: one for each CPU that this process may use. 0: only the calling thread.
        progress: True for a bar on standard error if that is a terminal, or a callable that gets (images done,
            `count`).

    Raises ValueError for arguments out of range. Raises FileExistsError if `out` holds images of another seed or number
    of classes, or images that fastload did not write.
    """
    _check("count", count, 1, 2**30)
    _check("seed", seed, 0, 2**63 - 1)
    _check("classes", classes, 1, 99_999_999)
    _check("workers", workers or 0, 0, 1024)
    out = Path(out)
    file_list = out / "filelist.txt"
    with _claim(out, {"format": _FORMAT, "seed": seed, "classes": classes}) as scratch:
        names = [_name(number, classes) for number in range(count)]
        missing = [number for number, name in enumerate(names) if not (out / name).exists()]
        for directory in {os.path.dirname(name) for name in names}:
            (out / directory).mkdir(parents=True, exist_ok=True)
        if missing:
            fields = [_field(np.random.default_rng([seed, 0, k])) for k in range(_FIELDS)]
            make = partial(_make, out, scratch, fields, seed=seed, classes=classes)
            with in_order(make, missing, workers) as made:
                _report(made, count - len(missing), count, progress)
        listed = "".join(f"{name}\n" for name in names).encode()
        write_file(file_list, listed, partial=scratch / file_list.name, durable=False)
    return file_list


def _make(
    out: Path, scratch: Path, fields: list[Plane], number: int, *, seed: int, classes: int
) -> None:
    """Paint an image and write its file."""
    rng = np.random.default_rng([seed, 1, number])
    planes = _paint(rng, fields, number, hue=2 * np.pi * (number % classes) / classes)
    path = out / _name(number, classes)
    encoded = encode_jpeg(planes, quality=QUALITY)
    write_file(path, encoded, partial=scratch / path.name, durable=False)


def _paint(
    rng: np.random.Generator, fields: list[Plane], number: int, *, hue: float
) -> NDArray[np.uint8]:
    """Return an image as uint8[3, H, W], luma and two chroma planes. `hue`, in radians, tints it."""
    long = int(rng.integers(400, SIDES[1], endpoint=True))
    short = max(SIDES[0], round(long / rng.choice(_ASPECTS)))
    height, width = (short, long) if rng.random() < 0.7 else (long, short)
    canvas = _surface(rng, fields, height, width, hue=hue)
    for _ in range(rng.integers(3, 7)):
        rows, columns, cover = _shape(rng, height, width)
        behind = canvas[:, rows, columns]
        behind += cover * (_surface(rng, fields, *behind.shape[1:], hue=hue) - behind)
    planes = np.clip(canvas, 0, 255).astype(np.uint8)
    for position, bit in enumerate(_code(number)):
        rows, columns = _block(height, width, position)
        planes[:, rows, columns] = np.array([255 if bit else 0, 128, 128])[:, None, None]
    return planes


def _surface(
    rng: np.random.Generator, fields: list[Plane], height: int, width: int, *, hue: float
) -> Plane:
    """Return float32[3, height, width] of one texture in one colour, unclipped."""
    contrast = _CONTRAST * rng.uniform(0.5, 1.5)
    hue += rng.normal(0, 0.8)
    saturation = rng.uniform(0, 30)
    mixes = (
        (rng.uniform(70, 180), (0.8 * contrast, 0.6 * contrast)),
        (128 + saturation * np.cos(hue), (0.2 * contrast,)),
        (128 + saturation * np.sin(hue), (0.2 * contrast,)),
    )
    surface = np.empty((3, height, width), dtype=np.float32)
    for plane, (mean, weights) in zip(surface, mixes, strict=True):
        plane[:] = mean
        for weight in weights:
            field = fields[rng.integers(len(fields))]
            top, left = rng.integers(_FIELD_SIDE - height), rng.integers(_FIELD_SIDE - width)
            plane += np.float32(weight) * field[top : top + height, left : left + width]
    return surface


def _shape(rng: np.random.Generator, height: int, width: int) -> tuple[slice, slice, Plane]:
    """Return the position of a tilted ellipse or rectangle, and how much of each pixel it covers, 0 to 1."""
    size = np.hypot(height, width)
    a, b = size * rng.uniform(0.06, 0.3, 2)
    reach = int(np.hypot(a, b)) + 1
    y, x = int(rng.integers(height)), int(rng.integers(width))
    rows = slice(max(0, y - reach), min(height, y + reach))
    columns = slice(max(0, x - reach), min(width, x + reach))
    tilt = rng.uniform(0, np.pi)
    dy = np.arange(rows.start - y, rows.stop - y, dtype=np.float32)[:, None]
    dx = np.arange(columns.start - x, columns.stop - x, dtype=np.float32)
    u = np.abs(np.float32(np.cos(tilt)) * dx + np.float32(np.sin(tilt)) * dy)
    v = np.abs(np.float32(np.cos(tilt)) * dy - np.float32(np.sin(tilt)) * dx)
    if rng.random() < 0.5:
        inside = np.minimum(np.float32(a) - u, np.float32(b) - v)
    else:
        inside = np.float32(min(a, b)) * (1 - np.hypot(u / np.float32(a), v / np.float32(b)))
    blur = np.float32(rng.choice([1, 1, 3, 12]))
    return rows, columns, np.clip(inside / blur + np.float32(0.5), 0, 1)


def _field(rng: np.random.Generator) -> Plane:
    """Return float32[side, side] of periodic noise with an amplitude spectrum of about 1/f."""
    y = np.fft.fftfreq(_FIELD_SIDE)[:, None]
    x = np.fft.rfftfreq(_FIELD_SIDE)
    direction, stretch = rng.uniform(0, np.pi), rng.uniform(1, 2)
    frequency = np.hypot(
        x * np.cos(direction) + y * np.sin(direction),
        stretch * (y * np.cos(direction) - x * np.sin(direction)),
    )
    frequency[0, 0] = np.inf
    spectrum = rng.standard_normal((2, *frequency.shape)) * frequency ** -rng.uniform(0.95, 1.25)
    field = np.fft.irfft2(spectrum[0] + 1j * spectrum[1], s=(_FIELD_SIDE, _FIELD_SIDE))
    unit: Plane = (field / field.std()).astype(np.float32)
    return unit


def _code(number: int) -> NDArray[np.bool_]:
    """Return the bits of the strip: black, white, the number and its checksum, low bits first."""
    word = number | (zlib.crc32(number.to_bytes(4)) & 0xFF) << 30
    return np.array([False, True] + [bool(word >> position & 1) for position in range(38)])


def _block(height: int, width: int, position: int) -> tuple[slice, slice]:
    """Return the block of bit `position` in an image."""
    row, column = divmod(position, _COLUMNS)
    top, row_height = height * (1 - _STRIP), height * _STRIP / _ROWS
    rows = (round(top + row_height * (row + end)) for end in (0, 1))
    columns = (round(width / _COLUMNS * (column + end)) for end in (0, 1))
    return slice(*rows), slice(*columns)


def _name(number: int, classes: int) -> str:
    wnid = f"n{number % classes + 1:08d}"
    return f"train/{wnid}/{wnid}_{number}.JPEG"


@contextmanager
def _claim(out: Path, made: dict[str, int]) -> Iterator[Path]:
    """Lock `out` against other runs, and yield a directory in it for incomplete files.

    The lock is on the file that says how the images are `made`. It ends with the process, so its holder may delete what
    a killed run has left in the directory.
    """
    out.mkdir(parents=True, exist_ok=True)
    marker, wanted = out / "synthetic.json", json.dumps(made)
    with open(marker, "a+") as file, locked(file):
        file.seek(0)
        found = file.read()
        if not found:
            if (out / "train").exists() or (out / "filelist.txt").exists():
                marker.unlink()
                raise FileExistsError(
                    f"{out} holds images that were not made by fastload. Choose another directory"
                )
            file.write(wanted)
            file.flush()
        elif found != wanted:
            raise FileExistsError(
                f"{out} holds images made with {found}, but {wanted} was requested. Choose another directory"
            )
        scratch = out / ".partial"
        scratch.mkdir(exist_ok=True)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch)


def _report(
    made: Iterator[None], done: int, count: int, progress: bool | Callable[[int, int], None]
) -> None:
    """Wait for each image, and report progress."""
    hidden = None if progress is True else True  # None: hidden unless standard error is a terminal
    with tqdm(total=count, initial=done, unit="image", disable=hidden) as bar:
        for now_done, _ in enumerate(made, done + 1):
            bar.update()
            if callable(progress):
                progress(now_done, count)


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be in {low}..{high}, got {value}")
