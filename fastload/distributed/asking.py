"""What the variables of a launcher leave open: asked of mpi4py, or read from the node file of the job."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastload.distributed.ranks import Finding, Launcher, Said, explain
from fastload.errors import RankError

MPI_LAUNCHERS: tuple[Launcher, ...] = ("openmpi", "pals", "mpich")


def find(environ: Mapping[str, str] = os.environ) -> Finding:
    """`explain(environ)`; what its variables leave open is asked of mpi4py, by all ranks, or of the node file."""

    def ask(launcher: Launcher) -> Said:
        if launcher in MPI_LAUNCHERS and (mpi := mpi4py()) is not None:
            world = mpi.COMM_WORLD
            node = world.Split_type(mpi.COMM_TYPE_SHARED)
            try:
                local_rank, local_size = node.Get_rank(), node.Get_size()
            finally:
                node.Free()
            return Said(
                mpi={
                    "rank": world.Get_rank(),
                    "world_size": world.Get_size(),
                    "local_rank": local_rank,
                    "local_size": local_size,
                }
            )
        return Said(nodes=node_count(environ) if launcher in MPI_LAUNCHERS else None)

    return explain(environ, ask)


def mpi4py() -> Any | None:
    """The module `mpi4py.MPI`, which starts MPI as it is imported; None without mpi4py, or without its MPI library."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError):  # RuntimeError: mpi4py found no library of MPI to load.
        return None


def node_count(environ: Mapping[str, str]) -> int | None:
    """How many different hosts `$PBS_NODEFILE` lists, one a line or more; None where there is no such file."""
    name = environ.get("PBS_NODEFILE")
    if not name:
        return None
    try:
        hosts = {line.strip() for line in Path(name).read_text().splitlines() if line.strip()}
    except OSError as error:
        raise RankError(f"PBS_NODEFILE={name} cannot be read: {error.strerror}") from error
    if not hosts:
        raise RankError(f"PBS_NODEFILE={name} lists no host")
    return len(hosts)
