"""Synthetic digits in MNIST's files: drawn from strokes, for a machine that cannot download MNIST.

A digit is a few strokes: lines and arcs. Each image bends, turns, stretches and moves them. It draws them with a pen
of its own thickness on a noisy ground. So a convolutional network learns them, and a linear model learns them less
well. They are not MNIST, and an accuracy on them says nothing about MNIST.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from fastload._kit.disk import replace_file, write_file
from fastload.datasets.idx import write_idx
from fastload.datasets.mnist import MARKER, SIDE, hold, raw_folder, split_files

Floats = NDArray[np.float32]

MAX_IMAGES, MAX_SEED = 10_000_000, 2**31 - 1

_FORMAT = 1  # raise it when the same seed gives other digits
_BLOCK = 1000  # images drawn at once; each block has a random stream of its own
_REACH, _GRID = 1.6, 160  # a field covers -_REACH.._REACH both ways, in _GRID x _GRID cells
_UNIT = 10.0  # pixels; a digit is about two units high


def generate_digits(
    root: str | os.PathLike[str],
    *,
    train: int = 60_000,
    test: int = 10_000,
    seed: int = 0,
    progress: bool | Callable[[int, int], None] = False,
) -> Path:
    """Write a synthetic set in MNIST's layout below `root`, and return the folder of its files, `root/MNIST/raw`.

    It writes four IDX files, as MNIST has them, and SYNTHETIC.txt, which says that they are not MNIST. Labels are drawn
    evenly from 0 to 9. Image k is a function of (seed, split, k) and the version of NumPy: a larger set begins with the
    images of a smaller one. Each file exists completely or not at all. After a killed run, the same call writes the
    missing files. If two runs start at once, the second waits for the first.

    Args:
        root: the folder to pass to `fastload.datasets.MNIST`.
        train, test: number of images for training and for testing.
        seed: same seed, same digits.
        progress: True for a bar on standard error if that is a terminal, or a callable that gets (images done, all).

    Raises ValueError for arguments out of range, and FileExistsError if the folder has a set that fastload did not
    write, or wrote with other arguments. Nothing is overwritten.
    """
    for name, value, low in (("train", train, 1), ("test", test, 1), ("seed", seed, 0)):
        high = MAX_SEED if name == "seed" else MAX_IMAGES
        if not low <= value <= high:
            raise ValueError(f"{name} must be in {low}..{high}, got {value}")
    folder = Path(raw_folder(root))
    made = {"format": _FORMAT, "seed": seed, "train": train, "test": test}
    hidden = None if progress is True else True  # None: hidden unless standard error is a terminal
    with (
        _claim(Path(root).expanduser(), folder, made),
        tqdm(total=train + test, unit="image", disable=hidden) as bar,
    ):
        fields = _fields()
        done = 0
        for is_train, count in ((True, train), (False, test)):
            paths = [folder / name for name in split_files(is_train)]
            if not all(path.exists() for path in paths):
                images = np.empty((count, SIDE, SIDE), np.uint8)
                labels = np.empty(count, np.uint8)
                for begin in range(0, count, _BLOCK):
                    part = slice(begin, min(begin + _BLOCK, count))
                    rng = np.random.default_rng([seed, is_train, begin // _BLOCK])
                    images[part], labels[part] = _draw(rng, fields, part.stop - begin)
                    bar.update(part.stop - begin)
                    if callable(progress):
                        progress(done + part.stop, train + test)
                for path, array in zip(paths, (images, labels), strict=True):
                    with replace_file(path) as file:
                        write_idx(file, array)
            done += count
    return folder


@contextmanager
def _claim(root: Path, folder: Path, made: dict[str, int]) -> Iterator[None]:
    """Lock the set against other runs. Write the marker first, so that synthetic files never exist without it."""
    marker, wanted = folder / MARKER, json.dumps(made)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder):
        if not marker.exists():
            _refuse_others(root, folder)
            said = "SYNTHETIC: these images are not MNIST. `fastload mnist --synthetic` drew them, with"
            write_file(marker, f"{said}\n{wanted}\n".encode())
        found = marker.read_text().splitlines()
        if wanted not in found:
            raise FileExistsError(
                f"{folder} holds synthetic digits made with {found[-1]}, but {wanted} was requested. Choose another "
                "folder, or delete that one"
            )
        yield


def _refuse_others(root: Path, folder: Path) -> None:
    names = [name for is_train in (True, False) for name in split_files(is_train)]
    for path in (
        place / (name + end) for place in (folder, root) for name in names for end in ("", ".gz")
    ):
        if path.exists():
            raise FileExistsError(
                f"{path} ({path.stat().st_size:,} bytes) was not made by fastload, so it will not be overwritten. "
                "Choose another folder"
            )


# ---- drawing ----


def _draw(
    rng: np.random.Generator, fields: Floats, n: int
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return n images, uint8[n, SIDE, SIDE], and their labels, uint8[n].

    It draws the random numbers of a whole block and uses the first: so the first n images do not depend on n.
    """
    labels = rng.integers(10, size=_BLOCK)[:n]
    variants = rng.integers(fields.shape[1], size=_BLOCK)[:n]

    def uniform(low: float, high: float) -> Floats:
        drawn = rng.uniform(low, high, _BLOCK)[:n, None, None]
        return np.asarray(drawn, np.float32)

    # From pixels back to the strokes: move, turn, slant, stretch, bend.
    center = (SIDE - 1) / 2
    pixels = np.arange(SIDE, dtype=np.float32) - np.float32(center)
    x = (pixels[None, None, :] - uniform(-2.5, 2.5)) / np.float32(_UNIT)
    y = (pixels[None, :, None] - uniform(-2.5, 2.5)) / np.float32(_UNIT)
    angle, slant = uniform(-0.35, 0.35), uniform(-0.3, 0.3)
    size, aspect = uniform(0.75, 1.15), uniform(0.8, 1.25)
    cosine, sine = np.cos(angle), np.sin(angle)
    u = (cosine * x + sine * y) / (size * aspect)
    v = (cosine * y - sine * x) / (size / aspect)
    u = u + slant * v
    u = u + uniform(0, 0.14) * np.sin(uniform(1.5, 4) * v + uniform(0, 2 * np.pi))
    v = v + uniform(0, 0.14) * np.sin(uniform(1.5, 4) * u + uniform(0, 2 * np.pi))

    distance = fields[labels[:, None, None], variants[:, None, None], _cell(v), _cell(u)]
    ink = np.clip((uniform(0.07, 0.2) - distance) * uniform(6, 12) + np.float32(0.5), 0, 1)
    ink *= uniform(150, 255)
    noise = rng.standard_normal((_BLOCK, SIDE, SIDE), dtype=np.float32)[:n]
    ink += noise * uniform(0, 30)
    return np.clip(ink, 0, 255).astype(np.uint8), labels.astype(np.uint8)


