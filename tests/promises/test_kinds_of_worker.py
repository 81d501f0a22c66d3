"""Promises:
- No workers, one thread, several, processes, and persistent ones deliver the same batches, errors and states, in the
  same order.
  See also `tests/contracts/workers.py`.
- The order and the errors of batches are those of torch's worker processes.
"""

from __future__ import annotations

from tests.contracts.workers import LikeTorch, Workers


class TestNoWorkers(Workers): ...


class TestOneThread(Workers, num_workers=1): ...


class TestTwoThreads(Workers, num_workers=2): ...


class TestEightThreads(Workers, num_workers=8): ...


class TestPersistentThreads(Workers, num_workers=2, persistent_workers=True): ...


class TestOneProcess(Workers, num_workers=1, worker_method="process"): ...


class TestTwoProcesses(Workers, num_workers=2, worker_method="process"): ...


class TestPersistentProcesses(
    Workers, num_workers=3, worker_method="multiprocessing", persistent_workers=True
): ...


class TestTorchsProcesses(
    LikeTorch, num_workers=2, worker_method="torch", multiprocessing_context="fork"
): ...
