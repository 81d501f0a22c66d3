"""ElasticDL's CNN on digits, trained by workers that wait for no one: the parameters are on servers.

    fastload mnist --synthetic ROOT                      # digits, for a machine without a network
    python examples/parameter_server.py ROOT             # 2 servers in this process, 3 workers, one epoch
    python examples/parameter_server.py ROOT --servers file:///shared/run7       # those of `fastload parameters serve`

Each worker leases digits, pulls the parameters, computes gradients for a batch, and pushes them. The servers apply each
push at once, with the other workers' pushes in between. A slow worker leases fewer digits, and no worker waits for
another. Today one trains such a model with DistributedDataParallel: see docs/parameters.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from manual_update import CNN
from torch import multiprocessing, nn

from fastload import DataLoader
from fastload.datasets import MNIST
from fastload.distributed import FolderStore
from fastload.elastic import Leases, LeaseSampler
from fastload.parameters import Optimizer, PSClient, Server, connect
from fastload.parameters.flight import ParameterServer


def work(worker: int, args: argparse.Namespace, servers: str | list[str], leased: Path) -> None:
    """Train one worker's part of the epoch. `leased` is a folder that all workers share."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    client, cnn = PSClient(connect(servers)), CNN()
    for server in range(client.ps_num):  # the first worker's parameters are taken
        client.push_dense_parameters(cnn.named_parameters(), server, 0)

    dataset = MNIST(args.root, tensors=True)
    versions, steps = [-1] * client.ps_num, 0
    with Leases(len(dataset), shard=10 * args.batch_size, store=FolderStore(leased)) as leases:
        batches = LeaseSampler(leases, args.batch_size)
        for x, y in DataLoader(dataset, batch_sampler=batches):
            newer, _ = client.pull_dense_parameters(range(client.ps_num), versions)
            cnn.load_state_dict(newer, strict=False)
            cnn.zero_grad()
            nn.functional.cross_entropy(cnn(x / 255.0)[0], y).backward()
            gradients = {name: parameter.grad for name, parameter in cnn.named_parameters()}
            client.push_gradients(gradients, {}, args.lr, versions)
            steps += 1
    client.close()
    print(f"worker {worker}: {steps} steps", flush=True)


def main() -> None:
    """Start servers and workers, then test what the servers have."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="folder with MNIST's files")
    parser.add_argument("--servers", help="where servers are (default: two in this process)")
    parser.add_argument("--workers", type=int, default=3, help="number of processes (default 3)")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 1e-3)")
    args = parser.parse_args()

    fronts = []
    if args.servers is None:
        adam = Optimizer(name="adam")
        fronts = [ParameterServer(Server(i, 2, optimizer=adam)) for i in range(2)]
    servers = args.servers or [front.address("127.0.0.1") for front in fronts]
    with TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (args, servers, Path(folder, "leases")), nprocs=args.workers)

    client, cnn = PSClient(connect(servers)), CNN()
    versions = [-1] * client.ps_num
    cnn.load_state_dict(client.pull_dense_parameters(range(client.ps_num), versions)[0])
    test = MNIST(args.root, train=False)
    with torch.no_grad():
        found = cnn(test.data[:, None] / 255.0)[0].argmax(1)
    right = (found == test.targets).float().mean()
    print(f"version {max(versions)}: test accuracy {right:.2%} of {len(test)} digits")
    client.close()
    for front in fronts:
        front.shutdown()


if __name__ == "__main__":
    main()
