"""Promise: `average_gradients` gives all ranks the same means, over gloo or mpi4py, for any gradients
that each rank has. The parameters are those of DDP within 1e-5. See also `tests/flow/test_mnist_example.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import command, run
from tests.train.programs.starting import ranks_started

PROGRAM = """
import sys
import torch
from fastload import distributed

rank = distributed.init("gloo").rank

def parameter(*shape, **options):
    return torch.zeros(*shape, requires_grad=True, **options)

communicators = [None]
if "mpi" in sys.argv:
    from mpi4py import MPI
    communicators.append(MPI.COMM_WORLD)
for comm in communicators:
    first, second, unused, half = (parameter(3), parameter(3), parameter(3), parameter(2, dtype=torch.bfloat16))
    (first if rank == 0 else second).grad = torch.full((3,), 1.0 + rank)
    half.grad = torch.full_like(half, float(rank))
    distributed.average_gradients([first, second, unused, half], comm=comm)
    assert first.grad.tolist() == [0.5] * 3, first.grad
    assert second.grad.tolist() == [1.0] * 3, second.grad
    assert unused.grad is None
    assert half.grad.tolist() == [0.5] * 2 and half.grad.dtype == torch.bfloat16
    alone = parameter(3)
    alone.grad = torch.full((3,), 2.0 * rank)
    distributed.average_gradients(alone, comm=comm)
    assert alone.grad.tolist() == [1.0] * 3, alone.grad
    table = torch.nn.Embedding(4, 2, sparse=True)
    if rank == 0:
        table(torch.tensor([1])).sum().backward()
    try:
        distributed.average_gradients(table, comm=comm)
    except ValueError as error:
        assert "parameter 0, of shape (4, 2), has a sparse gradient" in str(error)
    else:
        raise AssertionError("it took a sparse gradient")
print("right")
"""


def test_ranks_that_have_different_gradients(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with ranks_started(2, [str(tmp_path / "program.py")]) as ranks:
        said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert all("right" in text for text in said)


@pytest.mark.slow
def test_ranks_of_mpi_that_have_different_gradients(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = run(command("mpich", 2, "program.py", "mpi"), tmp_path)
    assert ended.code == 0, ended.text
    assert ended.text.count("right") == 2
