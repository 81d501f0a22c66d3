"""Promises:
- The system chooses the port, and the address is one that other nodes reach, even if MASTER_ADDR says localhost. Two
  network stacks stand for nodes.
- The ranks meet with mpi4py and without it.
- Files of dead starts and stores of other jobs do no harm. Slurm is simulated by its variables alone.

The launchers of this file are simulated, by their variables alone; the processes, sockets and network stacks are real.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from fastload.distributed import Rank, init, shutdown
from fastload.distributed.addresses import address_towards, interface_of, own_address
from fastload.distributed.rendezvous import _by_torchrun, _call, _open, rendezvous
from fastload.errors import RendezvousError
from tests.children import Python
from tests.distributed.launching import warm_environment

SLURM = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}


@pytest.fixture(scope="module", autouse=True)
def _one_time_descriptors() -> None:
    """Open the pipe that torch's store opens once per process, so that no test is blamed for it."""
    _open(two(0), timedelta(seconds=5))


def two(rank: int, launcher: str = "slurm", local_size: int = 2) -> Rank:
    return Rank(rank, 2, rank % local_size, local_size, launcher)  # type: ignore[arg-type]


def test_the_system_chooses_the_port() -> None:
    stores = [_open(two(0), timedelta(seconds=5)) for _ in range(2)]
    assert stores[0].port != stores[1].port
    assert {store.host for store in stores} == {"127.0.0.1"}  # all ranks are on this node


def test_the_address_for_other_nodes_is_not_the_loopback() -> None:
    try:
        address = own_address(single_node=False)
    except RendezvousError as error:
        assert "has only the address 127.0.0.1" in str(error)  # a machine without a network
        return
    assert not address.startswith("127.")
    assert interface_of(address) not in (None, "lo")
    assert address_towards(address) == address


def test_a_named_interface_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address(single_node=False) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no0")
    with pytest.raises(RendezvousError, match="GLOO_SOCKET_IFNAME=no0 is not an interface"):
        own_address(single_node=False)


def test_a_file_of_a_start_that_died_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = SLURM | {"FASTLOAD_MEETING_DIR": str(tmp_path)}
    with closing(socket.create_server(("127.0.0.1", 0))) as gone:
        dead = gone.getsockname()[1]
    with rendezvous(two(0), environ, timeout_s=20) as (store, _):
        (path,) = tmp_path.iterdir()
        assert path.stat().st_mode & 0o777 == 0o600
        good = path.read_text()
        path.write_text(json.dumps(json.loads(good) | {"port": dead}))
        monkeypatch.setattr(time, "sleep", lambda _: path.write_text(good))  # before it looks again
        with rendezvous(two(1), environ, timeout_s=20) as (joined, way):
            joined.set("from", "rank 1")
        assert way == f"the file {path}"
        assert store.get("from") == b"rank 1"
        assert path.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["unreadable", "foreign"])
def test_a_file_that_cannot_be_read_is_looked_for_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = SLURM | {"FASTLOAD_MEETING_DIR": str(tmp_path)}
    with rendezvous(two(0), environ, timeout_s=20) as (store, _):
        (path,) = tmp_path.iterdir()
        kept = path.rename(tmp_path / "kept")
        if kind == "unreadable":
            path.mkdir()  # reading it fails as that of a stale handle of NFS does: an OSError, and no address known
        else:
            path.write_text("[1]")

        def put_back(_: float) -> None:
            if path.is_dir():
                path.rmdir()
            kept.rename(path)

        monkeypatch.setattr(time, "sleep", put_back)
        with rendezvous(two(1), environ, timeout_s=20) as (joined, _):
            joined.set("from", "rank 1")
        assert store.get("from") == b"rank 1"


def test_a_store_of_another_job_is_refused_and_other_starts_have_other_files(
    tmp_path: Path,
) -> None:
    environ = SLURM | {"FASTLOAD_MEETING_DIR": str(tmp_path)}
    with rendezvous(two(0), environ, timeout_s=5):
        (path,) = tmp_path.iterdir()
        path.write_text(json.dumps(json.loads(path.read_text()) | {"token": "another"}))
        with pytest.raises(RendezvousError, match="rank 1 of 2 found another job's store"):
            rendezvous(two(1), environ, timeout_s=5).__enter__()
    others = [{}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "10"}]
    names = set()
    for other in others:
        with rendezvous(two(0), environ | other, timeout_s=5) as (_, way):
            names.add(way)
    assert len(names) == len(others)


