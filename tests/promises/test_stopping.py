"""Promises:
- Every way out ends the threads within 0.5 s plus the call in progress: close, with, break, exception, Ctrl-C,
  SIGTERM, garbage collection, exit.
- Ctrl-C at any instruction of `iter()`, `next()`, `close()` or the next epoch leaves no thread.
- The one exception for Ctrl-C is the finalizer of a forgotten iterator, in which Python swallows Ctrl-C. Threads can
  then stay idle until `close()` or the end of the process.
- No thread and no descriptor is left, also after 200 abandoned iterators. Every test of the suite checks this. See
  also `tests/conftest.py`.
- A call that does not return is named, and blocks neither `close()` nor the end of the process.
- A timeout shows the workers' stacks and loses nothing.
- Ctrl-C in `next()` closes the iterator, and `state_dict()` says what the loop had. Random functions are those of
  before, and no random stream stays open. See also `tests/promises/test_resume.py`.
"""

from __future__ import annotations

import dis
import functools
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, ParamSpec
from unittest import mock

import pytest
from torch.utils.data import Sampler

import fastload
from fastload import DataLoader
from fastload.engine.iterator import LoaderIterator
from fastload.errors import LoaderClosedError, LoaderTimeoutError
from fastload.random import python_random
from fastload.random.streams import current_stream
from tests.children import Ended, run_script, start_script
from tests.fakes import fastload_threads
from tests.promises.reading import Reads, fill, wait_until

