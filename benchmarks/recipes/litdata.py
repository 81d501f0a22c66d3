"""LitData: chunks of the original JPEG bytes on the local disk, read by torch's worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from litdata import StreamingDataLoader, StreamingDataset, optimize

from benchmarks.recipes import Batch, Task, files
from benchmarks.recipes._decoding import crop, decode, encoded


class _Images(StreamingDataset):
    def __getitem__(self, index: Any) -> tuple[torch.Tensor, int]:
        sample = super().__getitem__(index)
        return crop(decode(sample["image"])), sample["number"]


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    dataset = _Images(str(task.source), shuffle=True)
    yield StreamingDataLoader(
        dataset, batch_size=task.batch, num_workers=task.workers, persistent_workers=True
    )


def pack(root: Path, out: Path, variant: str) -> None:
    optimize(
        _sample,
        list(enumerate(files(root))),
        output_dir=str(out),
        chunk_bytes="64MB",
        num_workers=2,
    )


def _sample(image: tuple[int, str]) -> dict[str, Any]:
    number, path = image
    return {"image": encoded(path), "number": number}
