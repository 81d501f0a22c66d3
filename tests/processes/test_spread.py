"""Promises of `worker_processes=n`:
- The readers of a loader are spread evenly over n processes. What a sample changes is a reader's own, large arrays are
  one for each process. The first reader of a process has its main thread.
- `worker_init_fn` runs for one reader after another, and the global random states return.
- What threads must not read is their error. Timeouts and a hung `close()` show the stacks of all readers.
- A process that dies names all batches that it had begun, each in its place. Other processes read the rest. With the
  last process the iterator closes, and the state resumes at the first batch that was lost.
- Kills, forks beside threads, and samples that fork or start programs cost no hang and no wrong batch.
- Memory that the loop keeps stays. SIGTERM and Ctrl-C to the group do what they do with one reader a process.
- Each process measures for how much of the time its GIL is in use while there is work. While it is in use for most of
  the time, fewer of its readers read at once.
- `FASTLOAD_STRESS_ROUNDS` is the number of kills and of starts in these tests.
"""

from __future__ import annotations

import functools
import operator
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from errno import EIO
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fastload import DataLoader, errors
from fastload.engine import choice, team
from fastload.errors import LoaderClosedError, LoaderTimeoutError, WorkerDiedError
from fastload.processes.jobs import Job
from fastload.processes.work import Work
from tests.children import Python
from tests.fakes import Numbers
from tests.processes import holding
from tests.processes.holding import Gate, Held, Pipe, Watch, descendants, memfds, outcomes, plain
from tests.processes.test_deaths import Tensors, died
from tests.processes.test_errors import wait_in_init
from tests.processes.test_signals import INTERRUPTED
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


class Torn(Numbers):
    """Each reader fails once on each of the indices `torn`, after it has drawn."""

    torn: Any = frozenset[int]()

    def __getitem__(self, index: int) -> Any:
        drawn = random.random(), torch.rand(2)
        if index in self.torn:
            self.torn.remove(index)
            raise OSError(EIO, "torn")
        return index, drawn


def test_a_retry_draws_the_same_numbers() -> None:
    dataset = Torn(24)
    expected = str(list(DataLoader(dataset, 4, seed=1)))
    dataset.torn = {2, 3, 13}
    assert str(list(spread(dataset, 4, 4, 1, seed=1, retries=1))) == expected


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


def test_an_init_fn_that_hangs_for_the_second_reader_is_shown(pipe: Pipe, gate: Gate) -> None:
    def init(worker: int) -> None:
        return wait_in_init(pipe.path, gate.path, worker) if worker == 1 else None

    loader = spread(Numbers(4), 1, 3, 1, worker_init_fn=init, timeout=1)
    with pytest.raises(LoaderTimeoutError, match=r"(?s)worker 1.*in init\n.*in pass_gate"):
        iter(loader)


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


def strike(before: set[int], choice: float, moments: list[float]) -> None:
    """Kill one of the processes that are not of `before`, if there is one."""
    with suppress(ProcessLookupError, IndexError):
        pids = sorted(descendants() - before)
        watch = Watch(pids[int(choice * len(pids))])
        moments.append(time.monotonic())
        watch.close()


@pytest.mark.parametrize(("workers", "over"), [(1, None), (4, 2)])
def test_tickets_wait_for_room_in_the_socket(workers: int, over: int | None) -> None:
    sampler = [[*range(k, k + 3000)] for k in range(100)]
    with spread(
        Numbers(4000), None, workers, over, sampler=sampler, prefetch_batches=100
    ) as loader:
        assert [[*map(int, batch)] for batch in loader] == sampler


