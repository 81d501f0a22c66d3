"""A ResNet learns digits with Hugging Face's Trainer. To use fastload, one import was changed.

    fastload mnist --synthetic digits --train 4000 --test 1000      # drawn digits in MNIST's files, not MNIST
    python examples/trainer_digits.py digits run
    python examples/trainer_digits.py digits run      # after Ctrl-C: resumes from the last checkpoint in `run`

It follows transformers' `run_image_classification.py`: workers decode PNG files and turn the images.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, Image
from torchvision import transforms
from torchvision.datasets import MNIST
from transformers import ResNetConfig, ResNetForImageClassification, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from fastload.integrations.transformers import Trainer  # was: from transformers import Trainer

as_tensor = transforms.ToTensor()
augment = transforms.Compose(
    [transforms.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.8, 1.2)), as_tensor]
)


def read(folder: str, *, train: bool) -> Dataset:
    """Return the digits as a table of PNG files and labels, whose images become tensors when they are read."""
    images, labels = zip(*MNIST(folder, train=train), strict=True)
    features = Features({"image": Image(), "label": ClassLabel(10)})
    table = Dataset.from_dict({"image": list(images), "label": list(labels)}, features)
    transform = augment if train else as_tensor

    def transformed(rows: dict[str, Any]) -> dict[str, Any]:
        return {"pixel_values": list(map(transform, rows["image"])), "labels": rows["label"]}

    return table.with_transform(transformed)


def accuracy(predicted: Any) -> dict[str, float]:
    """Return the share of digits that are recognized."""
    return {"accuracy": (predicted.predictions.argmax(1) == predicted.label_ids).mean()}


def main(folder: str, output: str) -> None:
    """Train two epochs on the digits in `folder`. Print an accuracy for each, and what bounds the training."""
    arguments = TrainingArguments(
        output,
        num_train_epochs=2,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=100,
        learning_rate=5e-3,
        dataloader_num_workers=2,
        remove_unused_columns=False,  # `transformed` reads the column "image", which the model has not
        eval_strategy="epoch",
        save_steps=100,
        report_to="none",
    )
    set_seed(0)
    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10,
        layer_type="basic",
    )  # fmt: skip
    trainer = Trainer(
        ResNetForImageClassification(config),
        arguments,
        train_dataset=read(folder, train=True),
        eval_dataset=read(folder, train=False),
        compute_metrics=accuracy,
    )
    found = get_last_checkpoint(output) if Path(output).exists() else None
    trainer.train(resume_from_checkpoint=found)
    print(trainer.callback_handler.train_dataloader.stats())  # new: what bounds the training


if __name__ == "__main__":
    main(*sys.argv[1:])
