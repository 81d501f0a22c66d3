"""How the ranks find each other: rank 0 opens torch's store on a port that the system chooses, and announces it.

The others learn the port from torchrun's variables, from a broadcast of MPI, or from a small file that all nodes see.
The file is for Slurm, and for ranks without an mpi4py that knows them. It is named after the launch, is put in place by
a rename, and exists only while the ranks connect.
"""

from __future__ import annotations

import hashlib
import ipaddress
import itertools
import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous as meet_by_variables

from fastload._kit.disk import write_file
from fastload.distributed.addresses import own_address
from fastload.distributed.detect import MPI_LAUNCHERS, Rank, mpi_of
from fastload.errors import RendezvousError

# Variables that identify one start of the ranks: equal on all ranks, and new at each start. Hydra sets none.
_LAUNCH_KEYS: dict[str, tuple[str, ...]] = {
    "openmpi": ("PMIX_NAMESPACE",),
    "pals": ("PALS_APID",),
    "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID"),
}
_MORE_OF_KEY = ("PBS_JOBID", "SLURM_RESTART_COUNT")
_LOOK_AGAIN_S = 0.05


@contextmanager
def rendezvous(
    rank: Rank, environ: Mapping[str, str], *, timeout_s: float, number: int = 0
) -> Iterator[tuple[Store, str]]:
    """Yield the store that all ranks of the job share, and how they found it.

    `number` distinguishes this rendezvous from earlier ones of the same processes. The ranks connect in the block. At
    its end, the announcement is removed.

    Raises:
        RendezvousError: the others did not connect within `timeout_s` seconds, or there is no way to reach them.
    """
    timeout = timedelta(seconds=timeout_s)
    if (mpi := mpi_of(rank)) is not None:
        yield _by_mpi(mpi, rank, timeout), "MPI"
    elif (key := _launch_key(rank, environ)) is not None:
        path = _place(rank, environ) / f"fastload-ranks-{key}-{number}"
        store = _open(rank, timeout) if rank.rank == 0 else None
        try:
            if store is not None:
                address = json.dumps(_address_of(rank, store)).encode()
                write_file(path, address, mode=0o600, durable=False)
            yield store or _join(rank, path, timeout_s), f"the file {path}"
        finally:
            if rank.rank == 0:
                path.unlink(missing_ok=True)
    elif (agent := _agent_store(timeout)) is not None:
        yield _by_torchrun(agent, rank), "torchrun's store"
    else:
        yield _by_variables(rank, environ, timeout), "MASTER_ADDR and MASTER_PORT"


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


def _open(rank: Rank, timeout: timedelta) -> TCPStore:
    """Return rank 0's store on a free port of this machine. Bind it at once, so that no other program takes it."""
    return TCPStore(
        own_address(single_node=_on_one_node(rank)),
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
    )


def _address_of(rank: Rank, store: TCPStore) -> dict[str, Any]:
    token = secrets.token_hex(8)
    store.set("fastload/token", token)
    return {"address": store.host, "port": store.port, "token": token}


def _connect(rank: Rank, place: Mapping[str, Any], timeout: timedelta) -> TCPStore:
    """Return the store of rank 0, for another rank. Raise RendezvousError if it is not the store of this job."""
    try:
        store = TCPStore(place["address"], place["port"], is_master=False, timeout=timeout)
        token = store.get("fastload/token").decode()
    except (DistError, RuntimeError) as error:
        raise RendezvousError(
            f"{rank} cannot reach rank 0 at {place['address']}:{place['port']}: {error}. If the nodes are connected by "
            "another network interface, name it in GLOO_SOCKET_IFNAME on all ranks"
        ) from error
    if token != place["token"]:
        raise RendezvousError(
            f"{rank} found another job's store at {place['address']}:{place['port']}. Start the ranks again"
        )
    return store


def _by_mpi(mpi: Any, rank: Rank, timeout: timedelta) -> Store:
    world = mpi.COMM_WORLD
    store: TCPStore | None = None
    place: dict[str, Any] = {}
    if rank.rank == 0:
        try:
            store = _open(rank, timeout)
            place = _address_of(rank, store)
        except (OSError, RuntimeError, RendezvousError) as error:
            world.bcast({"error": str(error)})  # Otherwise the others would wait forever.
            raise
    place = world.bcast(place)
    if "error" in place:
        raise RendezvousError(f"{rank}: rank 0 could not open a store: {place['error']}")
    return store or _connect(rank, place, timeout)


