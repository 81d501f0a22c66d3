"""Trainings with Lightning, undisturbed and resumed from each of their checkpoints, on one process or on two."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import IterableDataset

import fastload
from tests.fakes import Draws
from tests.promises.framework_ranks import on_ranks

Spec = dict[str, Any]


def run(world_size: int, function: Any, *arguments: Any) -> list[Any]:
    """Call `function` as one process, which is this one, or as several. Return the results of all ranks."""
    if world_size > 1:
        return on_ranks(function, *arguments, world_size=world_size, modules="lightning")
    return [function(*arguments)]


class Stream(IterableDataset[Any]):
    """The same, one after the other, each worker its own part."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, self.length, step):
            yield index, torch.rand(())


class Counted(Stream):
    """Knows its place."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.length:
            self.at += 1
            yield self.at - 1, torch.rand(())
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


DATASETS = {"rows": Draws, "stream": Stream, "counted": Counted}


def loader(spec: Spec) -> Any:
    """Return a fastload loader, or what Lightning combines."""
    options = {"batch_size": 3, "seed": 5, "num_workers": 2, **spec}
    if "each" in options:
        each = [loader(one) for one in options["each"]]
        mode = options.get("mode")
        return each if mode is None else CombinedLoader(dict(zip("abc", each, strict=False)), mode)
    kind = DATASETS[options.pop("dataset", "rows")]
    dataset = kind(options.pop("length", 14))
    if "generator" in options:
        options["generator"] = torch.Generator().manual_seed(options["generator"])
    order = options.pop("order", None)
    if order == "rank":
        options["sampler"] = fastload.RankSampler(dataset, seed=3)
    return fastload.DataLoader(dataset, **options)


class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Notes its batches."""

    def __init__(self, train: Spec, validate: Spec | None, fails: int | None) -> None:
        super().__init__()
        self.specs, self.fails = (train, validate), fails
        self.layer = torch.nn.Linear(1, 1)
        self.trained: list[Any] = []
        self.validated: list[Any] = []

    def train_dataloader(self) -> Any:
        return loader(self.specs[0])

    def val_dataloader(self) -> Any:
        return [] if self.specs[1] is None else loader(self.specs[1])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        if len(self.trained) == self.fails:
            self.fails = None
            raise OSError("the step fails")
        self.trained.append(_plain(batch))
        return self.layer(torch.ones(1)).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, _: int) -> None:
        self.validated.append((self.current_epoch, _plain(batch)))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


class Saver(pl.Callback):  # type: ignore[misc, name-defined]
    """Saves a checkpoint at each of `events`, and notes how many batches had been trained on."""

    def __init__(self, folder: Path, events: list[str]) -> None:
        self.folder, self.saved = folder, []  # type: ignore[var-annotated]
        for event in events:
            setattr(self, event, self._save_at(event))

    def _save_at(self, event: str) -> Any:
        def save(trainer: Any, module: Any, *_: Any) -> None:
            if trainer.sanity_checking:
                return
            path = self.folder / f"{len(self.saved)}-{event}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((str(path), len(module.trained)))

        return save


EVENTS = ["on_train_batch_end", "on_train_epoch_end", "on_validation_end"]


def fit(
    spec: Spec,
    folder: Path,
    *,
    resume: str | None = None,
    events: list[str] | None = None,
) -> tuple[Model, list[Any]]:
    """Train, perhaps from a checkpoint. Return the model, and the checkpoints."""
    saver = Saver(folder, events or [])
    model = Model(spec["train"], spec.get("validate"), None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(spec, folder, saver).fit(model, ckpt_path=resume)
    return model, saver.saved


def trainer(spec: Spec, folder: Path, *callbacks: Any) -> Any:
    """Return a Trainer that prints nothing."""
    options = {"max_epochs": 3, **spec.get("trainer", {})}
    if "WORLD_SIZE" in os.environ:
        options |= {"strategy": "ddp", "plugins": [TorchElasticEnvironment()]}
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )


def resumed_each(specs: dict[str, Spec], folder: str) -> dict[str, list[Any]]:
    """Train undisturbed, and from every fifth checkpoint. Return what came after each, in both."""
    answers: dict[str, list[Any]] = {}
    for name, spec in specs.items():
        here = Path(folder, name.replace(" ", "_"))
        whole, saved = fit(spec, here, events=spec.get("events", EVENTS))
        answers[name] = [
            (
                Path(path).name,
                whole.trained[trained:],
                whole.validated,
                fit(spec, here, resume=path)[0],
            )
            for path, trained in saved[1 :: spec.get("step", 5)]
        ]
        answers[name] = [
            (at, rest, again.trained, validated, again.validated)
            for at, rest, validated, again in answers[name]
        ]
    return answers


def whole_and_saved(spec: Spec, folder: str) -> Any:
    """Train undisturbed. Return its batches, and its checkpoints."""
    model, saved = fit(spec, Path(folder), events=["on_train_batch_end"])
    return model.trained, saved


def resumed(spec: Spec, folder: str, path: str) -> Any:
    """Train from a checkpoint. Return its batches, or the error."""
    try:
        return fit(spec, Path(folder), resume=path)[0].trained
    except fastload.errors.StateError as error:
        return str(error)