PROMPT_SECONDS = 0.5
CALL_SECONDS = 0.2
P = ParamSpec("P")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Let loaders have threads, also those of scripts that signal themselves by `os.getpid()`."""
    with mock.patch.dict("os.environ", FASTLOAD_WORKER_METHOD="thread"):
        yield


class Gated(Reads):
    """From index `first` on, a call waits until the gate is open; `waiting` counts the calls that came to it."""

    fastload_per_worker = ()

    def __init__(self, length: int = 1000, first: int = 8) -> None:
        super().__init__(length)
        self.first, self.gate, self.waiting = first, threading.Event(), threading.Semaphore(0)

    def __getitem__(self, index: int) -> int:
        if index >= self.first:
            self.waiting.release()
            self.wait_at_the_gate()
        return super().__getitem__(index)

    def wait_at_the_gate(self) -> None:
        assert self.gate.wait(30)


class LateError(AssertionError):
    """All is right except the seconds."""


def in_time(took_s: float, limit_s: float, case: str = "") -> None:
    if took_s >= limit_s:
        raise LateError(f"it took {took_s:.2f} s, at most {limit_s} s: {case}")


def three_attempts(test: Callable[P, None]) -> Callable[P, None]:
    """Let the seconds of a test have three attempts, as those of `ends`."""

    @functools.wraps(test)
    def attempts(*args: P.args, **kwargs: P.kwargs) -> None:
        for _ in range(2):
            try:
                return test(*args, **kwargs)
            except LateError:
                gc.collect()
        return test(*args, **kwargs)

    return attempts


def threads_end(call_seconds: float = 0.0) -> None:
    started = time.monotonic()
    wait_until(lambda: not fastload_threads(), "no thread is left")
    in_time(time.monotonic() - started, PROMPT_SECONDS + call_seconds)


# ---- inside a process that goes on ----


def begun(loader: DataLoader[Any], full: bool) -> Iterator[Any]:
    iterator = iter(loader)
    next(iterator)
    if full:
        fill(loader)
    return iterator


def by_close(loader: DataLoader[Any], full: bool) -> None:
    iterator = begun(loader, full)
    loader.close()
    assert not fastload_threads(), "close() returned before its threads had ended"
    with pytest.raises(LoaderClosedError):
        next(iterator)


def by_exception_in_with(loader: DataLoader[Any], full: bool) -> None:
    with pytest.raises(ZeroDivisionError), loader:
        iterator = begun(loader, full)
        assert fastload_threads()
        raise ZeroDivisionError
    assert not fastload_threads(), "the block was left before its threads had ended"
    del iterator


def by_break(loader: DataLoader[Any], full: bool) -> None:
    for _ in loader:
        if full:
            fill(loader)
        break


def by_exception(loader: DataLoader[Any], full: bool) -> None:
    """The exception, with its traceback and the frames in it, is still held when the threads must end."""
    with pytest.raises(ZeroDivisionError) as caught:
        for _ in loader:
            if full:
                fill(loader)
            raise ZeroDivisionError
    if not loader.persistent_workers:
        threads_end(CALL_SECONDS)
    assert caught.value.__traceback__ is not None


def by_not_beginning(loader: DataLoader[Any], full: bool) -> None:
    iterator = iter(loader)
    if full:
        fill(loader)
    del iterator


def by_end_of_epoch(loader: DataLoader[Any], full: bool) -> None:
    del full
    assert len(list(loader)) == len(loader)


WAYS = [by_close, by_exception_in_with, by_break, by_exception, by_not_beginning, by_end_of_epoch]


@pytest.mark.parametrize(
    ("way", "full", "persistent"),
    [
        (way, full, (full + place) % 2 == 0)
        for place, way in enumerate(WAYS)
        for full in (False, True)
    ],
)
@three_attempts
def test_no_thread_outlives_the_way_out(
    way: Callable[[DataLoader[Any], bool], None], full: bool, persistent: bool
) -> None:
    """Of the persistent workers too: they end with the loader, at the latest."""
    dataset = Reads(8 if way is by_end_of_epoch else 1000, seconds=0 if full else CALL_SECONDS / 2)
    loader = DataLoader(dataset, 2, num_workers=4, persistent_workers=persistent)
    way(loader, full)
    if persistent:
        del loader
        gc.collect()
    threads_end(CALL_SECONDS)
    calls = dataset.calls
    time.sleep(0.01)
    assert dataset.calls == calls, "a sample was read after the threads had ended"


def test_a_call_in_progress_is_waited_for_and_no_other_is_begun() -> None:
    dataset = Gated(first=0)
    loader = DataLoader(dataset, 8, num_workers=2)
    iterator = iter(loader)
    for _ in range(2):
        assert dataset.waiting.acquire(timeout=30)
    closer = threading.Thread(target=loader.close)
    closer.start()
    with pytest.raises(LoaderClosedError):
        next(iterator)
    assert closer.is_alive(), "close() did not wait"
    dataset.gate.set()
    closer.join(30)
    assert not fastload_threads()
    assert dataset.calls == 2


def test_200_abandoned_iterators_leave_no_thread() -> None:
    """Every second one in a cycle."""
    loader = DataLoader(Reads(), 4, num_workers=2)
    for number in range(200):
        holder: list[Any] = [iter(loader)]
        next(holder[0])
        if number % 2:
            holder.append(holder)
    del holder

    def collected() -> bool:
        gc.collect()  # which does nothing while another thread is in a collection
        return not fastload_threads()

    wait_until(collected, "no thread is left", 10)


class Copied(Reads):
    """The same, of which each worker has a copy."""


@pytest.mark.parametrize("kind", [Reads, Copied])
@three_attempts
def test_loader_and_dataset_are_collected_while_threads_wait(kind: type[Reads]) -> None:
    """The threads hold no strong reference to what the user has dropped."""
    dataset = kind()
    loader = DataLoader(dataset, 4, num_workers=4, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    if kind is Reads:
        fill(loader)
    gone = [weakref.ref(loader), weakref.ref(dataset), weakref.ref(iterator)]
    del loader, dataset, iterator
    gc.collect()
    started = time.monotonic()
    wait_until(lambda: not any(ref() for ref in gone), "all is collected")
    in_time(time.monotonic() - started, PROMPT_SECONDS)
    threads_end()


# ---- Ctrl-C strikes anywhere ----


class Strike:
    """A trace function that raises KeyboardInterrupt at the `point`-th moment a signal could.

    CPython runs signal handlers when a function of Python begins, after a call of C and when a loop
    turns. This forces each of these moments once, in fastload's code, instead of waiting for it; of
    the turns of one loop, the first eight (no loop over workers or batches turns more often here,
    while one over the bars of a histogram would be a thousand moments).
    """

    TURNS = 8
    FOLDER = os.path.dirname(fastload.__file__) + os.sep

    def __init__(self, point: int) -> None:
        self.left = point
        self.at = ""
        self.last: dict[FrameType, int] = {}  # the instruction that each frame ran last
        self.turns = Counter[tuple[FrameType, int]]()  # how often each came to a moment

    def __call__(self, frame: FrameType, event: str, _: object) -> Strike | None:
        if event == "call" and frame.f_back is not None:
            self.last.pop(frame.f_back, None)  # what it ran last was no call of C
        if not frame.f_code.co_filename.startswith(self.FOLDER):
            return None
        frame.f_trace = self  # Python 3.13 traces the opcodes of frames that are traced
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode" and not self.at:
            last = self.last.get(frame)
            self.last[frame] = frame.f_lasti
            if last is not None and can_be_interrupted(frame.f_code, last, frame.f_lasti):
                self.turns[frame, frame.f_lasti] += 1
                if self.turns[frame, frame.f_lasti] > self.TURNS:
                    if frame.f_code.co_name in ("<listcomp>", "<genexpr>"):  # which is one loop
                        frame.f_trace_opcodes = False
                    return self
                if not self.left:
                    name = os.path.basename(frame.f_code.co_filename)
                    self.at = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
                    raise KeyboardInterrupt
                self.left -= 1
        return self

    def during(self, act: Callable[[], object]) -> None:
        """Run `act()`, and swallow the interrupt; `at` says where it struck, or is empty at the end."""
        before = sys.gettrace()
        gc.disable()  # what is raised in the finalizer of an earlier iterator reaches nobody
        # Python 3.12 traces opcodes only if some frame has asked before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self)
        try:
            act()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
            gc.enable()
            self.last.clear()
            self.turns.clear()


@functools.cache
def can_be_interrupted(code: CodeType, last: int, now: int) -> bool:
    """Whether a signal can strike between two instructions, of which one ran right after the other."""
    instructions = {i.offset: i.opname for i in dis.get_instructions(code)}
    handlers = [
        [
            entry.target
            for entry in dis._parse_exception_table(code)
            if entry.start <= at < entry.end
        ]  # type: ignore[attr-defined]
        for at in (last, now)
    ]
    if instructions[last] in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
        # It is raised out of the call. Where the next instruction is under another handler, it
        # would be raised to the wrong one.
        return handlers[0] == handlers[1]
    return instructions[last] in ("RESUME", "JUMP_BACKWARD")


def strike_everywhere(
    prepare: Callable[[], Callable[[], object]], stop: Callable[[], object], every: int
) -> None:
    """Interrupt what `prepare()` returns at its first point, then `every` points later ..., until it ends.

    After each, and after `stop()`, no thread may be left, and nothing but the interrupt be raised.
    """
    bad: list[str] = []
    for point in range(0, 5000, every):
        strike = Strike(point)
        for act in (lambda st=strike: st.during(prepare()), stop):
            try:
                act()
            except Exception as error:
                bad.append(f"{strike.at}: {error!r:.150}")
        deadline = time.monotonic() + 10
        while fastload_threads():
            assert time.monotonic() < deadline, f"Ctrl-C at {strike.at}: {fastload_threads()} left"
            gc.collect()
        if not strike.at:
            assert point > 5, "hardly anything was interrupted"
            assert not bad, "Ctrl-C at\n" + "\n".join(bad)
            return
    pytest.fail("it does not end")


STEPS = [("next", False, True), *((step, True, False) for step in ("next", "next epoch", "close"))]
ITER = ("iter", False, False)


@pytest.mark.parametrize(
    ("step", "persistent", "full", "every"),
    [
        *((*step, 5) for step in STEPS),
        (*ITER, 97),
        *(
            pytest.param(*step, 1, marks=pytest.mark.slow)
            for step in (*STEPS, ITER, ("iter", True, False))
        ),
    ],
)
def test_ctrl_c_at_any_point_leaves_no_thread(
    step: str, persistent: bool, full: bool, every: int
) -> None:
    """Of the next epoch and of `close()`, once the loader is closed; else without it."""
    kept: list[Any] = []

    def prepare() -> Callable[[], object]:
        length = 8 if step == "next epoch" else 1000
        loader = DataLoader(Reads(length), 4, num_workers=2, persistent_workers=persistent, seed=1)
        if step == "next epoch":
            list(loader)
        if step in ("next epoch", "close"):
            kept.append(loader)
        if step in ("next", "close"):
            kept.append(iter(loader))
        if full:
            fill(loader)
        if step == "close":
            next(kept[-1])
            return loader.close
        if step == "next":
            return lambda: (next(kept[-1]), loader)
        return lambda: (kept.append(iter(loader)), next(kept[-1]))

    def stop() -> None:
        if kept and isinstance(kept[0], DataLoader):
            kept[0].close()
        kept.clear()

    strike_everywhere(prepare, stop, every)


class Lazily(Sampler[int]):
    """A generator, which is dead once an exception went through it."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        yield from range(16)


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["threads", "inline", "any order", "sampler of the user's"])
def test_after_ctrl_c_at_any_point_of_next_the_state_says_what_was_delivered(
    kind: str, every: int
) -> None:
    """The rest of the epoch, by a loader that resumes, has what `next()` did not give.

    No random stream stays open. (Ctrl-C may still strike in the
    caller's line, as `next()` has returned and before the batch has a name: not in a `for` loop.)
    """
    options: dict[str, Any] = {
        "threads": {"num_workers": 2},
        "inline": {},
        "any order": {"num_workers": 1, "in_order": False},
        "sampler of the user's": {"num_workers": 1, "sampler": Lazily()},
    }[kind]

    def make() -> DataLoader[Any]:
        return DataLoader(Reads(16), 4, seed=1, prefetch_batches=2, **options)

    whole = sorted(batch.tolist() for batch in make())
    wrong: list[str] = []
    for point in range(0, 5000, every):
        loader = make()
        iterator = iter(loader)
        got = [next(iterator).tolist()]
        strike = Strike(point)
        strike.during(lambda to=got, out=iterator: to.append(next(out).tolist()))
        state = loader.state_dict()
        loader.close()
        if current_stream() is not None or python_random._thread.own is not None:
            wrong.append(f"{strike.at}: a stream is open")
        had = len(got)
        with make() as resumed:
            resumed.load_state_dict(state)
            got += [batch.tolist() for batch in resumed]
        if sorted(got) != whole or state["batches"] + len(state["ahead"]) != had:
            wrong.append(f"{strike.at}: {state['batches']} of {got}")
        if not strike.at:
            break
    assert point > 5
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_ctrl_c_in_next_closes_the_iterator_and_the_next_epoch_is_whole(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    take, strikes = LoaderIterator._take, [False, True]

    def struck(iterator: LoaderIterator) -> Any:
        if strikes and strikes.pop(0):
            raise KeyboardInterrupt
        return take(iterator)

    monkeypatch.setattr(LoaderIterator, "_take", struck)
    loader = DataLoader(Reads(16), 4, num_workers=workers, persistent_workers=workers > 0)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    wait_until(lambda: not fastload_threads(), "the threads ended")
    with pytest.raises(LoaderClosedError, match="Begin another epoch"):
        next(iterator)
    assert [batch.tolist() for batch in loader] == [list(range(k, k + 4)) for k in range(0, 16, 4)]
    loader.close()


# ---- timeout= ----


@three_attempts
def test_a_timeout_says_what_each_worker_was_doing_and_loses_nothing() -> None:
    dataset = Gated(16)
    loader = DataLoader(dataset, 4, num_workers=2, timeout=0.2)
    iterator = iter(loader)
    assert dataset.waiting.acquire(timeout=30)
    wait_until(lambda: dataset.calls == 8, "two batches are read before they are asked for")
    batches = [next(iterator).tolist(), next(iterator).tolist()]
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(LoaderTimeoutError, match=r"timed out after 0\.2 seconds") as caught:
            next(iterator)
        assert time.monotonic() - started >= 0.2
        in_time(time.monotonic() - started, 0.2 + PROMPT_SECONDS)
        said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert isinstance(caught.value, RuntimeError)
        for worker in ("fastload-worker-0", "fastload-worker-1"):
            assert worker in said
        assert said.count("in wait_at_the_gate") == 2, said
    dataset.gate.set()
    batches += [batch.tolist() for batch in iterator]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]


