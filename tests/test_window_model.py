"""Promises:
- The window keeps `0 <= issued - taken <= depth` in thousands of interleavings that are checked against a model.
- No interleaving loses a wake-up or ends in a deadlock, and the window can be closed from inside any line.

The threads are real and the code is the shipped one, but its locks are replaced by locks of a scheduler. It lets one
thread run at a time and draws, at every lock, which one goes next. So an interleaving is a pure function of its seed,
a lost wake-up is seen as a deadlock at once (no thread can run), and nothing sleeps.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType, SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fastload.engine.waiting as waiting_module
import fastload.engine.window as window_module
from fastload.engine.window import Claim, Window
from fastload.errors import LoaderClosedError, LoaderTimeoutError, WorkerCrashError
from fastload.memory.ticket import Ticket
from fastload.reading.runs import RUN_SECONDS

INTERLEAVINGS_PER_EXAMPLE = 10


# ---- a scheduler that owns every lock ----


class Deadlock(AssertionError):
    """No thread can run, or they run without end."""


class Abandoned(BaseException):
    """Unwinds the other threads of a schedule that has failed."""


@dataclass(eq=False)
class Task:
    """One thread of a schedule; it runs only while it holds the baton."""

    name: str
    body: Callable[[], None]
    baton: threading.Lock = field(default_factory=threading.Lock)
    until: Callable[[], bool] | None = None
    may_expire: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        self.baton.acquire()


class Schedule:
    """Runs its tasks one at a time; at every lock a draw from `seed` says which goes on."""

    MAX_SWITCHES = 50_000

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tasks: list[Task] = []
        self.failure: BaseException | None = None
        self.switches = 0
        self.now = 0.0  # seconds; a wait that expires moves it on
        self.running: Task | None = None
        self._finished = threading.Event()

    def spawn(self, name: str, body: Callable[[], None]) -> None:
        self.tasks.append(Task(name, body))

    def run(self) -> None:
        """Run all tasks to their end; raises what the first of them raised, or `Deadlock`."""
        threads = [
            threading.Thread(target=self._main, args=(task,), daemon=True) for task in self.tasks
        ]
        for thread in threads:
            thread.start()
        self._pass_on()
        if not self._finished.wait(60):
            self._fail(Deadlock(f"a task never came back to the scheduler: {self._who()}"))
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive(), f"{thread} did not end"
        self.running = None
        if self.failure is not None:
            raise self.failure

    def point(self) -> None:
        """A place where another task may go first."""
        self.wait(None)

    def wait(self, until: Callable[[], bool] | None, *, may_expire: bool = False) -> bool:
        """Let others run until `until()` holds and it is this task's turn; False if the wait expired instead."""
        task = self.running
        if task is None:  # before or after the schedule there is one thread only
            return True
        task.until, task.may_expire = until, may_expire
        self._pass_on()
        if self.failure is None:
            task.baton.acquire()
        if self.failure is not None:
            raise Abandoned
        self.running = task
        held = until is None or until()
        task.until, task.may_expire = None, False
        return held

    def _main(self, task: Task) -> None:
        task.baton.acquire()
        try:
            if self.failure is None:
                self.running = task
                task.body()
        except Abandoned:
            pass
        except BaseException as error:
            self._fail(error)
        finally:
            task.done = True
            self._pass_on()

    def _pass_on(self) -> None:
        """Hand the baton to a task drawn from those that can run."""
        if self.failure is not None:
            return
        waiting = [task for task in self.tasks if not task.done]
        if not waiting:
            self._finished.set()
            return
        self.switches += 1
        ready = [task for task in waiting if task.until is None or task.until()]
        expiring = [task for task in waiting if task.may_expire and task not in ready]
        if expiring and (not ready or self.random.random() < 0.05):
            ready = expiring
        if not ready:
            self._fail(Deadlock(f"nobody can run: {self._who()}"))
        elif self.switches > self.MAX_SWITCHES:
            self._fail(Deadlock(f"they run without end: {self._who()}"))
        else:
            self.random.choice(ready).baton.release()

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            self.failure = error
        self._finished.set()
        for task in self.tasks:
            with suppress(RuntimeError):  # it holds its baton already
                task.baton.release()

    def _who(self) -> str:
        return ", ".join(f"{t.name} {'ended' if t.done else 'waits'}" for t in self.tasks)


