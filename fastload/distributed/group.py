"""The process group of a job: `init()` at its start, `shutdown()` at its end, `cores()` in between."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from fastload.distributed.addresses import address_towards, interface_of, own_address
from fastload.distributed.affinity import cores_of
from fastload.distributed.detect import Rank, detect_rank
from fastload.distributed.rendezvous import rendezvous
from fastload.errors import RankError, RendezvousError

_SHOWN = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables by which a launcher restricts a process to some devices of the node."""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@dataclass
class _Joined:
    """Everything that `init` set up in this process, for `shutdown`."""

    rank: Rank
    backend: str | None = None
    met_by: str = "no process group for a single process"
    on_node: list[list[int]] = field(default_factory=list)
    """The cores of each rank of this node, or [] if no group was made."""
    abort: _Hook = sys.excepthook
    """Replacement for sys.excepthook that ends all ranks if MPI is in use."""
    before: _Hook = sys.excepthook
    """The sys.excepthook that `abort` replaced."""
    store: Store | None = None


_joined: _Joined | None = None
_groups_begun = 0
"""Number of groups begun in this process. It keeps their keys apart in torchrun's store, which outlives them."""


def init(backend: str = "auto", *, timeout_s: float = 600.0) -> Rank:
    """Detect this rank, connect to the others, and make torch's default process group. All ranks call this.

    Without a launcher, this is rank 0 of 1, and no process group is made. A second call returns the same rank. An
    existing group is kept, and `shutdown()` does not touch it.

    Args:
        backend: one of torch's, or "auto": NCCL for tensors on CUDA devices (XCCL on Intel's), and Gloo for those on
            the CPU. Unless it is "gloo", each rank's own device becomes the current one: see `device_of`.
        timeout_s: seconds to wait for the others here, and in each later collective of Gloo. If a rank is stuck, the
            others raise instead of hanging.

    If this process uses mpi4py, an uncaught exception aborts the whole job, because MPI's end would wait forever for
    all ranks. `shutdown()` is called at exit.

    Raises:
        RankError: see `detect_rank`.
        RendezvousError: the other ranks did not connect, or there is no way to find them.

    Returns:
        This rank.

    Examples:
        >>> fastload.distributed.init("gloo").rank
        0
    """
    global _joined
    if _joined is not None:
        return _joined.rank
    rank = detect_rank().rank
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank.rank, rank.world_size):
            raise RankError(
                f"torch.distributed was initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but the "
                f"launcher ({rank.launcher}) says {rank}. Let fastload initialise it, or correct RANK and WORLD_SIZE"
            )
        _joined = _Joined(rank, met_by="an existing process group")
    elif rank.launcher == "none":
        _joined = _Joined(rank)
    else:
        _joined = _join(rank, backend_for(backend), timeout_s)
        atexit.register(shutdown)
    return _joined.rank


def shutdown() -> None:
    """Undo `init()`. It is called at exit too, and may be called any number of times, also without `init()`.

    Examples:
        >>> rank = fastload.distributed.init("gloo")
        >>> fastload.distributed.shutdown()
    """
    global _joined
    joined, _joined = _joined, None
    if joined is None:
        return
    atexit.unregister(shutdown)
    if sys.excepthook is joined.abort:
        sys.excepthook = joined.before
    if joined.store is not None and dist.is_initialized():
        gc.collect()  # DistributedDataParallel, which holds the group, is part of reference cycles
        dist.destroy_process_group()


def end_job(error: BaseException, *, line: str | None = None, code: int = 1) -> None:
    """End this rank after an uncaught error: print `line`, or the traceback without one, and exit with `code`.

    If MPI is in use, which would wait for the others at its end, the whole job is aborted. It returns if there is only
    one process, or if `init()` did not make the process group.

    Args:
        error: the uncaught error.
        line: text to print in place of the traceback.
        code: exit code of this rank.

    Raises:
        SystemExit: with `code`, unless it returns.

    Examples:
        >>> try:
        ...     loss = model(torch.ones(1, 48)).sum()
        ... except RuntimeError as error:
        ...     fastload.distributed.end_job(error)
    """
    joined = _joined
    if joined is None or joined.store is None:
        return
    mpi = _mpi_in_use()
    if isinstance(error, KeyboardInterrupt):
        if mpi is None:
            return
        line = f"fastload: {joined.rank} was interrupted and ends the job"
    if line is None:
        joined.before(type(error), error, error.__traceback__)
    else:
        print(line, file=sys.stderr, flush=True)
    if mpi is not None:
        mpi.COMM_WORLD.Abort(code)
    raise SystemExit(code)


def cores() -> int:
    """Return the number of threads that this rank can keep busy: its share of the cores that it may run on, at least 1.

    After `init()`, a core that k ranks of the node may use counts 1/k for each. Before `init()`, if a rank may run on
    all cores of the machine, the ranks of the node are assumed to share them.

    Warn (UserWarning) if the launcher bound the rank to one core of several, and name the option to change.

    Examples:
        >>> loader = DataLoader(dataset, num_workers=fastload.distributed.cores())
    """
    joined = _joined or _Joined(detect_rank().rank)
    return cores_of(joined.rank, joined.on_node, stacklevel=2)


