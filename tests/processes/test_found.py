"""Promises:
- A process that a sample forks gives no batch, whether it exits, raises or returns.
- Such a process ends by SIGTERM, so a sample can use and end a pool of processes.
- Ctrl-C during a fork ends `iter()`, and no worker is left.
- A segment that cannot be mapped closes its descriptor once, and no other file's.
- `on_error` draws the same numbers with processes as with threads and without workers, and the loop's random states
  stay as they are.
- Indices that are views of one tensor, as `iter(torch.randperm(n))` gives them, cost a worker process their own bytes.
- In a worker process, a generator at the top of a module draws its own numbers for each sample, for any number of
  processes. Global random states of the loop's process stay as they are.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

import fastload
from fastload import sample_rng
from fastload.processes.packing import packed_indices
from fastload.processes.segments import Segment
from fastload.random.global_states import global_states
from tests.conftest import open_descriptors
from tests.fakes import Numbers, fastload_threads
from tests.processes.holding import processes


def raises() -> None:
    raise ValueError("in the forked process")


class Forks(Numbers):
    """Forks in each sample. The new process exits, raises or returns; the sample gives its exit code."""

    def __getitem__(self, index: int) -> int:
        if not (pid := os.fork()):
            (lambda: sys.exit(3), raises, lambda: None)[index % 3]()
            return -1
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)


def test_a_process_that_a_sample_forks_gives_no_batch() -> None:
    with processes(Forks(6), 2, timeout=60) as loader:
        assert torch.cat(list(loader)).tolist() == [3, 1, 1] * 2


def no_memory(*_: object, **__: object) -> None:
    raise RuntimeError("Cannot allocate memory")


def test_a_segment_that_cannot_be_mapped_closes_its_descriptor_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(torch, "from_file", no_memory)
        with pytest.raises(OSError, match="Cannot allocate") as caught:
            Segment.new((0, 0), 65536)
    reader, writer = os.pipe()  # it takes the number, if that is free already
    del caught
    gc.collect()
    os.write(writer, b"whole")
    assert os.read(reader, 5) == b"whole"
    os.close(reader)
    os.close(writer)
    assert open_descriptors() == before


def draws() -> list[float]:
    gauss = random.gauss(), np.random.standard_normal()
    return [*gauss, random.random(), np.random.rand(), torch.rand(()).item(), sample_rng().random()]


class BadDraws(Numbers):
    """Every second sample fails, half of them after they have drawn."""

    def __getitem__(self, index: int) -> Any:
        if index % 4 == 1:
            raise ValueError(index)
        drawn = draws()
        if index % 4 == 3:
            raise ValueError(index)
        return drawn


class BadLanes(IterableDataset[Any]):
    """The same, sample by sample."""

    def __iter__(self) -> Iterator[Any]:
        return map(BadDraws(8).__getitem__, range(8))


@pytest.mark.parametrize(
    ("kind", "batch_size"), [(lambda: BadDraws(8), 3), (BadLanes, None)], ids=["map", "iterable"]
)
def test_on_error_draws_the_same_numbers_everywhere(kind: Any, batch_size: int | None) -> None:
    def read(num_workers: int, method: Any) -> Any:
        with fastload.DataLoader(
            kind(),
            batch_size,
            num_workers=num_workers,
            worker_method=method,
            seed=3,
            on_error=lambda index, error: draws(),
        ) as loader:
            return [torch.tensor(np.stack(batch)).tolist() for _ in range(2) for batch in loader]

    before = global_states()
    processes = read(2, "process")
    assert global_states() == before
    assert read(2, "thread") == processes
    if kind is not BadLanes:
        assert read(0, "thread") == processes


class Doubles(Numbers):
    def __getitem__(self, index: Any) -> Any:
        assert isinstance(index, torch.Tensor)
        return index * 2


def test_indices_that_are_views_of_one_tensor_are_sent_without_it() -> None:
    order = torch.randperm(100_000)
    assert len(pickle.dumps(packed_indices([*order[:64]]), 5)) < 32 * 1024
    with fastload.DataLoader(
        Doubles(len(order)),
        64,
        sampler=order,
        num_workers=1,
        worker_method="process",  # type: ignore[arg-type]
    ) as loader:
        assert next(iter(loader)).tolist() == (2 * order[:64]).tolist()


class Pools(Numbers):
    """Each sample computes in a process of its own, and ends it by SIGTERM."""

    def __getitem__(self, index: int) -> int:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return int(pool.apply(abs, (-index,)))


def test_a_sample_uses_a_pool_of_processes_and_ends_it() -> None:
    with processes(Pools(4), 2, timeout=30) as loader:
        assert torch.cat(list(loader)).tolist() == [0, 1, 2, 3]


strikes: list[int] = []
os.register_at_fork(after_in_parent=lambda: strikes and signal.raise_signal(strikes.pop()))


def test_ctrl_c_during_a_fork_ends_iter() -> None:
    loader = processes(Numbers(8), 2)
    strikes.append(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        iter(loader)
    assert not strikes
    assert not multiprocessing.active_children()
    assert not fastload_threads()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(list(loader)) == 4


# ---- draws ----

RNG = np.random.default_rng(1)
GENERATOR = torch.Generator().manual_seed(3)


class DrawsAtTheTop(Numbers):
    def __getitem__(self, index: int) -> Any:
        return RNG.random(), torch.rand(1, generator=GENERATOR).item()


class DrawsGlobally(Numbers):
    def __getitem__(self, index: int) -> Any:
        return random.random(), np.random.random(), torch.rand(1).item()


def read_by_processes(dataset: Any, **options: Any) -> list[list[float]]:
    with fastload.DataLoader(dataset, 4, seed=5, worker_method="process", **options) as loader:
        return [[part.tolist() for part in batch] for batch in loader]


@pytest.mark.parametrize("kind", [DrawsAtTheTop, DrawsGlobally])
def test_draws_do_not_depend_on_the_number_of_processes_and_leave_the_loops_states(
    kind: type[Numbers],
) -> None:
    before = global_states(), RNG.bit_generator.state, GENERATOR.get_state().tolist()
    one = read_by_processes(kind(12), num_workers=1)
    assert read_by_processes(kind(12), num_workers=2) == one
    drawn = [draw for batch in one for part in batch for draw in part]
    assert len({*drawn}) == len(drawn)
    assert (global_states(), RNG.bit_generator.state, GENERATOR.get_state().tolist()) == before
