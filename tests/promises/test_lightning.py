"""Promises:
- A loader that Lightning rebuilds keeps every argument.
- The batches of Lightning's Trainer come from fastload's threads.
- The samples of a `RankSampler` are divided once, by it, if Lightning wraps it for the same ranks. For other ranks the
  loader raises.

Lightning builds a loader again from its attributes, to put a sampler of its own in: for distributed runs, for
prediction, for overfitting.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, SequentialSampler

from fastload import DataLoader, RankSampler

pytest.importorskip("lightning")
with warnings.catch_warnings():  # what Lightning's own imports warn of is not ours
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.utilities.data import _update_dataloader

# What Lightning and its requirements warn of in a run is not ours either; fastload's warnings stay errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings(r"error:.*(fastload|sample|worker_init_fn|thread):RuntimeWarning"),
]


class Threads(Dataset[torch.Tensor]):
    """Rows of four numbers; notes which threads read them."""

    fastload_per_worker = ()  # one for all workers

    def __init__(self, length: int = 24) -> None:
        self.length = length
        self.names: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.names.add(threading.current_thread().name)
        return torch.full((4,), float(index))


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def init(worker: int) -> None:
    pass


def on_error(index: int, error: BaseException) -> torch.Tensor:
    return torch.zeros(4)


FULL: dict[str, Any] = {
    "num_workers": 3,
    "collate_fn": collate,
    "timeout": 20.0,
    "worker_init_fn": init,
    "prefetch_factor": 4,
    "persistent_workers": True,
    "in_order": False,
    "on_error": on_error,
    "max_errors": 5,
    "copy_dataset": False,
    "prefetch_batches": 6,
    "drop_last": True,
    "pin_memory_device": "cpu",
}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "threads": {"batch_size": 4, "num_workers": 2},
    "all": {"batch_size": 4, **FULL},
    "all, seeded": {"batch_size": 4, **FULL, "shuffle": True, "seed": 9},
    "one by one": {**FULL, "batch_size": None, "drop_last": False, "collate_fn": torch.clone},
    "generator": {"batch_size": 4, "num_workers": 2, "shuffle": True, "generator": 4},
    "context": {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"},
    "process": {"batch_size": 4, "num_workers": 2, "worker_method": "process"},
    "rank": {"batch_size": 4, "num_workers": 2, "rank": True},
}
ARGUMENTS = [
    name
    for name in inspect.signature(DataLoader.__init__).parameters
    if name not in ("self", "shuffle", "sampler", "batch_sampler")
]


def build(case: str) -> DataLoader[Any]:
    arguments = dict(CASES[case])
    dataset = Threads()
    if arguments.pop("rank", False):
        arguments["sampler"] = RankSampler(dataset, rank=1, world_size=2, seed=3)
    if "generator" in arguments:
        arguments["generator"] = torch.Generator().manual_seed(arguments["generator"])
    return DataLoader(dataset, **arguments)


def depth(loader: DataLoader[Any]) -> int:
    iterator = iter(loader)
    next(iterator)
    loader.close()
    return loader.stats().depth


@pytest.mark.parametrize("case", CASES)
def test_building_again_keeps_every_argument(case: str) -> None:
    loader = build(case)
    again = _update_dataloader(loader, loader.sampler)
    assert type(again) is DataLoader
    assert again is not loader
    for name in ARGUMENTS:
        assert getattr(again, name) is getattr(loader, name), name
    assert again.sampler is loader.sampler
    assert type(again.batch_sampler) is type(loader.batch_sampler)
    if case != "process":
        assert depth(again) == depth(loader)


def test_building_again_with_a_distributed_sampler() -> None:
    loader = build("all")
    sampler = DistributedSampler(loader.dataset, num_replicas=2, rank=1, shuffle=False)  # type: ignore[arg-type]
    again = _update_dataloader(loader, sampler)
    assert again.sampler is sampler
    for name in ARGUMENTS:
        assert getattr(again, name) is getattr(loader, name), name
    with again:
        rows = sorted(row for batch in again for row in batch[:, 0].tolist())
    assert rows == [float(index) for index in range(1, 24, 2)]


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.rows: dict[str, list[float]] = {"train": [], "validate": [], "predict": []}

    def note(self, stage: str, batch: torch.Tensor) -> torch.Tensor:
        self.rows[stage] += batch[:, 0].tolist()
        return self.layer(batch).mean()  # type: ignore[no-any-return]

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.note("train", batch)

    def validation_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.note("validate", batch)

    def predict_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.note("predict", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(folder: Path, **arguments: Any) -> Any:
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **arguments,
    )


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_inside_the_trainer_come_from_our_threads(tmp_path: Path, persistent: bool) -> None:
    """Training, validation after each epoch, prediction (whose loader Lightning builds again), `num_workers` many."""
    train, validate, predict = Threads(24), Threads(12), Threads(10)
    model = Model()
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent}
    loaders = [
        DataLoader(train, 4, shuffle=True, seed=1, **options),
        DataLoader(validate, 4, **options),
        DataLoader(predict, 4, **options),
    ]
    trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0).fit(model, loaders[0], loaders[1])
    trainer(tmp_path).predict(model, loaders[2])
    for dataset in (train, validate, predict):
        assert dataset.names
        assert all(name.startswith("fastload-worker-") for name in dataset.names), dataset.names
    every = [float(index) for index in range(24)]
    epochs = [model.rows["train"][:24], model.rows["train"][24:]]
    assert [sorted(epoch) for epoch in epochs] == [every, every]
    assert epochs[0] != epochs[1], "the order of each epoch is another"
    assert model.rows["validate"] == every[:12] * 2
    assert model.rows["predict"] == every[:10]
    for loader in loaders:
        loader.close()


def test_a_rank_sampler_is_not_divided_again() -> None:
    """Lightning wraps the sampler of a loader unless `use_distributed_sampler=False`. Each rank would lose samples."""
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    dataset = Threads()
    sampler = RankSampler(dataset, rank=1, world_size=2, seed=0)
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=DistributedSamplerWrapper(sampler, num_replicas=2, rank=1),
    )
    assert loader.sampler is sampler
    others = DistributedSamplerWrapper(sampler, num_replicas=4, rank=1)
    with pytest.raises(
        ValueError, match="RankSampler gives only the samples of its rank.* use_distributed_sampler"
    ):
        DataLoader(dataset, batch_size=4, sampler=others)
    whole = DistributedSamplerWrapper(SequentialSampler(dataset), num_replicas=2, rank=0)
    assert len(list(DataLoader(dataset, batch_size=4, sampler=whole))) == 3
