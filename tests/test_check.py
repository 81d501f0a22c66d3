"""Promises:
- `fastload check` finds what threads cannot share, and says what to do.
- `fastload check` compares the rows that a dataset fills with its samples.
- `fastload check` reports a dataset that ends the process, and in which reading.
"""

from __future__ import annotations

import random
import sqlite3
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import fastload
from fastload import DataLoader as FastDataLoader
from fastload._kit.cores import usable_cores
from fastload.check import Finding, Report, check
from fastload.check.equality import same
from fastload.cli import main
from fastload.cli._checking import checked
from fastload.measure.fresh import Ended
from fastload.rows import Run
from tests.children import run_python
from tests.fakes import OwnIterator

RECORD = 16


@pytest.fixture(autouse=True)
def _default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loaders choose, as in a program of the user's."""
    monkeypatch.setenv("FASTLOAD_WORKER_METHOD", "auto")


class Records(Dataset[int]):
    """Records of one file, read at a position that all readers share."""

    def __init__(self, path: Path, length: int = 64) -> None:
        self.length = length
        path.write_bytes(b"".join(k.to_bytes(RECORD, "big") for k in range(length)))
        self.path = path
        self.file = path.open("rb")

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.file.seek(index * RECORD)
        time.sleep(0.0005)  # simulates the disk
        return int.from_bytes(self.file.read(RECORD), "big")


class Honest(Dataset[Any]):
    """Draws through torch alone, and waits a little."""

    def __init__(self, length: int = 64, seconds: float = 0.0) -> None:
        self.length, self.seconds = length, seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return {"x": torch.arange(3) + index + torch.rand(3), "y": index, "name": str(index)}


class Draws(Honest):
    """Draws from one of the global random states."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def __getitem__(self, index: int, held: Callable[[], float] = random.random) -> float:
        if self.source == "random":
            return random.random()
        if self.source == "numpy":
            return float(np.random.rand())
        return held()  # which no routing of the module reaches


class OneBuffer(Honest):
    """Returns the same array for each sample, filled anew."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = np.zeros(4)

    def __getitem__(self, index: int) -> npt.NDArray[np.float64]:
        self.buffer[:2] = index
        time.sleep(0.0005)
        self.buffer[2:] = index
        return self.buffer


class Sharded(IterableDataset[int]):
    def __init__(self, length: int = 1000) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(worker, self.length, workers))


class Unsharded(Sharded):
    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def words(report: Report, level: str | None = None) -> str:
    return " ".join(
        f"{finding.what} {finding.advice}"
        for finding in report.findings
        if level in (None, finding.level)
    )


# ---- faults ----


def test_a_file_that_was_opened_early_is_shared_by_threads_alone(tmp_path: Path) -> None:
    dataset = Records(tmp_path / "records.bin")
    with dataset.file:
        report = check(dataset, samples=64, workers=4)
    assert report.ok
    assert "dataset.file" in report.copies.partition("shared")[2]


def test_a_file_position_that_threads_share_is_a_fault(tmp_path: Path) -> None:
    class Claims(Records):
        fastload_per_worker = ()  # which is not true

    dataset = Claims(tmp_path / "records.bin")
    with dataset.file:
        report = check(dataset, samples=64, workers=4)
    assert not report.ok
    assert "Something that workers share keeps state" in words(report, "fault")
    assert "dataset (Claims" in report.copies.partition("shared")[2]
    assert "not safe to read with 4 workers" in str(report)


def table(path: Path) -> Dataset[int]:
    class Table(Honest):
        def __init__(self) -> None:
            super().__init__()
            self.connection = sqlite3.connect(path)
            self.connection.execute("CREATE TABLE IF NOT EXISTS numbers (n INTEGER)")

        def __getitem__(self, index: int) -> int:
            found: int = self.connection.execute("SELECT ?", (index,)).fetchone()[0]
            return found

    return Table()


