"""Promises:
- The rank is found from the variables of torchrun, Open MPI, MPICH, PALS and Slurm (but not in Slurm's batch shell),
  and inside another launcher.
- Variables that disagree, are missing or are not numbers are named.
- The variables that srun sets for an MPI are not those of another launcher.
- An MPI that does not know the ranks of srun or of another launcher is refused, with the remedy.

The environments of torchrun, Open MPI, MPICH and Slurm are as seen under them (`test_real_ranks.py` and
`tests/submit/test_slurm.py` run them). That of PALS follows its documents, as it does not run here.
"""

from __future__ import annotations

from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import pytest

from fastload.distributed import Launcher, Rank, detect_rank
from fastload.distributed.detect import check_world
from fastload.errors import RankError


def words(text: str) -> dict[str, str]:
    """Turn "A=1 B=2" into {"A": "1", "B": "2"}."""
    return dict(word.split("=", 1) for word in text.split())


def rank_by(environ: dict[str, str]) -> Rank:
    return detect_rank(environ).rank


TORCHRUN = words("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 TORCHELASTIC_RUN_ID=none")
OPENMPI = words(
    "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
    "OMPI_COMM_WORLD_NODE_RANK=1 PMIX_RANK=5 PMIX_NAMESPACE=prterun-vm-7@1"
)
MPICH = words("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=4 PMI_FD=9")
PALS = words(
    "PALS_RANKID=5 PALS_LOCAL_RANKID=1 PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4 PALS_APID=a-b"
)
SLURM = words(
    "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_STEP_NUM_TASKS=8 SLURM_LOCALID=1 SLURM_STEP_ID=0 SLURM_JOB_ID=9 "
    "SLURM_NODEID=1 SLURM_STEP_TASKS_PER_NODE=4(x2) SLURM_STEP_NUM_NODES=2"
)
BY_HAND = words("RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=n1 MASTER_PORT=29")
BATCH_SHELL = words(
    "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_TASKS_PER_NODE=4(x2)"
)
LAUNCHERS: dict[Launcher, dict[str, str]] = {
    "torchrun": TORCHRUN,
    "openmpi": OPENMPI,
    "mpich": MPICH,
    "pals": PALS,
    "slurm": SLURM,
    "environment": BY_HAND,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_is_known_by_what_it_sets(launcher: Launcher) -> None:
    assert rank_by(LAUNCHERS[launcher]) == Rank(5, 8, 1, 4, launcher)
    assert rank_by(words("RANK=0 WORLD_SIZE=1")) == Rank(0, 1, 0, 1, "environment")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        BATCH_SHELL,
        {"RANK": "", "WORLD_SIZE": "1"},
        {**SLURM, "SLURM_STEP_ID": "4294967290"},  # an interactive shell
        {**SLURM, "SLURM_STEP_ID": "4294967291"},  # that of a batch job
    ],
    ids=str,
)
def test_without_a_launcher_there_is_one_rank(environ: dict[str, str]) -> None:
    assert rank_by(environ) == Rank(0, 1, 0, 1, "none")


@pytest.mark.parametrize(
    ("per_node", "node", "size"),
    [("4(x2)", 1, 4), ("3,5", 0, 3), ("3,5", 1, 5), ("1,2(x2),3", 3, 3)],
)
def test_slurm_lists_its_tasks_by_node(per_node: str, node: int, size: int) -> None:
    environ = SLURM | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_NODEID": str(node)}
    assert rank_by(environ).local_size == size


@pytest.mark.parametrize(
    "outer", [MPICH, OPENMPI, PALS, SLURM], ids=["mpich", "openmpi", "pals", "slurm"]
)
def test_under_torchrun_other_variables_are_those_of_its_agent(outer: dict[str, str]) -> None:
    agent = outer | {name: "1" for name in outer if "RANK" in name or "PROCID" in name}
    assert rank_by(agent | TORCHRUN) == Rank(5, 8, 1, 4, "torchrun")


