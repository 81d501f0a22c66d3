"""Promises:
- SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 to a worker process do nothing, also as it is forked. A
  program that a sample starts has the default handlers.
- If all processes of a job get SIGTERM, the loop still gets batches and saves its checkpoint.
- Ctrl-C raises KeyboardInterrupt in the loop once, and leaves no process.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import closing
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from tests.children import Python
from tests.fakes import Numbers
from tests.processes.holding import Gate, Held, Pipe, Watch, contexts, processes
from tests.promises.reading import in_batches

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


@contexts
def test_signals_to_workers_do_nothing(context: str, pipe: Pipe, gate: Gate) -> None:
    """In a sample that holds, which a signal without a handler would end, and between samples."""
    dataset = Held(40, (0, 4, 20), pipe.path, gate.path)
    with processes(dataset, context=context) as loader:
        iterator = iter(loader)
        pids = pipe.numbers(2)
        assert len({*pids}) == 2
        with closing(Watch(*pids)) as watch:
            for _ in range(3):
                for number in SIGNALS:
                    for pid in pids:
                        os.kill(pid, number)
            assert watch.alive(0) == pids
            gate.open()
            got = []
            for _ in range(10):
                got.append(next(iterator).tolist())
                for number in SIGNALS:
                    for pid in watch.alive(0):
                        os.kill(pid, number)
            assert got == in_batches(range(40), 4)
            assert next(iterator, None) is None
            loader.close()
            assert watch.alive(10) == []


def signals_to_myself() -> None:
    for number in SIGNALS:
        os.kill(os.getpid(), number)


def test_signals_to_a_worker_that_starts_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gets them in its first moment after the fork, with the handlers of the loop's process."""
    here, struck = os.getpid(), []
    starts = Process._bootstrap  # type: ignore[attr-defined]

    def bootstrap(process: Any, *args: Any, **named: Any) -> Any:
        assert os.getpid() != here
        signals_to_myself()
        return starts(process, *args, **named)

    monkeypatch.setattr(Process, "_bootstrap", bootstrap)
    before = signal.signal(signal.SIGHUP, lambda *_: struck.append(1))
    try:
        loader = processes(Numbers(4))
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert struck == []


def test_a_program_that_a_sample_starts_has_default_handlers() -> None:
    with processes(Masks(4), 2, workers=1, collate_fn=list) as loader:
        masks = [mask for batch in loader for mask in batch]
    assert len(masks) == 4
    for ignored, blocked in masks:
        for number in SIGNALS:
            assert not (ignored | blocked) >> (number - 1) & 1, number


class Masks(Numbers):
    """Which signals a program that the sample starts ignores and blocks."""

    def __getitem__(self, index: int) -> Any:
        said = subprocess.run(
            ["cat", "/proc/self/status"], capture_output=True, text=True, check=True
        ).stdout
        fields = dict(line.split(":", 1) for line in said.splitlines())
        return int(fields["SigIgn"], 16), int(fields["SigBlk"], 16)


# ---- a signal to a whole job ----

TRAINING = """
import os, signal, sys, torch, fastload
from pathlib import Path
from tests.processes.holding import Says, say

pipe, checkpoint, context = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
ends = False

def end(number, frame):
    global ends
    ends = True

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    loader = fastload.DataLoader(
        Says(10**6, pipe), 4, num_workers=2, worker_method="process", multiprocessing_context=context, seed=1
    )
    had, after = 0, 0
    for batch in loader:
        assert batch.tolist() == [*range(4 * had, 4 * had + 4)]
        had += 1
        if had == 3:
            say(pipe, "training")
        after += ends
        if after == 100:  # more than were in flight
            break
    state = loader.state_dict()
    assert state["batches"] == had
    torch.save({"loader": state, "had": had}, checkpoint)
    loader.close()
    say(pipe, "saved")
"""


@contexts
def test_a_job_that_gets_sigterm_saves_its_checkpoint(
    context: str, pipe: Pipe, tmp_path: Path
) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    checkpoint = tmp_path / "checkpoint"
    with Python(
        [tmp_path / "training.py", pipe.path, checkpoint, context], start_new_session=True
    ) as job:
        lines = [pipe.hear()[0] for _ in range(3)]
        lines.remove("training")
        with closing(Watch(*map(int, lines))) as workers:
            os.killpg(job.pid, signal.SIGTERM)
            assert pipe.hear() == ["saved"]
            assert workers.alive(10) == []
            assert job.wait(60) == 0
    saved = torch.load(checkpoint)
    assert saved["had"] >= 102
    with fastload.DataLoader(Numbers(10**6), 4, seed=1) as loader:
        loader.load_state_dict(saved["loader"])
        assert next(iter(loader)).tolist() == [*range(4 * saved["had"], 4 * saved["had"] + 4)]


INTERRUPTED = """
import os, signal, sys, fastload
from pathlib import Path
from fastload.engine.iterator import LoaderIterator
from tests.processes.holding import Held, Says, say

pipe, gate, context, held = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]

struck = 0

def strike(number, frame):
    global struck
    # Interrupt the loop in `next()`, and nowhere else: then the iterator closes.
    while frame is not None and frame.f_code is not LoaderIterator.__next__.__code__:
        frame = frame.f_back
    # Again if it is not there, and if a finalizer that runs there swallows the interrupt, as Python does.
    signal.setitimer(signal.ITIMER_REAL, 0.001 if frame is None else 5)
    if frame is not None:
        struck += 1
        raise KeyboardInterrupt

if __name__ == "__main__":
    signal.signal(signal.SIGINT, strike)
    signal.signal(signal.SIGALRM, strike)
    dataset = Held(10**6, (0, 1), pipe, gate) if held == "held" else Says(10**6, pipe)
    loader = fastload.DataLoader(
        dataset, 1, num_workers=2, worker_method="process", multiprocessing_context=context
    )
    iterator = iter(loader)
    say(pipe, "loop")
    caught = 0
    while True:  # an interrupt before `next()` has begun its work closes nothing, and the timer strikes again
        try:
            for batch in iterator:
                pass
        except KeyboardInterrupt:
            caught += 1
        except fastload.errors.LoaderClosedError:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    say(pipe, "closed", caught, struck)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("context", "held"),
    [
        ("fork", "held"),
        ("fork", "free"),
        pytest.param("forkserver", "free", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_is_raised_once_and_leaves_no_process(
    context: str, held: str, pipe: Pipe, gate: Gate, tmp_path: Path
) -> None:
    """Ctrl-C in a terminal goes to every process of the group."""
    (tmp_path / "loop.py").write_text(INTERRUPTED)
    with Python(
        [tmp_path / "loop.py", pipe.path, gate.path, context, held],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        lines = [pipe.hear()[0] for _ in range(3)]
        lines.remove("loop")
        with closing(Watch(*map(int, lines))) as workers:
            os.killpg(job.pid, signal.SIGINT)
            said, caught, struck = pipe.hear()
            assert (said, caught) == ("closed", struck)
            if held == "held":
                gate.open()
            _, said = job.communicate("", timeout=60)
            assert job.returncode == 0, said
            assert workers.alive(10) == []
    assert "Traceback" not in said, "no worker prints one"
