"""Promises:
- The programs of ElasticDL's design for PyTorch run on the loader: ten numbers in batches of 5 and 7, each epoch a
  permutation.
- ElasticDL's CNN that is updated by hand runs on the loader too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from fastload.datasets.synthetic import generate_digits
from tests.children import run_python

ROOT = Path(__file__).parent.parent.parent


def example(name: str, *arguments: str | Path) -> str:
    environment = {**os.environ, "COLUMNS": "200"}
    return run_python(ROOT / "examples" / name, *arguments, env=environment, check=True).stdout


@pytest.mark.parametrize(("batch_size", "sizes"), [("5", [5, 5]), ("7", [7, 3])])
def test_ten_numbers(batch_size: str, sizes: list[int]) -> None:
    lines = example("ten_numbers.py", batch_size).splitlines()
    numbers = [
        [[float(n) for n in re.findall(r"[\d.]+", text)] for text in re.findall(r"\[(.*?)\]", line)]
        for line in lines
    ]
    assert [len(x) for x, _ in numbers] == sizes * 3
    assert all(a + b == 11 for x, y in numbers for a, b in zip(x, y, strict=True))
    epochs = [numbers[2 * epoch][0] + numbers[2 * epoch + 1][0] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(1, 11)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "each epoch has an order of its own"
    assert [line.split("|")[0].split() for line in lines[:2]] == [["Epoch:", "0"]] * 2


@pytest.mark.slow
def test_a_cnn_that_is_updated_by_hand_learns(tmp_path: Path) -> None:
    generate_digits(tmp_path, train=6000, test=2000)
    text = example("manual_update.py", tmp_path, "--lr", "0.1", "--epochs", "2")
    accuracies = [float(found) for found in re.findall(r"test accuracy: ([\d.]+)", text)]
    assert len(accuracies) == 6
    assert accuracies[-1] > 0.6, "chance is 0.1"
    assert len(re.findall(r"\[\d( \d){9}\] (?:prediction|real) number", text)) == 2
