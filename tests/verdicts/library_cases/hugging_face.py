"""Hugging Face datasets: with formats and transforms, wrapped, streamed, joined, and with decoded features."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, encoded, texts, wave


def rows() -> Any:
    """Return eight rows with a text, numbers and a label."""
    columns = {
        "text": texts(),
        "values": [[float(index), float(index + 1)] for index in range(COUNT)],
        "label": [index % 2 for index in range(COUNT)],
    }
    return datasets.Dataset.from_dict(columns)


def torch_format(folder: Path) -> Made:
    return Made(rows().with_format("torch"))


def images() -> Any:
    """Return eight rows with an encoded image."""
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    )
    made_of = {
        "image": [{"bytes": encoded(index), "path": None} for index in range(COUNT)],
        "label": [index % 2 for index in range(COUNT)],
    }
    return datasets.Dataset.from_dict(made_of, features=features)


def with_transform(folder: Path) -> Made:
    from torchvision.transforms import Compose, Normalize, RandomResizedCrop, ToTensor

    normalize = Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    train_transforms = Compose([RandomResizedCrop(16), ToTensor(), normalize])

    def preprocess_train(batch: dict[str, Any]) -> dict[str, Any]:
        """Apply the transforms across a batch."""
        batch["pixel_values"] = [train_transforms(image.convert("RGB")) for image in batch["image"]]
        return batch

    def collate(examples: list[Any]) -> dict[str, Any]:
        pixel_values = torch.stack([example["pixel_values"] for example in examples])
        labels = torch.tensor([example["label"] for example in examples])
        return {"pixel_values": pixel_values, "labels": labels}

    return Made(images().with_transform(preprocess_train), collate)


def set_transform(folder: Path) -> Made:
    from tests.verdicts.library_cases.tokenized import fast_tokenizer

    tokenizer = fast_tokenizer()

    def encode(batch: dict[str, Any]) -> Any:
        return tokenizer(
            batch["text"], padding="max_length", truncation=True, max_length=8, return_tensors="pt"
        )

    found = rows()
    found.set_transform(encode, columns=["text"])
    return Made(found)


class Texts(Dataset[Any]):
    """A wrapper around rows of another dataset."""

    def __init__(self, hf_dataset: Any, max_length: int) -> None:
        self.hf_dataset = hf_dataset
        self.max_length = max_length

    def __len__(self) -> int:
        return len(self.hf_dataset)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        item = self.hf_dataset[idx]
        ids = [int(word[1:]) for word in item["text"].split()][: self.max_length]
        ids += [0] * (self.max_length - len(ids))
        return {"input_ids": torch.tensor(ids), "label": item["label"]}


def wrapped(folder: Path) -> Made:
    return Made(Texts(rows(), max_length=4))


def add_length(example: dict[str, Any]) -> dict[str, Any]:
    example["length"] = len(example["text"].split())
    return example


def streamed(folder: Path) -> Made:
    stream = rows().to_iterable_dataset(num_shards=4)
    return Made(stream.map(add_length).shuffle(seed=0, buffer_size=4).with_format("torch"))


def interleaved(folder: Path) -> Made:
    streams = [rows().to_iterable_dataset(num_shards=2) for _ in range(2)]
    joined = datasets.interleave_datasets(streams, probabilities=[0.7, 0.3], seed=1)
    return Made(joined.filter(lambda example: example["label"] == 1).remove_columns("text"))


def concatenated(folder: Path) -> Made:
    joined = datasets.concatenate_datasets([rows(), rows()]).shuffle(seed=3)
    return Made(joined.remove_columns("text").with_format("numpy"))


def decoded_images(folder: Path) -> Made:
    from torchvision.transforms.functional import pil_to_tensor

    def collate(examples: list[Any]) -> tuple[Any, Any]:
        pictures = torch.stack([pil_to_tensor(example["image"]) for example in examples])
        return pictures, torch.tensor([example["label"] for example in examples])

    return Made(images(), collate)


class Sounds(Dataset[Any]):
    """Sounds whose bytes lie in a column."""

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Any:
        import soundfile as sf

        array, rate = sf.read(io.BytesIO(self.table[index]["audio"]["bytes"]), dtype="float32")
        return torch.from_numpy(array), rate


def sound_bytes(folder: Path) -> Made:
    import soundfile as sf

    column = []
    for index in range(COUNT):
        file = io.BytesIO()
        sf.write(file, wave(index), 8_000, format="WAV")
        column.append({"bytes": file.getvalue(), "path": None})
    table = datasets.Dataset.from_dict({"audio": column})
    return Made(Sounds(table.cast_column("audio", datasets.Audio(decode=False))))
