"""Promises:
- A server that dies before or after any message and restarts changes nothing.
- A push is applied once though a server restarts. A synchronous push is applied by all servers or by none.
- A loss that cannot be repaired is a `ParametersLostError`.

A server dies before it has a message, or after it has dealt with it and before it answers. What is in memory is gone.
"""

from __future__ import annotations

import functools
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import ParametersError, ParametersLostError
from fastload.parameters import InProcess, Optimizer, PSClient, Server
from fastload.parameters.checkpoint import newest
from fastload.parameters.journal import Journal
from fastload.parameters.transport import Answer, ServerGoneError

Deaths = set[tuple[int, bool]]
"""The messages, counted over all servers, at which the server that gets it dies: before or after it deals with it."""


@pytest.fixture(autouse=True, scope="module")
def _no_loss_of_power() -> Iterator[None]:
    """Spare the disk: what a process wrote outlives the process without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "fdatasync", lambda descriptor: None)
        yield


class Job:
    """Servers that share a folder, and die at messages."""

    def __init__(self, folder: str, number: int, deaths: Deaths, **options: Any) -> None:
        self._make = lambda i, rejoin: Server(i, number, folder=folder, rejoin=rejoin, **options)
        self.servers = [self._make(i, False) for i in range(number)]
        self.deaths, self.messages, self.died = deaths, 0, 0

    def client(self, **options: Any) -> PSClient:
        return PSClient([Mortal(self, i) for i in range(len(self.servers))], **options)

    def restart(self, number: int) -> None:
        self.servers[number].close()
        self.servers[number] = self._make(number, True)
        self.died += 1

    def close(self) -> None:
        for server in self.servers:
            server.close()


class Mortal:
    """A stub of a server that may die."""

    def __init__(self, job: Job, number: int) -> None:
        self._job, self._number = job, number
        self.name = f"server {number}"

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        job = self._job
        message, job.messages = job.messages, job.messages + 1
        if (message, False) in job.deaths:
            job.restart(self._number)
            raise ServerGoneError("died before")
        answer = InProcess(job.servers[self._number]).start(method, arguments)
        if (message, True) in job.deaths:
            job.restart(self._number)
            raise ServerGoneError("died after")
        return answer

    def close(self) -> None:
        pass


class Worker:
    """A worker whose gradients depend on its number and on the parameters."""

    def __init__(self, client: PSClient, number: int) -> None:
        self.client, self._number = client, number
        self.versions = [-1] * client.ps_num
        self._values: dict[str, torch.Tensor] = {}

    def pull(self) -> None:
        self._values |= self.client.pull_dense_parameters(range(self.client.ps_num), self.versions)[
            0
        ]

    def push(self) -> bool:
        dense = {k: v * 0.1 + self._number + 1 for k, v in self._values.items()}
        ids = torch.tensor([self._number, 7, 8, 7])
        rows = self.client.pull_embedding_vectors("t", ids)
        return self.client.push_gradients(dense, {"t": (ids, rows * 0.1 + 1)}, None, self.versions)[
            0
        ]


def parameters(job: Job, workers: list[Worker], step: int) -> dict[str, Any]:
    """Return all parameters, read while no server dies: one that has restarted gives what it has so far."""
    while True:
        died, client = job.died, workers[0].client
        settle(workers, step)
        values, rows = client.pull_variable(), client.pull_embedding_vectors("t", torch.arange(10))
        if job.died == died:
            return {**{k: v.tolist() for k, v in values.items()}, "t": rows.tolist()}


def begin(job: Job, workers: int) -> list[Worker]:
    clients = [job.client() for _ in range(workers)]
    for client in clients:
        client.push_embedding_table_infos([("t", 2)])
    for i in range(len(job.servers)):
        clients[0].push_dense_parameters({n: torch.ones(2) for n in "abcd"}, i, 0)
    if job.servers[0].folder:
        clients[0].checkpoint()
    return [Worker(client, number) for number, client in enumerate(clients)]


def train(job: Job, workers: list[Worker], steps: range) -> dict[str, Any]:
    """Train in step, and return the parameters."""
    for step in steps:
        settle(workers, step)
        for worker in workers:
            while not worker.push():  # its rows were old: a server has restarted
                settle(workers, step)
    return parameters(job, workers, steps.stop)


def settle(workers: list[Worker], step: int) -> None:
    """Let all workers pull until all servers have made all steps: it takes them to notice that one has restarted."""
    for _ in range(20):
        for worker in workers:
            worker.pull()
        if all(set(worker.versions) == {step} for worker in workers):
            return
    raise AssertionError(f"at step {step} the versions are {[w.versions for w in workers]}")


@functools.cache
def undisturbed(steps: int, workers: int, **options: Any) -> tuple[dict[str, Any], int]:
    """Return the parameters after training without deaths, and the number of messages that it took."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, 2, set(), **options)
        begun, before = begin(job, workers), job.messages
        found = train(job, begun, range(steps))
        job.close()
        return found, job.messages - before