class ScheduledLock:
    """A lock; taking it is a point where another task may go first. Who of those that wait gets it is drawn."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.held = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        assert blocking
        if not self.schedule.wait(lambda: not self.held, may_expire=timeout >= 0):
            self.schedule.now += timeout
            return False
        self.held = True
        return True

    def release(self) -> None:
        assert self.held or self.schedule.failure, "released twice"
        self.held = False


class ScheduledRLock:
    """The same, re-entrant."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.owner: Task | None = None
        self.depth = 0

    def acquire(self) -> bool:
        me = self.schedule.running
        if self.owner is not me:
            self.schedule.wait(lambda: self.owner is None)
            self.owner = me
        self.depth += 1
        return True

    def release(self) -> None:
        if self.schedule.failure is None:
            assert self.owner is self.schedule.running, "released by a thread that does not own it"
            self.depth -= 1
            if not self.depth:
                self.owner = None

    def _is_owned(self) -> bool:
        return self.owner is self.schedule.running

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def locks_of(schedule: Schedule) -> Iterator[None]:
    """The window takes its locks and its time from `schedule`."""
    fake = SimpleNamespace(
        RLock=lambda: ScheduledRLock(schedule), Lock=lambda: ScheduledLock(schedule)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_module, "threading", fake)
        patch.setattr(waiting_module, "threading", fake)
        patch.setattr(window_module, "perf_counter", lambda: schedule.now)
        yield


# ---- the model: what must hold, whoever goes first ----


class Batch(Ticket):
    """A ticket as the model sees it: its epoch, its place, and how often each unit was claimed."""

    __slots__ = ("completed", "epoch", "finishers", "place", "times_claimed")

    def __init__(self, epoch: int, place: int, units: int) -> None:
        super().__init__(units)
        self.epoch = epoch
        self.place = place
        self.times_claimed = [0] * units
        self.finishers = 0
        self.completed = False

    def __repr__(self) -> str:
        return f"Batch(epoch={self.epoch}, place={self.place}, units={self.units})"


@dataclass(frozen=True)
class Plan:
    """One case: the shape of the window, who works on it, and what goes wrong."""

    depth: int
    workers: int
    in_order: bool
    collected: bool
    epochs: list[list[int]]  # units of each batch; 0 = failed before it could be read
    unit_seconds: float
    timeouts: bool = False
    leave_after: int | None = None  # batches of an epoch after which the loop begins the next one
    close_after: int | None = None  # claims after which a stranger closes the window
    break_after: int | None = None  # claims after which a worker breaks down


