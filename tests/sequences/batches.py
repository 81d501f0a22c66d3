"""What holds for the batches of a dataset of sequences, with workers of any kind."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate

from fastload import DataLoader, RankSampler
from tests.promises.equal import check_same
from tests.resuming import resumes_twice

KINDS = [(0, "thread"), (2, "thread")]
"""Processes: see `test_workers_resume_too`."""


def check_batches(dataset: Any, **options: Any) -> None:
    """Expect batches of the samples that the dataset gives alone, also after it was resumed twice."""
    order = list(RankSampler(len(dataset), seed=1, rank=0, world_size=1))
    samples = [dataset[index] for index in order]
    expected = [default_collate(samples[k : k + 4]) for k in range(0, len(order), 4)]
    with DataLoader(dataset, 4, sampler=order, **options) as loader:
        check_same([*loader], expected)
    resumes_twice(lambda: DataLoader(dataset, 4, shuffle=True, seed=2, **options))