OPTIONS = {"optimizer": Optimizer(name="adam", lr=0.1), "checkpoint_every": 3}
DEATHS = st.sets(st.tuples(st.integers(0, 199), st.booleans()), max_size=8)


@given(DEATHS, st.sampled_from([0, 3]))
def test_synchronous_steps_are_made_by_all_servers_or_none(deaths: Deaths, every: int) -> None:
    options = OPTIONS | {"grads_to_wait": 2, "checkpoint_every": every}
    expected, _ = undisturbed(7, 2, **options)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, 2, set(), **options)
        workers = begin(job, 2)
        job.deaths = {(job.messages + message, after) for message, after in deaths}
        assert train(job, workers, range(7)) == expected
        job.close()


@given(DEATHS, st.sampled_from([0, 3]))
def test_asynchronous_pushes_are_applied_once(deaths: Deaths, every: int) -> None:
    options = OPTIONS | {"checkpoint_every": every}
    expected, _ = undisturbed(15, 1, **options)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, 2, set(), **options)
        workers = begin(job, 1)
        job.deaths = {(job.messages + message, after) for message, after in deaths}
        assert train(job, workers, range(15)) == expected
        job.close()


@pytest.mark.parametrize("after", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_each_message_of_a_push_can_be_the_last_of_a_server(after: bool, tmp_path: Path) -> None:
    options = OPTIONS | {"grads_to_wait": 2, "checkpoint_every": 1}
    expected, messages = undisturbed(2, 2, **options)
    for message in range(messages):
        job = Job(str(tmp_path / str(message)), 2, set(), **options)
        workers = begin(job, 2)
        job.deaths = {(job.messages + message, after)}
        assert train(job, workers, range(2)) == expected, message
        assert job.died == 1
        job.close()


def test_a_worker_that_ends_before_the_last_message_is_completed_by_the_next(
    tmp_path: Path,
) -> None:
    job = Job(str(tmp_path), 2, set(), grads_to_wait=2)
    one, two = begin(job, 2)
    for worker in (one, two):
        worker.pull()
    real = Mortal.start

    def without_commit(self: Mortal, method: str, arguments: Mapping[str, Any]) -> Any:
        if method == "commit":
            raise KeyboardInterrupt  # the worker ends here
        return real(self, method, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mortal, "start", without_commit)
        with pytest.raises(KeyboardInterrupt):
            one.push()
    assert two.push()
    assert [server.version for server in job.servers] == [1, 1]
    job.close()


def test_a_push_that_only_a_dead_worker_had_is_an_error_that_says_so(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 2, set(), grads_to_wait=2)
    one, two = begin(job, 2)
    impatient = Worker(job.client(patience_s=0), 2)
    for worker in (one, two, impatient):
        worker.pull()
    assert one.push()
    del one
    job.restart(1)
    assert not two.push(), "its rows were old"
    with pytest.raises(
        ParametersLostError,
        match=r"server 1 has restarted at version 0, and lacks push 1 of worker",
    ):
        for _ in range(3):
            impatient.push()
    job.close()


def test_a_full_disk_loses_no_entry_of_the_order_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(str(tmp_path))

    def full(*arguments: Any) -> None:
        if len(arguments) == 3:
            os.write(arguments[0], arguments[2][:5])
        raise OSError(28, "No space left on device")

    journal.append(("one", 1))
    with monkeypatch.context() as patch:
        patch.setattr("fastload.parameters.journal.write_all", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append(("two", 1))
    journal.append(("two", 1))
    with monkeypatch.context() as patch:
        patch.setattr("fastload.parameters.journal.replace_file", full)
        with pytest.raises(OSError, match="No space left"):
            journal.forget(1)
    journal.append(("three", 1))
    journal.close()
    again = Journal(str(tmp_path), resume=True)
    assert again.since(1) == (1, [("two", 1), ("three", 1)])
    again.close()


@pytest.mark.parametrize("grads_to_wait", [None, 1])
@pytest.mark.parametrize("has_folder", [True, False])
def test_pushes_beyond_the_bound_and_a_server_without_a_folder_are_lost(
    has_folder: bool, grads_to_wait: int | None, tmp_path: Path
) -> None:
    job = Job(str(tmp_path) * has_folder, 2, set(), grads_to_wait=grads_to_wait)
    begin(job, 1)
    worker = Worker(job.client(**({"retained_bytes": 100} if has_folder else {})), 0)
    for _ in range(5):
        worker.pull()
        assert worker.push()
    job.restart(1)
    with pytest.raises(ParametersLostError, match="server 1 has restarted at version 0"):
        worker.pull()
    with pytest.raises(ParametersLostError, match="server 1 has restarted at version 0"):
        worker.push()
    job.close()


def test_a_checkpoint_bounds_what_is_kept_and_the_order(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 2, set(), grads_to_wait=1, checkpoint_every=4)
    (worker,) = begin(job, 1)
    for _ in range(41):
        worker.pull()
        assert worker.push()
    assert len((tmp_path / "journal.jsonl").read_text().splitlines()) < 12
    names = sorted(path.name for path in tmp_path.glob("version-*"))
    assert names == ["version-32", "version-36", "version-40"], "the newest three"
    job.close()


def test_a_server_that_gives_no_answer_is_named(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 1, {(n, False) for n in range(100)})
    with pytest.raises(ParametersError, match="server 0 has not answered for 0 s: died before"):
        job.client(patience_s=0).pull_variable()
    job.close()


# ---- several threads, several workers ----


def test_an_answer_of_a_server_that_did_nothing_does_not_count_if_another_thread_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(str(tmp_path), 1, set())
    (worker,) = begin(job, 1)
    client, ids = worker.client, torch.arange(3)
    rows = client.pull_embedding_vectors("t", ids)
    job.restart(0)
    real = Mortal.start

    def start(self: Mortal, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        finish = real(self, method, arguments)

        def late() -> Answer:
            other = threading.Thread(target=client.pull_variable)
            other.start()
            other.join(30)
            return finish()

        return late if method == "rows" else finish

    monkeypatch.setattr(Mortal, "start", start)
    assert torch.equal(client.pull_embedding_vectors("t", ids), rows)
    job.close()


def test_a_checkpoint_that_waits_for_one_worker_lets_others_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(str(tmp_path), 2, set(), grads_to_wait=1)
    slow, busy, saver = begin(job, 3)
    slow.pull()
    assert slow.push()
    busy.pull()
    job.restart(1)  # it waits for the push of `slow`
    dense = {name: torch.ones(2) for name in "abcd"}
    meanwhile: list[Callable[[], Any]] = [
        slow.pull,
        lambda: busy.client.push_gradients(dense, {}, None, busy.versions),
    ]
    told: list[Any] = []
    monkeypatch.setattr("time.sleep", lambda _: told.append(meanwhile.pop()()))
    assert saver.client.checkpoint() == 1
    assert told[0] == (True, 2), "the order is longer than at the mark"
    found = newest(str(tmp_path))
    assert found is not None
    assert found.version == 1
    assert [server.version for server in job.servers] == [2, 2]
    job.close()


def test_each_thread_that_may_have_old_rows_pushes_them_in_vain(tmp_path: Path) -> None:
    job = Job(str(tmp_path), 2, set(), grads_to_wait=1)
    one, two = begin(job, 2)
    one.pull()
    assert one.push()
    two.pull()
    job.restart(1)  # it waits for the push of `one`
    ids = torch.arange(4)

    def rows() -> torch.Tensor:
        return two.client.pull_embedding_vectors("t", ids)

    def pushed(found: torch.Tensor) -> bool:
        return two.client.push_gradients({}, {"t": (ids, found)}, None, two.versions)[0]

    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(rows).result()
        assert not pushed(rows())
        assert not other.submit(pushed, theirs).result()
        one.pull()
        assert other.submit(pushed, other.submit(rows).result()).result()
    job.close()


def test_a_push_that_two_servers_refuse_blocks_no_later_one_if_one_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(str(tmp_path), 2, set())
    begin(job, 1)
    client, real, pushes = job.client(patience_s=0), Mortal.start, []

    def start(self: Mortal, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        pushes.append(method)
        if pushes.count("push") == 3:
            raise ServerGoneError(
                "server 1 goes away while the client tells server 0 to skip the push"
            )
        return real(self, method, arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Mortal, "start", start)
        with pytest.raises(ParametersError, match="server 0 has not answered"):
            client.push_gradients({name: torch.ones(3) for name in "abcd"}, {}, None, [0, 0])
    assert client.push_gradients({name: torch.ones(2) for name in "abcd"}, {}, None, [0, 0])[0]
    assert [server.version for server in job.servers] == [2, 2], "the refused push counts as empty"
    job.close()


def test_a_forked_worker_is_a_new_one_before_any_of_its_threads_makes_a_call(
    tmp_path: Path,
) -> None:
    job = Job(str(tmp_path), 1, set())
    (worker,) = begin(job, 1)
    session = worker.client._session
    name, held, freed = session.worker, threading.Event(), threading.Event()

    def push() -> None:
        with session._lock:
            held.set()
            freed.wait(30)

    with ThreadPoolExecutor(1) as other, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        other.submit(push)
        assert held.wait(30)
        pid = os.fork()
        if not pid:
            try:
                assert session.worker != name
                assert session._lock.acquire(blocking=False)
                os._exit(0)
            finally:
                os._exit(3)
        freed.set()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert session.worker == name
    job.close()
