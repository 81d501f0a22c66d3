"""Which rank this process is: read from the variables that a launcher sets. Pure functions over a mapping.

| launcher | rank and size | on its node |
|---|---|---|
| torchrun | `RANK`, `WORLD_SIZE` | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` |
| openmpi: Open MPI | `OMPI_COMM_WORLD_RANK`, `..._SIZE` | `OMPI_COMM_WORLD_LOCAL_RANK`, `..._LOCAL_SIZE` |
| pals: Polaris, Aurora | `PALS_RANKID`, `PMI_RANK`, `PMI_SIZE` | `PALS_LOCAL_RANKID`, `PMI_LOCAL_RANK`, `..._SIZE` |
| mpich: Hydra of MPICH and Intel MPI | `PMI_RANK`, `PMI_SIZE` | `MPI_LOCALRANKID`, `MPI_LOCALNRANKS` |
| environment: set by hand or by Kubernetes | as torchrun, without `TORCHELASTIC_RUN_ID` | as torchrun |
| slurm: a step of srun | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |

Whatever is set has to agree. One launcher inside another is no disagreement: under torchrun all other variables
describe its agent, one per node; and a step of Slurm that holds one task per node, or a terminal, carries the daemons
of an MPI, or a shell.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from fastload.errors import RankError

Launcher = Literal["torchrun", "openmpi", "pals", "mpich", "environment", "slurm", "none"]
Field = Literal["rank", "world_size", "local_rank", "local_size"]
Claims = dict[Field, dict[str, int]]
"""Of each field what was said of it: by source (a variable, or another), the value."""

_FIELDS: tuple[Field, ...] = ("rank", "world_size", "local_rank", "local_size")
_PARTS: tuple[tuple[Field, Field], ...] = (("rank", "world_size"), ("local_rank", "local_size"))
_SEVERAL: tuple[tuple[Field, int], ...] = (("world_size", 2), ("local_size", 2), ("local_rank", 1))
_TORCH: dict[str, Field] = {
    "RANK": "rank",
    "WORLD_SIZE": "world_size",
    "LOCAL_RANK": "local_rank",
    "LOCAL_WORLD_SIZE": "local_size",
}
_MPI: dict[str, Field] = {
    "OMPI_COMM_WORLD_RANK": "rank",
    "OMPI_COMM_WORLD_SIZE": "world_size",
    "OMPI_COMM_WORLD_LOCAL_RANK": "local_rank",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "local_size",
    "PALS_RANKID": "rank",
    "PALS_LOCAL_RANKID": "local_rank",
    "PMI_RANK": "rank",
    "PMI_SIZE": "world_size",
    "PMI_LOCAL_RANK": "local_rank",
    "PMI_LOCAL_SIZE": "local_size",
    "MPI_LOCALRANKID": "local_rank",
    "MPI_LOCALNRANKS": "local_size",
}
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
"""By the variable of the rank, the launcher. The first that is set names it."""

# Slurm numbers the steps that are no srun of the user's from here: interactive 0xFFFFFFFA, batch, extern, pending.
_SLURM_NO_STEP = 0xFFFF_FFFA
_DIGITS = 18
"""No count has more."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What others than the environment know of this process; empty and None where they know nothing."""

    mpi: Mapping[Field, int] | None = None
    """All four fields, from mpi4py."""
    nodes: int | None = None
    """How many nodes the node file of the job lists."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rank, and of each of its four fields what said so, as "VARIABLE=value"."""

    rank: Rank
    origins: Mapping[Field, tuple[str, ...]]


def detect(environ: Mapping[str, str]) -> Rank:
    """The rank that the variables of `environ` describe; rank 0 of 1 where no launcher set any.

    Raises:
        RankError: a value is no count, or not below its size; two variables disagree; something is missing. All are
            named, with their values.
    """
    return explain(environ).rank


def explain(
    environ: Mapping[str, str], ask: Callable[[Launcher], Said] = lambda _: Said()
) -> Finding:
    """As `detect`, with the reasons. `ask` is called with the launcher only if the variables leave something open."""
    claims = _claims(environ)
    launcher = _launcher(environ, claims)
    if launcher == "none":
        _refuse_sizes_without_rank(claims)
        return Finding(Rank(0, 1, 0, 1, "none"), {})
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
                "ranks are counted from 0 and lie below the size. Unset what is left over from another job"
            )
    if values["local_size"] > values["world_size"]:
        raise RankError(
            f"{_first(claims, 'local_size')}, and {_first(claims, 'world_size')}: "
            "a node cannot hold more ranks than the job. Unset what is left over from another job"
        )
    rank = Rank(**{field: values[field] for field in _FIELDS}, launcher=launcher)
    origins = {f: tuple(f"{name}={value}" for name, value in claims[f].items()) for f in _FIELDS}
    return Finding(rank, origins)


