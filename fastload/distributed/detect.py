"""Detection of the rank of this process, from the variables of a launcher, and from mpi4py or the node file.

| launcher | rank and size | on its node |
|---|---|---|
| torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
| openmpi: Open MPI | `OMPI_COMM_WORLD_RANK`, `..._SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `..._LOCAL_SIZE` |
| pals: Polaris, Aurora | `PALS_RANKID`, `PMI_RANK`, `PMI_SIZE` | `PALS_LOCAL_RANKID`, `PMI_LOCAL_RANK`, `..._SIZE` |
| mpich: Hydra of MPICH and Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
| environment: set by hand or by Kubernetes | as torchrun, without `TORCHELASTIC_RUN_ID` | as torchrun |
| slurm: a step of srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |

All variables that are set must agree. An exception is one launcher inside another. Under torchrun, all other variables
describe its agent, one per node. A Slurm step with one task per node, or with a terminal, runs the daemons of an MPI or
a shell. `srun --mpi=cray_shasta` sets variables of PALS, and a PALS_APID with a dot: job.step. With `--mpi=pmi2` srun
sets PMI_RANK and PMI_SIZE without a local rank. So such a rank is srun's own if it equals SLURM_PROCID.
"""

from __future__ import annotations

import importlib
import os
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastload.errors import RankError

Launcher = Literal["torchrun", "openmpi", "pals", "mpich", "environment", "slurm", "none"]
MPI_LAUNCHERS: tuple[Launcher, ...] = ("openmpi", "pals", "mpich")
Field = Literal["rank", "world_size", "local_rank", "local_size"]
Claims = dict[Field, dict[str, int]]
"""The claimed values of each field, by source. A source is a variable, or another such as mpi4py."""

_FIELDS: tuple[Field, ...] = ("rank", "world_size", "local_rank", "local_size")
_PARTS: tuple[tuple[Field, Field], ...] = (("rank", "world_size"), ("local_rank", "local_size"))
_SEVERAL: tuple[tuple[Field, int], ...] = (("world_size", 2), ("local_size", 2), ("local_rank", 1))
_TORCH: dict[str, Field] = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_size",
}
_MPI: tuple[dict[str, Field], ...] = (
    {
        "OMPI_COMM_WORLD_RANK": "rank",
        "OMPI_COMM_WORLD_SIZE": "world_size",
        "OMPI_COMM_WORLD_LOCAL_RANK": "local_rank",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "local_size",
    },
    {"PALS_RANKID": "rank", "PALS_LOCAL_RANKID": "local_rank"},
    {
        "PMI_RANK": "rank",
        "PMI_SIZE": "world_size",
        "PMI_LOCAL_RANK": "local_rank",
        "PMI_LOCAL_SIZE": "local_size",
        "MPI_LOCALRANKID": "local_rank",
        "MPI_LOCALNRANKS": "local_size",
    },
)
"""The variables of each family of launchers."""
_SLURM: dict[str, Field] = {
    "SLURM_STEP_NUM_TASKS": "world_size",
    "SLURM_LOCALID": "local_rank",
    "SLURM_STEP_TASKS_PER_NODE": "local_size",
}
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
    """One process of a job: `rank` of `world_size` in all, `local_rank` of `local_size` on its node."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    launcher: Launcher

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}"


Answer = Mapping[Field, int] | int | None
"""All four fields of this process, from mpi4py; or the number of nodes in the node file; or None without both."""


@dataclass(frozen=True, slots=True)
class Detected:
    """A rank, and the sources of each of its four fields, as "VARIABLE=value"."""

    rank: Rank
    origins: Mapping[Field, tuple[str, ...]]


def detect_rank(environ: Mapping[str, str] = os.environ) -> Detected:
    """Return the rank by `detect_by_variables`. Get missing values from mpi4py, on all ranks, or from the node file.

    Args:
        environ: the environment variables.

    Raises:
        RankError: see `detect_by_variables` and `check_world`. Also if the node file cannot be read, or lists no host.

    Examples:
        >>> rank = fastload.distributed.detect_rank().rank
    """

    def ask(launcher: Launcher) -> Answer:
        if launcher in MPI_LAUNCHERS and (mpi := mpi4py()) is not None:
            check_world(mpi, environ)
            world = mpi.COMM_WORLD
            node = world.Split_type(mpi.COMM_TYPE_SHARED)
            try:
                local_rank, local_size = node.Get_rank(), node.Get_size()
            finally:
                node.Free()
            values = (world.Get_rank(), world.Get_size(), local_rank, local_size)
            return dict(zip(_FIELDS, values, strict=True))
        return node_count(environ) if launcher in MPI_LAUNCHERS else None

    return detect_by_variables(environ, ask)


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
    rank. If the launcher does not say its size, only MPICH and MPIs like it show that: they set no APPNUM. PALS and
    Hydra do not start Open MPI.
    """
    claims = _claims(environ)
    if "rank" not in claims:
        return
    rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
    library = " ".join(mpi.Get_library_version().splitlines()[0].partition(",")[0].split())
    wrong = [f"{name}={v}" for name, v in claims.get("world_size", {}).items() if v != size]
    wrong += [f"{name}={v}" for name, v in claims["rank"].items() if v != rank]
    unknown = size == 1 and "world_size" not in claims
    if unknown and ("Open MPI" in library or mpi.COMM_WORLD.Get_attr(mpi.APPNUM) is None):
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