def _cell(place: Floats) -> NDArray[np.intp]:
    cells = (place + np.float32(_REACH)) * np.float32(_GRID / (2 * _REACH))
    found: NDArray[np.intp] = np.clip(cells, 0, _GRID - 1).astype(np.intp)
    return found


def _fields() -> Floats:
    """Return how far each cell is from the strokes: float32[digit, variant, _GRID, _GRID]."""
    places = (np.arange(_GRID) + 0.5) * (2 * _REACH / _GRID) - _REACH
    points = np.stack(np.meshgrid(places, places), axis=-1)  # [row, column, (x, y)]
    most = max(map(len, _STROKES))
    return np.array(
        [
            [_distance(points, variants[k % len(variants)]) for k in range(most)]
            for variants in _STROKES
        ],
        dtype=np.float32,
    )


def _distance(points: NDArray[Any], strokes: list[NDArray[Any]]) -> NDArray[Any]:
    nearest = np.full(points.shape[:2], np.inf)
    for stroke in strokes:
        for begin, end in pairwise(stroke):
            along = end - begin
            part = np.clip((points - begin) @ along / (along @ along), 0, 1)
            from_it = points - begin - part[..., None] * along
            nearest = np.minimum(nearest, np.hypot(from_it[..., 0], from_it[..., 1]))
    return nearest


