"""Promise: Faults, stops and resumes at random cause no hang, lose no sample, deliver none twice and leave no thread.

Samples raise, stall or fail for a moment; loops break off, close, forget or abandon their iterator, or resume from a
state with other workers. A model says what the loop must get, batch by batch, and hypothesis looks for a course of
events that breaks it.
"""

from __future__ import annotations

import errno
import gc
import json
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils.data import IterableDataset, get_worker_info

from fastload import DataLoader, RankSampler
from fastload.errors import EmptyBatchError, LoaderClosedError
from tests.fakes import Numbers, fastload_threads

LENGTH, SEED, LANE = 40, 7, 1000
DEADLINE_S = 20.0  # only a deadlock waits that long
Event = tuple[str, tuple[int, ...]]


class Faults(Counter[str]):
    """How many of each kind there were, counted by all workers together."""

    fastload_per_worker = ()


FAULTS = Faults()


class Fault(ValueError):
    """Raised in the place of a sample."""


class Weather:
    """The faults of a run, the same for all copies of a dataset.

    Samples of `broken` raise, those of `quitting` raise GeneratorExit: always. Those of `stalled` wait
    until `let_go()`; those of `flaky` raise EIO once.
    """

    fastload_per_worker = ()

    def __init__(self, broken: Set[int], quitting: Set[int], stalled: Set[int]) -> None:
        self.broken, self.quitting, self.stalled = broken, quitting, stalled
        self.flaky: set[int] = set()
        self.turn = threading.Condition()  # owns flaky, calm
        self.calm = True

    def let_go(self) -> None:
        with self.turn:
            self.calm = True
            self.turn.notify_all()

    def rise(self, workers: int) -> None:
        """From now on samples stall, where threads read them and not the loop itself."""
        with self.turn:
            self.calm = workers == 0

    def strike(self, sample: int) -> None:
        with self.turn:
            if sample in self.flaky:
                self.flaky.discard(sample)
                FAULTS["transient errors"] += 1
                raise OSError(errno.EIO, "simulated", str(sample))
            if sample in self.stalled and not self.calm:
                FAULTS["stalls"] += 1
                self.turn.notify_all()
                if not self.turn.wait_for(lambda: self.calm, DEADLINE_S):
                    raise TimeoutError(sample)
        if sample in self.quitting:
            raise GeneratorExit(sample)
        if sample in self.broken:
            raise Fault(sample)


class Samples(Numbers):
    def __init__(self, weather: Weather) -> None:
        super().__init__(LENGTH)
        self.weather = weather

    def __getitem__(self, index: int) -> int:
        self.weather.strike(index)
        return index


