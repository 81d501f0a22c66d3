"""Whether what a loader delivered was the work: random crops of all images, each once, in an order of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from PIL import Image

from benchmarks.recipes import Batch, points
from fastload.bench.figures import BenchError
from fastload.measure.processes import cpu_seconds


@dataclass(frozen=True, slots=True)
class Pass:
    """What one epoch delivered, and when."""

    numbers: torch.Tensor
    points: torch.Tensor
    shapes: set[tuple[Any, ...]]
    first_at: float
    ended_at: float
    cpu_s: float


def run_pass(batches: Iterable[Batch]) -> Pass:
    numbers, kept, shapes = [], [], set()
    first_at = ended_at = 0.0
    for images, labels in batches:
        ended_at = perf_counter()
        first_at = first_at or ended_at
        shapes.add((images.dtype, *images.shape))
        # Copies: some loaders write into a batch again, and others cannot while it is kept.
        kept.append(points(images))
        numbers.append(labels.clone())
    if not numbers:
        raise BenchError("a pass delivered no batch")
    cpu_s = cpu_seconds()
    return Pass(
        torch.cat(numbers),
        torch.cat(kept),
        shapes,
        first_at,
        ended_at,
        cpu_s or time.process_time(),
    )


def check(passes: Sequence[Pass], paths: Sequence[str], *, shape: list[int]) -> None:
    """Raise BenchError unless every pass delivered random crops of all images, each once, in an order of its own.

    Two crops of one image are more like each other than like each other's mirror image, unless a coin decides on the
    flip: then they are in half of the pairs. That half may be missed by four standard deviations.
    """
    count = len(paths)
    by_number: list[torch.Tensor] = []
    alike = pairs = 0
    for number, one in enumerate(passes):
        if one.shapes != {(torch.uint8, *shape)}:
            raise BenchError(f"pass {number}: expected batches of uint8{shape}, got {one.shapes}")
        ordered, at = one.numbers.sort()
        if not torch.equal(ordered, torch.arange(count)):
            raise BenchError(
                f"pass {number} delivered {len(ordered)} images, {len(set(ordered.tolist()))} of them different, "
                f"but must deliver each of {count} exactly once"
            )
        if torch.equal(one.numbers, ordered):
            raise BenchError(f"pass {number} was not shuffled")
        by_number.append(one.points[at].float())
    for number in range(1, len(passes)):
        if torch.equal(passes[number].numbers, passes[number - 1].numbers):
            raise BenchError(f"pass {number} had the same order as the pass before")
        before, after = by_number[number - 1 : number + 1]
        upright, mirrored = _apart(before, after), _apart(before, after.flip(-1))
        same = (torch.minimum(upright, mirrored) < 2).float().mean().item()
        alike += int((upright < mirrored).sum())
        pairs += count
        if same > 0.1:
            raise BenchError(
                f"pass {number}: {same:.0%} of the crops are the same as in the pass before"
            )
    if abs(alike - pairs / 2) > 2 * pairs**0.5:
        raise BenchError(
            f"{alike / pairs:.0%} of the crops lie as those of another pass; expected 50%"
        )
    if (likeness := _likeness(by_number[0][:128], paths[:128])) < 0.4:
        raise BenchError(
            f"the crops' colours are not those of their images (correlation {likeness:.2f})"
        )


def _apart(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mean difference between images of equal number, in steps of 255."""
    return (left - right).abs().mean((1, 2, 3))


def _likeness(crops: torch.Tensor, paths: Sequence[str]) -> float:
    """The smaller correlation, of brightness and of red against blue, between crops and the whole images."""
    whole = torch.stack([_mean_colour(path) for path in paths])
    part = crops.mean((2, 3))
    pairs = [
        torch.stack([whole.mean(1), part.mean(1)]),
        torch.stack([whole[:, 0] - whole[:, 2], part[:, 0] - part[:, 2]]),
    ]
    return min(torch.corrcoef(pair)[0, 1].item() for pair in pairs)


def _mean_colour(path: str) -> torch.Tensor:
    with Image.open(path) as image:
        image.draft("RGB", (image.width // 8, image.height // 8))
        pixel: Any = image.convert("RGB").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    return torch.tensor(pixel, dtype=torch.float32)