def store_of_ranks() -> Store | None:
    """Return the store that `init()` made the group with, or None if it made none."""
    return None if _joined is None else _joined.store


def met_by() -> str:
    """Return the backend and how the ranks found each other, as text, or "not initialised" before `init()`.

    Examples:
        >>> isinstance(fastload.distributed.met_by(), str)
        True
    """
    if _joined is None:
        return "not initialised"
    return f"{_joined.backend}, by {_joined.met_by}" if _joined.backend else _joined.met_by


def backend_for(backend: str) -> str:
    """Return the backends by device for "auto", and any other backend unchanged.

    Args:
        backend: as in `init`.

    Examples:
        >>> fastload.distributed.backend_for("gloo")
        'gloo'
    """
    if backend != "auto":
        return backend
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"
    if torch.xpu.is_available() and dist.is_xccl_available():
        return "cpu:gloo,xpu:xccl"
    return "gloo"


def _join(rank: Rank, backend: str, timeout_s: float) -> _Joined:
    for device in (torch.cuda, torch.xpu):
        if device.is_available() and backend != "gloo":
            device.set_device(device_of(rank, device.device_count()))
    global _groups_begun
    # If this module is imported later, as torch.optim does, its default arguments keep the group. Its threads then run
    # while Python ends, and one that releases a tensor aborts the process.
    importlib.import_module("torch.distributed.nn.functional")
    _groups_begun += 1
    shared, met_by = rendezvous(rank, os.environ, timeout_s=timeout_s, number=_groups_begun)
    store = PrefixStore(f"fastload/{_groups_begun}", shared)
    _name_interface(rank, store)
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=rank.rank,
            world_size=rank.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        on_node = _gather_affinities(rank, store, timedelta(seconds=timeout_s))
    except (DistError, RuntimeError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        raise RendezvousError(
            f"{rank} cannot form the process group of {rank.world_size} ranks (backend {backend}, by {met_by}, "
            f"time limit {timeout_s:g} s): {error}"
        ) from error
    before, abort = sys.excepthook, _abort_when_nobody_catches(rank)
    return _Joined(rank, backend, met_by, on_node, abort, before, store)


def device_of(rank: Rank, count: int) -> int:
    """Return the index of the rank's own device, of `count` that torch finds: its local rank.

    It is 0 if a launcher restricts each rank to one device with a variable. NCCL refuses to share one, and sharing
    distorts measurements.

    Args:
        rank: the rank, as `init` returns it.
        count: number of devices that torch finds.

    Raises:
        RankError: there are fewer devices than ranks.

    Examples:
        >>> rank = fastload.distributed.init("gloo")
        >>> fastload.distributed.device_of(rank, 1)
        0
    """
    if count == 1 and any(os.environ.get(name) for name in _SHOWN):
        return 0
    if rank.local_rank < count:
        return rank.local_rank
    raise RankError(
        f"Local rank {rank.local_rank} of {rank.local_size} has no device of its own. torch finds {count} on its node. "
        "Start as many ranks per node as there are devices, or train on the CPU"
    )


def _name_interface(rank: Rank, store: Store) -> None:
    """Tell Gloo which interface to use between nodes, unless the user did.

    By default it uses the address of the host's name, which is the loopback on many nodes.
    """
    if rank.local_size == rank.world_size or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    if rank.rank == 0:
        own: str | None = own_address()
        store.set("address", str(own))
    else:
        own = address_towards(store.get("address").decode())
    if own is not None and (name := interface_of(own)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _gather_affinities(rank: Rank, store: Store, timeout: timedelta) -> list[list[int]]:
    """Return the cores of all ranks on this machine. This is also a barrier: it waits for the last rank."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    number = store.add(f"ranks of {machine}", 1)
    store.set(f"cores of {machine}/{number}", json.dumps(sorted(os.sched_getaffinity(0))))
    if store.add("here", 1) == rank.world_size:
        store.set("all", "here")
    store.wait(["all"], timeout)
    ranks = range(1, store.add(f"ranks of {machine}", 0) + 1)
    return [json.loads(store.get(f"cores of {machine}/{number}")) for number in ranks]


def _mpi_in_use() -> Any | None:
    """Return `mpi4py.MPI` if this process has started it, together with others, else None."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    running = mpi and mpi.Is_initialized() and not mpi.Is_finalized()
    return mpi if running and mpi.COMM_WORLD.Get_size() > 1 else None


def _abort_when_nobody_catches(rank: Rank) -> _Hook:
    """Let an uncaught exception end all ranks after its traceback, if MPI would wait for them. Return the hook."""
    before: _Hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if (mpi := _mpi_in_use()) is not None:
            print(f"fastload: {rank} ends the job", file=sys.stderr, flush=True)
            mpi.COMM_WORLD.Abort(1)

    sys.excepthook = hook
    return hook