@pytest.mark.parametrize(
    ("rank", "environ", "named"),
    [
        (two(1), SLURM, "rank 1 of 2 waited 0.3 s for rank 0: .* does not exist"),
        (two(1, "mpich"), {}, "rank 1 of 2 cannot find the other ranks .launcher: mpich.. Either install mpi4py"),
        (two(0, "environment"), {"MASTER_ADDR": "n1"}, "or set MASTER_ADDR and MASTER_PORT"),
        (
            two(0, "environment", 1),
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "12399"},
            "MASTER_ADDR=localhost points each node to itself, but the 2 ranks are on several nodes",
        ),
    ],
    ids=["nobody comes", "no way", "half a way", "localhost across nodes"],
)  # fmt: skip
def test_ranks_that_cannot_meet_say_so(
    rank: Rank, environ: dict[str, str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it were not installed
    place = {"FASTLOAD_MEETING_DIR": str(tmp_path)}
    with pytest.raises(RendezvousError, match=named):
        rendezvous(rank, environ | place, timeout_s=0.3).__enter__()


def test_ranks_that_torchrun_restarts_meet_without_the_keys_of_ranks_that_have_ended() -> None:
    agent = HashStore()
    agent.set_timeout(timedelta(seconds=20))

    def meet(world_size: int) -> list[Store]:
        ranks = [Rank(k, world_size, 0, 1, "torchrun") for k in range(world_size)]
        with ThreadPoolExecutor(world_size) as pool:
            return list(pool.map(lambda rank: _by_torchrun(agent, rank), ranks))

    for attempt, world_size in enumerate((3, 3, 2, 1)):
        _call(agent, 1, f"killed{attempt}")  # before it heard an answer
        stores = meet(world_size)
        assert not any(store.check(["key"]) for store in stores)
        stores[0].set("key", str(attempt))
        assert {store.get("key") for store in stores} == {str(attempt).encode()}


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_of_torchrun_that_waits_in_vain_says_so(number: int) -> None:
    agent = HashStore()
    agent.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RendezvousError, match=f"rank {number} of 2 did not meet the others"):
        _by_torchrun(agent, two(number, "torchrun"))


def test_ranks_that_an_mpi_does_not_know_meet_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", alone)
    environ = {"PALS_APID": "a-b", "FASTLOAD_MEETING_DIR": str(tmp_path)}
    with rendezvous(two(0, "pals"), environ, timeout_s=20) as (_, way):
        assert way.startswith(f"the file {tmp_path}/fastload-ranks-")
        with rendezvous(two(1, "pals"), environ, timeout_s=20) as (_, joined):
            assert joined == way
    with pytest.raises(RendezvousError, match="install mpi4py, built for the MPI of this mpiexec"):
        rendezvous(two(1, "mpich"), {}, timeout_s=5).__enter__()


def test_alone_there_is_no_group_and_ending_it_is_no_error() -> None:
    import torch.distributed as dist

    shutdown()
    assert init() == init() == Rank(0, 1, 0, 1, "none")
    assert not dist.is_initialized()
    shutdown()
    shutdown()


# `ip netns exec NODE python -m fastload ...`, in a process that has begun.
ON_NODE = """
import ctypes, os, runpy, sys
CLONE_NEWNET = 0x40000000
node = os.open(f"/run/netns/{sys.argv.pop(1)}", os.O_RDONLY)
assert ctypes.CDLL(None, use_errno=True).setns(node, CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
os.close(node)
runpy.run_module("fastload", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, str]]:
    """Two network stacks with a cable between them. Each has a loopback of its own, as nodes have."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and ip (Debian: iproute2)")

    def ip(arguments: str) -> None:
        command = ["ip", *arguments.split()]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)

    names = (f"fastload-a-{os.getpid()}", f"fastload-b-{os.getpid()}")
    with ExitStack() as ends:
        try:
            for name in names:
                ip(f"netns add {name}")
                ends.callback(ip, f"netns delete {name}")
            ip(f"link add fl0 netns {names[0]} type veth peer name fl1 netns {names[1]}")
            for number, name in enumerate(names):
                ip(f"-n {name} address add 10.7.3.{number + 1}/24 dev fl{number}")
                ip(f"-n {name} link set fl{number} up")
                ip(f"-n {name} link set lo up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield names


def test_ranks_on_two_nodes_meet_by_a_file_and_compute_together(
    two_nodes: tuple[str, str], tmp_path: Path
) -> None:
    common = SLURM | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "localhost",  # what the scripts of others export, and nobody may go by
        "MASTER_PORT": "12399",
    }

    def start(rank: int) -> subprocess.Popen[str]:
        return Python(
            ["-c", ON_NODE, two_nodes[rank], "env", "--meet"],
            cwd=tmp_path,
            env=warm_environment(common | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    with ExitStack() as ends:
        ranks = [ends.enter_context(start(0))]
        ends.callback(ranks[0].kill)
        place = wait_for_file(tmp_path)  # before rank 1 is there, and rank 0 removes it
        ranks.append(ends.enter_context(start(1)))
        ends.callback(ranks[1].kill)
        outputs = [rank.communicate(timeout=50)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert place["address"] == "10.7.3.1"
    assert place["port"] != 12399
    for number, output in enumerate(outputs):
        assert f"rank {number} of 2: local rank 0 of 1 on " in output
        assert f"(gloo, by the file {tmp_path}/fastload-ranks-" in output
        assert "the ranks add up to 1\n" in output
    assert list(tmp_path.iterdir()) == []


def wait_for_file(directory: Path) -> dict[str, object]:
    """What rank 0 published while it was there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in directory.glob("fastload-ranks-" + "?" * 16 + "-1"):
            try:
                place: dict[str, object] = json.loads(path.read_text())
            except FileNotFoundError:
                continue
            return place
        time.sleep(0.005)
    raise AssertionError("rank 0 published nothing in 60 s")
