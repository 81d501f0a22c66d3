"""Promises:
- Accelerate's `prepare` replaces the threads of a loader, and fastload warns of it. A loader that is not prepared
  keeps its threads and its ranks.
- Accelerate's `register_for_checkpointing` puts the state of a loader into `save_state`.
- A Hugging Face Trainer that returns a fastload loader keeps its threads, except in the epoch in which it resumes.
"""

from __future__ import annotations

import threading
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


def test_prepare_drops_the_threads_and_a_warning_says_so() -> None:
    """Should it keep them, the README's section can be shorter."""
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="without fastload's workers, seed and state.*RankSampler"):
        prepared = accelerator.prepare(loader_of(accelerator, workers=2))
    assert not isinstance(prepared, fastload.DataLoader)


def test_prepare_drops_nothing_of_torch_s_own_iterator() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(fastload.DataLoader(Augmented(), worker_method="torch"))


# ---- Hugging Face's Trainer ----


class Names(Dataset[Any]):
    """Samples for a model, and the threads that read them."""

    fastload_per_worker = ()  # one for all workers, to be looked at

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread().name)
        return {"x": torch.tensor([float(index)])}


class Model(torch.nn.Module):
    """Keeps the batches that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.batches.append(x.flatten().tolist())
        return {"loss": (x * self.scale).sum()}


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """The Trainer of the README, with 10 steps an epoch and a checkpoint after the fifth."""
    transformers = pytest.importorskip("transformers")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            args = self.args
            sampler = RankSampler(
                self.train_dataset, rank=args.process_index, world_size=args.world_size, seed=0
            )
            return fastload.DataLoader(
                self.train_dataset,
                batch_size=args.train_batch_size,
                sampler=sampler,
                num_workers=2,
                seed=0,
                collate_fn=self.data_collator,
            )

    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_steps=5,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
    )

    def make() -> Any:
        return Trainer(Model(), arguments, train_dataset=Names())

    return make


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_trainer_whose_loader_is_ours_keeps_the_threads(trainer: Any, tmp_path: Path) -> None:
    """A resumed one too, and it goes on with the same batches; but for the epoch that it resumes in."""
    whole = trainer()
    whole.train()
    assert whole.train_dataset.threads == {"fastload-worker-0", "fastload-worker-1"}
    resumed = trainer()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.model.batches == whole.model.batches[5:]
    assert resumed.train_dataset.threads >= {"fastload-worker-0", "fastload-worker-1"}
