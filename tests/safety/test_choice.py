"""Promises:
- `worker_method="auto"` reads by processes what is not plainly safe, as torch does: right without any proof.
- Plainly safe code that only copies memory is read by the loop or by threads. All other is read by few processes, and
  from the second epoch on by the kind that was measured to be best: in the same random streams, with worker info.
- What was measured holds for the next loader of such samples, and by the file FASTLOAD_CHOICES for the next run.
- `chosen()`, `repr`, `stats()` and the log name the kind and the reason.
- Threads that were asked for are warned of what they are known to share. So are those that read because MPI is in use
  or the dataset holds CUDA tensors.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

import fastload
from fastload.engine import choice
from fastload.errors import SharedStateWarning
from fastload.safety import Survey, libraries
from fastload.settings import Settings
from fastload.telemetry import prediction
from fastload.telemetry.prediction import Kind
from tests.children import run_python

SEEN: list[int] = []


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = np.arange(400, dtype=np.float32).reshape(100, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + 1


class Drawn(Rows):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:  # no `assert`, which pytest rewrites
            raise ValueError("no worker info")
        return self.rows[index], torch.rand(1), random.random(), np.random.rand(), info.seed


class Slow(Rows):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return self.rows[index]


class Shares(Rows):
    def __getitem__(self, index: int) -> Any:
        SEEN.append(index)
        return self.rows[index] + len(SEEN) * 0


class Transformed(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.transform: Any = None

    def __getitem__(self, index: int) -> Any:
        if self.transform is not None:
            self.transform(index)
        return self.rows[index]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(8))


@pytest.fixture(autouse=True)
def _nothing_is_vouched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_allowed", set())
    monkeypatch.setattr(choice, "_told", set())
    choice.forget()


def auto(dataset: Any, batch_size: int | None = 4, **options: Any) -> fastload.DataLoader[Any]:
    options = {"num_workers": 2, "worker_method": "auto", **options}
    return fastload.DataLoader(dataset, batch_size, **options)


def measured_as(monkeypatch: pytest.MonkeyPatch, kind: str, processes: int = 0) -> None:
    """Let all loaders find that a kind of workers was measured to be best."""
    monkeypatch.setattr(choice, "known", lambda settings: Kind(kind, processes, "it was measured"))


@pytest.mark.parametrize(
    ("dataset", "options", "kind", "reason"),
    [
        (Rows(), {}, "process", "nothing is measured yet"),
        (Shares(), {}, "process", "SEEN`, which all threads share"),
        (Stream(), {}, "process", "iterable"),
        (Rows(), {"collate_fn": list}, "process", "collate_fn"),
        (Rows(), {"worker_init_fn": print}, "process", "worker_init_fn"),
        (Rows(), {"batch_size": None}, "process", "without batches"),
        (Rows(), {"num_workers": 0}, "none", "num_workers is 0"),
        (TensorDataset(torch.zeros(8, 4)), {}, "none", "copies a batch faster"),
        (TensorDataset(torch.zeros(8, 1 << 20)), {}, "thread", "only copies memory"),
        (Rows(), {"worker_method": "process"}, "process", ""),
        (Rows(), {"worker_method": "torch"}, "torch", ""),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Dataset) else str(x)[:20],
)
def test_the_kind(dataset: Any, options: dict[str, Any], kind: str, reason: str) -> None:
    chosen = auto(dataset, **options).chosen()
    assert chosen.kind == kind, chosen
    assert chosen.number == (0 if kind == "none" else 2)
    assert reason in chosen.reason


def values(loader: fastload.DataLoader[Any]) -> list[Any]:
    with loader:
        return [[x.tolist() for x in batch] for _ in range(3) for batch in loader]


@pytest.mark.parametrize("persistent", [False, True])
def test_the_loop_reads_as_workers_would(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, "none")
    fastload.threads_ok(Drawn)

    def read(method: str, seed: int | None) -> list[Any]:
        torch.manual_seed(3)
        options = {"worker_method": method, "persistent_workers": persistent, "seed": seed}
        return values(auto(Drawn(), 20, num_workers=1, shuffle=True, timeout=9, **options))

    for seed in (5, None):
        loop = read("auto", seed)
        assert loop == read("process", seed)
        assert loop == read("thread", seed)
    assert auto(Drawn(), 20, num_workers=1, timeout=9).chosen().kind == "none"


def test_it_tells(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fastload"), auto(Shares()) as loader:
        assert sum(len(batch) for batch in loader) == 100
        assert SEEN == []
        assert "(process)" in repr(loader)
        assert loader.stats().worker_method == "process"
        assert "Shares.__getitem__" in loader.stats().worker_reason
        assert "SEEN" in str(loader.stats())
        [*auto(Shares())]
    assert [record.getMessage()[:34] for record in caplog.records] == [
        "fastload: workers are processes: `"
    ]
    with auto(TensorDataset(torch.zeros(8, 4))) as loader:
        assert len([*loader]) == 2
        assert "copies a batch faster" in str(loader.stats())


def test_threads_that_were_asked_for_are_warned() -> None:
    loader = auto(Shares(), worker_method="thread")
    with (
        pytest.warns(SharedStateWarning, match=r"SEEN`, which all threads share\. Keep it"),
        loader,
    ):
        assert len([*loader]) == 25
    SEEN.clear()


def test_threads_read_if_mpi_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", SimpleNamespace(Is_initialized=lambda: True))
    with pytest.warns(SharedStateWarning, match="MPI is in use"):
        chosen = auto(Shares()).chosen()
    assert chosen.kind == "thread"
    assert "although" in chosen.reason
    assert auto(Rows()).chosen().kind == "thread"  # and no warning


def test_vouching(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, "none")
    assert auto(Shares()).chosen().kind == "process"
    fastload.threads_ok(Shares)
    assert auto(Shares()).chosen().kind == "none"
    monkeypatch.setattr(libraries, "_allowed", set())
    fastload.threads_ok("tests")
    assert auto(Shares()).chosen().kind == "none"
    for wrong in ("a.b", 3):
        with pytest.raises(ValueError, match="names of top-level packages"):
            fastload.threads_ok(wrong)  # type: ignore[arg-type]


class Config(dict[str, int]):
    def __getattribute__(self, name: str) -> int:
        return self[name]


class Configured(Rows):
    config: Any = None

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] * self.config.scale


def test_what_raises_as_it_is_read_is_read_by_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("settings")
    module.__getattr__ = {"scale": 2}.__getitem__  # type: ignore[method-assign]
    for config in (Config(scale=2), module):
        monkeypatch.setattr(Configured, "config", config)
        assert auto(Configured()).chosen().kind == "process"


def test_what_is_set_between_two_epochs_is_looked_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    measured_as(monkeypatch, "none")
    dataset: Any = Transformed()
    with auto(dataset) as loader:
        assert len([*loader]) == 25
        assert loader.chosen().kind == "none"
        dataset.transform = SEEN.append
        assert len([*loader]) == 25
        assert loader.chosen().kind == "process"
    assert SEEN == []


@pytest.mark.parametrize("name", ["__getitem__", "__getitems__"])
def test_a_method_that_replaces_torch_s_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(dataset: TensorDataset, given: Any) -> Any:
        SEEN.append(given)
        return [(torch.ones(1),)] * len(given) if name == "__getitems__" else (torch.ones(1),)

    monkeypatch.setattr(TensorDataset, name, replaced, raising=False)
    with auto(TensorDataset(torch.zeros(8, 1))) as loader:
        assert loader.chosen().kind == "process"
        assert [batch[0].tolist() for batch in loader] == [[[1.0]] * 4] * 2
    assert SEEN == []


@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_falls_into_the_reading(enabled: bool) -> None:
    seen: list[bool] = []

    def reading(*args: Any, **options: Any) -> Any:
        seen.append(gc.isenabled())
        raise KeyError

    (gc.enable if enabled else gc.disable)()
    try:
        with mock.patch.object(Survey, "code", reading), pytest.raises(KeyError):
            auto(Shares()).chosen()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False]


GENERATOR = np.random.default_rng(0)


class HeldByModule(Rows):
    def __getitem__(self, index: int) -> Any:
        return GENERATOR.random(2)


def test_generators_of_modules_are_keyed_in_processes() -> None:
    state = GENERATOR.bit_generator.state
    read = [values(auto(HeldByModule(), 10, num_workers=n, seed=1)) for n in (1, 2)]
    assert read[0] == read[1]
    assert len({tuple(row) for batch in read[0] for row in batch}) == 300
    assert GENERATOR.bit_generator.state == state


def test_a_lambda_and_a_class_of_main_are_read(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(MAIN)
    done = run_python("main.py", cwd=tmp_path, timeout=100.0)
    assert done.stdout == "[0, 2, 4, 6] process\n", done.stderr


MAIN = """
import fastload
COUNT = []
class Own:
    transform = staticmethod(lambda x: 2 * x)
    def __len__(self): return 4
    def __getitem__(self, index):
        COUNT.append(index)
        return (lambda x: self.transform(x))(index)
