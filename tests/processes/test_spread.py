"""Promises of `worker_processes=n`:
- The readers of a loader are spread evenly over n processes. What a sample changes is a reader's own, large arrays are
  one for each process. The first reader of a process has its main thread.
- `worker_init_fn` runs for one reader after another, and the global random states return.
- What threads must not read is their error. Timeouts and a hung `close()` show the stacks of all readers.
- A process that dies names all batches that it had begun, each in its place. Other processes read the rest. With the
  last process the iterator closes, and the state resumes at the first batch that was lost.
- Forks beside threads, and samples that fork or start programs, cost no hang and no wrong batch. Kills at random,
  signals and kept memory are in `test_deaths.py`, `test_signals.py` and `test_memory.py`.
- Each process measures for how much of the time its GIL is in use while there is work. While it is in use for most of
  the time, fewer of its readers read at once.
- `FASTLOAD_STRESS_ROUNDS` is the number of kills and of starts in these tests.
"""

from __future__ import annotations

import operator
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fastload import DataLoader, errors
from fastload.engine import choice, team
from fastload.errors import LoaderClosedError, LoaderTimeoutError
from fastload.processes.jobs import Job
from fastload.processes.work import Work
from tests.fakes import Numbers
from tests.processes import holding
from tests.processes.holding import Gate, Held, Pipe, outcomes, plain
from tests.processes.test_deaths import died
from tests.processes.test_starts import Busy, Holds
from tests.promises.reading import in_batches

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
ROUNDS = os.environ.get("FASTLOAD_STRESS_ROUNDS")


def spread(dataset: Any, size: int | None, workers: int, over: Any, **options: Any) -> Any:
    return holding.processes(dataset, size, workers=workers, worker_processes=over, **options)


class Sees(Held):
    """What its reader is and has. It counts the samples of its reader."""

    def __init__(self, *held: Any) -> None:
        super().__init__(*held)
        self.seen, self.table = list[int](), np.zeros(1 << 22)

    def __getitem__(self, index: int) -> Any:
        self.seen.append(super().__getitem__(index))
        if main := threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        info: Any = get_worker_info()
        told = info.id, info.num_workers, info.dataset is self, len(self.seen)
        return os.getpid(), *told, main, self.table.ctypes.data


@pytest.mark.parametrize(("over", "sizes"), [(1, "5"), (2, "32"), (None, "11111"), (7, "11111")])
def test_readers_are_spread_evenly_and_have_their_own(
    over: int | None, sizes: str, pipe: Pipe, gate: Gate
) -> None:
    """More processes than readers are one for each. All five hold at once, so each of them reads one sample."""
    dataset = Sees(5, tuple(range(5)), pipe.path, gate.path)
    with spread(dataset, None, 5, over, collate_fn=tuple) as loader:
        iterator = iter(loader)
        pids = Counter(pipe.numbers(5))
        gate.open()
        samples = sorted(iterator, key=lambda sample: sample[1])
    assert sorted(pids.values(), reverse=True) == [*map(int, sizes)]
    assert [each[1:5] for each in samples] == [(worker, 5, True, 1) for worker in range(5)]
    assert len({(pid, table) for pid, *_, table in samples}) == len(pids), "one table a process"
    for pid in pids:
        first, *others = (main for at, *_, main, _ in samples if at == pid)
        assert (first, any(others)) == (True, False)


MEETING = threading.Barrier(2)


def states() -> int:
    """Return what stands for the global random states, which a thread that is no reader sees."""
    with ThreadPoolExecutor(1) as pool:
        taken = random.getstate, np.random.get_state, torch.get_rng_state
        return hash(str([pool.submit(take).result() for take in taken]))


