"""Promises:
- The programs of Twister2's two documents run with only their imports changed, under both MPIs: 4 ranks over Parquet
  files, 2 ranks in memory.
- Twister2's programs print what their documents show, and learn. The test uses 3,000 synthetic digits and ten times
  the learning rate.

Digits are synthetic, 3,000 for training. The documents' learning rate is for 60,000, so it is ten times as high here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pyarrow.parquet import read_metadata

from tests.distributed.launching import command, run
from tests.flow.twister2_programs import run_flow, write_digits, write_programs
from tests.sizes_of_runs import in_full

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

FASTER = ("lr=0.01", "lr=0.1")


def expect_training(text: str, folder: Path, ranks: int) -> None:
    """Look for what the documents' training prints and writes. If labels belonged to other images, chance is 10 %."""
    assert re.search(r"Progress 100% \s", text)
    assert re.search(r"Rank  0 , epoch  0 :  \d+\.\d+", text)
    assert re.search(r"Total Training Time : \d+\.\d+\nTotal Testing Time : \d+\.\d+", text)
    ((right, count, percent),) = re.findall(
        r"Test set: Average loss: \d+\.\d{4}, Accuracy: (\d+)/(\d+) \((\d+)%\)", text
    )
    assert int(percent) > 30
    # The documents count rank 0's, and print the mean of all ranks' accuracy.
    assert int(count) == 500 // ranks // (16 // ranks) * (16 // ranks)
    assert int(right) > 0.2 * int(count)
    (row,) = (folder / "stats.csv").read_text().splitlines()
    world_size, training_s, communication_s, testing_s = map(float, row.split(","))
    assert world_size == ranks
    assert training_s > communication_s > 0
    assert testing_s > 0


@pytest.mark.parametrize("launcher", in_full(["mpich", "openmpi"], ["mpich"]))
def test_download_prepare_and_train_on_four_ranks(launcher: str, tmp_path: Path) -> None:
    write_programs(tmp_path, "disk", FASTER)
    write_digits(tmp_path / "data" / "twister2deepnet" / "mnist")
    ended = run_flow(launcher, tmp_path / "Twister2Flow.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "pytorch_task: done" in ended.stderr
    parquet = tmp_path / "data" / "parquet"
    for rank in range(4):
        for kind, columns in (("data", 784), ("target", 1)):
            for split, rows in (("train", 750), ("test", 125)):
                found = read_metadata(parquet / split / f"{rank}.{kind}")
                assert (found.num_rows, found.num_columns) == (rows, columns)
    for word in ("Data Loading 0", "TRAIN", "TEST"):  # ranks print at once, so lines are torn
        assert ended.stdout.count(word) >= 4
    assert "Data SAVED to DISK" in ended.stdout
    expect_training(ended.stdout, tmp_path, 4)


@pytest.mark.parametrize("launcher", in_full(["mpich", "openmpi"], ["openmpi"]))
def test_prepare_and_train_in_memory_on_two_ranks(launcher: str, tmp_path: Path) -> None:
    write_programs(tmp_path, "memory", FASTER, ("PARALLELISM = 4", "PARALLELISM = 2"))
    write_digits(tmp_path / "data" / "twister2deepnetv1" / "mnist")
    ended = run(command(launcher, 2, "PytorchMnistMemory.py"), tmp_path)
    assert ended.code == 0, ended.text
    assert "Source Test 2 <class 'numpy.ndarray'> (250, 784) (250,)" in ended.text
    assert "From Memory:  (1500, 784) (1500, 1) (250, 784) (250, 1)" in ended.text
    shapes = ([23, 64, 28, 28], [23, 64], [31, 8, 28, 28], [31, 8])
    assert "From File:  " + " ".join(f"torch.Size({shape})" for shape in shapes) in ended.text
    assert ended.text.count("Loading Done") == ended.text.count("Start Training") == 2
    expect_training(ended.text, tmp_path, 2)


def test_another_number_of_ranks_is_an_error_that_says_how_to_start(tmp_path: Path) -> None:
    write_programs(tmp_path, "disk")
    ended = run(command("mpich", 2, "Twister2PytorchMnist.py"), tmp_path)
    assert ended.code != 0
    assert "runs on 2 ranks, but the resources have 4 instances" in ended.text
    assert "mpiexec -n 4 python Twister2PytorchMnist.py" in ended.text


FOLDERS = """
import os
from fastload.compat.twister2flow import FileUtils, SourceFunc, Twister2Environment

class Nothing(SourceFunc):
    def has_next(self):
        return False

    def next(self):
        raise AssertionError

env = Twister2Environment(resources=[{"cpu": 1, "instances": 2}])
if env.worker_id == 0:
    with open("begin", "rb"):  # until rank 1 is about to make its source
        FileUtils.mkdir_branch_with_access("a/b/c")
else:
    open("begin", "wb").close()
env.create_source(Nothing(), 2).cache()
print(f"there: {os.path.isdir('a/b/c')}")
"""


def test_folders_that_one_rank_made_are_there_for_the_sources_of_all(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(FOLDERS)
    os.mkfifo(tmp_path / "begin")
    ended = run(command("mpich", 2, "program.py"), tmp_path)
    assert ended.code == 0, ended.text
    assert ended.text.count("there: True") == 2
