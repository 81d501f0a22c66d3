"""Promises:
- A worker process that dies raises `WorkerDiedError` in its batch's place within a second, and the others continue.
  The error names worker, signal or exit code, and the indices.
- Of n worker processes, number k reads every n-th batch. After its death the next one reads them.
- When the last worker has died, the iterator closes, and `iter()` begins again.
- A dead worker of an iterable dataset closes the iterator. The state then resumes exactly.
- Workers killed at random moments cost no hang, no wrong batch, and leave no process, descriptor or memory.
- Workers end within two seconds if the loop's process is killed, also while another fork of that process lives, or
  while a sample holds the GIL. No named semaphore is left.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import inspect
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import get_worker_info

import fastload
from fastload.errors import LoaderClosedError, WorkerDiedError
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
    killed,
    leaves,
    memfds,
    outcomes,
    pass_gate,
    plain,
    processes,
    say,
    segfault,
)
from tests.promises.reading import in_batches, wait_until
from tests.promises.test_stopping import LateError, in_time
from tests.resuming import through_json
from tests.sizes_of_runs import in_full

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WITHIN_S = 1.0
WAYS: dict[int, tuple[Callable[[], None], str]] = {
    14: (killed, "SIGKILL"),
    22: (segfault, "SIGSEGV"),
    30: (leaves, "code 3"),
}


def died(error: Any, *words: str) -> WorkerDiedError:
    """Return an error that must be a `WorkerDiedError` with these words."""
    assert type(error) is WorkerDiedError, repr(error)
    missing = [word for word in words if word not in str(error)]
    assert not missing, f"{missing} not in: {error}"
    return error


def three_attempts(test: Callable[..., None]) -> Callable[..., None]:
    """Let the seconds of a test have three attempts, each with a pipe, a gate and a folder of its own."""
    own = ("pipe", "gate", "tmp_path")
    given = inspect.signature(test).parameters

    @functools.wraps(test)
    def attempts(tmp_path: Path, **arguments: Any) -> None:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            with closing(Pipe(folder / "pipe")) as pipe, closing(Gate(folder / "gate")) as gate:
                made = dict(zip(own, (pipe, gate, folder), strict=True))
                try:
                    return test(**arguments, **{name: made[name] for name in own if name in given})
                except LateError:
                    if number == 2:
                        raise
                    gc.collect()

    asked = [parameter for name, parameter in given.items() if name not in own]
    folder = inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY)
    attempts.__signature__ = inspect.Signature([*asked, folder])  # type: ignore[attr-defined]
    return attempts


# ---- one death ----


@contexts
@three_attempts
def test_a_death_is_an_error_in_the_place_of_its_batch(context: str, tmp_path: Path) -> None:
    dataset = Dies(40, {index: way for index, (way, _) in WAYS.items()}, tmp_path / "moment")
    with processes(dataset, workers=4, context=context, prefetch_batches=1) as loader:
        iterator = iter(loader)
        for place, indices in enumerate(in_batches(range(40), 4)):
            if not (deadly := WAYS.keys() & indices):
                assert next(iterator).tolist() == indices, "the others continue"
                continue
            with pytest.raises(WorkerDiedError) as caught:
                next(iterator)
            took_s = time.monotonic() - float((tmp_path / "moment").read_text())
            named = WAYS[deadly.pop()][1]
            died(caught.value, "worker ", named, str(indices)[1:-1], f"batch {place}")
            in_time(took_s, WITHIN_S)
        assert next(iterator, None) is None


class Read(Numbers):
    """A sample is its index and the worker that read it. One index `deadly` ends its worker."""

    def __init__(self, deadly: int) -> None:
        super().__init__(12)
        self.deadly = deadly

    def __getitem__(self, index: int) -> Any:
        if index == self.deadly:
            killed()
        return index, get_worker_info().id


@pytest.mark.parametrize("deadly", [-1, 4])
def test_worker_k_reads_every_nth_batch_and_the_next_one_does_after_its_death(deadly: int) -> None:
    """As in torch, so that code which changes what its process holds gives the same samples in each run."""
    with processes(Read(deadly), 1, workers=3, persistent_workers=True) as loader:
        for _ in range(2 if deadly < 0 else 1):
            batches = outcomes(iter(loader))
            readers = [None if isinstance(b, Exception) else int(b[1]) for b in batches]
            assert readers == (
                [0, 1, 2] * 4 if deadly < 0 else [0, 1, 2, 0, None, 2, 0, 2, 2, 0, 2, 2]
            )


@pytest.mark.parametrize(
    ("deadly", "workers"), [((2, 5), 2), ((2, 4), 2), ((0, 1), 2), ((2,), 1), ((2, 5, 7), 3)]
)
def test_after_the_last_death_no_batch_is_waited_for(
    deadly: tuple[int, ...], workers: int, tmp_path: Path
) -> None:
    """A batch was left to a worker that died before it read it, and the loop waited for ever."""
    dataset = Dies(12, dict.fromkeys(deadly, leaves), tmp_path / "moment")
    with processes(dataset, None, workers=workers) as loader:
        *got, last = outcomes(iter(loader))
    assert type(last) is LoaderClosedError
    read = [int(each) for each in got if not isinstance(each, Exception)]
    assert read == sorted({*range(len(got))} - {*deadly} - lost(got))
    assert sum(type(each) is WorkerDiedError for each in got) >= workers


def lost(got: list[Any]) -> set[int]:
    return {k for k, each in enumerate(got) if "no other was left" in str(each)}


def test_a_death_between_two_batches_is_no_hang(pipe: Pipe, gate: Gate) -> None:
    """An idle worker dies. The batch that it is given next is the first that is lost."""
    dataset = Held(400, (0, 1), pipe.path, gate.path)
    with processes(dataset, 1, prefetch_batches=2) as loader:
        iterator = iter(loader)
        first, _ = pipe.numbers(2)
        dead = Watch(first)
        gate.open()
        assert [next(iterator).item() for _ in range(100)] == [*range(100)]
        os.kill(first, signal.SIGKILL)
        assert dead.alive(10) == []
        dead.close()
        got = plain(outcomes(iterator))
    assert got.count("WorkerDiedError") <= 1, "one death costs at most one batch"
    assert len(got) == 300
    assert [
        b for b, k in zip(got, range(100, 400), strict=True) if b not in ([k], "WorkerDiedError")
    ] == []


@pytest.mark.parametrize("persistent", [False, True])
def test_with_the_last_worker_the_iterator_closes_and_iter_begins_again(
    persistent: bool, tmp_path: Path
) -> None:
    dataset = Dies(40, {4: killed, 9: killed}, tmp_path / "moment")
    with processes(dataset, persistent_workers=persistent) as loader:
        for _ in range(2):
            iterator = iter(loader)
            assert next(iterator).tolist() == [0, 1, 2, 3]
            for place in (1, 2):
                with pytest.raises(WorkerDiedError, match=f"batch {place} "):
                    next(iterator)
            with pytest.raises(LoaderClosedError, match="iter"):
                next(iterator)
    living = processes(Numbers(8))
    assert plain(outcomes(iter(living))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_persistent_workers_are_whole_again_in_the_next_epoch(tmp_path: Path) -> None:
    """A dead worker is replaced between epochs, not within one."""
    dataset = DiesOnce(40, {6: killed}, tmp_path / "moment")
    with processes(dataset, persistent_workers=True) as loader:
        # As code that keeps an error, this keeps its traceback, and so the first iterator.
        kept = outcomes(iter(loader))
        first = plain(kept)
        assert first[:1] + first[2:] == in_batches(range(40), 4)[:1] + in_batches(range(8, 40), 4)
        assert first[1] == "WorkerDiedError"
        assert len(descendants() - HERE) == 1
        assert plain(outcomes(iter(loader))) == in_batches(range(40), 4)
        wait_until(lambda: len(descendants() - HERE) == 2, "the worker that was left has ended")


HERE: set[int] = set()
"""What runs beside the worker processes of a test: the server of `tests.children`."""


@pytest.fixture(autouse=True)
def _here() -> None:
    HERE.clear()
    HERE.update(descendants())


class DiesOnce(Dies):
    """Dies at its first reading of each deadly index only."""

    def __getitem__(self, index: int) -> int:
        return index if self.note.exists() else super().__getitem__(index)


@contexts
def test_a_worker_that_dies_as_it_starts_is_an_error_of_iter(context: str) -> None:
    """In `worker_init_fn`, or as the dataset is unpickled. The other workers end."""
    by_init = processes(Numbers(40), worker_init_fn=die_in_worker_1)
    by_dataset = processes(DiesUnpickled(40), context=context)
    loader, code = (by_init, "code 7") if context == "fork" else (by_dataset, "code 8")
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(WorkerDiedError) as caught:
            next(iter(loader))
        assert time.monotonic() - started < 25, "it does not wait for a worker that is gone"
        died(caught.value, code, "start", "worker_init_fn crashed in C")
        assert not settle(lambda: descendants() - HERE)


def die_in_worker_1(worker: int) -> None:
    if worker == 1:
        os._exit(7)


class DiesUnpickled(Numbers):
    """Ends the process that unpickles it."""

    def __setstate__(self, state: Any) -> None:
        os._exit(8)


# ---- iterable datasets ----


@pytest.mark.parametrize(("workers", "over"), [(2, None), (4, 2)])
def test_a_dead_lane_closes_the_iterator_and_its_state_resumes_exactly(
    workers: int, over: int | None, tmp_path: Path
) -> None:
    def make() -> fastload.DataLoader[Any]:
        dataset = DyingLane(11, 7, tmp_path / "moment")
        return processes(dataset, 3, workers=workers, worker_processes=over, seed=5)

    note = tmp_path / "moment"
    note.touch()
    with make() as loader:
        whole = plain(outcomes(iter(loader)))
    note.unlink()
    with make() as loader:
        iterator = iter(loader)
        got = outcomes(iterator)
        state = through_json(loader.state_dict())
        took_s = time.monotonic() - float(note.read_text())
    assert took_s < 10 * WITHIN_S, "no hang"
    assert [type(b) for b in got[-2:]] == [WorkerDiedError, LoaderClosedError], got
    died(got[-2], "worker 1", "SIGKILL")
    had = plain(got[:-2])
    assert had == whole[: len(had)]
    assert 7 // 3 <= len(had) < len(whole)
    with make() as loader:
        loader.load_state_dict(state)
        assert had + plain(outcomes(iter(loader))) == whole


# ---- who waits, and who holds the socket ----


class Leaves(Numbers):
    """Reading index 5 forks a process that holds all that its worker has, and then kills the worker."""

    def __init__(self, length: int, in_c: bool, pipe: Path, gate: Path) -> None:
        super().__init__(length)
        self.in_c, self.pipe, self.gate = in_c, pipe, gate

    def __getitem__(self, index: int) -> int:
        if index == 5:
            fork = ctypes.CDLL(None).fork if self.in_c else os.fork
            if fork() == 0:
                say(self.pipe, os.getpid())
                pass_gate(self.gate)
                os._exit(0)
            pass_gate(self.gate.with_suffix(".worker"))
            killed()
        return index


@pytest.mark.parametrize("in_c", [False, True], ids=["os.fork", "fork of C"])
@three_attempts
def test_a_grandchild_that_holds_the_socket_hides_no_death(
    in_c: bool, pipe: Pipe, gate: Gate, tmp_path: Path
) -> None:
    dataset = Leaves(20, in_c, pipe.path, gate.path)
    ready = Gate(tmp_path / "gate.worker")
    with processes(dataset) as loader:
        iterator = iter(loader)
        next(iterator)
        watch = Watch(*pipe.numbers())
        ready.close()
        moment = time.monotonic()
        with pytest.raises(WorkerDiedError) as caught:
            next(iterator)
        in_time(time.monotonic() - moment, WITHIN_S)
        died(caught.value, "SIGKILL", "4, 5, 6, 7")
        assert plain(outcomes(iterator)) == in_batches(range(8, 20), 4)
        assert watch.alive(0) == watch.pids, "the grandchild held the socket all the time"
    gate.open()
    assert watch.alive(10) == []
    watch.close()


# ---- kills at random moments ----


class Tensors(Numbers):
    """Tensors of its own index, of `width` values."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__(length)
        self.width = width

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.width,), index)


