"""Promises:
- An error of a worker process has its type, arguments, attributes, notes, cause, context and members. Its traceback is
  a note.
- What cannot be pickled of it is left out, and a note names it. An error whose class cannot be rebuilt is of the
  nearest base that can be, or a RuntimeError, and names the class.
- `on_error` runs in the loop's process. It gets the error, and may return a sample, skip it, or raise.
- A timeout names each worker process, with its stack and the indices that it reads.
- A worker process that reads a batch and uses no CPU time is named once in the log, with its stack.
- A worker process that hangs is killed by `close()`, with a warning that shows its stack. If it hangs after its last
  batch, that is one line. Time in which it waited for a core does not count.
- A `worker_init_fn` that does not end is an error after `timeout`, counted from the start. Without it, it is a warning.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload import SKIP
from fastload.engine import team
from fastload.engine import threads as engine_threads
from fastload.errors import DecodeError, LoaderTimeoutError, WorkerDiedError
from fastload.processes import wire
from fastload.processes.child import Child
from fastload.processes.packed_errors import dumps
from tests.fakes import Numbers
from tests.processes.holding import (
    Gate,
    Held,
    Pipe,
    Says,
    Watch,
    outcomes,
    pass_gate,
    processes,
    say,
)
from tests.promises.reading import in_batches

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Bad(Numbers):
    """Its own indices, but reading index 5, 13, 21 and so on raises what a function makes."""

    def __init__(self, makes: Sequence[Callable[[], BaseException]]) -> None:
        super().__init__(8 * len(makes) + 4)
        self.makes = makes

    def __getitem__(self, index: int) -> Any:
        if index % 8 == 5:
            raise_it(self.makes[index // 8]())
        return torch.full((3,), index)


def raise_it(error: BaseException) -> None:
    raise error


class TwoArguments(Exception):
    """Its `__init__` takes other arguments than it stores."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class KeywordOnly(ValueError):
    def __init__(self, *, code: int) -> None:
        super().__init__()
        self.code = code

    def __str__(self) -> str:
        return f"code {self.code}"


def with_notes_and_cause() -> BaseException:
    error = KeyError("a", 3)
    error.add_note("first note")
    error.__cause__ = with_attributes()
    error.__cause__.__cause__ = TwoArguments("b.jpg", "torn")
    return error


def with_attributes() -> BaseException:
    error = OSError(28, "no room", "file.txt")
    error.shelf = [1, 2]  # type: ignore[attr-defined]
    return error


def out_of_another(cause: BaseException | None) -> Any:
    """Return an error that was raised while another was handled, which was raised while a third was."""
    try:
        try:
            {}["a"]
        except KeyError:
            int("b")
    except ValueError:
        try:
            raise TwoArguments("a.jpg", "torn") from cause
        except TwoArguments as error:
            return error


class Exits(Exception):
    """It exits as it is pickled, if told so, or rebuilt."""

    def __init__(self, *args: Any, told: bool = False) -> None:
        super().__init__(*args)
        self.told = told

    def __reduce__(self) -> Any:
        return sys.exit(3) if self.told else (sys.exit, (4,))


def loader_of(makes: Sequence[Callable[[], BaseException]], **options: Any) -> Any:
    return processes(Bad(makes), **options)


def the_errors(*makes: Callable[[], BaseException]) -> list[Any]:
    """Return the errors in the places of batches 1, 3, 5 and so on. All other batches must be right."""
    errors = []
    with loader_of(makes) as loader:
        iterator = iter(loader)
        for first in range(0, 8 * len(makes), 8):
            assert next(iterator)[:, 0].tolist() == [*range(first, first + 4)]
            with pytest.raises(BaseException) as caught:  # noqa: PT011
                next(iterator)
            errors.append(caught.value)
        assert [len(batch) for batch in iterator] == [4]
    return errors


MAKES: list[Callable[[], BaseException]] = [
    lambda: ValueError("a", 2, ["c"]),
    with_attributes,
    lambda: TwoArguments("a.jpg", "torn"),
    lambda: KeywordOnly(code=7),
    lambda: DecodeError("a/1.jpg", "the file is empty"),
    lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    lambda: FileNotFoundError(2, "no such file", "a.jpg"),
    with_notes_and_cause,
    lambda: out_of_another(None),
    lambda: out_of_another(OSError("cause")),
    lambda: ExceptionGroup("several", [with_notes_and_cause(), out_of_another(OSError())]),
]


