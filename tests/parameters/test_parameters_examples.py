"""Promises:
- The examples of parameter servers run.
- ElasticDL's CNN reaches 95 % on 27,000 synthetic digits in an epoch, with 2 servers and 3 worker processes.
- After a server was killed, 3 servers have equal parameters, and the training continues.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fastload.datasets.synthetic import generate_digits
from tests.children import run_python
from tests.distributed.launching import ROOT, warm_environment
from tests.parameters.running import connected, forking

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")

ONE_EPOCH = 27_000  # digits: 180 steps of 50 for each of three workers


def example(name: str, *arguments: str | Path) -> str:
    environ = warm_environment({"COLUMNS": "200"})
    program = ROOT / "examples" / name
    return run_python(program, *arguments, env=environ, check=True, timeout=500).stdout


def percent(text: str) -> float:
    return float(re.findall(r"test accuracy ([\d.]+) ?%", text)[0])


def test_a_recommender_learns() -> None:
    text = example("embeddings.py", "--clicks", "30000")
    assert "59 steps" in text
    assert "'prefetched': 59, 'pulled': 0" in text
    assert percent(text) > 65, "a coin has 50"


@pytest.mark.slow
def test_a_cnn_trains_on_servers_in_its_process(tmp_path: Path) -> None:
    generate_digits(tmp_path, train=200, test=100)
    text = example("parameter_server.py", tmp_path, "--workers", "1")
    assert "version 4:" in text, "four batches of 50"
    assert percent(text) >= 0


@contextmanager
def processes(number: int, folder: Path, store: Path) -> Iterator[list[int]]:
    """Run servers, each a process; yield the processes' ids."""
    about = {"of": number, "store": str(store), "optimizer": {"name": "adam"}}
    with forking() as start:
        yield [start(number=i, options={"folder": str(folder)}, **about) for i in range(number)]


@pytest.mark.slow
@pytest.mark.timeout(600)  # two epochs, each with four processes that import torch
def test_a_cnn_learns_on_two_servers_and_goes_on_on_three(tmp_path: Path) -> None:
    generate_digits(tmp_path / "digits", train=ONE_EPOCH, test=2000)
    saved, two, three = tmp_path / "saved", tmp_path / "two", tmp_path / "three"
    with processes(2, saved, two) as pids:
        text = example("parameter_server.py", tmp_path / "digits", "--servers", f"file://{two}")
        assert percent(text) >= 95
        with connected(two) as client:
            assert client.checkpoint() == ONE_EPOCH // 50
            before = client.pull_variable()
        os.kill(pids[1], signal.SIGKILL)
    with processes(3, saved, three):
        with connected(three) as client:
            after = client.pull_variable()
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)
        text = example("parameter_server.py", tmp_path / "digits", "--servers", f"file://{three}")
        assert percent(text) >= 95
        assert f"version {2 * ONE_EPOCH // 50}:" in text
