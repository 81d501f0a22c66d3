"""MosaicML Streaming: MDS shards of the original JPEG bytes on the local disk, read by torch's worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from benchmarks.recipes import Batch, Task, files
from benchmarks.recipes._decoding import crop, decode, encoded


class _Images(StreamingDataset):
    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        sample: Any = super().__getitem__(at)
        return crop(decode(sample["image"])), sample["number"]


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    clean_stale_shared_memory()
    dataset = _Images(local=str(task.source), shuffle=True, batch_size=task.batch)
    yield StreamingDataLoader(
        dataset, batch_size=task.batch, num_workers=task.workers, persistent_workers=True
    )


def pack(root: Path, out: Path, variant: str) -> None:
    with MDSWriter(out=str(out), columns={"image": "bytes", "number": "int"}) as shards:
        for number, path in enumerate(files(root)):
            shards.write({"image": encoded(path), "number": number})
