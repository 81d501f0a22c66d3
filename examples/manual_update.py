"""A CNN on MNIST whose parameters are updated by hand: the second program of ElasticDL's design for PyTorch.

    python examples/manual_update.py ROOT            # MNIST in ROOT; it is downloaded if it is not there
    fastload mnist --synthetic ROOT                  # or digits for a machine without a network

The loader and the dataset are fastload's. Mended: the test that never called the network. Left out: an optimizer that
was made and never used, and the plots.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from fastload import DataLoader
from fastload.datasets import MNIST


class CNN(nn.Module):
    """28,938 parameters; float32[B, 1, 28, 28] become logits, float32[B, 10], and the layer before them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Sequential(nn.Conv2d(1, 16, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(2))
        self.conv2 = nn.Sequential(nn.Conv2d(16, 32, 5, 1, 2), nn.ReLU(), nn.MaxPool2d(2))
        self.out = nn.Linear(32 * 7 * 7, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, and what they are made of."""
        x = self.conv2(self.conv1(x))
        x = x.view(x.size(0), -1)
        return self.out(x), x


def main() -> None:
    """Train, test every 50 steps, and print ten predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="folder with MNIST's files")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-4, help="learning rate (default 1e-4)")
    args = parser.parse_args()

    train_data = MNIST(args.root, train=True, download=True, tensors=True)
    train_loader = DataLoader(train_data, args.batch_size, shuffle=True)
    test_data = MNIST(args.root, train=False)
    test_x = test_data.data[:2000, None] / 255.0
    test_y = test_data.targets[:2000]

    cnn = CNN()
    print(cnn)
    loss_func = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        for step, (b_x, b_y) in enumerate(train_loader):
            output = cnn(b_x / 255.0)[0]
            loss = loss_func(output, b_y)
            cnn.zero_grad()
            loss.backward()
            with torch.no_grad():
                for param in cnn.parameters():
                    assert param.grad is not None
                    param -= args.lr * param.grad
            if step % 50 == 0:
                with torch.no_grad():
                    pred_y = cnn(test_x)[0].argmax(1)
                accuracy = (pred_y == test_y).float().mean().item()
                print(
                    "Epoch: ",
                    epoch,
                    f"| train loss: {loss.item():.4f}",
                    f"| test accuracy: {accuracy:.2f}",
                )

    pred_y = cnn(test_x[:10])[0].argmax(1)
    print(pred_y.numpy(), "prediction number")
    print(test_y[:10].numpy(), "real number")


if __name__ == "__main__":
    main()