def _by_variables(rank: Rank, environ: Mapping[str, str], timeout: timedelta) -> Store:
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port:
        hint = (
            "install mpi4py, built for the MPI of this mpiexec (pip install '.[mpi]' in the clone of fastload)"
            if rank.launcher in MPI_LAUNCHERS
            else "start them with torchrun, mpiexec or srun"
        )
        raise RendezvousError(
            f"{rank} cannot find the other ranks (launcher: {rank.launcher}). Either {hint}, or set MASTER_ADDR and "
            "MASTER_PORT to a host that all ranks can reach, and a free port on it"
        )
    if not _on_one_node(rank) and _is_loopback(address):
        raise RendezvousError(
            f"MASTER_ADDR={address} points each node to itself, but the {rank.world_size} ranks are on several nodes "
            f"({rank.local_size} of them on this one). Set MASTER_ADDR to the host name of the first node"
        )
    try:
        store, _, _ = next(meet_by_variables("env://", rank.rank, rank.world_size, timeout=timeout))
    except (DistError, RuntimeError, ValueError, OSError) as error:
        raise RendezvousError(
            f"{rank} did not meet the others at MASTER_ADDR={address}, MASTER_PORT={port} within "
            f"{timeout.total_seconds():g} s: {error}"
        ) from error
    joined: Store = store
    return joined


def _launch_key(rank: Rank, environ: Mapping[str, str]) -> str | None:
    """Return a unique name for this start of the ranks, or None if the launcher sets none."""
    names = _LAUNCH_KEYS.get(rank.launcher, ())
    if not names or not all(environ.get(name) for name in names):
        return None
    text = "\0".join(environ.get(name, "") for name in (*names, *_MORE_OF_KEY))
    return hashlib.sha256(f"{os.getuid()}\0{text}".encode()).hexdigest()[:16]


def _place(rank: Rank, environ: Mapping[str, str]) -> Path:
    """Return a folder that all ranks see: one of this node if all are here, else the working directory."""
    if named := environ.get("FASTLOAD_MEETING_DIR"):
        return Path(named)
    if not _on_one_node(rank):
        return Path.cwd()
    own = Path(tempfile.gettempdir(), f"fastload-{os.getuid()}")
    own.mkdir(mode=0o700, exist_ok=True)
    if own.stat().st_uid != os.getuid() or own.is_symlink():
        raise RendezvousError(
            f"{own} belongs to another user. Name another folder in FASTLOAD_MEETING_DIR"
        )
    return own


def _join(rank: Rank, path: Path, timeout_s: float) -> TCPStore:
    """Wait for the file of rank 0, and return the store that it names.

    A file of an earlier start names a port that does not answer, until rank 0 replaces it. The file is polled, because
    shared file systems do not report changes.
    """
    deadline = time.monotonic() + timeout_s
    seen = f"{path} does not exist"
    while (left := deadline - time.monotonic()) > 0:
        try:
            place = json.loads(path.read_text())
            host, port = place["address"], place["port"]
        except FileNotFoundError:
            pass  # Rank 0 has not written it yet.
        except (OSError, ValueError, LookupError, TypeError) as error:
            seen = f"{path} cannot be read ({error})"  # Such as a stale handle, if rank 0 replaced a file on NFS.
        else:
            try:
                with socket.create_connection((host, port), timeout=min(left, 5.0)):
                    pass
                return _connect(rank, place, timedelta(seconds=timeout_s))
            except OSError as error:
                seen = f"{path} names {host}:{port}, which does not answer ({error})"
        time.sleep(_LOOK_AGAIN_S)
    raise RendezvousError(
        f"{rank} waited {timeout_s:g} s for rank 0: {seen}. Rank 0 ended, or its node does not share this folder. Name "
        "a folder that all nodes share in FASTLOAD_MEETING_DIR"
    )


def _on_one_node(rank: Rank) -> bool:
    return rank.local_size == rank.world_size


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False  # An unknown name is reported by the attempt to reach it.
    return any(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)