class Alarm:
    """A `worker_init_fn`: worker `victim` ends after `seconds` by SIGALRM, which may strike anywhere."""

    def __init__(self, victim: int, seconds: float, pipe: Path) -> None:
        self.victim, self.seconds, self.pipe = victim, seconds, pipe

    def __call__(self, worker: int) -> None:
        if worker == self.victim:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            say(self.pipe, os.getpid())
            signal.setitimer(signal.ITIMER_REAL, self.seconds)


def one_kill(rng: random.Random, pipe: Pipe) -> bool:
    """Kill a worker at a random moment. All batches that it did not cost must be right. Return whether it cost one."""
    length, batch_size = rng.randrange(40, 400), rng.choice([1, 4, 16])
    init = Alarm(rng.randrange(3), rng.uniform(0.0001, 0.05), pipe.path)
    dataset = Tensors(length, rng.choice([1, 1000, 20_000]))
    with processes(dataset, batch_size, workers=3, worker_init_fn=init) as loader:
        errors = 0
        try:
            iterator = iter(loader)
        except WorkerDiedError as error:
            died(error, "SIGALRM", "start")
            pipe.hear()
            return True
        pipe.hear()
        for indices in in_batches(range(length), batch_size):
            try:
                batch = next(iterator)
            except WorkerDiedError as error:
                died(error, "SIGALRM")
                assert not str(error).count("while it read") or str(indices[0]) in str(error)
                errors += 1
            else:
                assert batch.shape == (len(indices), dataset.width)
                assert torch.equal(batch, torch.tensor(indices).unsqueeze(1).expand_as(batch))
        assert next(iterator, None) is None
        assert errors <= 1
    return bool(errors)


