"""Promises:
- `examples/digits.toml` exceeds 90 % on scikit-learn's real digits. Digits with shifted labels stay at chance.
- If the prepare script of `examples/digits.toml` changes, `--resume` runs it and the training again.
- The paths of a pipeline may have spaces.
"""

from __future__ import annotations

import importlib.util
import shutil
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fastload.datasets import MNIST
from tests.distributed.launching import ROOT
from tests.flow.examples import accuracy, flow

datasets = pytest.importorskip("sklearn.datasets")


@pytest.fixture(scope="module")
def download() -> ModuleType:
    """Return the script that writes the digits, as a module."""
    path = ROOT / "examples" / "mnist" / "download.py"
    spec = importlib.util.spec_from_file_location("download", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_digits_are_scikit_learn_s_in_mnist_s_files(
    download: ModuleType, tmp_path: Path
) -> None:
    download.write_real_digits(str(tmp_path))
    train, test = MNIST(tmp_path), MNIST(tmp_path, train=False)
    assert (len(train), len(test)) == (1500, 297)
    images, labels = torch.cat([train.data, test.data]), torch.cat([train.targets, test.targets])
    squares = images[:, 2:-2, 2:-2].unflatten(1, (8, 3)).unflatten(3, (8, 3))
    small = squares[:, :, 1, :, 1]
    assert (squares == small[:, :, None, :, None]).all()
    small = (small * (16 / 255)).round()
    found = sorted(
        (*rows, label)
        for *rows, label in torch.cat([small.flatten(1), labels[:, None]], 1).tolist()
    )
    data, target = datasets.load_digits(return_X_y=True)
    assert found == sorted(
        (*rows, label) for rows, label in zip(data.tolist(), target.tolist(), strict=True)
    )
    assert images.long().sum() == squares.long().sum(), "the margin is empty"


def test_another_set_is_not_overwritten(download: ModuleType, tmp_path: Path) -> None:
    download.write_real_digits(str(tmp_path))
    download.write_real_digits(str(tmp_path))
    path = tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    path.write_bytes(struct.pack(">2I", 2049, 0))
    with pytest.raises(SystemExit, match="t10k-labels-idx1-ubyte is of another set"):
        download.write_real_digits(str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(290)
def test_from_download_to_accuracy_and_to_chance_with_shifted_labels(tmp_path: Path) -> None:
    """The script that shifts them changed: it and the training run again, in a folder whose name has a space."""
    folder = tmp_path / "real digits"
    shutil.copytree(ROOT / "examples" / "mnist", folder / "mnist")
    shutil.copy(ROOT / "examples" / "digits.toml", folder)
    ended = flow(sys.executable, folder / "digits.toml")
    assert ended.returncode == 0, ended.stderr
    assert "scikit-learn's digits, not MNIST" in ended.stdout
    assert accuracy(ended.stdout) >= 90
    script = folder / "mnist" / "prepare.py"
    text = script.read_text()
    shifted = text.replace("mnist.targets.tensor_split", "mnist.targets.roll(1).tensor_split")
    assert shifted != text
    script.write_text(shifted)
    again = flow(sys.executable, folder / "digits.toml", "--resume")
    assert [
        line.partition(" (")[0] for line in again.stderr.splitlines() if " done" not in line
    ] == [
        "download: fresh",
        "prepare: running, as mnist/prepare.py changed",
        "train: running, as prepare ran",
    ]
    assert accuracy(again.stdout) < 20, "chance is 10"