# ---- child processes ----


def ends(script: str, code: int, call_seconds: float, traceback: str | None = None) -> Ended:
    """Run `script`, which must end promptly, with `code`, and a traceback of `traceback` if any.

    The code and the output must be right every time. The seconds have three attempts: on a machine
    that other work keeps busy a process may lose its core for longer than it is allowed to take,
    but not every time.
    """
    for _ in range(3):
        ended = run_script(script)
        assert ended.code == code, ended
        for sign in ("Fatal Python error", "Exception ignored", "terminate called", "Warning"):
            assert sign not in ended.err, ended
        last = ended.err.strip().rpartition("\n")[2]
        assert traceback in last if traceback else "Traceback" not in ended.err, ended
        if ended.seconds < PROMPT_SECONDS + call_seconds:
            return ended
    pytest.fail(f"not within {PROMPT_SECONDS + call_seconds} s, three times: {ended}")


BEGIN = """
loader = fastload.DataLoader(Reads(seconds={seconds}), 4, num_workers={workers}, persistent_workers={persistent})
iterator = iter(loader)
next(iterator)
"""
STATES = {
    "in a call": BEGIN.format(seconds=CALL_SECONDS, workers=4, persistent=False),
    "full queues": BEGIN.format(seconds=0, workers=4, persistent=False) + "fill(loader)\n",
    "persistent": BEGIN.format(seconds=0, workers=4, persistent=True) + "fill(loader)\n",
}
EXITS = {
    "end of the script": ("stamp()", 0, None),
    "exception": ("stamp(); raise ZeroDivisionError('x')", 1, "ZeroDivisionError"),
    "os._exit": ("stamp(); os._exit(7)", 7, None),
    "SIGINT": (
        "stamp(); os.kill(os.getpid(), 2); time.sleep(9)",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "SIGTERM": ("stamp(); os.kill(os.getpid(), 15); time.sleep(9)", -signal.SIGTERM, None),
    "SIGTERM that closes": (
        "signal.signal(15, lambda *_: (loader.close(), sys.exit(143)))\n"
        "stamp(); os.kill(os.getpid(), 15); time.sleep(9)",
        143,
        None,
    ),
}


CASES = [
    ("end of the script", "in a call"),
    ("end of the script", "persistent"),
    ("exception", "full queues"),
    ("SIGINT", "in a call"),
    ("SIGTERM that closes", "full queues"),
    ("SIGTERM", "full queues"),
    ("os._exit", "full queues"),
]


@pytest.mark.parametrize(("way", "state"), CASES)
def test_the_process_ends(way: str, state: str) -> None:
    script, code, traceback = EXITS[way]
    ends(STATES[state] + script, code, CALL_SECONDS, traceback)


SIGNAL_IN_NEXT = """
class Interrupts(Reads):
    def __getitem__(self, index):
        if index == 9:
            time.sleep(0.05)  # the loop has long had what came before, and waits
            stamp()
            os.kill(os.getpid(), signal.{name})
        if index > 7:
            time.sleep({seconds})
        return super().__getitem__(index)

loader = fastload.DataLoader(Interrupts(), 4, num_workers={workers})
"""


CAUGHT = """
seen = []
try:
    for batch in loader: seen.append(len(batch))
except KeyboardInterrupt:
    pass
wait_until(lambda: not threads(), 'the threads ended')
assert len(seen) == 2
"""
EXITING = """
signal.signal(signal.SIGTERM, lambda *_: ({close}, sys.exit(143)))
for batch in loader: pass
"""


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    ("name", "loop", "code", "traceback"),
    [
        ("SIGINT", "for batch in loader: pass", -signal.SIGINT, "KeyboardInterrupt"),
        ("SIGINT", CAUGHT, 0, None),
        ("SIGTERM", EXITING.format(close="None"), 143, None),
        ("SIGTERM", EXITING.format(close="loader.close()"), 143, None),
    ],
    ids=["not caught", "caught", "handler that exits", "handler that closes"],
)
def test_a_signal_while_the_loop_waits_for_a_batch(
    name: str, loop: str, code: int, traceback: str | None, workers: int
) -> None:
    script = SIGNAL_IN_NEXT.format(name=name, seconds=CALL_SECONDS, workers=workers)
    ends(script + loop, code, CALL_SECONDS, traceback)


