"""The bound: plain threads that read, decode with simplejpeg, and resize a random box by torch's uint8 kernel.

There is no loader: each thread takes the next image and drops what it made of it, but for the `points` that show that
it was made. A pass is one batch of all images' points. Whole images are decoded, and none is flipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import sample

import simplejpeg
import torch
from torch.nn.functional import interpolate

from benchmarks.recipes import SIZE, Batch, Task, files, points
from benchmarks.recipes._decoding import encoded, random_box


class _Passes:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._images = list(enumerate(files(task.source)))

    def __iter__(self) -> Iterator[Batch]:
        numbers, paths = zip(*sample(self._images, len(self._images)), strict=True)
        with ThreadPoolExecutor(self._task.workers) as pool:
            made = list(pool.map(lambda path: points(_crop(path)), paths))
        yield torch.cat(made), torch.tensor(numbers)


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    torch.set_num_threads(1)  # The threads are the parallelism; a resize shall not start more.
    yield _Passes(task)


def _crop(path: str) -> torch.Tensor:
    """uint8[1, 3, 224, 224]."""
    pixels = simplejpeg.decode_jpeg(encoded(path))
    left, top, width, height = random_box(pixels.shape[1], pixels.shape[0])
    part = torch.from_numpy(pixels[top : top + height, left : left + width]).permute(2, 0, 1)
    return interpolate(part[None], (SIZE, SIZE), mode="bilinear", antialias=True)
