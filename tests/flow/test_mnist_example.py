"""Promise: `fastload flow run examples/mnist.toml` goes from download to accuracy, and images keep their labels.

The sets may lie in shared memory.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from fastload.store import get
from fastload.store.root import SHARED_MEMORY
from tests.distributed.launching import LAUNCHERS, ROOT, command, run

pytestmark = pytest.mark.slow

MPIS = [name for name in LAUNCHERS if name != "torchrun"]


def pipeline(folder: Path, *, ranks: int, digits: int = 12_000) -> Path:
    """Copy the example, with fewer digits and so many ranks of both kinds."""
    shutil.copytree(ROOT / "examples" / "mnist", folder / "mnist")
    text = (ROOT / "examples" / "mnist.toml").read_text()
    small = f'args = ["raw", "--synthetic", "--train", "{digits}", "--test", "2000"]'
    text = text.replace('args = ["raw"]', small).replace('"0.02"', '"0.1"')
    text = re.sub(r"parallelism = \d", f"parallelism = {ranks}", text)
    (folder / "mnist.toml").write_text(text)
    return folder / "mnist.toml"


def flow(launcher: str, file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `fastload flow` with the Python that has this MPI's mpi4py."""
    mpiexec, *_, python = command(launcher, 1)
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(mpiexec).parent}{os.pathsep}{os.environ['PATH']}",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [python, "-m", "fastload", "flow", "run", file, *options],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def accuracy(text: str) -> float:
    (found,) = re.findall(r"Accuracy: \d+/2000 \(([\d.]+)%\)", text)
    return float(found)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("launcher", "ranks"), [("mpich", 1), ("mpich", 4), ("openmpi", 2)])
def test_from_download_to_accuracy(launcher: str, ranks: int, tmp_path: Path) -> None:
    file = pipeline(tmp_path, ranks=ranks)
    ended = flow(launcher, file)
    assert ended.returncode == 0, ended.stderr
    assert "train: done" in ended.stderr
    assert accuracy(ended.stdout) > 85
    assert "Total Training Time : " in ended.stdout
    world, *_ = (tmp_path / "stats.csv").read_text().split(",")
    assert int(world) == ranks
    again = flow(launcher, file, "--resume")
    assert again.stderr.count("fresh") == 3
    script = tmp_path / "mnist" / "prepare.py"
    script.write_text(script.read_text() + "\n")
    planned = flow(launcher, file, "--resume", "--dry-run")
    assert "download: fresh" in planned.stderr
    assert "prepare: would run, as mnist/prepare.py changed" in planned.stderr
    assert "train: would run, as prepare would run" in planned.stderr


@pytest.mark.timeout(500)
def test_labels_shifted_by_one_row_give_chance(tmp_path: Path) -> None:
    file = pipeline(tmp_path, ranks=1, digits=4000)
    script = tmp_path / "mnist" / "prepare.py"
    text = script.read_text()
    shifted = text.replace("mnist.targets.tensor_split", "mnist.targets.roll(1).tensor_split")
    assert shifted != text
    script.write_text(shifted)
    ended = flow("mpich", file)
    assert ended.returncode == 0, ended.stderr
    assert accuracy(ended.stdout) < 20


@pytest.mark.timeout(500)
def test_a_set_in_shared_memory_is_the_hand_over(tmp_path: Path) -> None:
    pipeline(tmp_path, ranks=2)
    download = ("mnist/download.py", "raw", "--synthetic", "--train", "4000", "--test", "2000")
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as sets:
        for ranks, arguments in (
            (1, download),
            (2, ("mnist/prepare.py", "raw", sets)),
            (2, ("mnist/train.py", sets, "--lr", "0.1")),
        ):
            ended = run(command("mpich", ranks, *arguments), tmp_path)
            assert ended.code == 0, ended.text
        assert accuracy(ended.text) > 50
        with_labels = get(f"{sets}/train", data="x", label="y")
        mapped = Path("/proc/self/maps").read_text()
        assert len(with_labels) == 4000
        assert f"{sets}/train/" in mapped


@pytest.mark.timeout(500)
@pytest.mark.parametrize("launcher", MPIS)
def test_explicit_averages_give_the_parameters_of_ddp(launcher: str, tmp_path: Path) -> None:
    pipeline(tmp_path, ranks=2)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    for script, *args in (
        ("download.py", "raw", "--synthetic", "--train", "2000", "--test", "100"),
        ("prepare.py", "raw", "sets"),
    ):
        program = [sys.executable, tmp_path / "mnist" / script, *args]
        subprocess.run(program, cwd=tmp_path, env=environ, check=True)
    for average in ("ddp", "explicit"):
        arguments = ("mnist/train.py", "sets", "--average", average, "--out", f"{average}.pt")
        ended = run(command(launcher, 2, *arguments), tmp_path)
        assert ended.code == 0, ended.text
    one, other = (torch.load(tmp_path / f"{name}.pt") for name in ("ddp", "explicit"))
    assert one.keys() == other.keys()
    for name, parameter in one.items():
        torch.testing.assert_close(parameter, other[name], rtol=0, atol=1e-5)


PROGRAM = """
import torch
from fastload import distributed
from mpi4py import MPI

rank = distributed.init("gloo")
torch.manual_seed(rank.rank)
for comm in (None, MPI.COMM_WORLD):
    for bucket_bytes in (1, 1000, 10**9):
        tensors = [torch.zeros(s, dtype=d, requires_grad=True)
                   for s, d in (((3, 5), torch.float32), ((700,), torch.float32), ((2, 2), torch.float64))]
        for number, tensor in enumerate(tensors):
            tensor.grad = torch.full_like(tensor, float(rank.rank + 10 * number))
        unused = torch.zeros(3, requires_grad=True)
        distributed.average_gradients([tensors[0], unused, *tensors[1:]], comm=comm, bucket_bytes=bucket_bytes)
        mean = (rank.world_size - 1) / 2
        assert all(bool((t.grad == mean + 10 * n).all()) for n, t in enumerate(tensors)), (comm, bucket_bytes)
        assert unused.grad is None
print("right")
"""


@pytest.mark.parametrize("launcher", MPIS)
def test_gradients_are_averaged_in_buckets(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run(command(launcher, 2, "program.py"), tmp_path)
    assert ended.code == 0, ended.text
    assert ended.text.count("right") == 2
