"""How the ranks find each other: rank 0 opens torch's store at an address that all ranks know, and the others connect.

Under MPI the system chooses the port, and a broadcast tells it. Under torchrun the store is that of its agent. Else
MASTER_ADDR and MASTER_PORT give the address, or it follows from the variables that identify the launch. Its host is the
first node of a Slurm step, or this node if all ranks are here. Its port is computed from the launch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import secrets
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastload.distributed.addresses import LOOPBACK, is_loopback, own_address
from fastload.distributed.detect import MPI_LAUNCHERS, Rank, mpi_of
from fastload.errors import RendezvousError

# Variables that identify one start of the ranks: equal on all ranks, and new at each start. Hydra sets none.
_LAUNCH_KEYS: dict[str, tuple[str, ...]] = {
    "openmpi": ("PMIX_NAMESPACE",),
    "pals": ("PALS_APID",),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}
_MORE_OF_KEY = ("PBS_JOBID", "SLURM_RESTART_COUNT")
_PORTS = range(10_000, 29_500)
"""Ports for launches: above those of services, and below torch's own and those that systems give to clients."""
_TOKEN = "fastload/token"


class _Place(NamedTuple):
    """Where rank 0 has its store, and the token by which the others know that it is the store of their job."""

    host: str
    port: int
    token: str


def rendezvous(
    rank: Rank, environ: Mapping[str, str], *, timeout_s: float, number: int = 0
) -> tuple[Store, str]:
    """Return the store that all ranks of the job share, and how they found it.

    `number` distinguishes this rendezvous from earlier ones of the same processes.

    Raises:
        RendezvousError: the others did not connect within `timeout_s` seconds, or there is no way to reach them.
    """
    timeout = timedelta(seconds=timeout_s)
    if (mpi := mpi_of(rank)) is not None:
        return _by_mpi(mpi, rank, timeout), "MPI"
    if (agent := _agent_store(timeout)) is not None:
        return _by_torchrun(agent, rank), "torchrun's store"
    place, named_by = _place_of(rank, environ, number)
    return _meet(rank, place, timeout), f"{named_by}: {place.host}:{place.port}"


def torchrun_store() -> Store | None:
    """Return the store of torchrun's agent, or None if torchrun did not start this process.

    The agent keeps its store when it restarts the ranks. The new ranks use other keys in it.
    """
    agent = _agent_store(timedelta(seconds=300))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return None if agent is None else PrefixStore(attempt, agent)


def _agent_store(timeout: timedelta) -> Store | None:
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, timeout=timeout)
    return PrefixStore(os.environ.get("TORCHELASTIC_RUN_ID", ""), store)


def _by_torchrun(agent: Store, rank: Rank) -> Store:
    """Return a part of the agent's store that has no keys of ranks that have ended.

    The restart count cannot name that part: if a rank fails, all nodes restart their ranks, but only its own node
    counts the restart. So rank 0 chooses the name. Each other rank writes a call, gets the name as an answer, and
    confirms it. Rank 0 answers the calls of a rank in their order, until it finds the confirmation. The first calls may
    be left from a rank that has ended.
    """
    own = secrets.token_hex(8)
    try:
        if rank.rank:
            _call(agent, rank.rank, own)
            part = agent.get(f"answer/{own}").decode()
            _call(agent, rank.rank, f"{own} {part}")
            return PrefixStore(part, agent)
        for caller in range(1, rank.world_size):
            for number in itertools.count():
                token, *confirmed = agent.get(f"call/{caller}/{number}").decode().split()
                if confirmed == [own]:
                    break
                agent.set(f"answer/{token}", own)
    except (DistError, RuntimeError) as error:
        raise RendezvousError(
            f"{rank} did not meet the others in torchrun's store: {error}. Look for the first error of another rank"
        ) from error
    return PrefixStore(own, agent)


def _call(agent: Store, rank: int, text: str) -> None:
    """Append a call to those of this rank, earlier attempts included. No two attempts write the same `text`."""
    numbers = itertools.count()
    while agent.compare_set(f"call/{rank}/{next(numbers)}", "", text).decode() != text:
        pass


