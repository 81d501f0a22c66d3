"""Promises:
- If a server has ended, the calls of all clients raise. The error names its address and what to do.
- A client waits for servers that do not listen yet.
- A restarted server is noticed by clients that knew it, and by new clients if other servers have not restarted.
- All servers that start again resume from the newest complete checkpoint, and the training ends as if undisturbed.
- A server that is killed while it saves leaves no checkpoint.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.distributed import FolderStore
from fastload.errors import ParametersError, ParametersLostError
from fastload.parameters import InProcess, Optimizer, PSClient, Server, connect
from fastload.parameters.transport import RESUME, Answer, ServerGoneError, publish
from tests.children import Python
from tests.distributed.launching import warm_environment
from tests.parameters.running import WAIT_S, connected, forking, servers
from tests.parameters.test_checkpoint import begin, parameters, train

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")

ENDED = (
    "does not answer.*End all servers and workers, and start them again with the same --checkpoint"
)


class Mortal(InProcess):
    """A server in this process that ends, and starts again with the options that it had."""

    def __init__(self, server: Server, **options: Any) -> None:
        super().__init__(server)
        self._options, self.is_there = options, True
        self.refused, self.comes_after = 0, -1

    def restart(self) -> None:
        self._server = Server(self._server.number, self._server.of, **self._options)

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        if not self.is_there:
            self.refused += 1
            self.is_there = self.refused == self.comes_after
            raise ServerGoneError(f"the server does not answer. {RESUME}")
        return super().start(method, arguments)


def mortals(**options: Any) -> list[Mortal]:
    return [Mortal(server, **options) for server in servers(2, **options)]


@pytest.mark.parametrize("grads_to_wait", [None, 1])
def test_every_call_raises_once_a_server_has_ended(grads_to_wait: int | None) -> None:
    stubs = mortals(grads_to_wait=grads_to_wait)
    client = PSClient(stubs, patience_s=0.1)
    begin(client)
    stubs[1].is_there = False
    ids, ones = torch.arange(4), torch.ones(4, 4)
    calls: list[Callable[[], object]] = [
        lambda: client.pull_dense_parameters([0, 1], [-1, -1]),
        lambda: client.pull_embedding_vectors("t", ids),
        lambda: client.set_embedding_vectors("t", ids, ones),
        lambda: client.push_gradients({}, {"t": (ids, ones)}, None, [0, 0]),
        lambda: client.push_embedding_table_infos([("u", 2)]),
        lambda: client.push_dense_parameters({}, 1, 0),
    ]
    for call in calls:
        with pytest.raises(ParametersError, match=ENDED):
            call()
    assert len(client.pull_embedding_vectors("t", 2 * ids)) == 4, "server 0 answers"


def test_a_client_waits_for_servers_that_do_not_listen_yet() -> None:
    stubs = mortals()
    stubs[1].is_there, stubs[1].comes_after = False, 3
    assert PSClient(stubs).pull_variable() == {}
    assert stubs[1].refused == 3
    stubs[1].is_there, stubs[1].comes_after = False, -1
    with pytest.raises(ParametersError, match=ENDED):
        PSClient(stubs, patience_s=0).pull_variable()


def test_a_store_that_has_lost_an_address_is_named(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, timedelta(0))
    publish(store, 0, 1, "grpc://127.0.0.1:1")
    [stub] = connect(store)
    store.delete_key("fastload/parameters/0")
    with pytest.raises(
        ParametersError, match="the store has no address of server 0: .* has no key"
    ):
        stub.start("hello", {})


def test_a_restarted_server_is_noticed(tmp_path: Path) -> None:
    """It applies nothing of clients that knew the one before it, and new clients do not mix its state with others'."""
    stubs = mortals(folder=tmp_path, optimizer=Optimizer(lr=1.0))
    client = PSClient(stubs)
    begin(client)
    client.checkpoint()
    train(client, range(2))
    stubs[1].restart()
    gradients = {name: torch.ones(3) for name in "abcdefgh"}
    for call in (client.pull_variable, lambda: client.push_gradients(gradients, {}, None, [2, 2])):
        with pytest.raises(
            ParametersLostError, match="server 1 in this process has restarted, and"
        ):
            call()
    assert stubs[1]._server.version == 0
    with pytest.raises(ParametersLostError, match="server 1 .* has restarted, and others have not"):
        PSClient(stubs).pull_variable()
    stubs[0].restart()
    assert parameters(PSClient(stubs))["a"] == [1.0] * 3, "all have resumed"


