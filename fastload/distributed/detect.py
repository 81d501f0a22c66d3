"""Detection of the rank of this process, from the variables of a launcher.

| launcher | rank and size | on its node |
|---|---|---|
| torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
| openmpi: Open MPI | `OMPI_COMM_WORLD_RANK`, `..._SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `..._LOCAL_SIZE` |
| pals: Polaris, Aurora | `PALS_RANKID`, `PMI_RANK`, `PMI_SIZE` | `PALS_LOCAL_RANKID`, `PMI_LOCAL_RANK`, `..._SIZE` |
| mpich: Hydra of MPICH and Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
| environment: set by hand or by Kubernetes | as torchrun, without `TORCHELASTIC_RUN_ID` | as torchrun |
| slurm: a step of srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |

One rule: the innermost launcher says who a rank is, and variables that are set by hand must agree with it. Under
torchrun, all other variables describe its agent, one per node. In a step of srun, Slurm's numbers are the truth: srun
itself sets variables of PALS and PMI for an MPI. Only a step with one task per node, or with a terminal, may run the
daemons of an MPI or a shell. There Open MPI, Hydra and PALS are known by a variable that srun does not set. Without
Slurm, all variables that are set must agree.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Literal

from fastload.errors import RankError

Launcher = Literal["torchrun", "openmpi", "pals", "mpich", "environment", "slurm", "none"]
MPI_LAUNCHERS: tuple[Launcher, ...] = ("openmpi", "pals", "mpich")
Field = Literal["rank", "world_size", "local_rank", "local_size"]
Claims = dict[Field, dict[str, int]]
"""The claimed values of each field, by variable or other source."""

_FIELDS: tuple[Field, ...] = ("rank", "world_size", "local_rank", "local_size")
_PARTS: tuple[tuple[Field, Field], ...] = (("rank", "world_size"), ("local_rank", "local_size"))
_SEVERAL: tuple[tuple[Field, int], ...] = (("world_size", 2), ("local_size", 2), ("local_rank", 1))


def _fields(names: str) -> dict[str, Field]:
    """Return the field of each variable. They stand in the order of `_FIELDS`, with "-" for none."""
    return {name: field for name, field in zip(names.split(), cycle(_FIELDS)) if name != "-"}


_TORCH = _fields("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE")
_OPENMPI = "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE"
_PALS = "PALS_RANKID - PALS_LOCAL_RANKID - PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE"
_MPI: dict[Launcher, dict[str, Field]] = {
    "openmpi": _fields(_OPENMPI),
    "pals": _fields(_PALS),
    "mpich": _fields("PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
}
_SLURM = _fields("- SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE")
_LAUNCHER_OF: dict[str, Launcher] = {
    "OMPI_COMM_WORLD_RANK": "openmpi",
    "PALS_RANKID": "pals",
    "PMI_RANK": "mpich",
    "RANK": "environment",
    "SLURM_PROCID": "slurm",
}
"""The launcher for each variable that gives the rank. The first variable that is set decides."""

# From here, Slurm numbers steps that are not the user's srun: interactive 0xFFFFFFFA, batch, extern, pending.
_SLURM_NO_STEP = 0xFFFF_FFFA
_DIGITS = 18
"""Maximum number of digits of a count."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a job: `rank` of `world_size` in all, `local_rank` of `local_size` on its node.

    `launcher` names what started it, "none" for a process alone.

    Examples:
        >>> str(fastload.distributed.Rank(1, 4, 1, 2, "torchrun"))
        'rank 1 of 4'
    """

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: Launcher

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


@dataclass(frozen=True, slots=True)
class Detected:
    """A rank, and the sources of each of its four fields, as "VARIABLE=value".

    Examples:
        >>> found = fastload.distributed.detect_rank({"RANK": "0", "WORLD_SIZE": "1"})
        >>> found.origins["world_size"]
        ('WORLD_SIZE=1',)
    """

    rank: Rank
    origins: Mapping[Field, tuple[str, ...]]


def detect_rank(environ: Mapping[str, str] = os.environ) -> Detected:
    """Return the rank that variables describe, or rank 0 of 1 if no launcher set any.

    Args:
        environ: the environment variables.

    Raises:
        RankError: a value is missing, not a count, or too large, or two variables disagree. The message names them.

    Examples:
        >>> rank = fastload.distributed.detect_rank().rank
    """
    claims = _claims(environ)
    launcher = _launcher(environ, claims)
    if launcher == "none":
        _refuse_sizes_without_rank(claims)
        return Detected(Rank(0, 1, 0, 1, "none"), {})
    values = _agreed(claims)
    if values.get("world_size") == 1:  # Then the node is known, whatever was left out.
        _say(claims, "local_rank", "the size of 1", 0)
        _say(claims, "local_size", "the size of 1", 1)
        values = _agreed(claims)
    if missing := [field for field in _FIELDS if field not in values]:
        raise RankError(_incomplete(launcher, claims, missing))
    for part, whole in _PARTS:
        if values[part] >= values[whole]:
            raise RankError(
                f"{_first(claims, part)}, and {_first(claims, whole)}: "
                "ranks are counted from 0 and must be less than the size. Unset variables of another job"
            )
    if values["local_size"] > values["world_size"]:
        raise RankError(
            f"{_first(claims, 'local_size')}, and {_first(claims, 'world_size')}: "
            "a node cannot have more ranks than the job. Unset variables of another job"
        )
    rank = Rank(**{field: values[field] for field in _FIELDS}, launcher=launcher)
    origins = {f: tuple(f"{name}={value}" for name, value in claims[f].items()) for f in _FIELDS}
    return Detected(rank, origins)


def mpi4py() -> Any | None:
    """Return the module `mpi4py.MPI`, whose import starts MPI, or None without mpi4py or its MPI library."""
    try:
        return importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError):  # RuntimeError: mpi4py found no library of MPI to load.
        return None


def mpi_of(rank: Rank) -> Any | None:
    """Return `mpi4py.MPI` if an MPI launcher started this process and that MPI knows it as `rank`, else None."""
    mpi = mpi4py() if rank.launcher in MPI_LAUNCHERS else None
    world = mpi and (mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
    return mpi if world == (rank.rank, rank.world_size) else None


def check_world(mpi: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Raise RankError if MPI numbers this process differently from the variables of its launcher.

    An MPI that does not know the launcher, such as one without a PMI that fits srun, makes a world of size 1 of each
    rank. So a world of size 1 needs a launcher that says so.
    """
    claims = _claims(environ)
    if "rank" not in claims:
        return
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    library = " ".join(mpi.Get_library_version().splitlines()[0].partition(",")[0].split())
    wrong = [f"{name}={v}" for name, v in claims.get("world_size", {}).items() if v != size]
    wrong += [f"{name}={v}" for name, v in claims["rank"].items() if v != rank]
    if size == 1 and "world_size" not in claims:
        wrong.append(_first(claims, "rank"))
    if not wrong:
        return
    remedy = (
        "Name a PMI that it knows, such as srun --mpi=pmix for Open MPI, or --mpi=pmi2 for MPICH and Intel MPI. "
        "`srun --mpi=list` prints the choices"
        if _launcher(environ, claims) == "slurm"
        else "Start them with its mpiexec, or install the mpi4py of this launcher's MPI. If they need no MPI, set "
        "WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE on each rank"
    )
    raise RankError(
        f"{wrong[0]}, but mpi4py says rank {rank} of {size}. Its library is {library!r}, which does not know the ranks "
        f"of this launcher. {remedy}"
    )