def node_count(environ: Mapping[str, str]) -> int | None:
    """Return the number of different hosts in `$PBS_NODEFILE`, or None without such a file."""
    name = environ.get("PBS_NODEFILE")
    if not name:
        return None
    try:
        hosts = {line.strip() for line in Path(name).read_text().splitlines() if line.strip()}
    except OSError as error:
        raise RankError(
            f"PBS_NODEFILE={name} cannot be read: {error.strerror}. Unset PBS_NODEFILE if it belongs to another job"
        ) from error
    if not hosts:
        raise RankError(
            f"PBS_NODEFILE={name} lists no hosts. Unset PBS_NODEFILE if it belongs to another job"
        )
    return len(hosts)


def detect_by_variables(
    environ: Mapping[str, str], ask: Callable[[Launcher], Answer] = lambda _: None
) -> Detected:
    """Return the rank that the variables of `environ` describe, or rank 0 of 1 if no launcher set any.

    `ask` is called with the launcher only if a value is missing.

    Raises:
        RankError: a value is missing, not a count, or too large, or two variables disagree. The message names them.
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
    if len(values) < len(_FIELDS):
        _add_said(claims, values, ask(launcher))
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


def _claims(environ: Mapping[str, str]) -> Claims:
    """Return the claims of the variables of `environ`, without those of an outer launcher."""
    claims: Claims = {}
    for name, field in _TORCH.items():
        _read(claims, environ, field, name)
    if environ.get("TORCHELASTIC_RUN_ID") and "rank" in claims:
        return claims
    own = _number(environ, "SLURM_PROCID")
    theirs = ("PALS_", "PMI_LOCAL_") if "." in environ.get("PALS_APID", "") else ()
    for family in _MPI:
        found: Claims = {}
        for name, field in family.items():
            if not name.startswith(theirs):
                _read(found, environ, field, name)
        if own and "local_rank" not in found and own[1] in found.get("rank", {}).values():
            found.clear()  # `srun --mpi` set it
        _merge(claims, found)
    slurm = _slurm_claims(environ)
    if "rank" not in claims or not _carries_others(environ, slurm):
        _merge(claims, slurm)
    return claims


def _merge(claims: Claims, more: Claims) -> None:
    for field, said in more.items():
        claims.setdefault(field, {}).update(said)


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


def _add_said(claims: Claims, values: Mapping[Field, int], said: Answer) -> None:
    """Add the claims of mpi4py, or else those that follow from the number of nodes if all run equally many ranks."""
    if isinstance(said, Mapping):
        for field, value in said.items():
            _say(claims, field, "mpi4py", value)
    elif said is not None:
        size, local_size = values.get("world_size"), values.get("local_size")
        source = f"a node file of {said} nodes"
        if size is None and local_size is not None:
            _say(claims, "world_size", source, said * local_size)
        elif local_size is None and size is not None and size % said == 0:
            _say(claims, "local_size", source, size // said)


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
    variables, asked = {
        "torchrun": (_TORCH, ""),
        "environment": (_TORCH, ""),
        "slurm": (_SLURM, ""),
    }.get(launcher, (dict(ChainMap(*_MPI)), "; mpi4py and a node file are missing too"))
    wanted = ", ".join(name for name, field in variables.items() if field in missing)
    lacking = " and ".join(field.replace("_", " ") for field in missing)
    return (
        f"{_first(claims, 'rank')} is set, but the {lacking} is unknown (none of {wanted} is set{asked}). Start all "
        "ranks with one launcher, or set the variables"
    )
