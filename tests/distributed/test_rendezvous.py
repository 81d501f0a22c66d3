"""Promises:
- The system chooses the port, and the address is one that other nodes reach, even if MASTER_ADDR says localhost. Two
  network stacks stand for nodes.
- The ranks meet with mpi4py and without it.
- Stores of other jobs do no harm. Slurm is simulated by its variables alone.

The launchers of this file are simulated, by their variables alone; the processes, sockets and network stacks are real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from fastload.distributed import Rank, init, shutdown
from fastload.distributed.addresses import address_towards, interface_of, own_address
from fastload.distributed.rendezvous import (
    _by_torchrun,
    _call,
    _meet,
    _Place,
    _place_of,
    rendezvous,
)
from fastload.errors import RendezvousError
from tests.children import Python
from tests.distributed.launching import warm_environment

SLURM = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "0"}


def two(rank: int, launcher: str = "slurm", local_size: int = 2) -> Rank:
    return Rank(rank, 2, rank % local_size, local_size, launcher)  # type: ignore[arg-type]


def _opened() -> TCPStore:
    return _meet(two(0), _Place("127.0.0.1", 0, ""), timedelta(seconds=5))


def test_the_system_chooses_the_port() -> None:
    stores = [_opened(), _opened()]
    assert stores[0].port != stores[1].port
    assert {store.host for store in stores} == {"127.0.0.1"}  # all ranks are on this node


def test_the_address_for_other_nodes_is_not_the_loopback() -> None:
    try:
        address = own_address()
    except RendezvousError as error:
        assert "has only the address 127.0.0.1" in str(error)  # a machine without a network
        return
    assert not address.startswith("127.")
    assert interface_of(address) not in (None, "lo")
    assert address_towards(address) == address


def test_a_named_interface_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no0")
    with pytest.raises(RendezvousError, match="GLOO_SOCKET_IFNAME=no0 is not an interface"):
        own_address()


def test_ranks_of_a_launch_meet_by_its_variables_and_refuse_the_store_of_another() -> None:
    places = set()
    for more in ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_JOB_ID": "10"}):
        for number in range(2):
            store, way = rendezvous(two(0), SLURM | more, timeout_s=20, number=number)
            joined, same = rendezvous(two(1), SLURM | more, timeout_s=20, number=number)
            joined.set("from", "rank 1")
            assert store.get("from") == b"rank 1"
            assert way == same
            assert way.startswith("SLURM_JOB_ID and SLURM_STEP_ID: 127.0.0.1:")
            places.add(way)
    assert len(places) == 8
    store.set("fastload/token", "another")
    with pytest.raises(RendezvousError, match="rank 1 of 2 found another job's store"):
        rendezvous(two(1), SLURM | more, timeout_s=5, number=1)


def test_rank_0_is_on_the_first_node_of_a_step() -> None:
    lists = {"n1": "n1", "n[07-12,20],m1": "n07", "a-[3],b": "a-3", "r[1-2]n[4,6].x,y": "r1n4.x"}
    across = two(0, local_size=1)
    for nodes, first in lists.items():
        place, _ = _place_of(across, SLURM | {"SLURM_STEP_NODELIST": nodes}, 0)
        assert place.host == first
    named = {"MASTER_ADDR": "here.example", "MASTER_PORT": "4"}
    assert _place_of(across, SLURM | named, 0)[0] == ("here.example", 4, "")


@pytest.mark.parametrize(
    ("rank", "environ", "named"),
    [
        (two(1), SLURM, "rank 1 of 2 did not meet the others at 127.0.0.1:.* within 0.3 s"),
        (two(0, local_size=1), SLURM, "cannot find the other ranks .launcher: slurm."),
        (two(1, "mpich"), {}, "rank 1 of 2 cannot find the other ranks .launcher: mpich.. Either install mpi4py"),
        (two(0, "environment"), {"MASTER_ADDR": "n1"}, "or set MASTER_ADDR and MASTER_PORT"),
        (
            two(0, "environment", 1),
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "12399"},
            "MASTER_ADDR=localhost points each node to itself, but the 2 ranks are on several nodes",
        ),
    ],
    ids=["others absent", "no node list", "no address", "address without port", "localhost across nodes"],
)  # fmt: skip
def test_ranks_that_cannot_meet_say_so(
    rank: Rank, environ: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # as if it were not installed
    with pytest.raises(RendezvousError, match=named):
        rendezvous(rank, environ, timeout_s=0.3)


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


def test_ranks_that_an_mpi_does_not_know_meet_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(COMM_WORLD=SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", alone)
    _store, way = rendezvous(two(0, "pals"), {"PALS_APID": "a-b"}, timeout_s=20)
    assert rendezvous(two(1, "pals"), {"PALS_APID": "a-b"}, timeout_s=20)[1] == way
    assert way.startswith("PALS_APID: 127.0.0.1:")
    with pytest.raises(RendezvousError, match="install mpi4py, built for the MPI of this mpiexec"):
        rendezvous(two(1, "mpich"), {}, timeout_s=5)


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


def test_ranks_on_two_nodes_meet_by_slurms_variables_and_compute_together(
    two_nodes: tuple[str, str], tmp_path: Path
) -> None:
    common = SLURM | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "10.7.3.[1-2]",
        "SLURM_LOCALID": "0",
        "MASTER_ADDR": "localhost",  # what the scripts of others export, and nobody may go by
        "MASTER_PORT": "12399",
    }
    with ExitStack() as ends:
        ranks = []
        for rank in range(2):
            own = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)}
            process = Python(
                ["-c", ON_NODE, two_nodes[rank], "env", "--meet"],
                cwd=tmp_path,
                env=warm_environment(common | own),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            ranks.append(ends.enter_context(process))
            ends.callback(process.kill)
        outputs = [rank.communicate(timeout=50)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    for number, output in enumerate(outputs):
        assert f"rank {number} of 2: local rank 0 of 1 on " in output
        assert "(gloo, by SLURM_JOB_ID and SLURM_STEP_ID: 10.7.3.1:" in output
        assert ":12399" not in output
        assert "the ranks add up to 1\n" in output