def _meet(rank: Rank, place: _Place, timeout: timedelta) -> TCPStore:
    """Return the store of rank 0 at this place. Rank 0 opens it, at once, so that no other program takes the port."""
    first = rank.rank == 0
    try:
        store = TCPStore(
            place.host,
            place.port,
            is_master=first,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=place.port != 0,  # else two stores of one process would have one port
        )
        if first:
            store.set(_TOKEN, place.token)
        token = store.get(_TOKEN).decode()
    except (DistError, RuntimeError, ValueError, OSError) as error:
        raise RendezvousError(
            f"{rank} did not meet the others at {place.host}:{place.port} within {timeout.total_seconds():g} s: "
            f"{error}. Look for the first error of another rank. If the nodes are connected by another network "
            "interface, name it in GLOO_SOCKET_IFNAME on all ranks. Without MPI, MASTER_ADDR and MASTER_PORT name "
            "another host of rank 0, and another port"
        ) from error
    if token != place.token:
        raise RendezvousError(
            f"{rank} found another job's store at {place.host}:{place.port}. Start the ranks again, or set MASTER_ADDR "
            "and MASTER_PORT on all ranks to the host of rank 0 and a free port on it"
        )
    return store


def _by_mpi(mpi: Any, rank: Rank, timeout: timedelta) -> Store:
    world = mpi.COMM_WORLD
    if rank.rank:
        place = world.bcast(None)
        if isinstance(place, str):
            raise RendezvousError(f"{rank}: rank 0 could not open a store: {place}")
        return _meet(rank, _Place(*place), timeout)
    try:
        host = LOOPBACK if _on_one_node(rank) else own_address()
        token = secrets.token_hex(8)
        store = _meet(rank, _Place(host, 0, token), timeout)
    except RendezvousError as error:
        world.bcast(str(error))  # Otherwise the others would wait forever.
        raise
    world.bcast((host, store.port, token))
    return store


def _place_of(rank: Rank, environ: Mapping[str, str], number: int) -> tuple[_Place, str]:
    """Return the place that variables give, and which ones."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    unreachable = not _on_one_node(rank) and is_loopback(host)
    if host and port.isdecimal() and not unreachable:
        return _Place(host, int(port), ""), "MASTER_ADDR and MASTER_PORT"
    names = _LAUNCH_KEYS.get(rank.launcher, ())
    first = LOOPBACK if _on_one_node(rank) else _first_host(environ.get("SLURM_STEP_NODELIST"))
    if first and names and all(environ.get(name) for name in names):
        text = "\0".join(environ.get(name, "") for name in (*names, *_MORE_OF_KEY))
        key = hashlib.sha256(f"{os.getuid()}\0{number}\0{text}".encode()).hexdigest()[:16]
        return _Place(first, _PORTS[int(key, 16) % len(_PORTS)], key), " and ".join(names)
    if host and unreachable:
        raise RendezvousError(
            f"MASTER_ADDR={host} points each node to itself, but the {rank.world_size} ranks are on several nodes "
            f"({rank.local_size} of them on this one). Set MASTER_ADDR to the host name of the first node"
        )
    hint = (
        "install mpi4py, built for the MPI of this mpiexec (pip install 'torch-fastload[mpi]')"
        if rank.launcher in MPI_LAUNCHERS
        else "start them with torchrun, mpiexec or srun"
    )
    raise RendezvousError(
        f"{rank} cannot find the other ranks (launcher: {rank.launcher}). Either {hint}, or set MASTER_ADDR and "
        "MASTER_PORT to a host that all ranks can reach, and a free port on it"
    )


def _first_host(nodes: str | None) -> str:
    """Return the first host of Slurm's list: n1 of "n[1-3,7],m2". Rank 0 runs there."""
    found = re.match(r"(?:[^,\[]|\[[^]]*\])+", nodes or "")
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", found[0]) if found else ""


def _on_one_node(rank: Rank) -> bool:
    return rank.local_size == rank.world_size