def test_an_error_is_what_it_was(subtests: pytest.Subtests) -> None:
    for number, (error, make) in enumerate(zip(the_errors(*MAKES), MAKES, strict=True)):
        expected: Any = make()
        with subtests.test(repr(expected)):
            assert type(error) is type(expected)
            assert repr(error.args) == repr(expected.args)
            assert str(error) == str(expected)
            theirs = {name: value for name, value in vars(error).items() if name != "__notes__"}
            assert theirs == {
                name: value for name, value in vars(expected).items() if name != "__notes__"
            }
            for name in ("errno", "filename", "reason", "object"):
                assert getattr(error, name, None) == getattr(expected, name, None)
            notes = "\n".join(error.__notes__)
            assert error.__notes__[: len(getattr(expected, "__notes__", []))] == getattr(
                expected, "__notes__", []
            )
            place = (f"index {8 * number + 5}", f"batch {2 * number + 1} of epoch 0")
            for words in ("worker ", "in __getitem__", "in raise_it", *place):
                assert words in notes
            check_chain(error, expected)


def check_chain(error: Any, expected: Any) -> None:
    """Check what an error came of: causes, contexts, members of groups."""
    assert error.__suppress_context__ == expected.__suppress_context__
    for name in ("__cause__", "__context__"):
        its, theirs = getattr(error, name), getattr(expected, name)
        assert type(its) is type(theirs)
        if its is not None:
            assert str(its) == str(theirs)
            check_chain(its, theirs)
    its, theirs = (getattr(one, "exceptions", ()) for one in (error, expected))
    assert [*map(repr, its)] == [*map(repr, theirs)]
    for one, other in zip(its, theirs, strict=True):
        check_chain(one, other)


def test_a_class_that_cannot_be_rebuilt_is_named_by_a_runtime_error() -> None:
    class Local(Exception):
        """A local class, which no other process can import."""

    error, exits, told = the_errors(
        lambda: Local("torn page"),
        lambda: Exits("torn page"),
        lambda: Exits("torn page", told=True),
    )
    assert type(error) is RuntimeError
    assert "Local" in str(error)
    assert "torn page" in str(error)
    assert "in raise_it" in "\n".join(error.__notes__)
    for its, was_told in ((exits, False), (told, True)):
        assert (type(its), its.args, its.told) == (Exits, ("torn page",), was_told)


