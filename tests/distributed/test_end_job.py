"""Promise: An error or a signal that is caught and printed in one line ends all ranks of an MPI job, as an uncaught
error does. No process is left.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from fastload import distributed
from fastload.distributed import Rank, group


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What MPI's Abort was called with, in a job of two ranks that is simulated: there is no MPI."""
    codes: list[int] = []
    world = SimpleNamespace(Abort=codes.append, Get_size=lambda: 2)
    running = {"Is_initialized": lambda: True, "Is_finalized": lambda: False}
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(COMM_WORLD=world, **running))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # and put back afterwards
    rank = Rank(1, 2, 1, 2, "openmpi")
    before, abort = sys.excepthook, group._abort_when_nobody_catches(rank)
    joined = group._Joined(rank, abort=abort, before=before, store=HashStore())
    monkeypatch.setattr(group, "_joined", joined)
    return codes


def raised() -> ValueError:
    try:
        raise ValueError("no such file")
    except ValueError as error:
        return error


@pytest.mark.parametrize("line", [None, "Error: no such file"])
def test_the_error_is_told_and_all_ranks_end(
    aborted: list[int],
    line: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if line:  # and though a library put its hook over ours
        monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    with pytest.raises(SystemExit, match="2"):
        distributed.end_job(raised(), line=line, code=2)
    told = capsys.readouterr().err
    assert aborted == [2]
    assert told.endswith("no such file\n")
    assert ("Traceback" in told) == (line is None)
    assert line is None or told == f"{line}\n"


def test_a_signal_ends_all_ranks_with_one_line(
    aborted: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        distributed.end_job(
            KeyboardInterrupt()
        )  # as at a time limit that strikes while ranks start
    assert aborted == [1]
    assert capsys.readouterr().err == "fastload: rank 1 of 2 was interrupted and ends the job\n"


def test_after_shutdown_the_hook_is_the_one_from_before_and_nothing_is_ended(
    aborted: list[int],
) -> None:
    assert group._joined is not None
    before = group._joined.before
    assert sys.excepthook is not before
    distributed.shutdown()
    assert sys.excepthook is before
    distributed.end_job(raised())
    assert aborted == []
