"""Promises:
- In threads that fastload chose, a first sample that changes process-wide state raises `SharedStateError` before its
  batch comes. So does one that changes its own element of shared data, in the epoch in which that matters.
- The error names what changed, and `sys.stdout` is back. A program that catches it gets it again in the next epoch.
- If threads were asked for, it is a warning. What the loop changes itself, what an import adds, and a cache that is
  filled are no faults.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastload
from fastload.errors import SharedStateError, SharedStateWarning
from fastload.reading.tripwire import SAMPLES

N = 2_000
READ: list[int] = []
"""Indices that samples put here. A closure would be copied for each worker."""


class Samples(torch.utils.data.Dataset[int]):
    """Datasets of the package `tests` are vouched for, so nothing is read, and threads are chosen."""

    def __init__(self, change: Callable[[Samples, int], object]) -> None:
        self.change = change
        self.rows = np.random.default_rng(0).random((N, 1_200))
        self.records = [[k] for k in range(N)]
        self.cache = np.empty((N, 1_200))
        self.cached = [False] * N

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> int:
        self.change(self, i)
        return i


def epochs(change: Callable[..., object], workers: int, *, of: int = 2, **arguments: Any) -> None:
    loader = fastload.DataLoader(
        Samples(change), batch_size=8, num_workers=workers, shuffle=True, **arguments
    )
    for _ in range(of):
        for _ in loader:
            pass


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore what the samples change."""
    monkeypatch.setenv("FASTLOAD_TEST", "before")
    here = os.getcwd()
    (tmp_path / "elsewhere").mkdir()
    READ.clear()
    with warnings.catch_warnings():
        yield
    os.chdir(here)
    torch.set_default_dtype(torch.float32)


def _stdout(*_: object) -> None:
    sys.stdout = sys.__stderr__


PROCESS = {
    "the working directory": lambda *_: os.chdir("/"),
    r"os.environ\['FASTLOAD_TEST'\]": lambda *_: os.environ.update(FASTLOAD_TEST="after"),
    "sys.stdout": _stdout,
    "torch's default dtype from torch.float32": lambda *_: torch.set_default_dtype(torch.float64),
    "the filters of warnings": lambda *_: warnings.simplefilter("ignore"),
}


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("what", PROCESS)
def test_what_the_first_sample_changes_in_the_process_raises(what: str, workers: int) -> None:
    out = sys.stdout
    with pytest.raises(SharedStateError, match=f"samples of Samples change {what}.*process"):
        epochs(PROCESS[what], workers)
    assert sys.stdout is out