def seeds(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.told = worker, states()
    with suppress(threading.BrokenBarrierError):
        MEETING.wait(0.1)
        raise AssertionError("two readers are set up at once")
    MEETING.reset()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(worker)


class Told(Numbers):
    told = (-1, 0)

    def __getitem__(self, index: int) -> Any:
        info: Any = get_worker_info()
        return os.getpid(), info.id, *self.told, states()


def test_init_fn_runs_for_one_reader_after_another_and_random_states_return() -> None:
    loader = spread(Told(24), None, 6, 2, collate_fn=tuple, worker_init_fn=seeds, random_modules=())
    for _, group in groupby(sorted(loader), key=operator.itemgetter(0)):
        (_, _, _, before, _), *_ = samples = list(group)
        assert {(worker - told, after) for _, worker, told, _, after in samples} == {(0, before)}


def test_what_threads_must_not_read_is_an_error_as_for_threads() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        held, said = Holds(connection), set()
        for kind in ({"worker_method": "thread"}, {"worker_processes": 1}):
            with pytest.raises(errors.DatasetCopyError, match=r"dataset\.transform") as caught:
                iter(DataLoader(held, num_workers=2, **{"worker_method": "process", **kind}))
            said.add(str(caught.value))
    assert len(said) == 1
    with pytest.warns(errors.SharedStateWarning, match=r"dataset\.transform"):  # it has no copy
        list(spread(Holds(memoryview(b"")), 1, 2, 1))


@pytest.mark.parametrize("over", [0, -1, 1.5, "2", 2])
def test_bad_arguments(over: Any) -> None:
    method = "thread" if over == 2 else "process"
    words = 'worker_method="process"' if over == 2 else f"worker_processes.* {over!r}"
    with pytest.raises(ValueError if isinstance(over, int) else TypeError, match=words):
        DataLoader(Numbers(4), num_workers=4, worker_method=method, worker_processes=over)


def test_a_timeout_and_a_hung_close_show_all_readers(
    pipe: Pipe, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = spread(Held(40, (0, 4, 8, 12), pipe.path, gate.path), 4, 4, 2, timeout=1)
    iterator = iter(loader)
    pids: dict[str, str] = dict(reversed(pipe.hear()) for _ in range(4))
    with pytest.raises(LoaderTimeoutError) as caught:
        next(iterator)
    monkeypatch.setattr(team, "JOIN_SECONDS", 0.5)
    with pytest.warns(RuntimeWarning, match="killed") as warned:
        loader.close()
    for text in (str(caught.value), str(warned[0].message)):
        assert text.count("in pass_gate") == 4
        for index, pid in pids.items():
            (line,) = [one for one in text.splitlines() if f"[{index}, " in one]
            assert f"process {pid}" in line


def test_a_death_names_all_begun_batches_and_others_read_the_rest(pipe: Pipe, gate: Gate) -> None:
    dataset = Held(40, (0, 2, 4, 6), pipe.path, gate.path)
    with spread(dataset, 2, 4, 2, prefetch_batches=12) as loader:
        iterator = iter(loader)
        said = sorted((int(index) // 2, int(pid)) for pid, index in (pipe.hear() for _ in range(4)))
        begun = [batch for batch, pid in said if pid == (victim := said[0][1])]
        os.kill(victim, signal.SIGKILL)
        gate.open()  # a thread of the victim does not come so far
        got = outcomes(iterator)
    expected: list[Any] = in_batches(range(40), 2)
    suspects = [f"process {victim}", "SIGKILL", *(f"batch {batch} of" for batch in begun)]
    for batch in begun:
        died(got[batch], *suspects, f"{expected[batch]} of batch {batch} ")
        expected[batch] = "WorkerDiedError"
    assert (len(begun), plain(got)) == (2, expected)


@pytest.mark.parametrize(
    ("deadly", "workers", "over"), [((3,), 2, 1), ((4, 9), 4, 2), ((0, 1), 6, 2), ((9, 16), 8, 2)]
)
def test_with_the_last_process_the_state_resumes_at_the_first_batch_that_was_lost(
    deadly: tuple[int, ...], workers: int, over: int, tmp_path: Path
) -> None:
    """A batch arrives, or its error says that it was read, or the state gives it again."""
    dataset = holding.Dies(40, dict.fromkeys(deadly, holding.leaves), tmp_path / "moment")
    with spread(dataset, None, workers, over) as loader:
        *got, last = outcomes(iter(loader))
        state = loader.state_dict()
    lost = {k: died(each, "code 3", f"of batch {k} ") for k, each in enumerate(got) if each != k}
    assert (type(last), {*deadly} - lost.keys()) == (LoaderClosedError, set())
    with spread(Numbers(40), None, workers, over) as loader:
        loader.load_state_dict(state)
        assert [int(each) for each in loader] == [*range(len(got), 40)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_forks_beside_threads_that_log_and_draw() -> None:
    with DataLoader(Busy(10**6, None), 8, num_workers=2, worker_method="thread") as beside:
        others = iter(beside)
        for number in range(int(ROUNDS or 200)):
            assert next(others).tolist() == [*range(8 * number, 8 * number + 8)]
            with spread(Busy(8, None), 2, 3, 1, context="fork", timeout=60) as loader:
                assert plain(outcomes(iter(loader))) == in_batches(range(8), 2)


class Forks(Busy):
    """Its samples fork, or start a program, and give the exit code. The new process leaves or returns."""

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        if index % 3 == 2:
            return subprocess.run(["sh", "-c", "exit 7"], check=False).returncode
        if not (pid := os.fork()):
            return os._exit(0) if index % 3 == 0 else -1
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_samples_that_fork_and_start_programs_beside_other_readers() -> None:
    with spread(Forks(48, None), 2, 4, 1, timeout=60) as loader:
        assert torch.cat(list(loader)).tolist() == [0, 1, 7] * 16


CHANGES = {
    "(0, 1)": "(0, 1, 2, 3)",
    "num_workers=2": "num_workers=4, worker_processes=2",
    "                pass": "                batch.item() == 99 and say(pipe, 'on')",
    "\n    dataset": "\n    signal.signal(signal.SIGTERM, lambda *_: say(pipe, 'told'))\n    dataset",
}


# ---- what a fork and its threads begin with ----


def draws_in_init(worker: int) -> None:
    drawn = torch.initial_seed() % 2**31, random.random(), np.random.rand()
    get_worker_info().dataset.told = drawn  # type: ignore[union-attr]


class ToldLane(IterableDataset[Any]):
    """What a reader was told: each reads its own copy."""

    told = (0, 0.0, 0.0)

    def __iter__(self) -> Iterator[Any]:
        yield from [self.told] * 2


def test_init_fn_draws_what_it_draws_in_a_process_of_its_own() -> None:
    told = []
    for over in (None, 1):
        torch.manual_seed(1)
        with spread(ToldLane(), None, 3, over, worker_init_fn=draws_in_init) as loader:
            told.append([[float(x) for x in sample] for sample in loader])
    assert told[0] == told[1]
    assert len({*map(tuple, told[0])}) == 3


def test_an_argument_that_changes_counts_from_the_next_epoch() -> None:
    with spread(Numbers(8), 4, 2, 2) as loader:
        assert len(list(loader)) == 2
        loader.worker_processes = 1
        assert loader.chosen().processes == 1


# ---- the default ----


def slowly(row: Any) -> Any:
    time.sleep(0.01)
    return row


class Transformed(Numbers):
    transform: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


def test_the_default_spreads_what_is_plainly_safe_and_only_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that becomes unsafe between two epochs has a process for each worker again."""
    monkeypatch.setattr(choice, "cores_of_rank", lambda: 2)
    dataset = Transformed(16)
    dataset.transform = slowly
    with DataLoader(dataset, 4, num_workers=3, worker_method="auto") as loader:
        assert [batch.tolist() for batch in loader] == in_batches(range(16), 4)
        assert loader.chosen()[0::3] == ("process", 2)
        dataset.transform = SEEN.append
        assert loader.chosen()[0::3] == ("process", 3)


SEEN: list[int] = []


class Computes(Numbers):
    def __getitem__(self, index: int) -> int:
        ends = time.perf_counter() + 0.02
        while time.perf_counter() < ends:
            pass
        return index


class Sleeps(Numbers):
    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def test_fewer_readers_read_at_once_while_the_gil_is_in_use() -> None:
    work = object.__new__(Work)
    work._job, work._changed = Job((0, 1, 2, 3), 0, None), threading.Condition()  # type: ignore[arg-type]
    work._most, found = 4, []
    for share in (0.5, 0.9, 0.9, 1.0, 0.5, 0.3, 0.3, 0.1, 0.9, 0.1):
        work.adapt(share)
        found.append(work._most)
    assert found == [4, 2, 1, 1, 1, 2, 3, 4, 2, 4]


class Counted(Computes):
    """Counts how many readers of its process are in a sample."""

    def __getitem__(self, index: int) -> int:
        with LOCK:
            INSIDE.append(len(INSIDE))
            most = len(INSIDE)
        super().__getitem__(index)
        with LOCK:
            INSIDE.pop()
        return most


LOCK, INSIDE = threading.Lock(), list[int]()


def test_one_reader_of_pure_python_reads_at_once() -> None:
    with spread(Counted(4096), 2, 4, 1) as loader:
        for batch in loader:
            if loader.stats().gil_probes >= 200 and batch.tolist() == [1, 1]:
                return
    pytest.fail("several readers read at once until the end")


MEET = threading.Barrier(2)


class Meets(Numbers):
    """Samples 40 and 41 wait for each other, after others that need the GIL."""

    def __getitem__(self, index: int) -> int:
        ends = time.perf_counter() + 0.03
        while time.perf_counter() < ends:
            pass
        if index in (40, 41):
            MEET.wait()
        return index


def test_a_reader_that_might_not_read_goes_on_once_the_gil_is_free() -> None:
    with spread(Meets(80), 1, 2, 1, timeout=60) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(80))


@pytest.mark.parametrize(
    ("dataset", "over", "least", "most"),
    [
        (Computes, 1, 0.9, 1.0),
        (Computes, 2, 1.6, 2.0),
        (Sleeps, 1, 0.0, 0.2),
        (Sleeps, 2, 0.0, 0.3),
    ],
)
def test_processes_measure_how_many_gils_are_in_use(
    dataset: Any, over: int, least: float, most: float
) -> None:
    with spread(dataset(4096), 2, 2, over) as loader:
        for _ in loader:
            stats = loader.stats()
            if stats.gil_probes >= 60:
                break
    assert least <= stats.gil_held <= most
    assert stats.processes == over
