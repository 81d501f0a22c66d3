"""Promises:
- `examples/vineyard_mnist.py` runs the program of "Dask on Vineyard", and its changed lines are listed.
- `examples/vineyard_mnist.py` has 20 partitions, 10 on each of two simulated hosts, and each image has its label.
- A network of 2,770,634 parameters learns in `examples/vineyard_mnist.py`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload import store
from fastload.datasets import MNIST
from fastload.datasets.synthetic import generate_digits
from tests.children import run_python

distributed = pytest.importorskip("distributed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
PROGRAM = ROOT / "examples" / "vineyard_mnist.py"
ROWS = 200


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> None:
    """Leave out the check of open sockets: Dask's client keeps its connections."""


def example() -> Any:
    spec = importlib.util.spec_from_file_location("vineyard_mnist", PROGRAM)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["vineyard_mnist"] = module
    spec.loader.exec_module(module)
    return module


def test_each_host_has_ten_parts_and_each_image_its_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, data = example(), generate_digits(tmp_path / "digits", train=ROWS, test=1)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"))
    with program.simulated_hosts(str(tmp_path)) as cluster, distributed.Client(cluster) as client:
        number = program.dask_preprocess(client, str(data), 20, ROWS)
    mnist = MNIST(data)
    for host in program.HOSTS:
        monkeypatch.setenv("FASTLOAD_NODE", host)
        monkeypatch.setenv("FASTLOAD_STORE", str(tmp_path / host))
        dataset = store.get(program.NAME, data="x", label="y", balance="drop")
        assert dataset.set_id.startswith(number)
        columns = [torch.cat(dataset.column(name)) for name in "xy"]
        assert torch.equal(columns[0], mnist.data.repeat(10, 1, 1) / torch.tensor(255.0).double())
        assert torch.equal(columns[1], mnist.targets.repeat(10))
        x, y = next(program.mnist_dataset(64))
        for image, label in zip(x, y, strict=True):
            same = (mnist.data / torch.tensor(255.0).double() == image).all((1, 2)).nonzero()
            assert label in mnist.targets[same]


def test_the_program_runs_and_learns() -> None:
    command = [PROGRAM, "--rows", "500", "--steps", "40", "--lr", "0.05"]
    done = run_python(*command, check=True, timeout=300)
    assert "10 + 10 parts on two simulated hosts; 2,770,634 parameters" in done.stdout
    accuracies = [float(text) for text in re.findall(r"accuracy ([\d.]+)%", done.stdout)]
    assert len(accuracies) == 3
    assert accuracies[-1] > 40, "chance is 10"