PRODUCTS = """
class Products(Reads):
    fastload_per_worker = ()
    def __getitem__(self, index):
        super().__getitem__(index)
        for _ in range(25):  # each comes back from C++ and asks for the interpreter
            matrix @ matrix
        return index

matrix = torch.ones(500, 500)
dataset = Products()
loader = fastload.DataLoader(dataset, 4, num_workers=4)
iterator = iter(loader)
wait_until(lambda: dataset.calls >= 4, "the workers are in torch")
"""


def test_exit_while_the_workers_are_inside_torch() -> None:
    """A daemon thread that comes back from C++ while the interpreter is taken down aborts the process.

    So the threads have to be waited for at the end of the process, whether or not their iterator still lives.
    """
    ends(PRODUCTS + "stamp()", 0, 5.0)


def test_the_interpreter_waits_for_a_loop_in_an_ordinary_thread() -> None:
    """The main thread ends first; Python then waits for the others, and so they still get their batches."""
    script = """
def loop():
    threading.main_thread().join()
    stamp()
    print("samples", sum(len(batch) for batch in iterator))

loader = fastload.DataLoader(Reads(40, seconds=0.005), 4, num_workers=2)
iterator = iter(loader)
threading.Thread(target=loop).start()
"""
    assert "samples 40" in ends(script, 0, 0.1).out


