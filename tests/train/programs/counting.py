"""A model whose parameters say how often it was trained on each sample, and a training of it that can be killed.

A sample is one-hot, the loss is the mean of the outputs of a linear layer that begins at zero, SGD has a rate of 1 and
no momentum: each time that a sample is trained on, its own weight falls by 1 / (global batch), and nothing else moves
it. So the weights follow the lineage: what was trained by a process that died without a checkpoint is not in them.

    python counting.py FOLDER BATCH_SIZE EVERY SAVE   # rank 0 dies in its SAVE-th save, before the rename
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import fastload
from fastload import distributed
from fastload.distributed import Control
from fastload.train import checkpoint
from fastload.train.learner import Learner, across_ranks
from fastload.train.loop import Trained, begin, fit
from fastload.train.recipe import Recipe

SAMPLES = 48
CPU = torch.device("cpu")


class OneHot(Dataset[tuple[torch.Tensor, int, int]]):
    """Sample k is the k-th unit vector, with k behind it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return torch.eye(SAMPLES)[index], 0, index


def counting_learner(rank: distributed.Rank) -> Learner:
    model = nn.Linear(SAMPLES, 1, bias=False)
    nn.init.zeros_(model.weight)
    forward, traffic = across_ranks(model, rank, CPU)
    return Learner(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        forward=forward,
        loss=lambda outputs, _: outputs.mean(),
        prepare=lambda images: images,
        device=CPU,
        traffic=traffic,
        about={"model": "counting"},
    )


def counts(folder: Path | str, *, global_batch: int) -> list[int]:
    """How often the model of a checkpoint was trained on each sample; -1 where that is no whole number."""
    found = checkpoint.Checkpoint.load(folder)
    assert found is not None
    times = (-found.model["weight"][0] * global_batch).tolist()
    return [round(time) if abs(time - round(time)) < 1e-4 else -1 for time in times]


def train_counting(
    folder: Path | str,
    *,
    batch_size: int,
    every: int | None,
    rank: distributed.Rank,
    on_step: Callable[[int, torch.Tensor], None] | None = None,
    workers: int = 1,
    epochs: int = 1,
    say: Callable[[str], None] = print,
    **options: Any,
) -> Trained:
    recipe = Recipe(
        file_list=Path(folder) / "none",
        batch_size=batch_size,
        epochs=epochs,
        workers=workers,
        checkpoint=folder,
        every=every,
        resume=True,
        **options,
    )
    sampler = fastload.RankSampler(SAMPLES, rank=rank.rank, world_size=rank.world_size, seed=7)
    control, learner = Control(rank), counting_learner(rank)
    with fastload.DataLoader(
        OneHot(), batch_size, sampler=sampler, num_workers=workers, seed=7
    ) as loader:
        source, first = begin(recipe, loader, learner, control, say=say)
        return fit(recipe, source, learner, control, first=first, say=say, on_step=on_step)


def main(folder: str, batch_size: str, every: str, fatal_save: str) -> None:
    rank = distributed.init("gloo")
    saves = 0

    def replace_or_die(source: Any, target: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == int(fatal_save):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    replace, os.replace = os.replace, replace_or_die
    train_counting(Path(folder), batch_size=int(batch_size), every=int(every), rank=rank)
    distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
