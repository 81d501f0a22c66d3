"""Trainings with the Hugging Face Trainer, for tests that run them as one process or as two."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch.utils.data import Dataset, IterableDataset

import fastload
from fastload.integrations.transformers import Trainer, TrainerMixin

ARGUMENTS = inspect.signature(transformers.TrainingArguments.__init__).parameters
GROUPED = (
    {"train_sampling_strategy": "group_by_length"}
    if "train_sampling_strategy" in ARGUMENTS
    else {"group_by_length": True}  # its older name
)

IN_ORDER = (
    {"train_sampling_strategy": "sequential"} if "train_sampling_strategy" in ARGUMENTS else {}
)


class Texts(Dataset[Any]):
    """Tokens of other numbers, and a random number that is drawn for each sample."""

    fastload_per_worker = ()  # one for all workers, to be looked at

    def __init__(self, length: int) -> None:
        self.length = length
        self.threads: set[str] = set()
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        if index >= self.length:
            raise IndexError(index)  # the sampler by length iterates over the dataset
        self.threads.add(threading.current_thread().name.rstrip("-0123456789"))
        self.read.append(index)
        return text(index)


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return map(text, range(self.length))


class KnownStream(Stream):
    def __len__(self) -> int:
        return self.length


def text(index: int) -> dict[str, Any]:
    return {
        "input_ids": [index] * (index % 5 + 1),
        "noise": torch.rand(()).item(),
        "labels": index,
        "unused": "text",
    }


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    assert "unused" not in samples[0]
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        "input_ids": torch.tensor(
            [s["input_ids"] + [0] * (longest - len(s["input_ids"])) for s in samples]
        ),
        "noise": torch.tensor([s["noise"] for s in samples]),
        "labels": torch.tensor([s["labels"] for s in samples]),
    }


class Model(torch.nn.Module):
    """Keeps the batches that it was given in training."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[Any] = []

    def forward(
        self, input_ids: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor, **_: Any
    ) -> dict[str, torch.Tensor]:
        if self.training:
            self.batches.append((labels.tolist(), noise.tolist(), input_ids.shape[1]))
        return {"loss": (noise * self.scale).mean(), "logits": labels.float() + 0 * self.scale}


class Seq2Seq(TrainerMixin, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """A Trainer of the user's."""


def trainer(folder: str, *, kind: Any = Trainer, train: Any = None, **options: Any) -> Any:
    """Return a Trainer of batches of 4, of 26 texts unless `train` is given, that evaluates 13."""
    kinds = transformers.TrainingArguments
    if kind is Seq2Seq:
        kinds = transformers.Seq2SeqTrainingArguments
    given = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 3,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "dataloader_num_workers": 2,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        **options,
    }
    return kind(
        Model(),
        kinds(folder, **given),
        data_collator=collate,
        train_dataset=Texts(26) if train is None else train,
        eval_dataset=Texts(13),
    )


def trained(folder: str, options: list[dict[str, Any]]) -> list[Any]:
    """Return the batches of trainings, the threads that read them, and what is predicted at the end."""
    answers = []
    for given in options:
        own = trainer(folder, **given)
        own.train()
        threads = own.train_dataset.threads
        evaluated = own.evaluate()
        predicted = own.predict(Texts(11))
        ours = [
            isinstance(made, fastload.DataLoader)
            for made in (own.get_train_dataloader(), own.get_eval_dataloader())
        ]
        labels = predicted.label_ids.tolist()
        losses = sorted(name for name in evaluated if name.endswith("loss"))
        answers.append(
            (own.model.batches, threads, predicted.predictions.tolist(), labels, ours, losses)
        )
    return answers


def resumed(folder: str, cases: list[tuple[dict[str, Any], int]]) -> list[Any]:
    """Return the batches after a checkpoint: of the undisturbed training, and of one that resumes.

    With the indices that the one that resumes has read.
    """
    answers = []
    for number, (given, step) in enumerate(cases):
        stream = {"stream": Stream, "known stream": KnownStream}.get(given.get("train", ""))

        def make(
            given: Any = given, number: int = number, stream: Any = stream, step: int = step
        ) -> Any:
            more = {"train": stream(26)} if stream else {}
            saved = {"save_strategy": "steps", "save_steps": step}
            return trainer(f"{folder}/{number}", **{**given, **saved, **more})

        whole = make()
        whole.train()
        rest = make()
        rest.train(resume_from_checkpoint=f"{folder}/{number}/checkpoint-{step}")
        done = step * given.get("gradient_accumulation_steps", 1)
        per_epoch = len(whole.model.batches) // whole.args.num_train_epochs
        if given.get("gradient_accumulation_steps"):
            updates = -(-per_epoch // given["gradient_accumulation_steps"])
            done = (
                step // updates * per_epoch + step % updates * given["gradient_accumulation_steps"]
            )
        read = None if stream else len(rest.train_dataset.read)
        answers.append((whole.model.batches[done:], rest.model.batches, read))
    return answers


def loader_arguments(folder: str) -> list[Any]:
    """Return the attributes of a training's and an evaluation's loader, all arguments of which are set."""
    own = trainer(
        folder,
        dataloader_num_workers=3,
        dataloader_persistent_workers=True,
        dataloader_prefetch_factor=5,
        dataloader_drop_last=True,
        **({"dataloader_in_order": False} if "dataloader_in_order" in ARGUMENTS else {}),
    )
    own.args.dataloader_pin_memory = True  # `use_cpu` has reset it
    names = "num_workers pin_memory persistent_workers prefetch_factor in_order drop_last"
    return [
        {name: getattr(loader, name) for name in names.split()}
        for loader in (own.get_train_dataloader(), own.get_eval_dataloader())
    ]