loader = fastload.DataLoader(Own(), num_workers=2)
print([int(x) for x in loader], loader.chosen().kind)
"""


# ---- what was measured ----


@pytest.fixture
def _handing_over_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "HAND_OVER_S", 1.0)  # so that a busy core decides nothing


SLOW_HAND_OVER = pytest.mark.usefixtures("_handing_over_takes_long")


@SLOW_HAND_OVER
def test_the_second_epoch_is_read_by_what_the_first_one_measured() -> None:
    fastload.threads_ok(Drawn)
    with auto(Drawn(), shuffle=True, seed=4) as loader:
        epochs = []
        for kind in ("process", "none", "none"):
            epochs.append([[x.tolist() for x in batch[:4]] for batch in loader])
            assert loader._choice is not None
            assert loader._choice.kind == kind
            assert loader._choice.reason.endswith("yet") == (len(epochs) == 1)
    with auto(Drawn(), shuffle=True, seed=4, worker_method="process") as workers:
        assert epochs == [[[x.tolist() for x in batch[:4]] for batch in workers] for _ in range(3)]


@SLOW_HAND_OVER
def test_the_next_loader_of_such_samples_is_read_so() -> None:
    def kind(dataset: Any, num_workers: int = 2, **options: Any) -> str:
        return auto(dataset, num_workers=num_workers, **options).chosen().kind

    with auto(Transformed()) as loader:
        next(iter(loader))
        assert kind(Transformed()) == "process"  # a batch shows too little
    with auto(Transformed()) as loader:
        for number, _ in enumerate(loader):
            if number == 12:  # the loop leaves the epoch
                break
    assert kind(Transformed()) == "none"
    other: Any = Transformed()
    other.transform = torch.neg
    assert kind(other) == kind(Rows()) == kind(Transformed(), 3) == "process"
    assert kind(Transformed(), 2, worker_method="process") == "process"


class Sums(Rows):
    def __init__(self) -> None:
        self.rows: Any = torch.rand(40, 150_000)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index].sum()


@SLOW_HAND_OVER
def test_the_loop_computes_with_one_thread_as_workers_do() -> None:
    """Sums over several threads differ in their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with auto(Sums(), batch_size=2) as loader:
            first, second = ([batch.tolist() for batch in loader] for _ in range(2))
            assert loader.stats().workers == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert first == second