def _claims(environ: Mapping[str, str]) -> Claims:
    """What the variables of `environ` say of this process, those of an outer launcher left out."""
    claims: Claims = {}
    for name, field in _TORCH.items():
        _read(claims, environ, field, name)
    if environ.get("TORCHELASTIC_RUN_ID") and "rank" in claims:
        return claims
    for name, field in _MPI.items():
        _read(claims, environ, field, name)
    slurm = _slurm_claims(environ)
    if "rank" not in claims or not _carries_others(environ, slurm):
        for field, said in slurm.items():
            claims.setdefault(field, {}).update(said)
    return claims


def _slurm_claims(environ: Mapping[str, str]) -> Claims:
    """What Slurm says of a process that srun started. The shell of a batch job has a SLURM_PROCID and is none."""
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
    """Whether a step may hold the daemons of another launcher, one per node, or a shell, rather than the ranks."""
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    tasks = slurm.get("world_size", {}).values()
    return bool(environ.get("SLURM_PTY_PORT")) or (nodes is not None and nodes[1] in tasks)


def _tasks_on_node(text: str, name: str, node: int) -> int:
    """The number of tasks on node `node` by Slurm's list of them: "2(x3),1" is 2, 2, 2, 1."""
    nodes, on_node = 0, 0
    for word in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", word.strip(), re.ASCII)
        if found is None:
            raise RankError(f"{name}={text!r} is no list of tasks per node such as 2(x3),1")
        before, nodes = nodes, nodes + int(found[2] or 1)
        if before <= node < nodes:
            on_node = int(found[1])
    if node >= nodes:
        raise RankError(f"SLURM_NODEID={node}, and {name}={text!r} lists {nodes} nodes")
    return on_node


def _number(environ: Mapping[str, str], *names: str) -> tuple[str, int] | None:
    """The first of the variables `names` that is set and its value, a count; None if none is. Empty is not set."""
    for name in names:
        if text := environ.get(name, "").strip():
            # Slurm's largest has ten digits; of thousands Python makes no number.
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
    """The one value of each field; RankError where two sources disagree."""
    for field, said in claims.items():
        (first, value), *others = said.items()
        for other, differing in others:
            if differing != value:
                raise RankError(
                    f"{first}={value} and {other}={differing} disagree on the {field.replace('_', ' ')} of this "
                    "process. Unset the one that is left over from another launcher or set by hand"
                )
    return {field: next(iter(said.values())) for field, said in claims.items()}


def _add_said(claims: Claims, values: Mapping[Field, int], said: Said) -> None:
    """Add to `claims` what mpi4py said; else what follows from the number of nodes, all of them equally full."""
    if said.mpi is not None:
        for field in _FIELDS:
            _say(claims, field, "mpi4py", said.mpi[field])
    elif said.nodes is not None:
        size, local_size = values.get("world_size"), values.get("local_size")
        source = f"a node file of {said.nodes} nodes"
        if size is None and local_size is not None:
            _say(claims, "world_size", source, said.nodes * local_size)
        elif local_size is None and size is not None and size % said.nodes == 0:
            _say(claims, "local_size", source, size // said.nodes)


def _refuse_sizes_without_rank(claims: Claims) -> None:
    """Several processes that know their number and not their rank would each be rank 0 of 1."""
    for field, least in _SEVERAL:
        for name, value in claims.get(field, {}).items():
            if value >= least:
                raise RankError(
                    f"{name}={value} speaks of several ranks, and no variable says which one this is (such as "
                    f"{', '.join(_LAUNCHER_OF)}). Start with a launcher, or unset it"
                )


def _first(claims: Claims, field: Field) -> str:
    name, value = next(iter(claims[field].items()))
    return f"{name}={value}"


def _incomplete(launcher: Launcher, claims: Claims, missing: list[Field]) -> str:
    variables, asked = {
        "torchrun": (_TORCH, ""),
        "environment": (_TORCH, ""),
        "slurm": (_SLURM, ""),
    }.get(launcher, (_MPI, "; neither mpi4py nor a node file was there to tell"))
    wanted = ", ".join(name for name, field in variables.items() if field in missing)
    lacking = " and ".join(field.replace("_", " ") for field in missing)
    return (
        f"{_first(claims, 'rank')} is set, and nothing says the {lacking} (none of {wanted}{asked}). "
        "Start all ranks with one launcher, or set the variables"
    )
