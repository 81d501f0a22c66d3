"""Promises:
- A run in a fresh process gives its result and its lines. It ends with an error in a sentence, or at a limit.
- An output that stays open after the end does not delay a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fastload.measure.fresh import answer, run_fresh
from fastload.measure.processes import cpu_seconds, descendants
from tests.distributed.launching import is_over

pytestmark = pytest.mark.skipif(cpu_seconds() is None, reason="reads /proc")


def work(content: dict[str, Any]) -> dict[str, Any]:
    left = None
    if content["leaves_child"]:  # which holds this process's output
        left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
    print("a line", flush=True)
    time.sleep(content["own_s"])
    return {"left": left}


MODULE = "tests.measure.test_fresh"
ENVIRON = {"PYTHONPATH": str(Path(__file__).parents[2])}


def test_a_run_gives_a_result_and_its_lines_are_passed_on() -> None:
    lines: list[str] = []
    given = {"leaves_child": False, "own_s": 0}
    ended = run_fresh(MODULE, given, say=lines.append, environ=ENVIRON)
    assert (ended.error, ended.status) == (None, 0), ended.messages
    assert ended.result == {"left": None}
    assert lines == ["a line"]
    assert ended.peak_bytes is not None
    unheard = run_fresh(MODULE, given, environ=ENVIRON)
    assert "a line" in unheard.messages, "without a listener"


def test_what_a_run_leaves_behind_ends_with_it() -> None:
    began = time.monotonic()
    lines: list[str] = []
    given = {"leaves_child": True, "own_s": 0}
    result = run_fresh(MODULE, given, say=lines.append, environ=ENVIRON).result
    assert is_over(result["left"]), "no process outlives the run"
    assert lines == ["a line"]
    assert time.monotonic() - began < 60


def test_an_error_is_a_sentence_with_a_status_and_a_traceback() -> None:
    ended = run_fresh(MODULE, {}, environ=ENVIRON)
    assert (ended.error, ended.status, ended.result) == ("KeyError: 'leaves_child'", 1, {})
    assert "Traceback" in ended.messages


def test_a_run_over_its_limit_is_ended() -> None:
    with pytest.raises(TimeoutError, match="did not end within 0.1 s, and was killed"):
        run_fresh(MODULE, {"leaves_child": False, "own_s": 60}, limit_s=0.1, environ=ENVIRON)


def test_what_interrupts_a_run_ends_its_children_too() -> None:
    processes = {*descendants(os.getpid())}
    started: list[int] = []

    def interrupt(line: str) -> None:
        started.extend({*descendants(os.getpid())} - processes)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_fresh(MODULE, {"leaves_child": True, "own_s": 60}, say=interrupt, environ=ENVIRON)
    assert len(started) == 3, "the guard, the process and its child"
    deadline = time.monotonic() + 30  # they are not this process's own to be waited for
    while not all(map(is_over, started)):
        assert time.monotonic() < deadline, started
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(answer(work))
