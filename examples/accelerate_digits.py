"""A network learns digits under Accelerate, on one process or several. To use fastload, two imports were changed.

    fastload mnist --synthetic digits --train 4000 --test 1000      # drawn digits in MNIST's files, not MNIST
    python examples/accelerate_digits.py digits
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/accelerate_digits.py digits

It follows Accelerate's `cv_example.py`: workers turn images, the model trains, and `gather_for_metrics` counts each
test image once.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torchvision import transforms
from torchvision.datasets import MNIST

from fastload import DataLoader  # was: from torch.utils.data import DataLoader
from fastload.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator

as_tensor = transforms.ToTensor()
augment = transforms.Compose(
    [transforms.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.8, 1.2)), as_tensor]
)


def main(folder: str) -> None:
    """Train two epochs on the digits in `folder`. Print an accuracy for each, and what bounds the training."""
    torch.manual_seed(0)
    train_set = MNIST(folder, train=True, transform=augment)
    test_set = MNIST(folder, train=False, transform=as_tensor)
    train_loader = DataLoader(train_set, batch_size=32, shuffle=True, num_workers=2)
    test_loader = DataLoader(test_set, batch_size=100, num_workers=2)

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 6 * 6, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    accelerator = Accelerator()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for epoch in range(2):
        model.train()
        for images, labels in train_loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

        model.eval()
        hits = []
        for images, labels in test_loader:
            with torch.no_grad():
                right = model(images).argmax(1) == labels
            hits.append(accelerator.gather_for_metrics(right))
        accelerator.print(f"epoch {epoch}: accuracy {torch.cat(hits).float().mean():.1%}")
    accelerator.print(train_loader.stats())  # new: what bounds the training


if __name__ == "__main__":
    main(sys.argv[1])