class Waits(Tensors):
    """Each waits a little, so that an epoch lasts."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(1e-3)
        return super().__getitem__(index)


def one_kill(rng: random.Random, late: list[float]) -> int:
    """Kill one of two processes with four readers each. Return how many batches it cost, -1 for the start."""
    length, batch_size, moments = rng.randrange(100, 1000), rng.choice([1, 4, 16]), list[float]()
    dataset, errors = Waits(length, rng.choice([1, 1000, 20_000])), 0
    order = descendants(), rng.random(), moments
    striking = threading.Timer(rng.uniform(0, 0.25), strike, order)
    with spread(dataset, batch_size, 8, 2) as loader:
        striking.start()
        try:
            iterator = iter(loader)
        except WorkerDiedError as error:
            died(error, "SIGKILL", "start")
            late.append(time.monotonic() - moments[0])
            return -1
        for place, indices in enumerate(in_batches(range(length), batch_size)):
            asked = time.monotonic()
            try:
                batch = next(iterator)
            except WorkerDiedError as error:
                late.append(time.monotonic() - max(asked, moments[0]))
                died(error, "SIGKILL", f"of batch {place} ")
                errors += 1
            else:
                assert batch.equal(torch.tensor(indices)[:, None].expand(-1, dataset.width))
        striking.join()
        assert next(iterator, None) is None
    assert errors <= 4, "a reader costs at most its batch"
    return errors


@pytest.mark.timeout(900)
def test_kills_at_random_moments_leave_nothing() -> None:
    rng, rounds, late = random.Random(0), int(ROUNDS or 20), list[float]()
    cost = Counter(one_kill(rng, late) for _ in range(rounds))
    assert median(late) < 1.0, f"seconds from a kill to its error: {late}"
    assert cost[0] + cost[-1] <= rounds * 0.9, f"kills strike epochs that run: {cost}"


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


@holding.contexts
def test_what_the_loop_keeps_for_100_batches_stays(context: str) -> None:
    """Whole, or as a view of an array. What is let go is read into again."""
    kept = deque[tuple[Any, Any]]()
    with spread(Tensors(800, 10_000), 4, 6, 2, context=context) as loader:
        for number, batch in enumerate(loader):
            rows = torch.arange(4 * number, 4 * number + 4).unsqueeze(1)
            kept.append((rows, batch if number % 2 else torch.from_numpy(batch.numpy())[:, ::9]))
            del batch
            assert len(kept) <= 100 or operator.eq(*kept.popleft()).all()
        assert len(memfds()) >= 100, "it is memory of the readers"
    assert all(operator.eq(*each).all() for each in kept), "the loader's end takes nothing away"


CHANGES = {
    "(0, 1)": "(0, 1, 2, 3)",
    "num_workers=2": "num_workers=4, worker_processes=2",
    "                pass": "                batch.item() == 99 and say(pipe, 'on')",
    "\n    dataset": "\n    signal.signal(signal.SIGTERM, lambda *_: say(pipe, 'told'))\n    dataset",
}


def test_sigterm_and_ctrl_c_to_the_group(pipe: Pipe, gate: Gate, tmp_path: Path) -> None:
    """SIGTERM ends no worker process. Ctrl-C is raised once, and ends both without a word."""
    (tmp_path / "loop.py").write_text(
        functools.reduce(lambda text, change: text.replace(*change), CHANGES.items(), INTERRUPTED)
    )
    with Python(
        [tmp_path / "loop.py", pipe.path, gate.path, "fork", "held"],
        start_new_session=True, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as job:  # fmt: skip
        words = [pipe.hear()[0] for _ in range(5)]
        words.remove("loop")
        with closing(Watch(*{*map(int, words)})) as workers:
            os.killpg(job.pid, signal.SIGTERM)
            assert pipe.hear() == ["told"]
            gate.open()
            assert pipe.hear() == ["on"], "it gets batches"
            assert len(workers.alive(0)) == 2
            os.killpg(job.pid, signal.SIGINT)
            said, caught, struck = pipe.hear()
            assert (said, caught) == ("closed", struck)
            _, said = job.communicate("", timeout=60)
            assert (job.returncode, workers.alive(10)) == (0, []), said
    assert "Traceback" not in said, "no worker prints one"


# ---- what a fork and its threads begin with ----


class Computed(Numbers):
    """A tensor that the copies of each reader clone."""

    told = (0, 0.0, 0.0)

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.table = torch.zeros(64, 1024)

    def __getitem__(self, index: int) -> Any:
        return self.table[index].sum(), *self.told


def test_readers_begin_after_a_parallel_operation_of_the_loop() -> None:
    """In a fork, OpenMP would wait for threads that the fork has lost."""
    (torch.rand(2000, 2000) * 2).sum()
    with spread(Computed(16), 4, 3, 1, timeout=60) as loader:
        assert len(list(loader)) == 4


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


def test_an_index_that_cannot_be_unpickled_ends_the_process() -> None:
    sampler = [[0, 1], [Poisoned(2), 3], [4, 5]]
    for k in (0, 1):  # of the first reader, and of another
        with spread(Numbers(8), None, 2, 1, sampler=sampler[k:], timeout=60) as loader:
            assert "WorkerDiedError" in {type(each).__name__ for each in outcomes(iter(loader))}


class Poisoned(int):
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


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
    work._job, work._changed = Job((0, 1, 2, 3), 4, 0, None), threading.Condition()  # type: ignore[arg-type]
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
