"""Promises:
- No workers, one thread, several, processes, and persistent ones deliver the same batches, errors and states, in the
  same order.
  See also `tests/contracts/workers.py`.
- The order and the errors of batches are those of torch's worker processes.
"""

from __future__ import annotations

import pytest

from tests.contracts.workers import InPairs, Late, LikeTorch, Workers


class TestNoWorkers(Workers): ...


class TestTwoThreads(Workers, num_workers=2): ...


class TestTwoProcesses(Workers, num_workers=2, worker_method="process"): ...


class TestOneThread(InPairs, num_workers=1): ...


class TestEightThreads(InPairs, num_workers=8): ...


class TestPersistentThreads(InPairs, num_workers=2, persistent_workers=True): ...


class TestOneProcess(Late, num_workers=1, worker_method="process"): ...


class TestPersistentProcesses(
    InPairs, num_workers=2, worker_method="multiprocessing", persistent_workers=True
): ...


class TestFourThreadsOfOneProcess(
    InPairs, num_workers=4, worker_method="process", worker_processes=1
): ...


class TestTwoProcessesOfThreeThreads(
    InPairs, num_workers=6, worker_method="process", worker_processes=2
): ...


@pytest.mark.slow
class TestTorchsProcesses(
    LikeTorch, num_workers=2, worker_method="torch", multiprocessing_context="fork"
): ...