@dataclass
class Model:
    """Drives a window by `plan` under `schedule` and asserts its contract at every step."""

    plan: Plan
    schedule: Schedule
    window_class: type[Window[Batch]] = Window
    issued: list[Batch] = field(default_factory=list)
    taken: list[Batch] = field(default_factory=list)
    epoch: int = -1
    claims: int = 0
    ended: str = ""

    def run(self) -> None:
        plan = self.plan
        with locks_of(self.schedule):
            self.window = self.window_class(
                plan.depth, in_order=plan.in_order, collected=plan.collected
            )
            self.schedule.spawn("loop", self.loop)
            for number in range(plan.workers):
                self.schedule.spawn(f"worker-{number}", self.worker)
            if plan.collected:
                self.schedule.spawn("collector", self.collector)
            if plan.close_after is not None:
                self.schedule.spawn("stranger", self.stranger)
            self.schedule.run()
        counts = self.window.counts()
        assert 0 <= counts.occupancy <= 1
        assert self.window.closed
        if not self.ended:
            self.check_complete()

    def flight(self) -> list[Batch]:
        return [b for b in self.issued if b.epoch == self.epoch and b not in self.taken]

    # -- the loop --

    def loop(self) -> None:
        try:
            for epoch, units in enumerate(self.plan.epochs):
                self.window.discard()
                self.epoch = epoch
                if not self.one_epoch([Batch(epoch, place, n) for place, n in enumerate(units)]):
                    break
        finally:
            self.window.close()

    def one_epoch(self, batches: list[Batch]) -> bool:
        todo = iter(batches)
        count = 0
        while count != self.plan.leave_after:
            self.fill(todo)
            batch = self.take()
            if batch is None:
                break
            count += 1
            self.check_taken(batch, count)
        return not self.ended

    def fill(self, todo: Iterator[Batch]) -> None:
        while self.window.has_room():
            batch = next(todo, None)
            if batch is None:
                return
            self.issued.append(batch)
            batch.completed = not batch.units  # by `issue` itself
            self.window.issue(batch)
            assert self.width() <= self.plan.depth, f"{self.width()} places in flight"
        assert self.width() == self.plan.depth, "room was refused in a window that is not full"

    def width(self) -> int:
        """Places from the oldest not yet taken to the newest issued."""
        return self.issued[-1].place + 1 - self.flight()[0].place

    def take(self) -> Batch | None:
        while True:
            try:
                batch = self.window.take(5.0 if self.plan.timeouts else None)
            except LoaderTimeoutError:
                assert self.plan.timeouts
            except LoaderClosedError:
                assert self.plan.close_after is not None, "closed by nobody"
                self.ended = "closed"
                return None
            except WorkerCrashError as error:
                assert self.plan.break_after is not None, "broken down by nobody"
                assert isinstance(error.__cause__, ZeroDivisionError)
                self.ended = "broken down"
                return None
            else:
                if batch is None:
                    assert not self.flight(), "the end was told with batches in flight"
                return batch

    def check_taken(self, batch: Batch, count: int) -> None:
        assert batch.epoch == self.epoch, "a batch of an epoch that was left"
        assert batch not in self.taken, "taken twice"
        assert batch.completed, "taken before it was complete"
        assert batch.times_claimed == [1] * batch.units, "units lost or doubled"
        assert batch.finishers == bool(batch.units), "not exactly one worker finished it"
        if self.plan.in_order:
            assert batch.place == count - 1, "out of order"
        self.taken.append(batch)

    # -- the others --

    def worker(self) -> None:
        while (claim := self.window.claim()) is not None:
            self.check_claim(claim)
            if self.claims == self.plan.break_after:
                self.window.close(ZeroDivisionError("of the test"))
                return
            self.schedule.point()
            units = claim.stop - claim.start
            if self.window.deliver(claim.ticket, units, units * self.plan.unit_seconds):
                assert claim.ticket.epoch == self.epoch, "asked to finish what nobody waits for"
                claim.ticket.finishers += 1
                self.schedule.point()
                claim.ticket.completed = True
                self.window.complete(claim.ticket)

    def check_claim(self, claim: Claim[Batch]) -> None:
        """Nothing can run between the claim and this check, so what it sees is what the claim left."""
        self.claims += 1
        batch = claim.ticket
        assert 0 <= claim.start < claim.stop <= batch.units
        for unit in range(claim.start, claim.stop):
            batch.times_claimed[unit] += 1
        assert max(batch.times_claimed) == 1, "a unit was claimed twice"
        assert batch.epoch == self.epoch, "claimed from an epoch that was left"
        issued = [b for b in self.issued if b.epoch == self.epoch]
        order = [n for b in issued for n in b.times_claimed[: b.units]]
        assert order == sorted(order, reverse=True), "claims left a hole in the order"
        run = claim.stop - claim.start
        assert run == 1 or run * self.plan.unit_seconds <= RUN_SECONDS * 1.001, "too long a run"

    def collector(self) -> None:
        newest = (-1, -1)
        while (batch := self.window.collect()) is not None:
            assert batch.completed, "collected before it was complete"
            place = (batch.epoch, batch.place)
            assert not self.plan.in_order or place > newest, "collected out of order"
            newest = place
            self.schedule.point()
            self.window.publish(batch)

    def stranger(self) -> None:
        self.schedule.wait(
            lambda: self.claims >= (self.plan.close_after or 0) or self.window.closed
        )
        self.window.close()

    # -- the end --

    def check_complete(self) -> None:
        """Nothing went wrong, so every batch of every epoch that was not left is there, once."""
        for epoch, units in enumerate(self.plan.epochs):
            places = [b.place for b in self.taken if b.epoch == epoch]
            wanted = len(units) if self.plan.leave_after is None else self.plan.leave_after
            assert len(places) == len(set(places)) == min(wanted, len(units))


epochs = st.lists(st.lists(st.integers(0, 5), max_size=7), min_size=1, max_size=3)
plans = st.builds(
    Plan,
    depth=st.integers(1, 5),
    workers=st.integers(1, 4),
    in_order=st.booleans(),
    collected=st.booleans(),
    epochs=epochs,
    unit_seconds=st.sampled_from([1e-6, RUN_SECONDS / 3, 1.0]),
    timeouts=st.booleans(),
)
seeds = st.integers(0, 2**32 - 1)
MODEL_SETTINGS = settings(
    max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck)
)


def run_interleavings(plan: Plan, seed: int, window_class: type[Window[Batch]] = Window) -> None:
    for offset in range(INTERLEAVINGS_PER_EXAMPLE):
        Model(plan, Schedule(seed + offset), window_class).run()


