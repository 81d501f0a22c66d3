"""Promises:
- `worker_processes=n` spreads the readers of a loader evenly over n processes. Ids, states and copies are per reader,
  large arrays per process. The first reader of each process has its main thread.
- `worker_init_fn` runs for one reader after another. The global random states are then those of before.
- What threads must not read is an error as for threads.
- A timeout, a `worker_init_fn` that does not end and a hung `close()` show the stacks of all readers.
- A process that dies names all batches that it had begun, each in its place. Other processes read the rest. With the
  last process, the iterator closes, and the state resumes at the first batch that was lost.
- Kills at random moments, forks beside threads, and samples that fork or start programs cost no hang, no wrong batch.
- Memory that the loop keeps does not change.
- SIGTERM and Ctrl-C to the group are those of one reader a process.

`FASTLOAD_STRESS_ROUNDS` is the number of kills and of starts.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from errno import EIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

import fastload
from fastload.engine import team
from fastload.errors import (
    DatasetCopyError,
    LoaderClosedError,
    LoaderTimeoutError,
    WorkerDiedError,
)
from tests.children import Python
from tests.conftest import open_descriptors, settle
from tests.fakes import Numbers
from tests.processes.holding import (
    Dies,
    DyingLane,
    Gate,
    Held,
    Pipe,
    Watch,
    contexts,
    descendants,
    leaves,
    memfds,
    outcomes,
    pass_gate,
    plain,
    processes,
    say,
)
from tests.processes.test_deaths import Tensors, died, three_attempts
from tests.processes.test_errors import wait_in_init
from tests.processes.test_signals import INTERRUPTED
from tests.processes.test_starts import Busy, ToNowhere
from tests.promises.reading import in_batches
from tests.promises.test_stopping import LateError, in_time

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ROUNDS = os.environ.get("FASTLOAD_STRESS_ROUNDS")
WITHIN_S = 1.0


def spread(
    dataset: Any, batch_size: int | None, workers: int, over: int | None, **options: Any
) -> fastload.DataLoader[Any]:
    return processes(dataset, batch_size, workers=workers, worker_processes=over, **options)


# ---- who reads ----


class Sees(Held):
    """What its reader is and has. It counts the samples of its reader."""

    def __init__(self, *held: Any) -> None:
        super().__init__(*held)
        self.seen: list[int] = []
        self.table = np.zeros(1 << 22)

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        self.seen.append(index)
        main = threading.current_thread() is threading.main_thread()
        if main:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        info: Any = get_worker_info()
        told = info.id, info.num_workers, info.dataset is self, len(self.seen)
        return os.getpid(), *told, main, self.table.ctypes.data


@contexts
@pytest.mark.parametrize(
    ("over", "sizes"), [(1, [5]), (2, [3, 2]), (None, [1] * 5), (7, [1] * 5)], ids=str
)
def test_readers_are_spread_evenly_and_have_their_own(
    over: int | None, sizes: list[int], context: str, pipe: Pipe, gate: Gate
) -> None:
    """More processes than readers are one for each. All five hold at once, so each of them reads one sample."""
    dataset = Sees(5, tuple(range(5)), pipe.path, gate.path)
    with spread(dataset, None, 5, over, collate_fn=tuple, context=context) as loader:
        iterator = iter(loader)
        pids = Counter(pipe.numbers(5))
        assert sorted(pids.values(), reverse=True) == sizes
        gate.open()
        samples = list(iterator)
    assert Counter(pid for pid, *_ in samples) == pids
    told = [each[1:5] for each in samples]
    assert sorted(told) == [(worker, 5, True, 1) for worker in range(5)]
    assert len({(pid, table) for pid, *_, table in samples}) == len(pids), "one table a process"
    for pid in pids:
        readers = sorted(each[1:] for each in samples if each[0] == pid)
        assert [main for *_, main, _ in readers] == [True] + [False] * (len(readers) - 1)


MEETING = threading.Barrier(2)


def states() -> int:
    """Return what stands for the global random states, which a thread that is no reader sees."""
    seen: list[int] = []

    def see() -> None:
        torchs = torch.get_rng_state().numpy().tobytes()
        numpys = np.random.get_state(legacy=True)[1]
        seen.append(hash((random.getstate(), numpys.tobytes(), torchs)))  # type: ignore[union-attr]

    thread = threading.Thread(target=see)
    thread.start()
    thread.join()
    return seen[0]


def seed_all(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.told = worker, states()
    with suppress(threading.BrokenBarrierError):
        MEETING.wait(0.1)
        raise AssertionError("two readers are set up at once")
    MEETING.reset()
    random.seed(worker)
    np.random.seed(worker)
    torch.manual_seed(worker)


class Told(Numbers):
    told = (-1, 0)

    def __getitem__(self, index: int) -> Any:
        return os.getpid(), get_worker_info().id, *self.told, states()  # type: ignore[union-attr]


@pytest.mark.parametrize("modules", [(), None])
def test_init_fn_runs_for_one_reader_after_another_and_random_states_return(modules: Any) -> None:
    options: dict[str, Any] = {"worker_init_fn": seed_all, "random_modules": modules}
    with spread(Told(24), None, 6, 2, collate_fn=tuple, **options) as loader:
        samples = list(loader)
    assert {worker == told for _, worker, told, *_ in samples} == {True}
    for pid in {pid for pid, *_ in samples}:
        (_, _, _, before, _), *_ = sorted(each for each in samples if each[0] == pid)
        assert {after for at, *_, after in samples if at == pid} == {before}


class Holds(Numbers):
    def __init__(self, held: Any) -> None:
        super().__init__(4)
        self.held = held


def test_what_threads_must_not_read_is_an_error_as_for_threads() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        said = []
        for loader in (
            fastload.DataLoader(Holds(connection), 1, num_workers=2, worker_method="thread"),
            spread(Holds(connection), 1, 2, 1),
        ):
            with pytest.raises(DatasetCopyError, match=r"dataset\.held") as caught:
                iter(loader)
            said.append(str(caught.value))
        assert said[0] == said[1]
        with spread(Holds(connection), 1, 2, 2) as loader, pytest.warns(RuntimeWarning):
            assert len(list(loader)) == 4, "one reader a process shares it, with a warning"


class Torn(Numbers):
    """It draws. Each reader fails once on each of the indices `torn`, after it has drawn."""

    def __init__(self, torn: set[int]) -> None:
        super().__init__(24)
        self.torn = torn

    def __getitem__(self, index: int) -> Any:
        drawn = random.random(), np.random.rand(), torch.rand(2)
        if index in self.torn:
            self.torn.remove(index)
            raise OSError(EIO, "torn")
        return index, drawn


def test_a_retry_draws_the_same_numbers() -> None:
    with fastload.DataLoader(Torn(set()), 4, seed=1) as loader:
        expected = list(loader)
    with spread(Torn({2, 3, 13}), 4, 4, 1, seed=1, retries=1) as loader:
        assert str(list(loader)) == str(expected)


@pytest.mark.parametrize(
    ("over", "method", "kind", "words"),
    [
        (0, "process", ValueError, "worker_processes.* 0"),
        (-1, "process", ValueError, "worker_processes.* -1"),
        (1.5, "process", TypeError, r"worker_processes.* 1\.5"),
        ("2", "process", TypeError, "worker_processes.* '2'"),
        (2, "thread", ValueError, 'worker_method="process"'),
        (2, None, ValueError, 'worker_method="process"'),
    ],
)
def test_bad_arguments(over: Any, method: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        fastload.DataLoader(Numbers(4), num_workers=4, worker_method=method, worker_processes=over)


# ---- readers that hang ----


def test_a_timeout_and_a_hung_close_show_all_readers(
    pipe: Pipe, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Held(40, (0, 4, 8, 12, 17), pipe.path, gate.path)
    loader = spread(dataset, 4, 4, 2, timeout=1)
    iterator = iter(loader)
    pids = {index: pid for pid, index in (pipe.hear() for _ in range(4))}
    with pytest.raises(LoaderTimeoutError) as caught:
        next(iterator)
    monkeypatch.setattr(team, "JOIN_SECONDS", 0.5)
    with closing(Watch(*{*map(int, pids.values())})) as watch:
        with pytest.warns(RuntimeWarning, match="killed") as warned:
            loader.close()
        assert watch.alive(0) == []
    for text in (str(caught.value), str(warned[0].message)):
        assert text.count("in pass_gate") == 4
        for k, indices in enumerate(in_batches(range(16), 4)):
            (line,) = [one for one in text.splitlines() if str(indices) in one]
            assert f"process {pids[str(4 * k)]}" in line


def test_an_init_fn_that_does_not_end_for_the_second_reader_is_an_error_with_its_stack(
    pipe: Pipe, gate: Gate
) -> None:
    init = functools.partial(wait_in_second, pipe.path, gate.path)
    loader = spread(Numbers(4), 1, 3, 1, worker_init_fn=init, timeout=1)
    said = r"(?s)worker 1.*in wait_in_second.*in pass_gate"
    with pytest.raises(LoaderTimeoutError, match=said):
        iter(loader)
    assert pipe.hear() == ["1"]


def wait_in_second(pipe: Path, gate: Path, worker: int) -> None:
    if worker == 1:
        wait_in_init(pipe, gate, worker)


# ---- processes that die ----


@three_attempts
def test_a_death_names_all_begun_batches_and_others_read_the_rest(pipe: Pipe, gate: Gate) -> None:
    dataset = Held(40, (0, 2, 4, 6), pipe.path, gate.path)
    with spread(dataset, 2, 4, 2, prefetch_batches=12) as loader:
        iterator = iter(loader)
        said = sorted((int(index) // 2, int(pid)) for pid, index in (pipe.hear() for _ in range(4)))
        begun = [batch for batch, pid in said if pid == said[0][1]]
        os.kill(said[0][1], signal.SIGKILL)
        moment = time.monotonic()
        with pytest.raises(WorkerDiedError) as caught:
            next(iterator)
        in_time(time.monotonic() - moment, WITHIN_S)
        gate.open()
        got = [caught.value, *outcomes(iterator)]
    suspects = [f"process {said[0][1]}", "SIGKILL", *(f"batch {batch}" for batch in begun)]
    for batch in begun:
        died(got[batch], *suspects, f"[{2 * batch}, {2 * batch + 1}] of batch {batch} ")
    expected: list[Any] = in_batches(range(40), 2)
    for batch in begun:
        expected[batch] = "WorkerDiedError"
    assert (len(begun), plain(got)) == (2, expected)


@pytest.mark.parametrize(
    ("deadly", "workers", "over"), [((3,), 2, 1), ((4, 9), 4, 2), ((0, 1), 6, 2), ((9, 17), 8, 2)]
)
def test_with_the_last_process_the_state_resumes_at_the_first_batch_that_was_lost(
    deadly: tuple[int, ...], workers: int, over: int, tmp_path: Path
) -> None:
    """A batch arrives, or its error says that it was read, or the state gives it again."""
    dataset = Dies(40, dict.fromkeys(deadly, leaves), tmp_path / "moment")
    with spread(dataset, None, workers, over) as loader:
        *got, last = outcomes(iter(loader))
        state = loader.state_dict()
    assert type(last) is LoaderClosedError
    for k, each in enumerate(got):
        if isinstance(each, Exception):
            died(each, "code 3", f"of batch {k} ")
        else:
            assert each == k
    assert {*deadly} <= {k for k, each in enumerate(got) if isinstance(each, Exception)}
    with spread(Numbers(40), None, workers, over) as loader:
        loader.load_state_dict(state)
        assert [int(each) for each in loader] == [*range(len(got), 40)]


def test_a_dead_process_of_lanes_closes_the_iterator_and_its_state_resumes_exactly(
    tmp_path: Path,
) -> None:
    note = tmp_path / "moment"

    def loader() -> fastload.DataLoader[Any]:
        return spread(DyingLane(11, 7, note), 3, 4, 2, seed=5)

    note.touch()
    with loader() as whole:
        expected = plain(outcomes(iter(whole)))
    note.unlink()
    with loader() as first:
        *had, error, closed = outcomes(iter(first))
        state = first.state_dict()
    died(error, "SIGKILL")
    assert type(closed) is LoaderClosedError
    with loader() as second:
        second.load_state_dict(state)
        assert plain(had) + plain(outcomes(iter(second))) == expected


# ---- at random moments ----


def strike(pipe: Pipe, number: int, seconds: float, moments: list[float]) -> None:
    """Kill the process of the reader that is set up as number `number`, after `seconds`."""
    pid = [*pipe.numbers(number)][-1]
    with suppress(ProcessLookupError):  # its epoch has ended
        watch = Watch(pid)
        time.sleep(seconds)
        moments.append(time.monotonic())
        watch.close()


def says_pid(pipe: Path, worker: int) -> None:
    say(pipe, os.getpid())


def one_kill(rng: random.Random, path: Path) -> int:
    """Kill one of two processes with four threads each. Return how many batches it cost."""
    length, batch_size, errors = rng.randrange(100, 1000), rng.choice([1, 4, 16]), 0
    dataset, moments = Tensors(length, rng.choice([1, 1000, 20_000])), list[float]()
    with closing(Pipe(path)) as pipe:
        init = functools.partial(says_pid, path)
        order = pipe, rng.randrange(1, 9), rng.choice([0.0, rng.uniform(0, 0.1)]), moments
        striking = threading.Thread(target=strike, args=order)
        striking.start()
        with spread(dataset, batch_size, 8, 2, worker_init_fn=init) as loader:
            asked = 0.0
            try:
                iterator: Iterator[Any] = iter(loader)
                for place, indices in enumerate(in_batches(range(length), batch_size)):
                    asked = time.monotonic()
                    try:
                        batch = next(iterator)
                    except WorkerDiedError as error:
                        took_s = time.monotonic() - max(asked, moments[0])
                        in_time(took_s, WITHIN_S)
                        died(error, "SIGKILL", f"of batch {place} ")
                        errors += 1
                    else:
                        assert batch.shape == (len(indices), dataset.width)
                        assert (batch == torch.tensor(indices).unsqueeze(1)).all()
                assert next(iterator, None) is None
            except WorkerDiedError as error:
                assert not asked
                died(error, "SIGKILL", "start")
                in_time(time.monotonic() - moments[0], WITHIN_S)
                errors = 1
        striking.join()
    path.unlink()
    return errors


def test_kills_at_random_moments_leave_nothing(tmp_path: Path) -> None:
    rng, rounds = random.Random(0), int(ROUNDS or 20)
    before, files, mapped = descendants(), len(open_descriptors()), len(memfds())
    cost, late = Counter[int](), []
    for number in range(rounds):
        try:
            cost[one_kill(rng, tmp_path / str(number))] += 1
        except LateError as error:
            late.append(str(error))
    print(cost, late)
    assert len(late) <= rounds // 20, "a busy machine"
    assert cost[0] <= rounds * 0.9, "the kills strike epochs that run"
    assert not settle(lambda: descendants() - before)
    assert not settle(lambda: len(open_descriptors()) > files)
    assert not settle(lambda: len(memfds()) > mapped)
