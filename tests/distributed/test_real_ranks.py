"""Promises:
- Each of 1, 2 and 4 real ranks under MPICH, Open MPI and torchrun finds its own rank.
- After ten DDP steps all ranks have the same parameters, within 1e-5 of those of one process.
- A job with a rank that is killed, raises or hangs ends with an error within 30 s. No process of it is left.

Each launch shows several things, as importing torch in four processes is what takes the time.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launching import LAUNCHERS, Ended, command, is_over, run
from tests.distributed.programs.model import global_batch, model, train

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).parent / "programs" / "ten_steps.py")
BOUND_S = (
    30.0  # from the loss of a rank to the end of the job: seconds, on a machine that does much else
)


def ten_steps(
    launcher: str,
    ranks: int,
    directory: Path,
    *arguments: str,
    options: tuple[str, ...] = (),
    forget: str = "",
) -> tuple[Ended, list[dict[str, Any]]]:
    """Run the program: how it ended, and what each rank reported."""
    if launcher == "openmpi" and not options:
        options = ("--oversubscribe",)
    started = command(launcher, ranks, PROGRAM, str(directory), *arguments, options=options)
    ended = run(started, directory, {"FORGET": forget})
    paths = [directory / f"{rank}.json" for rank in range(ranks)]
    assert all(path.exists() for path in paths), ended.text
    assert len(list(directory.glob("*.json"))) == ranks
    return ended, [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def trained_alone() -> list[float]:
    """The parameters after ten steps on the whole global batches, in this process, without DDP."""
    torch.manual_seed(0)
    net = model()
    train(net, global_batch)
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()]).tolist()


def assert_trained_alike(reports: list[dict[str, Any]], alone: list[float], launcher: str) -> None:
    """Each rank is who it is, all have the same parameters, and those of one process."""
    size = len(reports)
    # Open MPI may number the ranks of a node in another order than those of the job.
    assert sorted(report["local"] for report in reports) == [[rank, size] for rank in range(size)]
    for rank, report in enumerate(reports):
        assert (report["rank"], report["world_size"]) == (rank, size)
        assert report["torch"] == [rank, size, "gloo"]
        assert report["sampler"] == [rank, size]
        assert report["launcher"] == launcher
        assert report["again"]
    assert len({report["hash"] for report in reports}) == 1
    torch.testing.assert_close(
        torch.tensor(reports[0]["parameters"]), torch.tensor(alone), rtol=0, atol=1e-5
    )
    start = torch.cat([parameter.detach().flatten() for parameter in model().parameters()])
    assert (start - torch.tensor(alone)).abs().max() > 1e-2  # it learned something


def lost(reports: list[dict[str, Any]]) -> Iterator[int]:
    """The processes that are still there after a moment of grace: polled, as nobody tells of others' children."""
    deadline = time.monotonic() + 10
    for report in reports:
        while not is_over(report["pid"]):
            if time.monotonic() > deadline:
                yield report["pid"]
                break
            time.sleep(0.05)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_four_ranks_train_as_one_process_with_their_batches_together(
    launcher: str, tmp_path: Path, trained_alone: list[float]
) -> None:
    # Under Open MPI as if mpi4py were not there: on one node its ranks can meet by its variables, too.
    ended, reports = ten_steps(launcher, 4, tmp_path, forget="mpi4py" * (launcher == "openmpi"))
    assert ended.code == 0, ended.text
    assert_trained_alike(reports, trained_alone, launcher)
    ways = {"torchrun": "torchrun's store", "mpich": "MPI", "openmpi": "PMIX_NAMESPACE: "}
    (met_by,) = {report["met_by"] for report in reports}
    assert met_by.startswith(f"gloo, by {ways[launcher]}")
    for report in reports:  # unbound ranks share the cores
        if all(other["affinity"] == report["affinity"] for other in reports):
            assert report["cores"] == max(1, len(report["affinity"]) // 4)
    assert not list(lost(reports))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_rank_under_a_launcher_has_a_group_of_its_own(
    launcher: str, tmp_path: Path, trained_alone: list[float]
) -> None:
    options = ("--bind-to", "core") if launcher == "openmpi" else ()
    ended, reports = ten_steps(launcher, 1, tmp_path, options=options)
    assert ended.code == 0, ended.text
    assert_trained_alike(reports, trained_alone, launcher)
    (report,) = reports
    bound_to_one_of_many = len(report["affinity"]) == 1 and (os.cpu_count() or 1) > 1
    assert ("--bind-to none" in str(report["warnings"])) == (
        bound_to_one_of_many and launcher == "openmpi"
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_ends_the_job_with_an_error(
    launcher: str, tmp_path: Path, trained_alone: list[float]
) -> None:
    ended, reports = ten_steps(launcher, 2, tmp_path, "kill")
    assert_trained_alike(reports, trained_alone, launcher)
    assert ended.code != 0, ended.text
    assert ended.moment - float((tmp_path / "moment").read_text()) < BOUND_S, ended.text
    assert not list(lost(reports))


@pytest.mark.parametrize(
    ("launcher", "ending", "said"),
    [
        ("openmpi", "raise", "RuntimeError: this rank has had enough"),
        ("mpich", "stick", "Timed out waiting 6000ms"),
    ],
)
def test_an_error_that_nobody_catches_ends_all_ranks(
    launcher: str, ending: str, said: str, tmp_path: Path
) -> None:
    # MPI's own end waits for all ranks: the one that raises, of itself or as a stuck one keeps it waiting, would wait
    # in it for ever.
    ended, reports = ten_steps(launcher, 2, tmp_path, ending, "6")
    assert {(report["world_size"], report["local"][1]) for report in reports} == {(2, 2)}
    assert {report["met_by"] for report in reports} == {"gloo, by MPI"}
    assert ended.code != 0, ended.text
    assert said in ended.text
    assert "ends the job" in ended.text
    assert ended.moment - float((tmp_path / "moment").read_text()) < BOUND_S, ended.text
    assert not list(lost(reports))