# ---- calls that do not return ----

STUCK_LIMIT_SECONDS = 9.0  # five, which the docstring of `close()` says, and a busy machine
STUCK = """
loader = fastload.DataLoader(Stuck(), 4, num_workers=2, persistent_workers={persistent}, timeout={timeout})
iterator = iter(loader)
next(iterator), next(iterator)
loader.dataset.stuck.acquire()
"""
STUCK_ENDS = {
    "exit": "stamp()",
    "close, then exit": """
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    stamp()
    loader.close()
assert any("fastload-worker-" in str(w.message) for w in said), said
assert any("read_for_ever" in str(w.message) for w in said), said
stamp()
""",
    "forget, then exit": "del iterator; gc.collect(); stamp()",
    "timeout": """
try:
    next(iterator)
except fastload.errors.LoaderTimeoutError as error:
    said = str(error) + "".join(getattr(error, "__notes__", []))
    assert "read_for_ever" in said, said
    stamp()
""",
    "Ctrl-C": """
interrupter = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
interrupter.start()
started = time.monotonic()
try:
    next(iterator)
except KeyboardInterrupt:
    assert time.monotonic() - started < 3, "it waited for the calls, as close() does"
    stamp()
""",
}


@three_attempts
def test_a_call_that_does_not_return_is_named_and_keeps_nobody() -> None:
    """All at once, as each waits a few seconds for nothing."""
    cases = [(way, False) for way in STUCK_ENDS] + [("exit", True), ("close, then exit", True)]
    children = {}
    for way, persistent in cases:
        begin = STUCK.format(persistent=persistent, timeout=2 if way == "timeout" else 0)
        children[way, persistent] = start_script(begin + STUCK_ENDS[way])
    for (way, persistent), child in children.items():
        ended = child.wait()
        case = f"{way}, persistent={persistent}: {ended}"
        assert ended.code == 0, case
        assert "STAMP" in ended.out, case
        assert "Fatal Python error" not in ended.err, case
        if way == "close, then exit":
            in_time(ended.seconds, 4.0, f"waited again for what was given up: {case}")
        else:
            assert "fastload-worker-" in ended.err, f"no thread was named: {case}"
            in_time(ended.seconds, STUCK_LIMIT_SECONDS, case)
