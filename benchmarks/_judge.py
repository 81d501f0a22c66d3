"""Whether what a loader delivered was the work: random crops of all images, each once, in an order of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from PIL import Image

from benchmarks.recipes import Batch
from fastload.bench.figures import BenchError
from fastload.measure.processes import cpu_seconds


@dataclass(frozen=True, slots=True)
class Pass:
    """What one epoch delivered, and when."""

    numbers: torch.Tensor
    points: torch.Tensor
    """8 x 8 pixels of each image, symmetric about its middle."""
    shapes: set[tuple[Any, ...]]
    first_at: float
    ended_at: float
    cpu_s: float


def run_pass(batches: Iterable[Batch]) -> Pass:
    numbers, points, shapes, times = [], [], set(), []
    for images, labels in batches:
        times.append(perf_counter())
        shapes.add((images.dtype, *images.shape))
        # Copies: some loaders write into a batch again, and others cannot while it is kept.
        kept = images[:, :, 10::29, 10::29]
        points.append(kept.clone(memory_format=torch.contiguous_format))
        numbers.append(labels.clone())
    if not numbers:
        raise BenchError("a pass delivered no batch")
    used = cpu_seconds() or time.process_time()
    return Pass(torch.cat(numbers), torch.cat(points), shapes, times[0], times[-1], used)


def check(passes: Sequence[Pass], paths: Sequence[str], *, shape: list[int]) -> None:
    """Raise BenchError unless every pass delivered random crops of all images, each once, in an order of its own.

    Two crops of one image are more like each other than like each other's mirror image, unless a coin decides on the
    flip: then they are in half of the pairs. That half may be missed by four standard deviations.
    """

    def expect(right: bool, message: str) -> None:
        if not right:
            raise BenchError(message)

    count, alike = len(paths), 0
    by_number: list[torch.Tensor] = []
    for number, one in enumerate(passes):
        which = f"pass {number}"
        right = one.shapes == {(torch.uint8, *shape)}
        expect(right, f"{which}: expected batches of uint8{shape}, got {one.shapes}")
        ordered, at = one.numbers.sort()
        different = len(ordered.unique())
        expect(
            torch.equal(ordered, torch.arange(count)),
            f"{which} delivered {len(ordered)} images, {different} of them different, but must deliver each of {count} "
            "exactly once",
        )
        expect(not torch.equal(one.numbers, ordered), f"{which} was not shuffled")
        by_number.append(one.points[at].float())
        if number:
            again = torch.equal(one.numbers, passes[number - 1].numbers)
            expect(not again, f"{which} had the same order as the pass before")
            before, after = by_number[-2:]
            upright, mirrored = _apart(before, after), _apart(before, after.flip(-1))
            same = (torch.minimum(upright, mirrored) < 2).float().mean().item()
            alike += int((upright < mirrored).sum())
            expect(
                same <= 0.1, f"{which}: {same:.0%} of the crops are the same as in the pass before"
            )
    pairs = count * (len(passes) - 1)
    share = f"{alike / max(1, pairs):.0%} of the crops lie as those of another pass; expected 50%"
    expect(abs(alike - pairs / 2) <= 2 * pairs**0.5, share)
    likeness = _likeness(by_number[0][:128], paths[:128])
    wrong = f"the crops' colours are not those of their images (correlation {likeness:.2f})"
    expect(likeness >= 0.4, wrong)


def _apart(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Mean difference between images of equal number, in steps of 255."""
    return (left - right).abs().mean((1, 2, 3))


def _likeness(crops: torch.Tensor, paths: Sequence[str]) -> float:
    """The smaller correlation, of brightness and of red against blue, between crops and the whole images."""
    colours = torch.stack([torch.stack([_mean_colour(path) for path in paths]), crops.mean((2, 3))])
    pairs = (colours.mean(-1), colours[..., 0] - colours[..., 2])
    return min(torch.corrcoef(pair)[0, 1].item() for pair in pairs)


def _mean_colour(path: str) -> torch.Tensor:
    with Image.open(path) as image:
        image.draft("RGB", (image.width // 8, image.height // 8))
        pixel: Any = image.convert("RGB").resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    return torch.tensor(pixel, dtype=torch.float32)
