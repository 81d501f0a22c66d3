"""Promises:
- The routing of global random functions tests itself once in a process: by every function of Python's and NumPy's that
  draws, and by an operator of each kind of torch's.
- If that test fails, `worker_method="auto"` takes processes, which have global generators of their own. The reason
  names what failed.
- With `worker_method="thread"`, the loader warns of it.
- A torch whose random functions cannot be routed gives a warning.
- `worker_method="auto"` takes processes if an attribute, a container, a default, a closure, a class or a partial holds
  `random.random`, or if a Generator uses NumPy's global state.
- `worker_method="auto"` takes processes if a `zip` or `map` of the dataset holds a running generator.
- A program that replaced a function of `random` before it imported fastload reads all samples.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import fastload
from fastload.errors import SharedStateWarning
from fastload.random import numpy_random, python_random, torch_random
from fastload.safety import Survey, libraries
from tests.children import ROOT

DRAWS: dict[str, Callable[[], float]] = {
    "Python's": lambda: random.random(),
    "NumPy's": lambda: float(np.random.rand()),
    "torch's": lambda: float(torch.rand(())),
}
STATES: dict[str, Callable[[], Any]] = {
    "Python's": random.getstate,
    "NumPy's": lambda: np.random.get_state()[1].tolist(),
    "torch's": lambda: torch.get_rng_state().tolist(),
}


class Draws(Dataset[float]):
    def __init__(self, whose: str) -> None:
        self.whose = whose

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[float, int]:
        return DRAWS[self.whose](), os.getpid()


@pytest.fixture(params=DRAWS)
def whose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the probe of one module fail, as in a process that begins on a Python, a NumPy or a torch that differs."""
    monkeypatch.delenv("FASTLOAD_WORKER_METHOD")
    if request.param == "Python's":
        python_random.unusable.cache_clear()
        monkeypatch.setattr(python_random, "_works", lambda: False)
    elif request.param == "NumPy's":
        monkeypatch.setattr(numpy_random, "_works", lambda: False)
        monkeypatch.setattr(numpy_random, "_failure", numpy_random._probe())
    else:
        monkeypatch.setattr(torch_random, "_works", lambda: False)
        monkeypatch.setattr(torch_random, "register_kernels", lambda _: lambda _: None)
        monkeypatch.setattr(torch_random, "_show", None)
        monkeypatch.setattr(torch_random, "_installed", False)
    yield request.param
    python_random.unusable.cache_clear()
    torch_random._failure = None


FAILED = "this installation cannot patch per thread: a test at the start drew other numbers"


def read(whose: str, **options: Any) -> tuple[list[float], set[int], Any, list[str]]:
    """Return draws, the processes that drew, the stats, and the warnings of sharing."""
    options = {"num_workers": 2, "seed": 3, "multiprocessing_context": "fork", **options}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fastload.DataLoader(Draws(whose), 2, **options) as loader:
            batches = list(loader)
            stats = loader.stats()
    drawn = [value for values, _ in batches for value in values.tolist()]
    processes = {pid for _, pids in batches for pid in pids.tolist()}
    shared = [str(each.message) for each in said if issubclass(each.category, SharedStateWarning)]
    return drawn, processes, stats, shared


def test_auto_takes_processes(whose: str, caplog: pytest.LogCaptureFixture) -> None:
    state = STATES[whose]()
    with caplog.at_level(logging.INFO, "fastload"):
        drawn, processes, stats, shared = read(whose, worker_method="auto")
    assert stats.worker_method == "process"
    assert stats.worker_reason.startswith(f"threads would share {whose} global random generator")
    assert FAILED in stats.worker_reason
    assert os.getpid() not in processes
    assert len(set(drawn)) == 16, "workers drew alike"
    assert shared == []
    assert STATES[whose]() == state
    assert "workers are processes: threads would share" in caplog.text


def test_threads_that_were_asked_for_are_warned_of(whose: str) -> None:
    _, processes, stats, (warning,) = read(whose, worker_method="thread")
    assert stats.worker_method == "thread"
    assert processes == {os.getpid()}
    assert f"data race, so samples can be wrong: threads would share {whose} global" in warning


@pytest.mark.usefixtures("whose")
def test_the_test_runs_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(python_random, "_works", lambda: calls.append("python") or True)
    python_random.unusable.cache_clear()
    assert [python_random.unusable() for _ in range(3)] == [None] * 3
    assert calls == ["python"]


REPLACED = """
import random
random.random = lambda: 0.5
import fastload
class Halves:
    def __len__(self): return 4
    def __getitem__(self, index): return index + random.random()
if __name__ == "__main__":
    loader = fastload.DataLoader(Halves(), 2, num_workers=1, worker_method="auto")
    print([batch.tolist() for batch in loader], loader.stats().worker_reason)
"""


def test_a_function_that_was_replaced_before_the_import_is_named(tmp_path: Path) -> None:
    """Its owner was looked up at import, and a Python function has none."""
    (script := tmp_path / "replaced.py").write_text(REPLACED)
    python = [
        sys.executable,
        str(script),
    ]  # which has not imported fastload, as those of run_python have
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("[[0.5, 1.5], [2.5, 3.5]] threads would share Python's"), done
    assert "other code had replaced `random.random`" in done.stdout


class Holds:
    """Holds the function that a program took before it was replaced in modules."""

    draw = python_random._STAND_INS["random"][0]
    static = staticmethod(draw)


HELD: dict[str, Callable[[], Callable[[], float]]] = {
    "attribute": lambda: Holds.draw,
    "partial": lambda: functools.partial(Holds.draw),
    "default": lambda: lambda draw=Holds.draw: draw(),
    "closure": lambda: (lambda draw: lambda: draw())(Holds.draw),
    "class": lambda: lambda: Holds.draw(),
    "static": lambda: lambda: Holds.static(),
    "generator": lambda: np.random.Generator(numpy_random.GLOBAL[0]).random,
    "container": lambda: (lambda draws: lambda: draws["uniform"]())({"uniform": Holds.draw}),
}


class Calls(Draws):
    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __getitem__(self, index: int) -> tuple[float, int]:
        return self.draw(), os.getpid()


def test_what_draws_past_the_routing_is_read_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTLOAD_WORKER_METHOD")
    monkeypatch.setattr(libraries, "_allowed", set())  # so that the code of this file is read
    assert [kind for kind, held in HELD.items() if Survey(Calls(held())).code().plain] == []
    before = random.getstate(), str(np.random.get_state())
    with fastload.DataLoader(
        Calls(HELD["partial"]()), None, num_workers=2, seed=5, worker_method="auto"
    ) as loader:
        samples = [*loader]
    assert os.getpid() not in {pid for _, pid in samples}
    assert len({draw for draw, _ in samples}) == 16
    assert (random.getstate(), str(np.random.get_state())) == before


def test_a_generator_that_a_zip_holds_is_read_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be copied. Threads shared it."""
    monkeypatch.delenv("FASTLOAD_WORKER_METHOD")
    numbers = zip((float(k) for k in range(16)), range(16), strict=True)
    with fastload.DataLoader(
        Calls(numbers.__next__), None, num_workers=2, worker_method="auto"
    ) as loader:
        samples = [*loader]
    assert os.getpid() not in {pid for _, pid in samples}
