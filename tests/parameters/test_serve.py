"""Promise: `fastload parameters serve` runs a server for each rank, found through the store and saved at SIGTERM. The
test under mpiexec and torchrun is marked slow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.errors import ParametersError
from fastload.parameters import PSClient
from tests.children import Python
from tests.distributed.launching import clean_environment, command, warm_environment
from tests.parameters.running import WAIT_S, connected

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")

SERVE = ("-m", "fastload", "parameters", "serve")


@contextmanager
def started(arguments: list[str], output: Path) -> Iterator[subprocess.Popen[Any]]:
    """Start a launcher with its arguments, or a Python with these, and end it."""
    with output.open("ab") as file:
        extra = {"GRPC_VERBOSITY": "NONE"}
        options: dict[str, Any] = {"stdout": file, "stderr": file, "start_new_session": True}
        process = (
            Python(arguments, env=warm_environment(extra), **options)
            if arguments[0] == "-m"
            else subprocess.Popen(arguments, env=clean_environment(extra), **options)
        )
    try:
        yield process
    finally:
        # Not SIGKILL: torchrun's ranks have sessions of their own, and it ends them.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def push(client: PSClient, times: int) -> None:
    for i in range(client.ps_num):
        client.push_dense_parameters({name: torch.zeros(2) for name in "abcd"}, i, 0)
    client.push_embedding_table_infos([("t", 2, "zeros")])
    for _ in range(times):
        gradients = {name: -torch.ones(2) for name in "abcd"}
        rows = {"t": (torch.arange(6), -torch.ones(6, 2))}
        assert client.push_gradients(gradients, rows, 1.0, [0] * client.ps_num)[0]


def parameters(client: PSClient) -> tuple[list[float], list[float]]:
    values, rows = client.pull_variable(), client.pull_embedding_vectors("t", torch.arange(6))
    return [values[name][0].item() for name in "abcd"], rows[:, 0].tolist()


def test_a_server_saves_at_its_end_and_new_workers_find_it_again(tmp_path: Path) -> None:
    arguments = [
        *SERVE,
        "--store",
        str(tmp_path / "store"),
        "--checkpoint",
        str(tmp_path / "saved"),
    ]
    output = tmp_path / "output"
    with started(arguments, output) as process, connected(tmp_path / "store") as client:
        push(client, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143, output.read_text()
        assert (tmp_path / "saved" / "version-3" / "part-0-of-1.arrow").exists()
        with started(arguments, output):
            with pytest.raises(
                ParametersError, match="start them again with the same --checkpoint"
            ):
                client.pull_variable()
            with connected(tmp_path / "store") as other:
                assert parameters(other) == ([3.0] * 4, [3.0] * 6)
                push(other, 1)
                assert parameters(other) == ([4.0] * 4, [4.0] * 6)
    lines = output.read_text().splitlines()
    assert "server 0 of 1: serving parameters of version 0 at grpc://127.0.0.1:" in lines[0]
    assert "server 0 of 1 has ended at version 3" in lines[1]
    assert "server 0 of 1: serving parameters of version 3 at" in lines[2]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpich", "torchrun"])
@pytest.mark.timeout(300)
def test_each_rank_is_a_server_and_three_take_the_place_of_two(
    launcher: str, tmp_path: Path
) -> None:
    output, saved = tmp_path / "output", tmp_path / "saved"
    arguments = [*SERVE, "--checkpoint", str(saved), "--store"]
    store = tmp_path / "first"
    with started(command(launcher, 2, *arguments, str(store)), output) as process:
        with connected(store) as client:
            assert client.ps_num == 2
            push(client, 3)
            assert client.checkpoint() == 3
            push(client, 2)
            assert parameters(client) == ([5.0] * 4, [5.0] * 6)
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)
    assert list(saved.glob("version-5/part-?-of-2.arrow")), output.read_text()
    store = tmp_path / "second"
    with started(command(launcher, 3, *arguments, str(store)), output), connected(store) as client:
        assert client.ps_num == 3
        assert parameters(client) == ([5.0] * 4, [5.0] * 6)
        push(client, 1)
        assert parameters(client) == ([6.0] * 4, [6.0] * 6)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_restarts_all_servers_if_one_is_killed(tmp_path: Path) -> None:
    output, saved, store = tmp_path / "output", tmp_path / "saved", tmp_path / "store"
    restarting = command("torchrun", 2, *SERVE, "--checkpoint", str(saved), "--store", str(store))
    restarting[3:3] = ["--max-restarts=1"]
    with started(restarting, output) as process:
        with connected(store) as client:
            push(client, 3)
            assert client.checkpoint() == 3
            push(client, 2)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            wait_for("serving parameters of version 3", output, times=2)
            with pytest.raises(
                ParametersError, match="start them again with the same --checkpoint"
            ):
                client.pull_variable()
        with connected(store) as client:
            assert parameters(client) == ([3.0] * 4, [3.0] * 6)


def wait_for(line: str, output: Path, *, times: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while output.read_text().count(line) < times:
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)