@pytest.mark.parametrize(
    ("mpi", "step"),
    [
        (MPICH, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}),
        (OPENMPI, {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PTY_PORT": "4001"}),
    ],
    ids=["daemons", "terminal"],
)
def test_a_step_of_slurm_may_carry_the_daemons_of_an_mpi(
    mpi: dict[str, str], step: dict[str, str]
) -> None:
    assert rank_by(SLURM | step | mpi) == rank_by(mpi)


OLD_SHASTA = words("PALS_RANKID=5 PALS_NODEID=1 PALS_APID=9.0 PALS_APINFO=/x")
CRAY_SHASTA = OLD_SHASTA | words(
    "PALS_LOCAL_RANKID=1 PMI_JOBID=9 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4 PMI_RANK=5 PMI_SIZE=8 PMI_UNIVERSE_SIZE=8"
)
"""What Slurm's plugin sets, in old and in later versions."""
PMI2 = words("PMI_RANK=5 PMI_SIZE=8 PMI_FD=9 PMI_JOBID=9.0")


@pytest.mark.parametrize("plugin", [OLD_SHASTA, CRAY_SHASTA, PMI2], ids=str)
def test_what_srun_sets_for_an_mpi_is_no_other_launcher(plugin: dict[str, str]) -> None:
    assert rank_by(SLURM | plugin) == Rank(5, 8, 1, 4, "slurm")
    one_per_node = words("SLURM_STEP_NUM_NODES=8 SLURM_STEP_TASKS_PER_NODE=1(x8) SLURM_NODEID=5")
    assert rank_by(SLURM | one_per_node | words("SLURM_LOCALID=0") | plugin) == Rank(
        5, 8, 0, 1, "slurm"
    )
    shell = BATCH_SHELL | {name: "0" if "RANK" in name else "1" for name in plugin}
    assert rank_by(shell | {"PALS_APID": "9.4294967291"}) == Rank(0, 1, 0, 1, "none")


def test_a_daemon_of_srun_passes_its_own_number_to_all_its_ranks() -> None:
    step = words("SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)")
    daemon = words(
        "PALS_RANKID=1 PALS_LOCAL_RANKID=0 PMI_LOCAL_RANK=0 PMI_LOCAL_SIZE=1 PMI_RANK=1 PMI_SIZE=2"
    )
    for name in ("mpich", "openmpi", "pals"):
        environ = SLURM | step | CRAY_SHASTA | daemon | LAUNCHERS[name]
        assert rank_by(environ) == Rank(5, 8, 1, 4, name)


def test_agreement_is_no_error_and_names_all_its_sources() -> None:
    assert detect_rank(BY_HAND | MPICH).origins["rank"] == ("RANK=5", "PMI_RANK=5")
    detected = detect_rank(SLURM | BY_HAND)
    assert detected.rank == Rank(5, 8, 1, 4, "environment")
    assert detected.origins["rank"] == ("RANK=5", "SLURM_PROCID=5")
    assert detected.origins["local_size"][-1] == "SLURM_STEP_TASKS_PER_NODE=4"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        (MPICH | words("OMPI_COMM_WORLD_RANK=6"), "OMPI_COMM_WORLD_RANK=6 and PMI_RANK=5 disagree on the rank"),
        (SLURM | words("RANK=4"), "RANK=4 and SLURM_PROCID=5 disagree on the rank"),
        (PALS | words("PMI_LOCAL_RANK=2"), "PALS_LOCAL_RANKID=1 and PMI_LOCAL_RANK=2 disagree on the local rank"),
        (MPICH | words("PMI_RANK=x"), "PMI_RANK='x' is not a number"),
        (MPICH | words("PMI_SIZE=٣"), "PMI_SIZE='٣' is not a number"),
        (MPICH | {"PMI_RANK": "9" * 5000}, "PMI_RANK='999999999999999999...' is not a number"),
        (MPICH | words("PMI_RANK=8"), "PMI_RANK=8, and PMI_SIZE=8"),
        (MPICH | words("MPI_LOCALNRANKS=9"), "MPI_LOCALNRANKS=9, and PMI_SIZE=8"),
        (MPICH | words("PMI_SIZE=0"), "PMI_RANK=5, and PMI_SIZE=0"),
        (words("WORLD_SIZE=4"), "WORLD_SIZE=4 means several ranks"),
        (words("RANK=1"), "RANK=1 is set, but the world size and local rank and local size is unknown"),
        (words("RANK=1 WORLD_SIZE=2"), "none of LOCAL_RANK, LOCAL_WORLD_SIZE"),
        (words("PALS_RANKID=1 PALS_LOCAL_RANKID=1"), "PALS_RANKID=1 is set, but the world size"),
        (SLURM | words("SLURM_STEP_TASKS_PER_NODE=x4"), "SLURM_STEP_TASKS_PER_NODE='x4' is not a list"),
        (SLURM | words("SLURM_STEP_TASKS_PER_NODE=4(x99999999999999)"), "is not a list of tasks per node"),
        (SLURM | words("SLURM_NODEID=2"), "SLURM_NODEID=2 does not fit SLURM_STEP_TASKS_PER_NODE='4(x2)', which"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_is_named(environ: dict[str, str], named: str) -> None:
    with pytest.raises(RankError, match=".") as caught:
        rank_by(environ)
    assert named in str(caught.value)


def world(rank: int, size: int) -> SimpleNamespace:
    """Return a stand-in of `mpi4py.MPI`."""
    of_all = {"Get_rank": lambda: rank, "Get_size": lambda: size}
    version = "MPICH Version:      4.0.2\nx, y"
    return SimpleNamespace(
        COMM_WORLD=SimpleNamespace(**of_all), Get_library_version=lambda: version
    )


def test_in_a_step_of_slurm_the_variables_of_an_mpi_say_nothing() -> None:
    assert rank_by(SLURM | words("PMI_RANK=0 PMI_SIZE=1")) == Rank(5, 8, 1, 4, "slurm")
    assert rank_by(SLURM | MPICH | words("PMI_RANK=0")) == Rank(5, 8, 1, 4, "slurm")


def test_an_mpi_that_does_not_know_the_ranks_of_the_launcher_is_refused() -> None:
    first = SLURM | words("SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0")
    for environ in (*LAUNCHERS.values(), {"PMI_RANK": "5"}):
        check_world(world(5, 8), environ)
    for environ in (
        {},
        BATCH_SHELL,
        words("WORLD_SIZE=4"),
        first | words("SLURM_STEP_NUM_TASKS=1"),
    ):
        check_world(world(0, 1), environ)
    alone = "SLURM_STEP_NUM_TASKS=8, but mpi4py says rank 0 of 1. Its library is 'MPICH Version: 4"
    with pytest.raises(RankError, match=f"{alone}.0.2', .*`srun --mpi=list`"):
        check_world(world(0, 1), first)
    with pytest.raises(RankError, match="WORLD_SIZE=8, but mpi4py .* Start them with its mpiexec"):
        check_world(world(0, 1), TORCHRUN)
    no_size = words("PALS_RANKID=0 PALS_LOCAL_RANKID=0")
    check_world(world(0, 2), no_size)
    with pytest.raises(RankError, match="PALS_RANKID=0, but .* set WORLD_SIZE, LOCAL_RANK and"):
        check_world(world(0, 1), no_size)


@hypothesis.given(
    st.dictionaries(
        st.sampled_from(sorted({name for environ in LAUNCHERS.values() for name in environ})),
        st.sampled_from(["0", "1", "2", "4", "8", "", "x", "2(x2)", " 1"]),
    )
)
def test_whatever_is_set_there_is_a_valid_rank_or_an_error(environ: dict[str, str]) -> None:
    try:
        rank = rank_by(environ)
    except RankError as error:
        assert any(name in str(error) for name in environ)
    else:
        assert 0 <= rank.rank < rank.world_size
        assert 0 <= rank.local_rank < rank.local_size <= rank.world_size
