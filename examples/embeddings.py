"""A small recommender: users and items are rows of tables on servers, which the loader's threads pull ahead.

    python examples/embeddings.py                                    # servers in this process
    python examples/embeddings.py --servers file:///shared/run7      # those of `fastload parameters serve`

The clicks are synthetic. Each user and each item has a hidden taste, and a user clicks if the two agree. Few users and
few items have most of the clicks. If all rows fit into one process, `nn.Embedding` is simpler and faster, and TorchRec
trains larger tables on GPUs: see docs/parameters.md.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from fastload import DataLoader
from fastload.parameters import Embedding, Optimizer, PSClient, Server, connect

USERS, ITEMS, TASTES = 2_000, 500, 4


class Clicks(Dataset[dict[str, Tensor]]):
    """Users, items, and whether the one clicked on the other."""

    def __init__(self, count: int, seed: int) -> None:
        taste = torch.Generator().manual_seed(0)
        users, items = (torch.randn(n, TASTES, generator=taste) for n in (USERS, ITEMS))
        draws = torch.Generator().manual_seed(seed)
        self.user, self.item = (
            (n ** torch.rand(count, generator=draws)).long().clamp_(max=n) - 1
            for n in (USERS, ITEMS)
        )
        self.click = ((users[self.user] * items[self.item]).sum(1) > 0).float()

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"user": self.user[index], "item": self.item[index], "click": self.click[index]}


def main() -> None:
    """Train, then test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", help="where servers are (default: two in this process)")
    parser.add_argument("--clicks", type=int, default=100_000, help="clicks to train on")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate (default 0.1)")
    args = parser.parse_args()

    adagrad = Optimizer(name="adagrad")
    here = [Server(i, 2, optimizer=adagrad) for i in range(2)]
    client = PSClient(connect(args.servers or here))
    options = {"client": client, "initializer": "normal(0.1)"}
    user = Embedding("user", 8, rows=USERS, **options)
    item = Embedding("item", 8, rows=ITEMS, **options)
    collate = item.prefetching("item", user.prefetching("user", default_collate))

    def score(batch: dict[str, Tensor]) -> Tensor:
        return (user(batch["user"]) * item(batch["item"])).sum(1)

    began = perf_counter()
    threads = {"num_workers": 2, "worker_method": "thread"}  # worker processes only collate
    loader = DataLoader(Clicks(args.clicks, seed=1), 512, collate_fn=collate, **threads)
    for step, batch in enumerate(loader):
        loss = nn.functional.binary_cross_entropy_with_logits(score(batch), batch["click"])
        loss.backward()
        user.push(args.lr)
        item.push(args.lr)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    print(f"{len(loader)} steps in {perf_counter() - began:.1f} s; users: {user.counts()}")

    user.eval()
    item.eval()
    test = Clicks(20_000, seed=2)
    right = (score(vars(test)) > 0) == (test.click > 0)
    print(f"test accuracy {right.float().mean():.2%} of {len(test)} clicks; a coin has 50 %")
    for table in (user, item):
        table.close()
    client.close()


if __name__ == "__main__":
    main()