class Response(OSError):
    """As `HTTPError` of requests: it holds a connection."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args)
        vars(self).update(fields)


class Coded(ExceptionGroup[Exception]):
    """A group with a field of its own, and a lock."""

    code: int

    def __new__(cls, message: str, code: int, *members: Exception) -> Coded:
        group = super().__new__(cls, message, members)
        group.code, group.lock = code, threading.Lock()  # type: ignore[attr-defined]
        return group

    def __init__(self, *_: Any) -> None:
        super().__init__()


class Inside(Response):
    """It shows what cannot be pickled."""

    def __str__(self) -> str:
        return f"status {self.lock!r}"  # type: ignore[attr-defined]


def local(kind: type[BaseException], *args: Any) -> BaseException:
    return type("Local", (kind,), {})(*args)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Frozen(Exception):
    """It refuses that anything is set."""

    path: str


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("error", "kind", "fields", "said"),
    [
        (Response(5, "torn", lock=LOCK, url="a"), Response, {"url": "a"}, "[Errno 5] torn"),
        (ValueError(LOCK), ValueError, {}, repr(LOCK)),
        (ValueError("torn", LOCK), ValueError, {}, repr(("torn", LOCK))),
        (Inside(lock=LOCK, url="a"), Response, {"url": "a"}, f"Inside: status {LOCK!r} (the class"),
        (Frozen("a.jpg"), Frozen, {"path": "a.jpg"}, "a.jpg"),
        (local(Response, 5, "torn"), Response, {}, "[Errno 5] torn"),
        (local(KeyError, "torn"), KeyError, {}, "'torn'"),
        (local(BaseException, "torn"), RuntimeError, {}, "Local: torn (the class"),
        (local(ExceptionGroup, "all", [OSError("torn")]), ExceptionGroup, {}, "all (1 sub"),
        (Coded("all", 7, OSError("torn"), local(OSError, "b")), Coded, {"code": 7}, "all (2 sub"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_error_of_which_a_part_cannot_be_pickled_keeps_the_rest(
    error: Any, kind: type, fields: dict[str, Any], said: str
) -> None:
    again: Any = pickle.loads(dumps(error, "worker 0"))
    assert type(again) is kind
    assert said in str(again)
    notes = "\n".join(vars(again).pop("__notes__", []))
    assert vars(again) == fields
    assert ("pickled: lock" in notes) == ("lock" in vars(error))
    assert getattr(again, "errno", None) == getattr(error, "errno", None)
    assert type(error).__name__ in repr(again) + notes
    members = getattr(again, "exceptions", ())
    assert [*map(str, members)] == [*map(str, getattr(error, "exceptions", ()))]
    assert {type(member) for member in members} <= {OSError}


def shared_group() -> BaseException:
    """Return a group that is the cause of another one, and a member of its member."""
    inner = ExceptionGroup("inner", [KeyError("a")])
    outer = ExceptionGroup("outer", [ExceptionGroup("middle", [inner, OSError(5, "torn")])])
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    "error", [shared_group(), BaseExceptionGroup("stops", [SystemExit(3), KeyError("a")])], ids=str
)
def test_the_members_of_groups_are_what_they_were(error: BaseException) -> None:
    again = pickle.loads(dumps(error, "worker 0"))
    assert type(again) is type(error)
    check_chain(again, error)


class Traced(Exception):
    """It comes with a traceback, as all errors do once tblib is installed."""

    def __reduce__(self) -> Any:
        return traced, ()


def traced() -> Traced:
    try:
        raise Traced
    except Traced as error:
        return error


def test_an_error_of_a_worker_keeps_no_frame_of_the_loop_s_process() -> None:
    assert traced().__traceback__ is not None
    assert pickle.loads(dumps(Traced(), "worker 0")).__traceback__ is None


# ---- on_error ----


def test_on_error_runs_in_the_process_of_the_loop() -> None:
    """It gives a sample, skips, raises an error of its own, and raises the one that it got."""
    calls: dict[int, Any] = {}

    def decide(index: Any, error: BaseException) -> Any:
        calls[index] = os.getpid(), error
        error.add_note("seen by on_error")
        if index == 21:
            raise ZeroDivisionError("out of on_error")
        if index == 29:
            raise error
        return torch.full((3,), -index) if index == 5 else SKIP

    with loader_of([lambda: TwoArguments("a.jpg", "torn")] * 4, on_error=decide) as loader:
        got = outcomes(iter(loader))
    raised = {21: got.pop(5), 29: got.pop(6)}
    assert [batch[:, 0].tolist() for batch in got] == [
        *([0, 1, 2, 3], [4, -5, 6, 7], [8, 9, 10, 11], [12, 14, 15]),
        *([16, 17, 18, 19], [24, 25, 26, 27], [32, 33, 34, 35]),
    ]
    assert isinstance(raised[21], ZeroDivisionError)
    assert raised[21].__context__ is calls[21][1], "the very error that on_error got"
    assert raised[29] is calls[29][1]
    for index, error in raised.items():
        assert f"index {index}" in "\n".join(error.__notes__)
    assert {index: pid for index, (pid, _) in calls.items()} == dict.fromkeys(
        (5, 13, 21, 29), os.getpid()
    )
    for _, error in calls.values():
        assert (type(error), error.path, error.reason) == (TwoArguments, "a.jpg", "torn")
        assert "in raise_it" in "\n".join(error.__notes__)
        assert "seen by on_error" in error.__notes__


def test_on_error_that_returns_what_cannot_be_pickled_is_an_error_in_its_place() -> None:
    def decide(index: Any, error: BaseException) -> Any:
        return threading.Lock()

    with loader_of([lambda: OSError("torn")], on_error=decide, collate_fn=list) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(TypeError, match="pickle"):
            next(iterator)
        assert len(list(iterator)) == 1


# ---- workers that hang ----


def test_a_timeout_names_what_each_worker_does(pipe: Pipe, gate: Gate) -> None:
    dataset = Held(40, (1, 6), pipe.path, gate.path)
    with processes(dataset, timeout=1) as loader:
        iterator = iter(loader)
        said = dict(reversed(pipe.hear()) for _ in range(2))
        with pytest.raises(LoaderTimeoutError) as caught:
            next(iterator)
        text = str(caught.value)
        for index, indices in (("1", "[0, 1, 2, 3]"), ("6", "[4, 5, 6, 7]")):
            (line,) = [line for line in text.splitlines() if f"process {said[index]}" in line]
            assert indices in line
        assert text.count("in pass_gate") == 2
        gate.open()
        got = []
        while len(got) < 10:
            try:
                got.append(next(iterator).tolist())
            except LoaderTimeoutError:
                continue  # a busy machine
        assert got == in_batches(range(40), 4), "nothing is lost"


@pytest.mark.parametrize("timeout", [1, 0])
def test_a_worker_init_fn_that_does_not_end_is_named_with_its_stack(
    timeout: float, pipe: Pipe, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `timeout`, counted from the start, as an error. Without it as a warning, and `iter()` waits on."""
    if not timeout:
        monkeypatch.setattr(Child, "IDLE_SECONDS", 0.2)
        monkeypatch.setattr(Child, "stack", opening(gate, Child.stack))
    init = functools.partial(wait_in_init, pipe.path, gate.path)
    loader = processes(Numbers(4), workers=1, worker_init_fn=init, timeout=timeout)
    if timeout:
        with pytest.raises(LoaderTimeoutError, match=r"(?s)worker 0.*timeout=1 s.*in pass_gate"):
            iter(loader)
    else:
        with pytest.warns(
            RuntimeWarning, match=r"(?s)worker 0 used no CPU.*pass timeout=.*in pass_gate"
        ):
            assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    loader.close()


