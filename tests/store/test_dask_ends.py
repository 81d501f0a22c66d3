"""Promises:
- A put raises if a Dask worker or client is killed, or if a seal fails on one node. Nothing is left on any node, or
  `gc` collects it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastload.errors import PrepareError
from fastload.store import put
from fastload.store.root import collect, sets
from tests.store.test_dask import cluster_of, frames, wait_until_empty

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.slow

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Leave out the check of open sockets: Dask's client keeps its connections from test to test."""


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    return [tmp_path / "node0", tmp_path / "node1"]


@pytest.fixture
def client(roots: list[Path]) -> Iterator[Any]:
    with cluster_of(roots) as cluster, distributed.Client(cluster) as client:
        yield client


def stop_at_part(fifo: str, number: int) -> None:
    """Have this worker say that it writes a part, and stay there."""
    from fastload.store import dask_put

    written = dask_put.write_part

    def stopped(path: str, *args: Any, **options: Any) -> Any:
        if path.endswith(f"partition-{number}"):
            with open(fifo, "w") as file:
                file.write("here")
            with open(fifo) as file:  # until the test opens it again
                file.read()
        return written(path, *args, **options)

    dask_put.write_part = stopped


def nothing_is_left(client: Any, roots: list[Path]) -> bool:
    wait_until_empty(client, roots)
    return not any(found for root in roots for found in (*sets(str(root)), *collect(str(root))))


@pytest.mark.parametrize("which", [0, 1])
def test_a_worker_that_is_killed_while_parts_are_written_ends_the_put(
    which: int, client: Any, roots: list[Path], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    known = client.scheduler_info()["workers"]
    address = next(a for a, about in known.items() if about["name"] == f"w{which}")
    pid = client.run(os.getpid, workers=[address])[address]
    client.run(stop_at_part, str(fifo), 0 if which == 0 else 5, workers=[address])
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(put, frames(6), "set", client=client)
        assert fifo.read_text() == "here"
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(PrepareError, match=f"worker {address} ended during the put"):
            running.result(WAIT_S)
    for root in roots:
        assert not list(sets(str(root)))
        collect(str(root))  # a killed worker cannot clean up: `gc` does
        assert not list((root / ".unsealed").iterdir())


PROGRAM = """
import sys
import distributed
from fastload.store import put
from tests.store.test_dask import frames

if __name__ == "__main__":
    with distributed.Client(sys.argv[1]) as client:
        put(frames(6), "set", client=client)
"""


def program(client: Any, tmp_path: Path) -> subprocess.Popen[bytes]:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", client.scheduler.address]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_a_client_that_is_killed_leaves_nothing(
    client: Any, roots: list[Path], tmp_path: Path
) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    client.run(stop_at_part, str(fifo), 1)
    with program(client, tmp_path) as process:
        assert fifo.read_text() == "here"
        process.kill()
        process.wait()
        fifo.write_text("go on")
    assert nothing_is_left(client, roots)


def test_a_seal_that_fails_on_one_node_is_undone_on_the_other(
    client: Any, roots: list[Path]
) -> None:
    def failing() -> None:
        from fastload.store import dask_put

        def seal(*args: Any) -> None:
            raise OSError(5, "the disk is gone", "node1")

        dask_put.seal = seal

    known = client.scheduler_info()["workers"]
    client.run(failing, workers=[a for a, about in known.items() if about["name"] == "w1"])
    with pytest.raises(OSError, match="the disk is gone"):
        put(frames(6), "set", client=client)
    assert nothing_is_left(client, roots)
