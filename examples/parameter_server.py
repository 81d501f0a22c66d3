"""ElasticDL's CNN on digits, trained by workers that wait for no one: the parameters are on servers.

    fastload mnist --synthetic ROOT                      # digits, for a machine without a network
    python examples/parameter_server.py ROOT             # 2 servers in this process, 3 workers, one epoch
    python examples/parameter_server.py ROOT --servers file:///shared/run7       # those of `fastload parameters serve`

Each worker pulls the parameters, computes gradients for its batch, and pushes them. The servers apply each push at
once, with the other workers' pushes in between. Today one trains such a model with DistributedDataParallel: see
docs/parameters.md.
"""

from __future__ import annotations

import argparse

import torch
from manual_update import CNN
from torch import multiprocessing, nn

from fastload import DataLoader, RankSampler
from fastload.datasets import MNIST
from fastload.parameters import Optimizer, PSClient, Server, connect
from fastload.parameters.flight import ParameterServer


def work(worker: int, args: argparse.Namespace, servers: str | list[str]) -> None:
    """Train one worker's part of the epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    client, cnn = PSClient(connect(servers), f"worker {worker}"), CNN()
    for server in range(client.ps_num):
        client.push_dense_parameters(
            cnn.named_parameters(), server, 0
        )  # the first worker's are taken

    dataset = MNIST(args.root, tensors=True)
    order = RankSampler(dataset, rank=worker, world_size=args.workers, seed=0)
    versions = [-1] * client.ps_num
    for x, y in DataLoader(dataset, args.batch_size, sampler=order):
        newer, _ = client.pull_dense_parameters(range(client.ps_num), versions)
        cnn.load_state_dict(newer, strict=False)
        cnn.zero_grad()
        loss = nn.functional.cross_entropy(cnn(x / 255.0)[0], y)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in cnn.named_parameters()}
        _, version = client.push_gradients(gradients, {}, args.lr, versions)
    print(f"worker {worker}: loss {loss.item():.3f} at version {version}", flush=True)
    client.close()


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
    multiprocessing.spawn(work, (args, servers), nprocs=args.workers)

    client, cnn = PSClient(connect(servers)), CNN()
    cnn.load_state_dict(client.pull_variable())
    test = MNIST(args.root, train=False)
    with torch.no_grad():
        found = cnn(test.data[:, None] / 255.0)[0].argmax(1)
    print(f"test accuracy: {(found == test.targets).float().mean():.2%} of {len(test)} digits")
    client.close()
    for front in fronts:
        front.shutdown()


if __name__ == "__main__":
    main()
