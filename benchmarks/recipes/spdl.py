"""SPDL: a pipeline of threads around FFmpeg's decoder; crop, resize and flip are FFmpeg filters.

Its batches are channels-last: uint8[B, 224, 224, 3], seen as [B, 3, 224, 224] without a copy.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import spdl.io
import torch
from spdl.pipeline import PipelineBuilder

from benchmarks.recipes import SIZE, Batch, Task, files
from benchmarks.recipes._decoding import random_box

try:
    spdl.io.ImagePackets  # noqa: B018  # loads FFmpeg's libraries
except RuntimeError as error:
    raise ImportError(f"SPDL finds no FFmpeg: {error}") from error


class _Passes:
    """A new pipeline for each pass, as SPDL's own examples have it."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._images = list(enumerate(files(task.source)))
        self._random = random.Random(0)

    def __iter__(self) -> Iterator[Batch]:
        order = self._random.sample(self._images, len(self._images))
        pipeline = (
            PipelineBuilder()
            .add_source(order)
            .pipe(_decode, concurrency=self._task.workers)
            .aggregate(self._task.batch)
            .pipe(_batch)
            .add_sink(2)
            .build(num_threads=self._task.workers)
        )
        with pipeline.auto_stop():
            yield from pipeline


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    yield _Passes(task)


def _decode(image: tuple[int, str]) -> tuple[Any, int]:
    number, path = image
    packets = spdl.io.demux_image(path)
    left, top, width, height = random_box(packets.width, packets.height)
    filters = [f"crop={width}:{height}:{left}:{top}", f"scale={SIZE}:{SIZE}:flags=bilinear"]
    if random.random() < 0.5:
        filters.append("hflip")
    filters.append("format=pix_fmts=rgb24")
    return spdl.io.decode_packets(packets, filter_desc=",".join(filters)), number


def _batch(samples: list[tuple[Any, int]]) -> Batch:
    frames, numbers = zip(*samples, strict=True)
    pixels = spdl.io.to_torch(spdl.io.convert_frames(list(frames)))
    return pixels.permute(0, 3, 1, 2), torch.tensor(numbers)
