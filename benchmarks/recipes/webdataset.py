"""WebDataset: tar shards of the original JPEG bytes, read by torch's worker processes.

Two shards or more per worker, shuffled, and a buffer of 1,000 samples in each worker: its shuffle is not a global one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import webdataset

from benchmarks.recipes import Batch, Task, files
from benchmarks.recipes._decoding import crop, decode, encoded

SHARDS = 8
"""Equal ones, so that each of 2 or 4 workers has whole batches of 64 of 2,048 images."""


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    shards = sorted(str(path) for path in task.source.glob("*.tar"))
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=len(shards))
        .shuffle(1000)
        .to_tuple("jpg", "cls")
        .map_tuple(_crop, int)
        .batched(task.batch)
    )
    yield webdataset.WebLoader(
        dataset, batch_size=None, num_workers=task.workers, persistent_workers=True
    )


def _crop(image: bytes) -> torch.Tensor:
    return crop(decode(image))


def pack(root: Path, out: Path, variant: str) -> None:
    images = files(root)
    with webdataset.ShardWriter(
        str(out / "%05d.tar"), maxcount=len(images) // SHARDS, verbose=0
    ) as shards:
        for number, path in enumerate(images):
            shards.write({"__key__": f"{number:05d}", "jpg": encoded(path), "cls": number})
