"""Promise: beside Accelerate a loader keeps its threads and its ranks, and its state goes into its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import fastload
from fastload import RankSampler

accelerate = pytest.importorskip("accelerate")


class Augmented(Dataset[Any]):
    """An index and a random number drawn for it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(1)


def loader_of(accelerator: Any, *, workers: int) -> fastload.DataLoader[Any]:
    dataset = Augmented()
    sampler = RankSampler(
        dataset, rank=accelerator.process_index, world_size=accelerator.num_processes
    )
    return fastload.DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers, seed=3)


def as_lists(batches: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in batches]


def test_a_checkpoint_of_accelerate_in_the_middle_of_an_epoch_resumes_the_loader(
    tmp_path: Path,
) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader = loader_of(accelerator, workers=2)
    accelerator.register_for_checkpointing(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    accelerator.save_state(str(tmp_path), safe_serialization=False)
    rest = as_lists(batches)
    loader.close()
    assert len(rest) == 7
    assert model is not None

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    another = accelerate.Accelerator(cpu=True)
    another.prepare(torch.nn.Linear(1, 1))
    resumed = loader_of(another, workers=1)
    another.register_for_checkpointing(resumed)
    another.load_state(str(tmp_path))
    with resumed:
        assert as_lists(resumed) == rest


def test_prepare_drops_the_threads_which_is_why_the_loader_is_left_out() -> None:
    """Should this fail, the README's section can be shorter."""
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(loader_of(accelerator, workers=2))
    assert not isinstance(prepared, fastload.DataLoader)