@pytest.mark.parametrize("fault", ["nothing", "leave_after", "close_after", "break_after"])
@MODEL_SETTINGS
@given(plans, seeds, st.integers(0, 12))
def test_every_batch_once_in_order_within_the_bound_whatever_goes_wrong(
    fault: str, plan: Plan, seed: int, moment: int
) -> None:
    """An epoch that is left leaves nothing in the next; closing wakes every waiter; the loop learns of a breakdown."""
    if fault != "nothing":
        moment = {"leave_after": moment % 5, "break_after": moment or 1}.get(fault, moment)
        plan = replace(plan, **{fault: moment})
    run_interleavings(plan, seed)


# ---- the checker can fail ----


class NoBound(Window[Batch]):
    def has_room(self) -> bool:
        return not self.closed


class OutOfOrder(Window[Batch]):
    def __init__(self, depth: int, *, in_order: bool = True, collected: bool = False) -> None:
        super().__init__(depth, in_order=False, collected=collected)


class TwoFinishers(Window[Batch]):
    def deliver(self, ticket: Batch, units: int, seconds: float) -> bool:
        super().deliver(ticket, units, seconds)
        return True


@pytest.mark.parametrize("broken", [NoBound, OutOfOrder, TwoFinishers])
def test_the_model_notices_a_broken_window(broken: type[Window[Batch]]) -> None:
    plan = Plan(
        depth=3,
        workers=3,
        in_order=True,
        collected=True,
        epochs=[[2, 3, 1, 2, 4, 1]] * 2,
        unit_seconds=1.0,
        leave_after=4,
    )
    run_interleavings(plan, 0)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        run_interleavings(plan, 0, broken)


# ---- a garbage collection that closes the window from inside ----


class Interruption:
    """A trace function that calls `act` once, before the `line`-th line of the window's code and of its locks.

    A garbage collection runs finalizers in whatever thread allocates, between any two lines; so does a signal handler
    in the main thread. This forces that moment instead of waiting for it.
    """

    FILES = tuple(
        module.__file__
        for module in (
            window_module,
            waiting_module,
            threading,
            sys.modules["fastload.telemetry.recorder"],
        )
    )

    def __init__(self, line: int, act: Callable[[], None]) -> None:
        self.left = line
        self.act = act
        self.done = False

    def __call__(self, frame: FrameType, event: str, _: object) -> Interruption | None:
        if frame.f_code.co_filename not in self.FILES:
            return None
        if event == "line" and not self.done:
            if not self.left:
                self.done = True
                sys.settrace(None)
                self.act()
            self.left -= 1
        return self


STEPS: dict[str, Callable[[Window[Batch]], object]] = {
    "claim": lambda w: w.claim(),
    "take": lambda w: w.take(),
    "take with a timeout": lambda w: w.take(30.0),
    "collect": lambda w: w.collect(),
    "issue": lambda w: w.issue(Batch(0, 9, 3)),
    "discard": lambda w: w.discard(),
    "recount": lambda w: w.recount(),
    "counts": lambda w: w.counts(),
    "has_room": lambda w: w.has_room(),
    "close": lambda w: w.close(),
}


def prepared(step: str, ready: bool) -> Window[Batch]:
    """A window in which `step` finds what it waits for (`ready`), or has to wait."""
    collects = step == "collect"
    window: Window[Batch] = Window(3, collected=collects)
    if ready or step != "claim":
        window.issue(Batch(0, 0, 2))
    if ready and step != "claim":
        claims = [window.claim(), window.claim()]
        for claim in claims:
            assert claim is not None
            if window.deliver(claim.ticket, 1, 1.0):
                window.complete(claim.ticket)
    return window


def closed_at(step: str, ready: bool, line: int) -> bool:
    """Close the window from inside of `step`, before its `line`-th line; False if it has no such line."""
    window = prepared(step, ready)
    interruption = Interruption(line, window.close)
    outcome: list[object] = []

    def body() -> None:
        sys.settrace(interruption)
        try:
            outcome.append(STEPS[step](window))
        except LoaderClosedError as error:
            outcome.append(error)
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(1.0)
    struck = interruption.done
    if struck:
        thread.join(10)  # it may be slow only
    hung = thread.is_alive()
    window.close()  # no thread outlives the test; a step that waits for good is woken
    thread.join(10)
    if struck:
        assert not hung, f"{step}() sleeps in a window that was closed at its line event {line}"
        assert len(outcome) == 1, f"{step}() raised at its line event {line}"
    assert not thread.is_alive()
    return struck


@pytest.mark.parametrize("ready", [True, False], ids=["something to do", "nothing to do"])
@pytest.mark.parametrize("step", sorted(STEPS))
def test_closing_from_inside_any_line_wakes_the_thread_itself(step: str, ready: bool) -> None:
    line = 0
    while closed_at(step, ready, line):
        line += 1
    assert line > 1, "nothing was interrupted"
