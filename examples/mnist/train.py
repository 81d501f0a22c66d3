"""Train a small network on the sets that prepare.py has made, on any number of ranks.

    mpiexec -n 4 python train.py SETS
    torchrun --nproc-per-node 2 train.py SETS --average explicit

The network, its optimiser and the printed lines are those of the document "Twister2 with PyTorch". Its faults are not:
every row is read once, images keep their labels, ranks have dropout masks of their own, and accuracy is that of all
ranks' counts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload import DataLoader, RankSampler, distributed, store


class Net(nn.Module):
    """1,199,882 parameters; float32[B, 1, 28, 28] become log-probabilities, float32[B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout2d(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the classes."""
        x = self.conv2(F.relu(self.conv1(x)))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


class Communication:
    """Seconds from the moment that gradients are handed over until their mean is there."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def hook(self, group, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations with its own
        """Average a bucket of DistributedDataParallel's, as it does without a hook."""
        began, tensor = time.perf_counter(), bucket.buffer() / dist.get_world_size()

        def averaged(future: Any) -> Any:
            self.seconds += time.perf_counter() - began
            return future.value()[0]

        return dist.all_reduce(tensor, async_op=True).get_future().then(averaged)


def loader(
    path: Path, rank: distributed.Rank, batch_size: int, *, shuffle: bool
) -> DataLoader[Any]:
    """Return a loader of this rank's rows: uint8[B, 28, 28] and int64[B]."""
    dataset = store.get(path, data="x", label="y")
    ends = "pad" if shuffle else "uneven"
    sampler = RankSampler(
        dataset, rank=rank.rank, world_size=rank.world_size, shuffle=shuffle, ends=ends
    )
    return DataLoader(dataset, batch_size, sampler=sampler, num_workers=1, seed=1234)


def train(args: argparse.Namespace, rank: distributed.Rank) -> tuple[nn.Module, float]:
    """Train; return the model, and the seconds of communication."""
    torch.manual_seed(1234)
    model: nn.Module = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    communication = Communication()
    step: nn.Module = model
    if args.average == "ddp" and rank.world_size > 1:
        step = DistributedDataParallel(model)
        step.register_comm_hook(None, communication.hook)
    torch.manual_seed(1234 + rank.rank)
    batches = loader(args.sets / "train", rank, args.batch_size // rank.world_size, shuffle=True)
    for epoch in range(args.epochs):
        batches.set_epoch(epoch)
        losses = 0.0
        for count, (x, y) in enumerate(batches, start=1):
            optimizer.zero_grad()
            loss = F.nll_loss(step(x[:, None] / 128.0), y)
            loss.backward()
            if args.average == "explicit":
                began = time.perf_counter()
                distributed.average_gradients(model)
                communication.seconds += time.perf_counter() - began
            optimizer.step()
            losses += loss.item()
            if rank.rank == 0:
                print(f"Progress {count / len(batches) * 100:.4g}% \r", end="\r")
        if rank.rank == 0:
            print("Rank ", rank.rank, ", epoch ", epoch, ": ", losses / len(batches))
    return model, communication.seconds


@torch.no_grad()
def test(args: argparse.Namespace, rank: distributed.Rank, model: nn.Module) -> None:
    """Print loss and accuracy over all test images, of which each rank reads its own."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)  # loss, right, all
    for x, y in loader(args.sets / "test", rank, 500, shuffle=False):
        output = model(x[:, None] / 128.0)
        right = (output.argmax(1) == y).sum()
        sums += torch.tensor([F.nll_loss(output, y, reduction="sum"), right, len(y)])
    if rank.world_size > 1:
        dist.all_reduce(sums)
    loss, right, count = sums.tolist()
    if rank.rank == 0:
        print(
            f"\nTest set: Average loss: {loss / count:.4f}, "
            f"Accuracy: {right:.0f}/{count:.0f} ({100 * right / count:.2f}%)\n"
        )


def main() -> None:
    """Train, test, and keep the model and the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", type=Path, help="folder of the sets `train` and `test`")
    parser.add_argument("--average", choices=["ddp", "explicit"], default="ddp")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--out", type=Path, default=Path("model.pt"))
    args = parser.parse_args()
    args.sets = args.sets.absolute()
    rank = distributed.init()
    began = time.perf_counter()
    model, communication = train(args, rank)
    trained = time.perf_counter()
    test(args, rank, model)
    if rank.rank == 0:
        training, testing = trained - began, time.perf_counter() - trained
        print(f"Total Training Time : {training}")
        print(f"Total Testing Time : {testing}")
        torch.save(model.state_dict(), args.out)
        with Path("stats.csv").open("a") as stats:
            stats.write(f"{rank.world_size},{training},{communication},{testing}\n")


if __name__ == "__main__":
    main()
