"""Promise: Server processes that are killed in the middle of pushes, and restarted, change nothing. 100 processes are
killed; the test is marked slow.

SIGKILL comes before a message is sent, while it is on its way, or after its answer, at messages drawn at random.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.distributed import FolderStore
from fastload.parameters import Optimizer, PSClient, Stub, connect
from fastload.parameters.transport import Answer
from tests.parameters.running import forking, servers

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")

OPTIMIZER = {"name": "adam", "lr": 0.05}
NAMES = "abcdef"


class Processes:
    """Servers as processes, and what restarts them."""

    def __init__(
        self, start: Callable[..., int], folder: Path, number: int, **options: Any
    ) -> None:
        self._begin, self._folder, self._of = start, folder, number
        self._options = options
        self.pids = [self._start(i, rejoin=False) for i in range(number)]

    def _start(self, number: int, *, rejoin: bool) -> int:
        options = {**self._options, "folder": str(self._folder / "checkpoints"), "rejoin": rejoin}
        about = {"number": number, "of": self._of, "optimizer": OPTIMIZER, "options": options}
        return self._begin(**about, store=str(self._folder / "store"))

    def kill(self, number: int) -> None:
        """Kill a server, and restart it."""
        os.kill(self.pids[number], signal.SIGKILL)
        self.pids[number] = self._start(number, rejoin=True)

    def stubs(self) -> list[Stub]:
        return connect(FolderStore(str(self._folder / "store")))


class Deadly:
    """A stub whose server is killed at some messages."""

    def __init__(
        self, stub: Stub, number: int, processes: Processes, draw: Callable[[str], str]
    ) -> None:
        self._stub, self._number = stub, number
        self._processes, self._draw = processes, draw

    @property
    def name(self) -> str:
        return self._stub.name

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        moment = self._draw(method)
        if moment == "before":
            self._processes.kill(self._number)
        wait = self._stub.start(method, arguments)
        if moment == "on its way":
            self._processes.kill(self._number)

        def finish() -> Answer:
            answer = wait()
            if moment == "after":
                self._processes.kill(self._number)
            return answer

        return finish

    def close(self) -> None:
        self._stub.close()


def train(clients: list[PSClient], steps: int) -> dict[str, Any]:
    """Let clients train in step, one thread for all; return the parameters."""
    versions = [[-1] * client.ps_num for client in clients]
    values: list[dict[str, torch.Tensor]] = [{} for _ in clients]

    def settle(step: int) -> None:
        """Let all pull, so that they notice what has restarted, until all servers have made all steps."""
        settled = False
        while not settled:
            for k, client in enumerate(clients):
                values[k] |= client.pull_dense_parameters(range(client.ps_num), versions[k])[0]
            settled = all(found == [step] * len(found) for found in versions)

    for step in range(steps):
        settle(step)
        for k, client in enumerate(clients):
            accepted = False
            while not accepted:
                ids = torch.tensor([k, step, 50, 51])
                rows = client.pull_embedding_vectors("t", ids)
                dense = {name: value * 0.1 + k + 1 for name, value in values[k].items()}
                accepted, _ = client.push_gradients(
                    dense, {"t": (ids, rows * 0.1 + 1)}, None, versions[k]
                )
                if not accepted:
                    settle(step)
    settle(steps)
    rows = clients[0].pull_embedding_vectors("t", torch.arange(60))
    return {**{name: value.tolist() for name, value in values[0].items()}, "t": rows.tolist()}


def begin(clients: list[PSClient]) -> None:
    for client in clients:
        client.push_embedding_table_infos([("t", 3)])
    for i in range(clients[0].ps_num):
        clients[0].push_dense_parameters({name: torch.ones(4) for name in NAMES}, i, 0)


def undisturbed(steps: int) -> dict[str, Any]:
    options: dict[str, Any] = {"optimizer": Optimizer(**OPTIMIZER), "grads_to_wait": 2}  # type: ignore[arg-type]
    stubs = connect(servers(2, **options))
    clients = [PSClient(stubs), PSClient(stubs)]
    begin(clients)
    return train(clients, steps)


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_servers_that_are_killed_change_nothing(kills: int, tmp_path: Path) -> None:
    draws, left = random.Random(kills), kills
    active = False
    died: dict[str, int] = {}

    def draw(method: str) -> str:
        nonlocal left
        if not active or not left or draws.random() > 0.15:
            return ""
        left -= 1
        moment = draws.choice(["before", "on its way", "after"])
        died[f"{method} {moment}"] = died.get(f"{method} {moment}", 0) + 1
        return moment

    steps = 4 * kills // 5 + 4
    with forking() as start:
        processes = Processes(start, tmp_path, 2, grads_to_wait=2, checkpoint_every=3)
        clients = []
        for _ in range(2):
            stubs = [Deadly(stub, i, processes, draw) for i, stub in enumerate(processes.stubs())]
            clients.append(PSClient(stubs, patience_s=60))
        begin(clients)
        clients[0].checkpoint()
        active = True
        found = train(clients, steps)
        for client in clients:
            client.close()
    assert left == 0, "all were killed"
    assert found == undisturbed(steps), died