def test_an_open_handle_is_read_as_the_loader_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes can use a connection, and threads cannot."""
    dataset: Any = table(tmp_path / "table.db")
    report = check(dataset, samples=8, workers=2)
    assert report.ok
    assert report.kind == "processes"
    assert "bit for bit" in str(report)
    assert "worker processes share the open dataset.connection" in words(report, "note")
    monkeypatch.setenv("FASTLOAD_WORKER_METHOD", "thread")
    report = check(dataset, samples=8, workers=2)
    dataset.connection.close()
    assert not report.ok
    assert "dataset.connection (sqlite3.Connection: open)" in words(report, "fault")
    assert "Nothing could be compared." in str(report)


def test_the_workers_are_those_of_a_default_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads read too where a later epoch may take them."""
    heard: list[str] = []
    report = check([1, 2, 3], samples=3, workers=2, say=heard.append)
    assert report.kind == "processes and threads"
    assert heard == ["serially", "in 2 processes", "in 2 threads"]
    assert "Processes and threads gave the samples" in str(report)
    assert check(Sharded(), samples=4, workers=2).kind == "processes"
    for method, kind in {"torch": "torch's processes", "thread": "threads"}.items():
        monkeypatch.setenv("FASTLOAD_WORKER_METHOD", method)
        report = check([1, 2, 3], samples=3, workers=2)
        assert report.kind == kind
        assert f"{kind} read it: FASTLOAD_WORKER_METHOD says so" in str(report)


def test_advice_stands_once_below_all_that_it_is_for() -> None:
    found = [("one", "Keep it."), ("two", "Leave it."), ("three", "Keep it.")]
    report = Report("Honest", 2, findings=[Finding("note", *each) for each in found])
    lines = ["note: one", "note: three", "       Keep it.", "note: two", "       Leave it."]
    assert "\n".join(lines) in str(report)


class Cursor(Honest):
    at = -1

    def __getitem__(self, index: int) -> int:
        self.at += 1
        return self.at


@pytest.mark.parametrize(
    ("dataset", "said"), [(OneBuffer(), "Return a copy of the buffer"), (Cursor(), "")]
)
def test_a_buffer_used_again_and_a_cursor_are_faults(dataset: Any, said: str) -> None:
    report = check(dataset, samples=64, workers=4)
    assert not report.ok
    assert said in words(report, "fault")


@pytest.mark.parametrize("source", ["random", "numpy"])
def test_draws_from_the_sample_s_own_stream_are_no_finding(source: str) -> None:
    report = check(Draws(source), samples=32, workers=2)
    assert report.ok, words(report)
    assert "draws from" not in words(report)


def test_draws_from_global_random_state_are_named_and_are_no_fault() -> None:
    class DrawsForNothing(Draws):
        def __getitem__(self, index: int) -> float:
            super().__getitem__(index)
            return index

    report = check(Draws("held"), samples=32, workers=2)
    assert report.ok, str(report)
    for said in ("draws from Python's global random state", "sample_generator"):
        assert said in words(report)
    assert "right but not reproducible" in words(report, "note")
    assert "cannot be compared" in str(report)
    assert "bit for bit" not in str(report)
    report = check(DrawsForNothing("held"), samples=32, workers=2)
    assert "No sample depends on these draws" in words(report, "note")
    assert "bit for bit" in str(report)


def test_an_iterable_that_every_worker_reads_whole_is_found() -> None:
    assert "get_worker_info" in words(check(Unsharded(), samples=32, workers=3))
    assert "own iterator" in words(check(OwnIterator(48), samples=32, workers=2))


class Parted(IterableDataset[int]):
    """Thirty samples, of which each worker yields a part of the order that `order` gives."""

    def __init__(self, order: Callable[[], list[int]], cut: Callable[[list[int], int, int], Any]):
        self.order, self.cut = order, cut

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        part = (worker.id, worker.num_workers) if worker else (0, 1)
        return iter(self.cut(self.order(), *part))


def strided(values: list[int], worker: int, workers: int) -> list[int]:
    return values[worker::workers]


def dropping(values: list[int], worker: int, workers: int) -> list[int]:
    size = len(values) // workers
    return values[worker * size : (worker + 1) * size]


def shuffled_anew() -> list[int]:
    return np.random.default_rng().permutation(30).tolist()


def in_order() -> list[int]:
    return [*range(30)]


def test_a_stream_is_compared_as_a_whole() -> None:
    """Samples that come several times or never are found also if the order is another one in each reading."""
    right = check(Parted(in_order, strided), workers=4)
    assert right.ok
    assert "bit for bit" in str(right)
    assert "bit for bit" not in str(check(Parted(in_order, strided), samples=20, workers=4)), "cut"
    assert "4 workers repeat samples" in words(check(Parted(shuffled_anew, strided), workers=4))
    assert "leave out samples of a serial loop: 2 of 30" in words(
        check(Parted(in_order, dropping), workers=4)
    )


