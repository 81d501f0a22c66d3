"""Promises:
- A process that a sample forks gives no batch, whether it exits, raises or returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastload
from tests.fakes import Numbers


class Forks(Numbers):
    """Forks in each sample. The new process ends in a way; the sample waits for it, and gives its own index."""

    def __init__(self, length: int, way: Callable[[], object]) -> None:
        super().__init__(length)
        self.way = way

    def __getitem__(self, index: int) -> int:
        if not (pid := os.fork()):
            self.way()
            return -1
        _, status = os.waitpid(pid, 0)
        return index + 100 * os.waitstatus_to_exitcode(status)


def raises() -> None:
    raise ValueError("in the forked process")


@pytest.mark.parametrize(
    ("way", "code"),
    [(lambda: sys.exit(3), 3), (raises, 1), (lambda: None, 1)],
    ids=["exits", "raises", "returns"],
)
def test_a_process_that_a_sample_forks_gives_no_batch(way: Any, code: int) -> None:
    with fastload.DataLoader(
        Forks(8, way), 2, num_workers=2, worker_method="process", timeout=60
    ) as loader:
        got = torch.cat(list(loader)).tolist()
    assert got == [index + 100 * code for index in range(8)]