def _claims(environ: Mapping[str, str]) -> Claims:
    """Return the claims of the variables of `environ`, without those of an outer launcher."""
    claims: Claims = {}
    for name, field in _TORCH.items():
        _read(claims, environ, field, name)
    if environ.get("TORCHELASTIC_RUN_ID") and "rank" in claims:
        return claims
    slurm = _slurm_claims(environ)
    inside = not slurm or _carries_others(environ, slurm)  # another launcher, or a shell
    for name, field in _variables_of_mpi(environ).items() if inside else ():
        _read(claims, environ, field, name)
    if "rank" not in claims or not inside:
        for field, said in slurm.items():
            claims.setdefault(field, {}).update(said)
    return claims


def _variables_of_mpi(environ: Mapping[str, str]) -> dict[str, Field]:
    """Return the variables of MPIs that may be set. Beside Slurm's, only those of a launcher that is surely there."""
    there: dict[Launcher, object] = {
        "openmpi": environ.get("OMPI_COMM_WORLD_RANK"),
        "pals": environ.get("PALS_APID") and "." not in environ["PALS_APID"],  # srun: job.step
        "mpich": environ.get("MPI_LOCALRANKID"),
    }
    every = not environ.get("SLURM_PROCID")
    found = (names for one, names in _MPI.items() if every or there[one])
    return {name: field for names in found for name, field in names.items()}


