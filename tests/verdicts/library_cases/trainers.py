"""What trainers hand to a loader: transformers' Trainer, and a data module of Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, random_split

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, image_folder, texts


class Classifier(torch.nn.Module):
    """A model whose arguments are the columns that Trainer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Embedding(32, 2)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any = None) -> Any:
        logits = self.weights(input_ids).mean(1)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def padding_collator(folder: Path) -> Made:
    import datasets
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    from tests.verdicts.library_cases.tokenized import fast_tokenizer

    tokenizer = fast_tokenizer()
    columns = {"text": texts(), "label": [index % 2 for index in range(COUNT)]}
    encoded = datasets.Dataset.from_dict(columns).map(
        lambda batch: tokenizer(batch["text"], truncation=True, max_length=8), batched=True
    )
    trainer = Trainer(
        model=Classifier(),
        args=TrainingArguments(
            output_dir=str(folder / "out"), use_cpu=True, report_to=[], disable_tqdm=True
        ),
        train_dataset=encoded,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    loader = trainer.get_train_dataloader()
    return Made(loader.dataset, loader.collate_fn)


class Encoded(Dataset[Any]):
    """Encodings that were made beforehand."""

    def __init__(self, encodings: dict[str, Any], labels: list[int]) -> None:
        self.encodings = encodings
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        item = {key: torch.tensor(val[idx]) for key, val in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[idx])
        return item


def default_collator(folder: Path) -> Made:
    from transformers import default_data_collator

    ids = [[index, index + 1, 0] for index in range(COUNT)]
    encodings = {"input_ids": ids, "attention_mask": [[1, 1, 0]] * COUNT}
    return Made(Encoded(encodings, [index % 2 for index in range(COUNT)]), default_data_collator)


def lightning_module(folder: Path) -> Made:
    import lightning
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    class Images(lightning.LightningDataModule):
        """A data module, as the documentation of Lightning writes it."""

        def __init__(self, data_dir: str) -> None:
            super().__init__()
            self.data_dir = data_dir
            self.transform = transforms.Compose(
                [transforms.RandomHorizontalFlip(), transforms.ToTensor()]
            )

        def setup(self, stage: str) -> None:
            full = ImageFolder(self.data_dir, transform=self.transform)
            self.train, self.val = random_split(full, [6, 2])

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, batch_size=2)

    module = Images(str(image_folder(folder)))
    module.setup("fit")
    loader = module.train_dataloader()
    return Made(loader.dataset, loader.collate_fn)