def _line(*points: tuple[float, float]) -> NDArray[Any]:
    return np.array(points)


def _arc(
    x: float, y: float, width: float, height: float, begin: int = 0, end: int = 360
) -> NDArray[Any]:
    """Return points on an ellipse about (x, y), from angle `begin` to `end`. 0 is right, 90 is below."""
    angles = np.radians(np.linspace(begin, end, max(2, (end - begin) // 18 + 1)))
    return np.stack([x + width * np.cos(angles), y + height * np.sin(angles)], axis=-1)


_TOP_RING, _LOW_RING = _arc(0, -0.42, 0.45, 0.45), _arc(0, 0.42, 0.48, 0.48)
# The variants of each digit, and the strokes of each variant, from -1 to 1. y points down.
_STROKES: list[list[list[NDArray[Any]]]] = [
    [[_arc(0, 0, 0.55, 0.9)], [_arc(0, 0, 0.42, 0.85)]],
    [[_line((0, -0.9), (0, 0.9))], [_line((-0.3, -0.55), (0.05, -0.9), (0.05, 0.9))]],
    [
        [_arc(0, -0.4, 0.5, 0.5, 190, 395), _line((0.41, -0.11), (-0.55, 0.9), (0.58, 0.9))],
        [
            _arc(0, -0.4, 0.5, 0.5, 190, 430),
            _line((0.17, 0.07), (-0.55, 0.85), (0.1, 0.75), (0.55, 0.88)),
        ],
    ],
    [
        [_arc(-0.05, -0.45, 0.48, 0.45, 200, 450), _arc(-0.05, 0.45, 0.55, 0.45, 270, 520)],
        [
            _line((-0.5, -0.88), (0.45, -0.88), (-0.05, -0.15)),
            _arc(-0.05, 0.38, 0.52, 0.52, 270, 520),
        ],
    ],
    [
        [_line((0.25, 0.9), (0.25, -0.9), (-0.6, 0.3), (0.62, 0.3))],
        [_line((-0.45, -0.85), (-0.5, 0.1), (0.6, 0.1)), _line((0.35, -0.85), (0.35, 0.9))],
    ],
    [
        [_line((0.5, -0.9), (-0.4, -0.9), (-0.42, -0.05)), _arc(-0.02, 0.35, 0.55, 0.55, 225, 510)],
        [_line((0.45, -0.9), (-0.3, -0.85), (-0.38, -0.1)), _arc(0, 0.32, 0.5, 0.55, 225, 480)],
    ],
    [
        [_arc(0.45, 0.42, 0.93, 1.32, 180, 270), _LOW_RING],
        [_line((0.25, -0.9), (-0.4, 0.25)), _LOW_RING],
    ],
    [
        [_line((-0.55, -0.88), (0.55, -0.88), (-0.15, 0.9))],
        [_line((-0.55, -0.85), (0.5, -0.85), (-0.1, 0.9)), _line((-0.25, 0.05), (0.5, 0.05))],
    ],
    [
        [_arc(0, -0.45, 0.42, 0.45), _arc(0, 0.45, 0.52, 0.45)],
        [_arc(0, -0.48, 0.36, 0.4), _arc(0, 0.41, 0.45, 0.49)],
    ],
    [
        [_arc(-0.45, -0.42, 0.93, 1.32, 0, 90), _TOP_RING],
        [_line((0.45, -0.42), (0.38, 0.9)), _TOP_RING],
    ],
]