def _slurm_claims(environ: Mapping[str, str]) -> Claims:
    """Return Slurm's claims on a process of srun. The shell of a batch job has a SLURM_PROCID, but is not one."""
    step = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if step is None or step[1] >= _SLURM_NO_STEP:
        return {}
    claims: Claims = {}
    _read(claims, environ, "rank", "SLURM_PROCID")
    _read(claims, environ, "world_size", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    _read(claims, environ, "local_rank", "SLURM_LOCALID")
    node = _number(environ, "SLURM_NODEID")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if environ.get(name) and node is not None:
            _say(claims, "local_size", name, _tasks_on_node(environ[name], name, node[1]))
            break
    return claims


def _carries_others(environ: Mapping[str, str], slurm: Claims) -> bool:
    """Return True if a step may run daemons of another launcher, one per node, or a shell, instead of ranks."""
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    tasks = slurm.get("world_size", {}).values()
    return bool(environ.get("SLURM_PTY_PORT")) or (nodes is not None and nodes[1] in tasks)


def _tasks_on_node(text: str, name: str, node: int) -> int:
    """Return the number of tasks on node `node` from Slurm's list: "2(x3),1" is 2, 2, 2, 1."""
    nodes, on_node = 0, 0
    for word in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", word.strip(), re.ASCII)
        if found is None:
            raise RankError(
                f"{name}={text!r} is not a list of tasks per node such as 2(x3),1. Unset or correct it"
            )
        before, nodes = nodes, nodes + int(found[2] or 1)
        if before <= node < nodes:
            on_node = int(found[1])
    if node >= nodes:
        raise RankError(
            f"SLURM_NODEID={node} does not fit {name}={text!r}, which lists {nodes} nodes. Unset the wrong one"
        )
    return on_node


def _number(environ: Mapping[str, str], *names: str) -> tuple[str, int] | None:
    """Return the first of the variables that is set, with its value, a count, or None. Empty means not set."""
    for name in names:
        if text := environ.get(name, "").strip():
            # Slurm's largest number has ten digits, and Python refuses thousands of digits.
            if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
                shown = text if len(text) <= _DIGITS else f"{text[:_DIGITS]}..."
                raise RankError(
                    f"{name}={shown!r} is not a number of 0 or more. Unset or correct it"
                )
            return name, int(text)
    return None


def _read(claims: Claims, environ: Mapping[str, str], field: Field, *names: str) -> None:
    if (found := _number(environ, *names)) is not None:
        _say(claims, field, *found)


def _say(claims: Claims, field: Field, source: str, value: int) -> None:
    claims.setdefault(field, {})[source] = value


def _launcher(environ: Mapping[str, str], claims: Claims) -> Launcher:
    ranks = claims.get("rank", {})
    if environ.get("TORCHELASTIC_RUN_ID") and "RANK" in ranks:
        return "torchrun"
    return next((name for variable, name in _LAUNCHER_OF.items() if variable in ranks), "none")


def _agreed(claims: Claims) -> dict[Field, int]:
    """Return the value of each field. Raise RankError if two sources disagree."""
    for field, said in claims.items():
        (first, value), *others = said.items()
        for other, differing in others:
            if differing != value:
                raise RankError(
                    f"{first}={value} and {other}={differing} disagree on the {field.replace('_', ' ')} of this "
                    "process. Unset the wrong one, which comes from another launcher or was set by hand"
                )
    return {field: next(iter(said.values())) for field, said in claims.items()}


def _refuse_sizes_without_rank(claims: Claims) -> None:
    """Raise RankError if a size is known without a rank. Otherwise each process would become rank 0 of 1."""
    for field, least in _SEVERAL:
        for name, value in claims.get(field, {}).items():
            if value >= least:
                raise RankError(
                    f"{name}={value} means several ranks, but no variable gives the rank of this process (such as "
                    f"{', '.join(_LAUNCHER_OF)}). Start the ranks with a launcher, or unset {name}"
                )


def _first(claims: Claims, field: Field) -> str:
    name, value = next(iter(claims[field].items()))
    return f"{name}={value}"


def _incomplete(launcher: Launcher, claims: Claims, missing: list[Field]) -> str:
    of_launcher = {"torchrun": _TORCH, "environment": _TORCH, "slurm": _SLURM}
    variables = of_launcher.get(launcher, dict(ChainMap(*_MPI.values())))
    wanted = ", ".join(name for name, field in variables.items() if field in missing)
    lacking = " and ".join(field.replace("_", " ") for field in missing)
    return (
        f"{_first(claims, 'rank')} is set, but the {lacking} is unknown (none of {wanted} is set). Start all ranks "
        "with one launcher, or set WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE on each"
    )