class Lanes(IterableDataset[int]):
    """Worker w yields w * LANE + k for the values k of its part of 0 .. LENGTH - 1; has a state."""

    def __init__(self, weather: Weather) -> None:
        self.weather, self.start = weather, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, self.start = self.start, 0
        self.walk = Walk(self, info.id if info else 0, info.num_workers if info else 1, start)
        return self.walk

    def state_dict(self) -> dict[str, int]:
        return {"at": self.walk.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


class Walk:
    """Goes on behind a sample that raised."""

    def __init__(self, dataset: Lanes, worker: int, workers: int, at: int) -> None:
        self.dataset, self.at = dataset, at
        self.values = lane(worker, workers)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == len(self.values):
            raise StopIteration
        self.at += 1
        value = self.values[self.at - 1]
        self.dataset.weather.strike(value % LANE)
        return value


def lane(worker: int, workers: int) -> list[int]:
    """Of different lengths: worker w leaves out its last 3 * w."""
    whole = [worker * LANE + k for k in range(worker, LENGTH, workers)]
    return whole[: len(whole) - min(3 * worker, len(whole))]


# ---- the model ----


@dataclass(frozen=True)
class Model:
    """What the loop must get. `on_error="skip"` skips what is an Exception, and nothing else."""

    batch_size: int
    broken: frozenset[int]
    quitting: frozenset[int]
    skip: bool

    def raises(self, value: int) -> bool:
        return value % LANE in (self.quitting if self.skip else self.quitting | self.broken)

    def outcome(self, batch: list[int]) -> Event:
        failed = tuple(k % LANE for k in batch if self.raises(k))
        if failed:
            return "error", failed
        good = tuple(k for k in batch if k % LANE not in self.broken)
        return ("batch", good) if good else ("empty", ())

    def of_map(self, epoch: int) -> list[Event]:
        sampler = RankSampler(LENGTH, rank=0, world_size=1, seed=SEED)
        sampler.set_epoch(epoch)
        order = [*sampler]
        return [
            self.outcome(order[at : at + self.batch_size])
            for at in range(0, LENGTH, self.batch_size)
        ]

    def of_lanes(self, workers: int) -> list[Event]:
        """The workers in turn. An error ends its batch there, and the next goes on behind it."""
        lanes: list[list[Event]] = []
        for worker in range(max(workers, 1)):
            events, batch = [], list[int]()
            for value in lane(worker, max(workers, 1)):
                batch.append(value)
                if len(batch) == self.batch_size or self.raises(value):
                    events.append(self.outcome(batch))
                    batch = []
            if batch:
                events.append(self.outcome(batch))
            lanes.append(events)
        return [events[at] for at in range(LENGTH) for events in lanes if at < len(events)]


# ---- the machine ----


class Storm(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loader: DataLoader[Any] | None = None
        self.iterator: Any = None
        self.abandoned: list[Any] = []
        self.saved: tuple[dict[str, Any], list[Event], int, int] | None = None
        self.expected: list[Event] = []
        self.epoch = 0

    # What stays the same in one run, so that a state fits.
    @initialize(
        iterable=st.booleans(),
        in_order=st.sampled_from([True, True, False]),
        model=st.builds(
            Model,
            batch_size=st.sampled_from([1, 3, 7]),
            broken=st.frozensets(st.integers(0, LENGTH - 1), max_size=5),
            quitting=st.frozensets(st.integers(0, LENGTH - 1), max_size=2),
            skip=st.booleans(),
        ),
        stalled=st.frozensets(st.integers(0, LENGTH - 1), max_size=3),
    )
    def begin(self, iterable: bool, in_order: bool, model: Model, stalled: frozenset[int]) -> None:
        self.iterable, self.in_order, self.model = iterable, in_order, model
        self.weather = Weather(model.broken, model.quitting, stalled)
        self.open(2, False, 0)

    def make(self, workers: int, persistent: bool) -> DataLoader[Any]:
        shuffle: Any = {} if self.iterable else {"shuffle": True}
        dataset: Any = (Lanes if self.iterable else Samples)(self.weather)
        return DataLoader(
            dataset,
            self.model.batch_size,
            num_workers=workers,
            seed=SEED,
            retries=0 if self.iterable else 1,
            on_error="skip" if self.model.skip else "raise",
            in_order=self.in_order,
            persistent_workers=persistent and workers > 0,
            **shuffle,
        )

    def whole(self, epoch: int) -> list[Event]:
        return self.model.of_lanes(self.workers) if self.iterable else self.model.of_map(epoch)

    def open(self, workers: int, persistent: bool, epoch: int) -> None:
        """A new loader at an epoch."""
        self.workers = workers
        self.loader = self.make(workers, persistent)
        self.loader.set_epoch(epoch)
        self.begin_epoch(epoch)

    def begin_epoch(self, epoch: int) -> None:
        self.weather.rise(self.workers)
        self.iterator = iter(self.loader)  # type: ignore[arg-type]
        self.epoch, self.expected = epoch, self.whole(epoch)

    def stop(self) -> None:
        self.weather.let_go()
        if self.loader is not None:
            self.loader.close()
        self.iterator = self.loader = None
        self.abandoned.clear()

    def take(self) -> bool:
        """One step of the loop, against the model; whether there was one."""
        self.weather.let_go()  # from here on the loop waits for the batch: a stall has to end
        try:
            return self.step()
        finally:
            self.weather.rise(self.workers)

    def step(self) -> bool:
        try:
            event: Event = ("batch", tuple(next(self.iterator).tolist()))
        except StopIteration:
            assert self.expected == [], "lost"
            return False
        except EmptyBatchError:
            event = ("empty", ())
        except Fault as error:
            event = ("error", error.args)
        except RuntimeError as error:
            assert isinstance(error.__cause__, GeneratorExit), error
            event = ("error", error.__cause__.args)
        self.match(event)
        return True

    def match(self, event: Event) -> None:
        """Of an error one failed sample is known, of an empty batch none."""

        def fits(wanted: Event) -> bool:
            kind, values = wanted
            if kind != event[0]:
                return False
            if kind == "empty":
                return True
            return event[1][0] in values if kind == "error" else event[1] == values

        candidates = self.expected[:1] if self.in_order else self.expected
        found = next((wanted for wanted in candidates if fits(wanted)), None)
        assert found is not None, f"got {event}, expected {candidates[:3]}"
        self.expected.remove(found)
        if self.model.skip or event[0] != "batch":
            FAULTS["raised"] += event[0] != "batch" or len(found[1]) < self.model.batch_size

    running = precondition(lambda self: self.iterator is not None)

    @running
    @rule(steps=st.integers(1, 8))
    def walk(self, steps: int) -> None:
        for _ in range(steps):
            if not self.take():
                self.begin_epoch(self.epoch + 1)
                return

    @running
    @rule()
    def wait_for_a_stall(self) -> None:
        """Let threads come to a stall, where the window has room for one."""
        with self.weather.turn:
            before = FAULTS["stalls"]
            self.weather.turn.wait_for(lambda: FAULTS["stalls"] > before, 0.005)

    @running
    @rule(samples=st.sets(st.integers(0, LENGTH - 1), max_size=4))
    def fail_once(self, samples: set[int]) -> None:
        with self.weather.turn:
            if not self.iterable:  # an iterator that raised is behind its sample
                self.weather.flaky = samples

    @running
    @rule()
    def save(self) -> None:
        assert self.loader is not None
        state = json.loads(json.dumps(self.loader.state_dict()))
        self.saved = state, list(self.expected), self.epoch, self.workers
        FAULTS["states"] += 1

    @precondition(lambda self: self.saved is not None)
    @rule(workers=st.integers(0, 4), persistent=st.booleans(), kill=st.booleans())
    def resume(self, workers: int, persistent: bool, kill: bool) -> None:
        """In a new loader, after the old one was closed, or while it goes on beside it."""
        assert self.saved is not None
        state, expected, epoch, saved_by = self.saved
        if kill:
            self.stop()
        else:
            self.abandon()
        self.workers = saved_by if self.iterable else workers
        self.loader = self.make(self.workers, persistent)
        self.loader.load_state_dict(state)
        self.iterator, self.epoch, self.expected = iter(self.loader), epoch, list(expected)
        FAULTS["resumes"] += 1

    def abandon(self) -> None:
        self.weather.let_go()
        if self.iterator is not None:
            self.abandoned.append((self.loader, self.iterator))
        del self.abandoned[:-3]
        self.loader = self.iterator = None

    @running
    @rule(epoch=st.none() | st.integers(0, 5))
    def leave(self, epoch: int | None) -> None:
        """The loop breaks off and asks the same loader for the next epoch, or for another."""
        assert self.loader is not None
        FAULTS["broken off"] += 1
        if epoch is not None:
            self.loader.set_epoch(epoch)
        self.begin_epoch(self.epoch + 1 if epoch is None else epoch)

    @running
    @rule()
    def close_under_it(self) -> None:
        assert self.loader is not None
        ender = threading.Timer(0.002, self.weather.let_go)
        ender.start()
        self.loader.close()
        ender.join()
        FAULTS["closed"] += 1
        if self.workers and self.expected:
            with pytest.raises(LoaderClosedError):
                next(self.iterator)
        self.begin_epoch(self.epoch + 1)

    @running
    @rule(workers=st.integers(0, 4), persistent=st.booleans(), keep=st.booleans())
    def open_another(self, workers: int, persistent: bool, keep: bool) -> None:
        """Nothing is closed: the last reference goes, with threads in the middle of calls, or is kept."""
        if keep:
            self.abandon()
        else:
            self.loader = self.iterator = None
            self.stop()
        FAULTS["abandoned" if keep else "forgotten"] += 1
        self.open(workers, persistent, self.epoch)

    @running
    @rule()
    def to_the_end(self) -> None:
        while self.take():
            pass
        self.begin_epoch(self.epoch + 1)

    def teardown(self) -> None:
        if not hasattr(self, "weather"):
            return
        FAULTS["runs"] += 1
        for loader, _ in self.abandoned:
            self.weather.let_go()
            loader.close()
        self.stop()
        deadline = time.monotonic() + 5.0
        if fastload_threads():
            gc.collect()  # those that were forgotten
        while (left := fastload_threads()) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not left, f"threads left: {left}"


FAULT_KINDS = {
    *("transient errors", "stalls", "raised", "states", "resumes"),
    *("broken off", "closed", "forgotten", "abandoned"),
}


@pytest.mark.slow
@pytest.mark.timeout(110)
def test_a_storm_of_faults_loses_nothing_and_doubles_nothing() -> None:
    FAULTS.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of samples that were skipped
        run_state_machine_as_test(
            Storm,
            settings=settings(
                max_examples=80,
                phases=[Phase.generate],  # a hang would be shrunk for longer than the time-out
                stateful_step_count=30,
                derandomize=True,
                deadline=None,
            ),
        )
    assert all(FAULTS[kind] > 0 for kind in FAULT_KINDS), FAULTS
    assert sum(FAULTS[kind] for kind in FAULT_KINDS) > 500


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("iterable", [False, True])
def test_a_chain_of_kills_gives_each_sample_once(iterable: bool, in_order: bool) -> None:
    """Killed after every second batch, with samples stalling and changing numbers of workers."""
    weather = Weather(set(), set(), {3, 11, 20, 33})
    state: dict[str, Any] | None = None
    got: list[int] = []
    for life in count():
        workers = 3 if iterable else (4, 1, 0, 2, 3)[life % 5]
        dataset: Any = (Lanes if iterable else Samples)(weather)
        loader: DataLoader[Any] = DataLoader(
            dataset, 3, num_workers=workers, seed=SEED, in_order=in_order
        )
        with loader:
            if state is not None:
                loader.load_state_dict(state)
            weather.calm = workers == 0
            iterator = iter(loader)
            gate = threading.Timer(0.005, weather.let_go)
            gate.start()
            batches = [batch.tolist() for batch in islice(iterator, 2)]
            gate.join()
            state = json.loads(json.dumps(loader.state_dict()))
        got += [k for batch in batches for k in batch]
        if len(batches) < 2 or life > 50:
            break
    wanted = [k for worker in range(3) for k in lane(worker, 3)] if iterable else [*range(LENGTH)]
    assert sorted(got) == wanted
