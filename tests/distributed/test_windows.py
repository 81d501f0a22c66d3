"""Promises:
- Through `distributed.WindowDataset` each rank reads every row of every rank, by two threads too, and after a rank
  has closed. Two ranks of MPICH show it.
- Columns of `distributed.WindowDataset` that differ raise on all ranks.
- Under srun without a PMI that fits, what uses MPI raises on each rank: `distributed.WindowDataset`,
  `average_gradients` and `store.prepare`.
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


def test_ranks_of_srun_that_mpi_does_not_know_are_refused(tmp_path: Path) -> None:
    """As each rank of srun without a PMI: a process that mpiexec has not started, with the variables of a step."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "from mpi4py import MPI\n"
        "from mpi4py.futures import MPICommExecutor\n"
        "from fastload import store\n"
        "from fastload.distributed import WindowDataset, average_gradients\n"
        "from fastload.errors import RankError\n"
        "def prepare():\n"
        "    with MPICommExecutor() as executor:\n"
        "        store.prepare(len, ['a'], 'set', executor=executor)\n"
        "for use in (\n"
        "    lambda: WindowDataset({'x': torch.zeros(10)}, MPI.COMM_WORLD),\n"
        "    lambda: average_gradients([], comm=MPI.COMM_WORLD),\n"
        "    prepare,\n"
        "):\n"
        "    try:\n"
        "        use()\n"
        "    except RankError as error:\n"
        "        print(error, flush=True)\n"
    )
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    _, *own = command("mpich", 1, "program.py")
    ended = run(own[2:], tmp_path, step)
    assert ended.code == 0, ended.text
    assert ended.text.count("SLURM_STEP_NUM_TASKS=2, but mpi4py says rank 0 of 1. ") == 3
    assert ended.text.count("`srun --mpi=list`") == 3


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
