"""Grain with threads: a shuffled MapDataset of the functions that torch's DataLoader has, read by a pool of threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import grain
import torch
from torch.utils.data import default_collate

from benchmarks.recipes import Batch, Endless, Task, files
from benchmarks.recipes._decoding import crop, decode_file


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    torch.set_num_threads(1)  # Its threads are the parallelism; a resize shall not start more.

    def load(sample: tuple[int, str]) -> Any:
        number, path = sample
        return crop(decode_file(path)), number

    images = grain.MapDataset.source(list(enumerate(files(task.source))))
    dataset = (
        images.seed(0)
        .shuffle()
        .repeat()
        .map(load)
        .to_iter_dataset(grain.ReadOptions(num_threads=task.workers))
        .batch(task.batch, batch_fn=default_collate)
    )
    with closing(iter(dataset)) as batches:
        yield Endless(batches, task.count // task.batch)