def wait_in_init(pipe: Path, gate: Path, worker: int) -> None:
    say(pipe, worker)
    pass_gate(gate)


def opening(gate: Gate, stack: Callable[..., str]) -> Callable[..., str]:
    """Return `stack`, which then opens the gate: what waits there has been seen."""

    def seen(child: Any) -> str:
        text = stack(child)
        gate.open()
        return text

    return seen


class Lines(Numbers):
    """Samples that a file of the loop's process holds."""

    def __init__(self, file: Any) -> None:
        super().__init__(2)
        self.file = file

    def __getitem__(self, index: int) -> int:
        return len(self.file.read(1))


class Slow(io.RawIOBase):
    """One byte after another. The first comes once the gate is open."""

    def __init__(self, reads: threading.Event, gate: threading.Event) -> None:
        self.reads, self.gate = reads, gate

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.reads.set()
        self.gate.wait()
        buffer[0] = 7
        return 1


def test_a_worker_that_waits_for_a_lock_of_a_thread_is_named_with_its_stack(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread of the loop's process held it at the fork. Here it is the lock of a BufferedReader."""
    reads, gate = threading.Event(), threading.Event()
    monkeypatch.setattr(Child, "IDLE_SECONDS", 0.2)
    stack = Child.stack
    monkeypatch.setattr(Child, "stack", lambda child: (stack(child), child.kill())[0])
    file = io.BufferedReader(Slow(reads, gate))  # type: ignore[arg-type]
    thread = threading.Thread(target=file.read, args=(1,))
    thread.start()
    reads.wait()
    loader = processes(Lines(file), 1, workers=1, context="fork")
    with pytest.raises(WorkerDiedError):
        next(iter(loader))
    gate.set()
    thread.join()
    (said,) = [one.getMessage() for one in caplog.records]
    assert "reading sample indices [0] of batch 0" in said
    assert "in __getitem__" in said
    assert "forkserver" in said


def test_a_worker_that_hangs_is_killed_by_close(pipe: Pipe, gate: Gate) -> None:
    dataset = Held(40, (1,), pipe.path, gate.path)
    loader = processes(dataset)
    iterator = iter(loader)
    (pid,) = pipe.numbers()
    with closing(Watch(pid)) as watch:
        started = time.monotonic()
        with pytest.warns(RuntimeWarning, match=f"process {pid}") as warned:
            loader.close()
        took_s = time.monotonic() - started
        assert engine_threads.JOIN_SECONDS <= took_s < engine_threads.JOIN_SECONDS + 5
        text = str(warned[0].message)
        assert "in pass_gate" in text
        assert watch.alive(0) == [], "close() returned before it had ended"
    del iterator


@pytest.mark.parametrize("delayed", [False, True])
def test_a_worker_that_does_not_end_after_its_last_batch_is_one_line(
    delayed: bool, pipe: Pipe, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time in which it waited for a core does not count."""
    loader = processes(Says(8, pipe.path), workers=1)
    iterator = iter(loader)
    (pid,) = pipe.numbers()
    assert [next(iterator).tolist() for _ in range(2)] == in_batches(range(8), 4)
    os.kill(pid, signal.SIGSTOP)  # as a process that gets no core
    monkeypatch.setattr(team, "JOIN_SECONDS", 0.5)
    seen = count()

    def delayed_s(pid: int) -> float:
        if not delayed or threading.current_thread() is not threading.main_thread():
            return 0.0
        if (calls := next(seen)) == 1:  # the loop looks again, after its time is over
            os.kill(pid, signal.SIGCONT)
        return 100.0 * calls

    monkeypatch.setattr(wire, "delayed_s", delayed_s)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert next(iterator, None) is None
    if delayed:
        assert caught == []
    else:
        (said,) = [str(one.message) for one in caught]
        assert f"worker process {pid}" in said
        assert "No batch is lost" in said
        assert "\n" not in said
