"""Promise: After `shutdown()`, and so at exit, no thread of the process group is left to use Python while it ends."""

from __future__ import annotations

import pytest

from tests.children import run_python
from tests.distributed.launching import warm_environment

PROGRAM = """
import os
import sys
import time
import torch
import torch.distributed as dist
from fastload import distributed

def threads_of_gloo():
    found = 0
    for number in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{number}/comm") as file:
                found += "gloo" in file.read()
        except (FileNotFoundError, ProcessLookupError):  # the thread ended
            continue
    return found

def train(wrapped):
    net = torch.nn.Linear(3, 3)
    torch.optim.SGD(net.parameters(), lr=0.1)  # imports modules whose default arguments may hold the group
    if wrapped:
        torch.nn.parallel.DistributedDataParallel(net)(torch.ones(2, 3)).sum().backward()
    else:
        dist.all_reduce(net.weight.data)

distributed.init("gloo")
train(sys.argv[1] == "ddp")
assert threads_of_gloo() > 0
distributed.shutdown()
deadline = time.monotonic() + 2
while threads_of_gloo() and time.monotonic() < deadline:
    time.sleep(0.001)  # the kernel lists a thread for a moment after it was joined
print("left:", threads_of_gloo())
"""


@pytest.mark.parametrize("model", [pytest.param("plain", marks=pytest.mark.slow), "ddp"])
def test_shutdown_ends_the_threads_of_the_group(model: str) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environ = warm_environment(alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    # Under this name it takes down its modules, as every Python does.
    ended = run_python("-c", PROGRAM, model, env=environ, name="script")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("left: 0\nEND ")
