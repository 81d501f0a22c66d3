"""Promises:
- Through `distributed.WindowDataset` each rank reads every row of every rank, by two threads too, and after a rank
  has closed. Two ranks of MPICH show it.
- Columns of `distributed.WindowDataset` that differ raise on all ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import command, run

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).parent / "programs" / "windows.py")


@pytest.mark.parametrize("counts", ["uneven", "none"])
def test_each_rank_reads_the_rows_of_all(counts: str, tmp_path: Path) -> None:
    ended = run(command("mpich", 2, PROGRAM, counts), tmp_path)
    assert ended.code == 0, ended.text
    for rank in range(2):
        assert f"rank {rank} of 2 read all rows" in ended.text


def test_mpi_without_threads_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import mpi4py\n"
        "mpi4py.rc.thread_level = 'funneled'\n"
        "from mpi4py import MPI\n"
        "from fastload.distributed import WindowDataset\n"
        "WindowDataset({'x': [[1]]}, MPI.COMM_WORLD)\n"
    )
    ended = run(command("mpich", 1, str(program)), tmp_path)
    assert ended.code != 0
    assert 'mpi4py.rc.thread_level = "multiple"' in ended.text
