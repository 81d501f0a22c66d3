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
from types import SimpleNamespace
from typing import Any

import pytest

from fastload.distributed import FolderStore
from fastload.parameters import PSClient, Stub, connect
from fastload.parameters.transport import Answer
from tests.parameters.running import forking
from tests.parameters.test_restarts import OPTIONS, Job, begin, train, undisturbed

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")


class Processes(Job):
    """Two servers as processes, of which `left` more are to be killed."""

    def __init__(self, start: Callable[..., int], folder: Path, kills: int) -> None:
        self._begin, self._store = start, str(folder / "store")
        self._options = {"grads_to_wait": 2, "checkpoint_every": 3, "folder": str(folder / "saved")}
        self._draws, self.left, self.died = random.Random(kills), 0, 0
        self.pids = [self._start(number, rejoin=False) for number in range(2)]
        self.servers: Any = [SimpleNamespace(**self._options)] * 2

    def _start(self, number: int, *, rejoin: bool) -> int:
        about = {"number": number, "of": 2, "optimizer": {"name": "adam", "lr": 0.1}}
        return self._begin(**about, options={**self._options, "rejoin": rejoin}, store=self._store)

    def client(self, **options: Any) -> PSClient:
        stubs = connect(FolderStore(self._store))
        return PSClient([Deadly(self, *one) for one in enumerate(stubs)], patience_s=60)

    def moment(self) -> str:
        """Return when to kill a server that gets a message, or nothing."""
        if not self.left or self._draws.random() > 0.15:
            return ""
        self.left -= 1
        return self._draws.choice(["before", "on its way", "after"])

    def restart(self, number: int) -> None:
        os.kill(self.pids[number], signal.SIGKILL)
        self.pids[number] = self._start(number, rejoin=True)
        self.died += 1


class Deadly:
    """A stub whose server is killed at some messages."""

    def __init__(self, job: Processes, number: int, stub: Stub) -> None:
        self._job, self._number, self._stub = job, number, stub
        self.name, self.close = stub.name, stub.close

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        moment = self._job.moment()
        if moment == "before":
            self._job.restart(self._number)
        wait = self._stub.start(method, arguments)
        if moment == "on its way":
            self._job.restart(self._number)

        def finish() -> Answer:
            answer = wait()
            if moment == "after":
                self._job.restart(self._number)
            return answer

        return finish


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_servers_that_are_killed_change_nothing(kills: int, tmp_path: Path) -> None:
    steps = 4 * kills // 5 + 4
    with forking() as start:
        job = Processes(start, tmp_path, kills)
        workers = begin(job, 2)
        job.left = kills
        found = train(job, workers, range(steps))
        for worker in workers:
            worker.client.close()
    assert job.left == 0, "all were killed"
    assert found == undisturbed(steps, 2, **OPTIONS, grads_to_wait=2)[0]