class Raises(Honest):
    """Each `every`-th sample raises."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self.every = every

    def __getitem__(self, index: int) -> int:
        if index % self.every == 0:
            # Two errors of one type are the same, whatever they say.
            raise FileNotFoundError(2, "No such file", f"{index} at {time.perf_counter()}")
        return index


@pytest.mark.parametrize(("every", "failed"), [(1, 64), (2, 32)])
def test_samples_that_raise_are_a_fault(every: int, failed: int) -> None:
    report = check(Raises(every), samples=64, workers=2)
    assert not report.ok
    assert report.failed == failed
    assert sum(finding.level == "fault" for finding in report.findings) == 1
    first = "raise FileNotFoundError: [Errno 2] No such file: '0"
    assert f"{failed} of 64 samples {first}" in words(report, "fault")
    assert "bit for bit" not in str(report)


@pytest.mark.parametrize("dataset", [Honest(0), Sharded(0), []], ids=["map", "iterable", "list"])
def test_an_empty_dataset_is_a_fault(dataset: Any) -> None:
    report = check(dataset, samples=8, workers=2)
    assert not report.ok
    assert "the dataset has no samples" in words(report, "fault")
    assert "Nothing could be compared" in str(report)


def test_an_iterable_dataset_that_raises_in_general_or_in_workers_alone_is_said_to() -> None:
    class NeedsNoWorker(Sharded):
        def __iter__(self) -> Iterator[int]:
            if get_worker_info():
                raise RuntimeError("no workers, please")
            return iter(range(100))

    class Breaks(Sharded):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise OSError("the second sample is damaged")

    report = check(Breaks(), samples=16, workers=4)
    assert "1 of 2 samples raise OSError: the second sample is damaged (index 1 first)" in words(
        report, "fault"
    )
    assert "each of 4 workers" not in words(report)
    assert str(report).endswith(
        "gave the other samples as a serial loop does. Fix those that raise."
    )
    report = check(NeedsNoWorker(), samples=16, workers=4)
    assert "with 4 workers, the dataset raises RuntimeError: no workers, please" in words(
        report, "fault"
    )


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ("a string", "got str"),
        (DataLoader([1, 2]), "Give its dataset"),
        (Honest, "Give an instance"),
        (Honest(-1), "is unknown: len.. raises ValueError"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_dataset_is_refused(dataset: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        check(dataset)


@dataclass
class Sample:
    x: torch.Tensor
    y: int = 0


MAKES: dict[str, Callable[[int], Any]] = {
    "sparse": lambda k: torch.sparse_coo_tensor(
        [[0, 2]], [1.0, float(k)], (4,), check_invariants=True
    ),
    "bfloat16": lambda k: torch.tensor([k, float("nan")], dtype=torch.bfloat16),
    "empty": lambda k: (torch.empty(0, 3), k),
    "dataclass": lambda k: Sample(torch.tensor([k, k])),
    "object array": lambda k: np.array([None, str(k)], dtype=object),
    "not a number": lambda k: (float("nan"), np.array([np.nan, k])),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_samples_of_any_kind_are_compared(make: Callable[[int], Any]) -> None:
    assert same(make(1), make(1))
    assert not same(make(1), make(2))


class Fills(Dataset[Any]):
    """Fills rows itself; those of index `wrong` and beyond with other values than `__getitem__` returns."""

    def __init__(self, wrong: int) -> None:
        self.wrong = wrong

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(2, generator=fastload.sample_generator())
        return index + noise, index

    def empty_sample(self) -> Any:
        return torch.empty(2), 0

    def fill_rows(self, run: Run) -> list[int]:
        values, labels = run.rows
        labels[:] = run.indices
        for row, index, key in zip(values, run.indices, run.keys.tolist(), strict=True):
            torch.rand(2, generator=torch.Generator().manual_seed(key), out=row)
            row += index + (index >= self.wrong)
        return []


def test_rows_that_are_filled_otherwise_than_samples_are_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check(Fills(40), samples=20, workers=2).ok
    said = "fill_rows() writes other samples than __getitem__ returns, in {} of 20"
    assert said.format(5) in words(check(Fills(30), samples=20, workers=2))
    monkeypatch.setattr(
        Fills, "__getitem__", lambda self, index: None
    )  # which torch cannot collate
    assert said.format(20) in words(check(Fills(40), samples=20, workers=2))


# ---- no fault ----


@pytest.mark.parametrize(
    "dataset",
    [
        Honest(),
        Honest(1),
        TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20)),
        Sharded(3),
        [(np.arange(4) * k, k) for k in range(30)],
    ],
    ids=lambda dataset: f"{type(dataset).__name__}-{len(getattr(dataset, '__dict__', dataset))}",
)
@pytest.mark.parametrize("workers", [None, 1, 4])
def test_an_honest_dataset_passes(dataset: Any, workers: int | None) -> None:
    report = check(dataset, samples=16, workers=workers)
    assert report.ok, str(report)
    assert not words(report, "fault")
    assert report.workers == workers or max(2, usable_cores())
    chosen = FastDataLoader(dataset, 64, num_workers=report.workers).chosen()
    names = {"thread": "threads", "process": "processes", "none": "the loop"}
    assert report.default.startswith(names[chosen.kind])
    assert f" it: {chosen.reason}" in str(report)
    assert 1 <= report.samples <= 16
    assert "bit for bit" in str(report)


def test_check_leaves_everything_as_it_was() -> None:
    dataset, iterable = Honest(), Sharded()
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[union-attr]
    interval, state = sys.getswitchinterval(), dict(vars(dataset))
    check(dataset, samples=16)
    check(iterable, samples=16)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[union-attr]
    assert sys.getswitchinterval() == interval
    assert vars(dataset) == state
    assert not [t for t in threading.enumerate() if t.name.startswith("fastload-")]


# ---- the command ----

MODULE = """
    import os, random, signal, threading, torch
    from torch.utils.data import IterableDataset

    class Good(torch.utils.data.Dataset):
        def __len__(self): return 20
        def __getitem__(self, index): return index

    class Counts(Good):
        def __getitem__(self, index):
            counted.append(index)
            return index

    class Needs(Good):
        def __init__(self, root): self.root = root

    class Missing(Good):
        def __getitem__(self, index): raise FileNotFoundError("gone.jpg")

    class Negative(Good):
        def __len__(self): return -3

    class Exits(Good):
        def __getitem__(self, index): os._exit(3)

    def make(): return Good()
    loader = torch.utils.data.DataLoader([1])
    good = Good()
    counted = []
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    (tmp_path / "sets_to_check.py").write_text(textwrap.dedent(MODULE))
    return "sets_to_check"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["sets_to_check:Good", "--samples", "8", "--workers", "2"], 0, "Good: 8 samples"),
        (["sets_to_check:make"], 0, "bit for bit"),
        (
            ["sets_to_check:Counts"],
            0,
            "threads would share this: `sets_to_check.Counts.__getitem__`",
        ),
        (["sets_to_check:Missing"], 1, "fault"),
        ([], 2, "Missing argument"),
        (["sets_to_check"], 2, "MODULE:NAME"),
        (["no_such_module:good"], 2, "no_such_module"),
        (["sets_to_check:nothing"], 2, "nothing"),
        (["sets_to_check:loader"], 2, "Give its dataset"),
        (["sets_to_check:Needs"], 2, "Needs"),
        (["sets_to_check:Negative"], 2, "0 or more"),
        (["sets_to_check:good", "--workers", "0"], 2, "--workers"),
    ],
)
def test_the_command_ends_with_0_1_or_2(
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    said: str,
) -> None:
    def here(_: str, options: dict[str, Any], **__: Any) -> Ended:
        """Stand in for the child: a new Python imports torch for seconds."""
        return Ended(result=checked(options), error=None, status=0, peak_bytes=None, messages="")

    monkeypatch.setattr("fastload.measure.fresh.run_fresh", here)
    monkeypatch.syspath_prepend(tmp_path)
    ended = CliRunner().invoke(main, ["check", *arguments])
    sys.modules.pop(module, None)
    assert ended.exit_code == status, ended
    assert said in ended.output


def test_the_process_tells_of_a_dataset_that_ends_it(module: str, tmp_path: Path) -> None:
    arguments = ["-m", "fastload", "check", f"{module}:Exits", "--samples", "4"]
    command = run_python(*arguments, cwd=tmp_path)
    assert command.returncode == 1, command
    assert "the dataset ended the process as it was read serially" in command.stdout
    assert "exit code 3" in command.stdout
    assert "Traceback" not in command.stderr