class OfWorkers(Rows):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return self.rows[index] + (0 if info is None else info.seed % 7)


def test_samples_that_ask_for_their_worker_have_a_process_each() -> None:
    chosen = auto(OfWorkers(), num_workers=3).chosen()
    assert (chosen.kind, chosen.processes) == ("process", 3)


def test_a_fork_and_a_timeout_leave_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    choice._known[choice._what_is_read(Settings.of(auto(Rows())))] = Kind("none", 0, "")
    assert auto(Rows()).chosen().kind == "none"
    assert auto(Rows(), timeout=5).chosen().kind == "process"
    with auto(Slow(), batch_size=2) as loader:
        assert len([*loader]) == 50
        monkeypatch.setattr(os, "getpid", lambda: -1)
        monkeypatch.setattr(choice, "best_kind", pytest.fail)
        assert loader._counts is not None
        loader._counts.learn()
        monkeypatch.undo()


@SLOW_HAND_OVER
def test_code_that_is_not_plainly_safe_stays_in_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLOAD_CHOICES", str(file := tmp_path / "choices.json"))
    with auto(Shares()) as loader:
        for _ in range(2):
            assert len([*loader]) == 25
            chosen = loader.chosen()
            assert (chosen.kind, chosen.processes) == ("process", 2)
    assert not file.exists()


@SLOW_HAND_OVER
def test_a_file_keeps_the_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLOAD_CHOICES", str(file := tmp_path / "choices.json"))
    monkeypatch.setenv("LOCAL_RANK", "1")
    with auto(Rows()) as loader:
        assert len([*loader]) == 25
    assert not file.exists()
    choice.forget()
    monkeypatch.setenv("LOCAL_RANK", "0")
    with auto(Rows()) as loader:
        assert len([*loader]) == 25
    choice.forget()
    assert auto(Rows()).chosen().kind == "none"
    kept = json.loads(file.read_text())
    assert next(iter(kept)).startswith("tests.safety.test_choice.Rows, num_workers=2 (")
    [one] = kept.values()
    assert one["kind"] == "none"
    assert "the loop would read a batch in" in one["reason"]
    one.update(kind="process", processes=1)
    file.write_text(json.dumps(kept))
    assert auto(Rows()).chosen().kind == "none"  # it is read once
    choice.forget()
    chosen = auto(Rows()).chosen()
    assert (chosen.kind, chosen.processes) == ("process", 1)


def test_a_file_that_has_no_choices_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLOAD_CHOICES", str(file := tmp_path / "choices.json"))
    for text in (
        "",
        "[]",
        "{",
        '{"a": 3}',
        '{"a": {"kind": "process"}}',
        '{"a": {"kind": "gpu", "processes": 1, "reason": ""}}',
        '{"a": {"kind": "process", "processes": "1", "reason": ""}}',
        '{"a": {"kind": "process", "processes": 0, "reason": ""}}',
        '{"a": {"kind": "thread", "processes": 2, "reason": ""}}',
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"FASTLOAD_CHOICES=.*choices\.json: expected JSON"):
            iter(auto(Rows()))


@SLOW_HAND_OVER
def test_a_file_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTLOAD_CHOICES", str(tmp_path / "missing" / "choices.json"))
    with pytest.warns(UserWarning, match="the choice is not kept"), auto(Rows()) as loader:
        assert len([*loader]) == 25
    choice.forget()
    assert auto(Rows()).chosen().kind == "process"


class Circle(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.itself = [self] * 3


def test_what_is_read_may_hold_itself() -> None:
    settings = Settings.of(auto(Circle()))
    assert choice._what_is_read(settings) == choice._what_is_read(settings)
