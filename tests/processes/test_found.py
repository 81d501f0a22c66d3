"""Promises:
- A process that a sample forks gives no batch, whether it exits, raises or returns.
- A segment that cannot be mapped closes its descriptor once, and no other file's.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastload
from fastload.processes.segments import Segment
from tests.conftest import open_descriptors
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


def no_memory(*_: object, **__: object) -> None:
    raise RuntimeError("Cannot allocate memory")


def test_a_segment_that_cannot_be_mapped_closes_its_descriptor_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "from_file", no_memory)
        with pytest.raises(RuntimeError, match="Cannot allocate") as caught:
            Segment.new((0, 0), 65536)
    reader, writer = os.pipe()  # it takes the number, if that is free already
    del caught
    gc.collect()
    os.write(writer, b"whole")
    assert os.read(reader, 5) == b"whole"
    os.close(reader)
    os.close(writer)
    assert open_descriptors() == before