def test_a_step_that_a_worker_left_incomplete_is_an_error() -> None:
    """The worker ended after server 0 had its part of a push, and before server 1 had it."""
    stubs = mortals(grads_to_wait=1)
    client, other = PSClient(stubs, patience_s=0.1), PSClient(stubs, patience_s=0)
    begin(client)
    begin(other)
    stubs[1].is_there = False
    with pytest.raises(ParametersError, match=ENDED):
        other.push_gradients({}, {}, None, [0, 0])
    stubs[1].is_there = True
    versions, deadline = [-1, -1], time.monotonic() + WAIT_S
    with pytest.raises(ParametersLostError, match="a worker has ended in the middle of a push"):
        while time.monotonic() < deadline:
            client.pull_dense_parameters([0, 1], versions)
            assert not client.push_gradients({}, {}, None, versions)[0]
    assert versions == [1, 0]


# ---- processes ----


def about(folder: Path, number: int, of: int = 2, **options: Any) -> dict[str, Any]:
    optimizer = {"name": "adam", "lr": 0.1}
    options["folder"] = str(folder / "saved")
    return {
        "number": number,
        "of": of,
        "optimizer": optimizer,
        "options": options,
        "store": str(folder / "store"),
    }


def test_a_server_that_dies_in_a_call_prints_no_line_of_arrow(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with forking() as start:
        pid = start(**about(tmp_path, 0, of=1))
        client = PSClient(connect(FolderStore(tmp_path / "store"), wait_s=WAIT_S), patience_s=2)
        client.push_dense_parameters({"w": torch.zeros(1_000_000)}, 0, 0)
        pulled = threading.Event()

        def pull(client: PSClient) -> None:
            with pytest.raises(ParametersError, match=ENDED):
                while True:
                    client.pull_variable()
                    pulled.set()

        thread = threading.Thread(target=pull, args=(client,))
        thread.start()
        assert pulled.wait(WAIT_S)
        os.kill(pid, signal.SIGKILL)
        thread.join()
    del client, thread
    gc.collect()
    assert "Close() failed" not in capfd.readouterr().err


def test_all_ranks_raise_after_a_kill_and_resume_from_the_checkpoint(tmp_path: Path) -> None:
    undisturbed = PSClient(connect(servers(2, optimizer=Optimizer(name="adam", lr=0.1))))
    begin(undisturbed)
    train(undisturbed, range(8))
    with forking() as start:
        pids = [start(**about(tmp_path, number, checkpoint_every=3)) for number in range(2)]
        stubs = [connect(FolderStore(tmp_path / "store"), wait_s=WAIT_S) for _ in range(3)]
        clients = [PSClient(each, patience_s=2) for each in stubs]
        begin(clients[0])
        train(clients[0], range(5))
        for client in clients:
            client.pull_variable()
        os.kill(pids[1], signal.SIGKILL)
        errors: list[str] = []

        def pull(client: PSClient) -> None:
            with pytest.raises(
                ParametersError, match=rf"server at grpc://127.0.0.1:\d+ {ENDED}"
            ) as caught:
                client.pull_variable()
            errors.append(str(caught.value))

        began = time.monotonic()
        threads = [threading.Thread(target=pull, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 3
        assert time.monotonic() - began < 20, "at once"
        for client in clients:
            client.close()
        os.kill(pids[0], signal.SIGKILL)
    with forking() as start:  # as a launcher does
        (tmp_path / "store").rename(tmp_path / "old store")
        for number in range(2):
            start(**about(tmp_path, number))
        with connected(tmp_path / "store") as client:
            versions = [-1, -1]
            client.pull_dense_parameters([0, 1], versions)
            assert versions == [3, 3], "the newest checkpoint"
            train(client, range(3, 8))
            assert parameters(client) == parameters(undisturbed)


SLOW_DISK = """
import signal, sys
from fastload.parameters import PSClient, Server, checkpoint, connect
from tests.parameters.test_checkpoint import begin, train

client = PSClient(connect([Server(i, 2, folder=sys.argv[1]) for i in range(2)]))
begin(client)
train(client, range(1))
client.checkpoint()
train(client, range(1, 2))
moments = int(sys.argv[2])

def hanging(original):
    def call(*arguments, **options):
        global moments
        moments -= 1
        if moments < 0:
            print("saving", flush=True)
            signal.pause()
        return original(*arguments, **options)
    return call

checkpoint._write = hanging(checkpoint._write)
checkpoint._publish = hanging(checkpoint._publish)
client.checkpoint()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "moments", [0, 1, 2]
)  # before a part of each server, and before the rename
def test_a_server_killed_while_it_saves_leaves_no_checkpoint(moments: int, tmp_path: Path) -> None:
    import subprocess

    arguments = ["-c", SLOW_DISK, tmp_path, str(moments)]
    with Python(arguments, env=warm_environment({}), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        process.kill()
    made = servers(2, folder=tmp_path)
    assert [server.version for server in made] == [1, 1]
    assert not list(tmp_path.glob("version-2.partial/*"))
    client = PSClient(connect(made))
    train(client, range(1, 2))
    assert client.checkpoint() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-1", "version-2"]
    assert re.fullmatch(
        r"\[.*\]", str(parameters(PSClient(connect(servers(3, folder=tmp_path))))["a"])
    )
