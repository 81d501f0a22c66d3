"""Dask prepares MNIST into the shared memory of two hosts, and both train on their parts: "Dask on Vineyard" today.

    python examples/vineyard_mnist.py                      # synthetic digits, which it writes first
    python examples/vineyard_mnist.py --data DIR           # MNIST's own files
    python examples/vineyard_mnist.py --rows 60000         # all rows in each partition, as in the original: 7.5 GB

Both hosts are simulated: two Dask workers, and then two ranks, on this machine, each with a store and a node name of
its own. On real hosts start `dask worker` on each, and this file's `train` under mpiexec or torchrun. With the
original's learning rate of 0.001, 210 steps are only a beginning: --lr 0.05 shows that the network learns.

The program is that of Vineyard's documentation, with its function names. These lines changed; imports aside:

    tf.keras.datasets.mnist.load_data()          MNIST(data).data and .targets: files, or synthetic ones
    with builder_context() as builder: ...       gone: nothing is registered
    vineyard.connect().put(gdf, dask_scheduler=...)   store.put(gdf, NAME, client=...); its placement is even
    with resolver_context() as resolver: ...     gone
    vineyard.connect().get(gdf_id, data='x', label='y')   store.get(NAME, data="x", label="y", balance="drop")
    .repeat().batch(batch_size), AutoShardPolicy.OFF      fastload.DataLoader(..., batch_size), repeated
    tf.keras.Sequential, compile                 torch.nn.Sequential, with the same 2,770,634 parameters
    MultiWorkerMirroredStrategy, fit             DistributedDataParallel and a loop
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.dataframe as dd
import numpy as np
import pandas as pd
import torch
from dask import delayed
from distributed import Client, Nanny, Scheduler, SpecCluster
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastload import DataLoader, store
from fastload.datasets import MNIST
from fastload.datasets.synthetic import generate_digits

NAME = "mnist-frame"
HOSTS = ("host-1", "host-2")
PARAMETERS = 2_770_634


def dask_preprocess(client: Client, data: str, partitions: int, rows: int) -> str:
    """Put a frame of `partitions` copies of MNIST's first `rows` images; return the id of the set."""

    def get_mnist() -> pd.DataFrame:
        mnist = MNIST(data)
        x_train, y_train = mnist.data[:rows].numpy(), mnist.targets[:rows].numpy()
        # The `x` arrays are uint8, from 0 to 255. The model wants floats from 0 to 1.
        x_train = x_train / np.float64(255)
        y_train = y_train.astype(np.int64)
        return pd.DataFrame({"x": list(x_train), "y": y_train})

    meta = pd.DataFrame({"x": pd.Series(dtype=object), "y": pd.Series(dtype=np.int64)})
    datasets = [delayed(get_mnist)() for _ in range(partitions)]
    dfs = [dd.from_delayed(ds, meta=meta) for ds in datasets]
    gdf = dd.concat(dfs)
    return store.put(gdf, NAME, client=client)


def mnist_dataset(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of this host's rows without end: float64[B, 28, 28] and int64[B]."""
    train_datasets = store.get(NAME, data="x", label="y", balance="drop")
    loader = DataLoader(
        train_datasets, batch_size, shuffle=True, drop_last=True, num_workers=2, seed=0
    )
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def build_cnn_model() -> nn.Module:
    """Return the network: images of [B, 28, 28] become logits of [B, 10]."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 28)),
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(26 * 26 * 32, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(epochs: int, steps_per_epoch: int, learning_rate: float) -> None:
    """Train on this host's parts, in step with the other host."""
    per_worker_batch_size = 64
    torch.manual_seed(0)
    multi_worker_model = DistributedDataParallel(build_cnn_model())
    optimizer = torch.optim.SGD(multi_worker_model.parameters(), lr=learning_rate)
    train_dataset = mnist_dataset(per_worker_batch_size)
    for epoch in range(epochs):
        losses, right = 0.0, torch.zeros(1)
        for x, y in itertools.islice(train_dataset, steps_per_epoch):
            logits = multi_worker_model(x.float())
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.item()
            right += (logits.argmax(1) == y).sum()
        torch.distributed.all_reduce(right)
        if torch.distributed.get_rank() == 0:
            accuracy = right.item() / (steps_per_epoch * per_worker_batch_size * len(HOSTS))
            print(
                f"epoch {epoch + 1}: loss {losses / steps_per_epoch:.4f}, accuracy {accuracy:.1%}",
                flush=True,
            )


# ---- two hosts on one machine ----


def on_host(rank: int, folder: str, *hyperparameters: Any) -> None:
    """Run `train` as one of the simulated hosts."""
    os.environ |= {"FASTLOAD_STORE": f"{folder}/{HOSTS[rank]}", "FASTLOAD_NODE": HOSTS[rank]}
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=len(HOSTS)
    )
    train(*hyperparameters)
    torch.distributed.destroy_process_group()


def simulated_hosts(folder: str) -> SpecCluster:
    """Start a Dask scheduler, and a worker for each host."""
    workers = {
        host: {
            "cls": Nanny,
            "options": {
                "nthreads": 1,
                "host": "127.0.0.1",
                "env": {
                    "FASTLOAD_STORE": f"{folder}/{host}",
                    "FASTLOAD_NODE": host,
                    "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "warning",
                },
            },
        }
        for host in HOSTS
    }
    options = {"dashboard_address": "127.0.0.1:0", "port": 0, "host": "127.0.0.1"}
    scheduler = {"cls": Scheduler, "options": options}
    return SpecCluster(workers=workers, scheduler=scheduler, silence_logs=logging.WARNING)


def main() -> None:
    """Prepare with Dask, train with torch."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", help="folder with MNIST's files (default: synthetic digits)")
    parser.add_argument("--partitions", type=int, default=20, help="of the frame (default 20)")
    parser.add_argument("--rows", type=int, default=3000, help="of a partition (default 3000)")
    parser.add_argument("--epochs", type=int, default=3, help="(default 3)")
    parser.add_argument("--steps", type=int, default=70, help="of an epoch (default 70)")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate (default 0.001)")
    args = parser.parse_args()

    count = sum(parameter.numel() for parameter in build_cnn_model().parameters())
    assert count == PARAMETERS, count
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="fastload-vineyard-", dir=memory) as folder:
        data = args.data or str(generate_digits(f"{folder}/digits", train=args.rows, test=1))
        with simulated_hosts(folder) as cluster, Client(cluster) as client:
            number = dask_preprocess(client, data, args.partitions, args.rows)
        parts = [len(list(Path(folder, host, NAME).glob("*.arrow"))) for host in HOSTS]
        print(
            f"set {number}: {parts[0]} + {parts[1]} parts on two simulated hosts; {count:,} parameters"
        )
        torch.multiprocessing.spawn(
            on_host, (folder, args.epochs, args.steps, args.lr), nprocs=len(HOSTS)
        )


if __name__ == "__main__":
    main()
