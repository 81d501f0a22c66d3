"""Promise: `fastload env` names the rank in every line, lists the variables, and says with what it would train. See
also `tests/distributed/test_rendezvous.py`.

With real launchers and with `--meet` between two network stacks it runs in `test_rendezvous.py`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fastload.cli import main
from fastload.image import kernels

MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def lines(*arguments: str, exit_code: int = 0, **environ: str) -> list[str]:
    result = CliRunner().invoke(main, ["env", *arguments], env=environ)
    assert result.exit_code == exit_code, result.output
    return result.output.splitlines()


def test_every_line_names_its_rank_and_the_variables_are_listed() -> None:
    found = lines(**MPICH)
    assert all(line.startswith("rank 5 of 8: ") for line in found)
    assert found[0] == f"rank 5 of 8: local rank 1 of 4 on {os.uname().nodename}, launcher mpich"
    assert found[1].removeprefix("rank 5 of 8: found in ").split(", ") == [
        f"{name}={value}" for name, value in MPICH.items()
    ]
    assert f"torch {torch.__version__}" in found[2]
    (error,) = lines(exit_code=1, **MPICH, WORLD_SIZE="4")
    assert error.startswith("Error: WORLD_SIZE=4 and PMI_SIZE=8 disagree on the world size")


def test_a_line_says_which_kernels_make_images_or_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**environ: str) -> list[str]:
        kernels._loaded.cache_clear()
        starts = "image kernels: ", "region decoder: "
        return [
            line
            for line in lines(**environ)
            if line.partition("rank 0 of 1: ")[2].startswith(starts)
        ]

    assert said(FASTLOAD_KERNELS="0") == [
        "rank 0 of 1: image kernels: off: FASTLOAD_KERNELS=0",
        "rank 0 of 1: region decoder: off without the image kernels",
    ]
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "_kernels.so")
    assert "installed without a C compiler" in said()[0]
    assert "pip install --force-reinstall --no-deps" in said()[0]
    (tmp_path / "_kernels.so").write_bytes(b"no library")
    assert said()[0].startswith(f"rank 0 of 1: image kernels: off: {tmp_path}")
    kernels._loaded.cache_clear()


def test_alone_there_is_nobody_to_meet() -> None:
    found = lines("--meet")
    assert found[1] == "rank 0 of 1: no variable of a launcher is set"
    assert "rank 0 of 1: no other ranks to meet (no process group for a single process)" in found


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core is all that there is")
def test_a_single_core_is_warned_of() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    try:
        one = {"PMI_RANK": "0", "PMI_SIZE": "1"}
        found = lines(**one)
    finally:
        os.sched_setaffinity(0, before)
    assert found[-2].startswith(
        f"rank 0 of 1: cores for this rank: 1; this rank may run on cores {core} of "
    )
    assert found[-1].startswith("rank 0 of 1: warning: fastload: this rank may run only on core ")
    assert "mpiexec -bind-to none" in found[-1]