@pytest.mark.parametrize("keeps", [True, False])
def test_filters_that_a_library_adds_as_a_sample_imports_it_are_no_fault(
    keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"imported_by_a_sample_{keeps}"
    other = "" if keeps else "warnings.resetwarnings()\n"
    (tmp_path / f"{name}.py").write_text(
        f"import warnings\n{other}warnings.filterwarnings('ignore', 'of {name}')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SharedStateError, match="filters") if not keeps else nullcontext():
        epochs(lambda *_: importlib.import_module(name), 2)


def test_handlers_of_signals_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the main thread can set one, so a sample changes what the loop reads.
    real, handlers = signal.getsignal, iter([signal.SIG_IGN])

    def getsignal(number: int) -> Any:
        return next(handlers, real(number)) if number == signal.SIGUSR1 and READ else real(number)

    monkeypatch.setattr(signal, "getsignal", getsignal)
    with pytest.raises(SharedStateError, match="change the handler of SIGUSR1"):
        epochs(lambda _, i: READ.append(i), 1)


ELEMENTS = {
    "rows": lambda samples, i: np.multiply(samples.rows[i], 0.5, out=samples.rows[i]),
    "records": lambda samples, i: samples.records[i].append(0),
}


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("what", ELEMENTS)
def test_an_element_that_its_sample_changes_raises_in_the_second_epoch(
    what: str, workers: int
) -> None:
    epochs(ELEMENTS[what], workers, of=1)
    with pytest.raises(SharedStateError, match=rf"change what they read, `dataset.{what}\[\d+\]`"):
        epochs(ELEMENTS[what], workers)


def test_an_element_that_changes_twice_in_an_epoch_raises() -> None:
    loader = fastload.DataLoader(
        Samples(ELEMENTS["records"]), sampler=[3, 5, 3], batch_size=1, num_workers=1
    )
    got = []
    with pytest.raises(SharedStateError, match=r"dataset.records\[3\]"):
        for batch in loader:
            got.append(batch.item())
    assert got in ([], [3], [3, 5]), "a worker may read ahead of the loop"


def test_a_program_that_goes_on_gets_the_error_again() -> None:
    loader = fastload.DataLoader(Samples(lambda *_: os.chdir("/")), num_workers=1)
    here = os.getcwd()
    for _ in range(4):
        os.chdir(here)
        with pytest.raises(SharedStateError):
            next(iter(loader))
    assert loader.state_dict()["batches"] == 0, "no batch counts as delivered"


def test_it_is_a_warning_if_threads_were_asked_for() -> None:
    with pytest.warns(SharedStateWarning, match="seems to change the working directory"):
        epochs(lambda *_: os.chdir("/"), 2, worker_method="thread")


def _fill(samples: Samples, i: int) -> None:
    if not samples.cached[i]:
        samples.cache[i] = i
        samples.cached[i] = True


NO_FAULTS = {
    "a cache": _fill,
    "a new variable": lambda *_: os.environ.setdefault("FASTLOAD_TEST_NEW", "1"),
    "catch_warnings": lambda *_: warnings.catch_warnings(record=True).__enter__(),
}


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("what", NO_FAULTS)
def test_no_false_alarm(what: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTLOAD_TEST_NEW", raising=False)
    epochs(NO_FAULTS[what], workers, of=3)


def test_what_the_loop_changes_is_no_fault(tmp_path: Path, capsys: Any) -> None:
    loader = fastload.DataLoader(Samples(lambda *_: None), batch_size=1, num_workers=2)
    for k, _ in enumerate(itertools.islice(loader, SAMPLES + 1)):
        os.chdir(tmp_path if k % 2 else tmp_path / "elsewhere")
        os.environ["FASTLOAD_TEST"] = str(k)
        torch.set_default_dtype(torch.float64 if k % 2 else torch.float32)
        warnings.simplefilter("ignore" if k % 2 else "default")
        with capsys.disabled():
            pass


def test_an_epoch_that_begins_ahead_of_its_use_waits_no_longer_than_for_its_first_sample() -> None:
    loader = fastload.DataLoader(Samples(lambda _, i: READ.append(i)), num_workers=1, batch_size=4)
    batches = iter(loader)
    while not batches.is_ready():  # type: ignore[attr-defined]
        pass
    assert READ[:4] == [0, 1, 2, 3]
    assert next(batches).tolist() == [0, 1, 2, 3]


class Guarded(np.ndarray):  # type: ignore[type-arg]
    """An array whose elements only its own dataset may take."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("user code ran")


def test_no_code_of_the_user_runs() -> None:
    dataset = Samples(lambda *_: None)
    dataset.rows = dataset.rows.view(Guarded)
    for _ in range(2):
        assert len(list(fastload.DataLoader(dataset, 64, num_workers=2))) == N // 64 + 1


def test_a_number_that_is_nan_does_not_change() -> None:
    numbers = [float("nan")] * 20_000  # all workers share it
    loader = fastload.DataLoader(Rows(numbers), batch_size=4, num_workers=2)
    for _ in range(3):
        assert len(list(loader)) == 5


class Rows(torch.utils.data.Dataset[float]):
    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> float:
        return self.numbers[index]


def test_samples_after_the_first_are_not_looked_at() -> None:
    def late(samples: Samples, i: int) -> None:
        if i >= SAMPLES:
            samples.records[i].append(0)

    loader = fastload.DataLoader(Samples(late), batch_size=8, num_workers=2)
    for _ in range(3):
        for _ in loader:
            pass