def kills(rounds: int, pipe: Pipe, seed: int = 0) -> None:
    rng = random.Random(seed)
    before, files, mapped = descendants(), open_descriptors(), len(memfds())
    struck, enough = 0, max(1, rounds // 10)
    for k in range(10 * rounds):  # on a fast machine most epochs end first
        struck += one_kill(rng, pipe)
        if k + 1 >= rounds and struck >= enough:
            break
    assert struck >= enough, "the kills strike epochs that run"
    assert not settle(lambda: descendants() - before)
    assert not settle(lambda: len(open_descriptors()) > len(files))
    assert not settle(lambda: len(memfds()) > mapped)


def test_kills_at_random_moments_leave_nothing_and_cost_at_most_a_batch(pipe: Pipe) -> None:
    kills(8, pipe)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
def test_a_fifth_of_a_thousand_kills_at_random_moments(seed: int, pipe: Pipe) -> None:
    kills(in_full(200, 60), pipe, seed)


# ---- the parent is killed ----

PARENT = """
import os, sys, torch, fastload
from tests.processes.holding import Computes, Held, Says, say
from pathlib import Path

if __name__ == "__main__":
    pipe, gate, context, held, forked, batches = sys.argv[1:]
    if held == "held":
        dataset = Held(10**6, (0, 1, 2, 3), Path(pipe), Path(gate))
    elif held == "computes":
        dataset = Computes(10**6, Path(pipe), context)
    else:
        dataset = Says(10**6, Path(pipe))
    loader = fastload.DataLoader(
        dataset, 1, num_workers=2, worker_method="process", multiprocessing_context=context
    )
    iterator = iter(loader)
    for _ in range(int(batches)):
        next(iterator)
    if forked == "forked" and os.fork() == 0:
        say(Path(pipe), "forked", os.getpid())
        sys.stdin.read()
        os._exit(0)
    say(Path(pipe), dataset.lock._semlock.name if held == "computes" else "ready")
    if held == "free":
        for _ in iterator:
            pass
    sys.stdin.read()
"""


def kill_parent(
    context: str, held: str, forked: str, batches: int, pipe: Pipe, gate: Gate, file: Path
) -> None:
    """Kill a process with two workers, and see that they end."""
    file.write_text(PARENT)
    arguments = [file, pipe.path, gate.path, context, held, forked, str(batches)]
    with Python(arguments, stdin=subprocess.PIPE) as parent:
        try:
            lines = [pipe.hear() for _ in range(3 + (forked == "forked"))]
            pids = [int(words[0]) for words in lines if words[0].isdecimal()]
            with closing(Watch(*pids)) as workers:
                assert len(workers.alive(0)) == 2, lines
                parent.kill()
                parent.wait()
                assert workers.alive(2.0) == []
            for name in (words[0] for words in lines if words[0].startswith("/mp-")):
                wait_until(lambda at=Path(f"/dev/shm/sem.{name[1:]}"): not at.exists(), name)
            for pid in (
                int(pid) for word, pid in filter(lambda words: words[0] == "forked", lines)
            ):
                os.kill(pid, signal.SIGKILL)  # it lived until here
        finally:
            parent.kill()


@pytest.mark.parametrize(
    ("context", "held", "forked"),
    [
        ("fork", "held", "forked"),
        ("fork", "computes", "alone"),
        ("fork", "free", "forked"),
        pytest.param("forkserver", "computes", "alone", marks=pytest.mark.slow),
        pytest.param("forkserver", "held", "forked", marks=pytest.mark.slow),
    ],
)
def test_workers_end_if_their_parent_is_killed(
    context: str, held: str, forked: str, pipe: Pipe, gate: Gate, tmp_path: Path
) -> None:
    """Also a worker that hangs in a sample or holds the GIL, and while another process that the parent forked lives."""
    kill_parent(context, held, forked, 0, pipe, gate, tmp_path / "parent.py")
