"""A network learns digits under Lightning. To use fastload, one import was changed.

    fastload mnist --synthetic digits --train 4000 --test 1000      # drawn digits in MNIST's files, not MNIST
    python examples/lightning_digits.py digits

It follows Lightning's `backbone_image_classifier.py`: workers turn images, the Trainer trains and validates.
"""

from __future__ import annotations

import sys

import lightning
import torch
from torch import nn
from torchvision import transforms
from torchvision.datasets import MNIST

from fastload import DataLoader  # was: from torch.utils.data import DataLoader

as_tensor = transforms.ToTensor()
augment = transforms.Compose(
    [transforms.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.8, 1.2)), as_tensor]
)


class Classifier(lightning.LightningModule):
    """float32[B, 1, 28, 28] become logits, float32[B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 6 * 6, 10),
        )

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch: list[torch.Tensor], _number: int) -> None:
        """Count the digits that are recognized."""
        images, labels = batch
        right = self.layers(images).argmax(1) == labels
        self.log("accuracy", right.float().mean(), batch_size=len(labels), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main(folder: str) -> None:
    """Train two epochs on the digits in `folder`. Print the accuracy, and what bounds the training."""
    train_set = MNIST(folder, train=True, transform=augment)
    test_set = MNIST(folder, train=False, transform=as_tensor)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, num_workers=2)
    test_loader = DataLoader(test_set, batch_size=100, num_workers=2)

    lightning.seed_everything(0)
    trainer = lightning.Trainer(max_epochs=2)
    trainer.fit(Classifier(), train_loader, test_loader)
    print(f"accuracy {trainer.callback_metrics['accuracy']:.1%}")
    print(trainer.train_dataloader.stats())  # new: what bounds the training


if __name__ == "__main__":
    main(sys.argv[1])
