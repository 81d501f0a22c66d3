"""Servers in this process and in others, and clients of them, for several tests."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastload.parameters import Optimizer, PSClient, Server, connect
from tests.children import Python
from tests.distributed.launching import warm_environment

OPTIMIZERS = [
    Optimizer(name="sgd", lr=0.05, momentum=0.9),
    Optimizer(name="adagrad", lr=0.05),
    Optimizer(name="adam", lr=0.05),
]
WAIT_S = 100.0


def of_torch(optimizer: Optimizer, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return torch's own optimizer with the same rule."""
    if optimizer.name == "sgd":
        return torch.optim.SGD(parameters, lr=optimizer.lr, momentum=optimizer.momentum)
    kinds = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    return kinds[optimizer.name](parameters, lr=optimizer.lr)


def servers(number: int, **options: Any) -> list[Server]:
    """Return servers in this process."""
    return [Server(i, number, **options) for i in range(number)]


@contextmanager
def forking() -> Iterator[Callable[..., int]]:
    """Yield a function that starts a server in a process of its own, as `programs/servers.py` reads it; end all."""
    with Python(
        [Path(__file__).parent / "programs/servers.py"],
        env=warm_environment({"GRPC_VERBOSITY": "NONE"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        wanted, pids = program.stdin, program.stdout
        assert wanted is not None
        assert pids is not None

        def start(**about: Any) -> int:
            """Return the process id."""
            print(json.dumps(about), file=wanted, flush=True)
            return int(pids.readline())

        yield start
        wanted.close()
        assert program.wait(WAIT_S) == 0


@contextmanager
def connected(store: Path) -> Iterator[PSClient]:
    """Yield a client of the servers whose addresses are in a folder."""
    client = PSClient(connect(f"file://{store}", wait_s=WAIT_S), patience_s=WAIT_S)
    try:
        yield client
    finally:
        client.close()
