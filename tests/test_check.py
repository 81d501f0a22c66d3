"""Promise: `check` tells a data set that threads can read from one that they cannot, and says what to do."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from fastload.cli import main
from fastload.inspection import Report, check

ROOT = Path(__file__).parents[1]
RECORD = 16


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

    def __getitem__(self, index: int) -> float:
        if self.source == "random":
            return random.random()
        if self.source == "numpy":
            return float(np.random.rand())
        return float(torch.rand((), generator=torch.default_generator))


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


class HoldsTheGil(Honest):
    def __getitem__(self, index: int) -> int:
        total = 0
        for k in range(20_000):
            total += k * index
        return total


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


class OwnIterator(Sharded):
    def __init__(self) -> None:
        super().__init__(48)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return self.at - 1


def words(report: Report, level: str | None = None) -> str:
    return " ".join(
        f"{finding.what} {finding.advice}"
        for finding in report.findings
        if level in (None, finding.level)
    )


# ---- faults ----


def test_a_file_position_that_threads_share_is_a_fault(tmp_path: Path) -> None:
    dataset = Records(tmp_path / "records.bin")
    with dataset.file:
        report = check(dataset, samples=64, workers=4)
    assert not report.ok
    faults = words(report, "fault")
    assert "copy_dataset" in faults or 'worker_method="process"' in faults
    assert "file" in words(report)
    assert "Do not" in str(report)


def test_a_position_of_its_own_for_each_copy_is_advised_where_it_helps(tmp_path: Path) -> None:
    class Reopens(Records):
        def __deepcopy__(self, memo: dict[int, Any]) -> Reopens:
            other = copy.copy(self)
            other.file = self.path.open("rb")
            opened.append(other.file)
            return other

    opened: list[Any] = []
    dataset = Reopens(tmp_path / "records.bin")
    with dataset.file:
        report = check(dataset, samples=64, workers=4)
    for file in opened:
        file.close()
    assert not report.ok
    assert "copy_dataset=True" in words(report, "fault")


def test_a_buffer_used_again_is_a_fault() -> None:
    report = check(OneBuffer(), samples=64, workers=4)
    assert not report.ok
    assert "Return a copy of the buffer" in words(report, "fault")


@pytest.mark.parametrize(
    ("source", "names"),
    [("random", ["random"]), ("numpy", ["NumPy", "numpy"]), ("torch", ["torch"])],
)
def test_draws_from_global_random_state_are_found_and_named(source: str, names: list[str]) -> None:
    report = check(Draws(source), samples=32, workers=2)
    said = words(report)
    assert any(name in said for name in names), said
    assert "sample_rng" in said or "sample_generator" in said or "generator" in said


def test_an_iterable_that_every_worker_reads_whole_is_found() -> None:
    report = check(Unsharded(), samples=32, workers=3)
    assert "get_worker_info" in words(report)


def test_a_data_set_that_is_its_own_iterator_is_found() -> None:
    assert "own iterator" in words(check(OwnIterator(), samples=32, workers=2))


def test_a_map_style_data_set_with_a_cursor_is_a_fault() -> None:
    class Cursor(Honest):
        at = -1

        def __getitem__(self, index: int) -> int:
            self.at += 1
            return self.at

    assert not check(Cursor(), samples=32, workers=2).ok


# ---- no fault ----


@pytest.mark.parametrize(
    "dataset",
    [
        Honest(),
        Honest(5),
        Honest(1),
        Honest(seconds=0.001),
        TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20)),
        Sharded(),
        Sharded(3),
        [(np.arange(4) * k, k) for k in range(30)],
    ],
    ids=lambda dataset: f"{type(dataset).__name__}-{len(getattr(dataset, '__dict__', dataset))}",
)
@pytest.mark.parametrize("workers", [1, 4])
def test_an_honest_data_set_passes(dataset: Any, workers: int) -> None:
    report = check(dataset, samples=16, workers=workers)
    assert report.ok, str(report)
    assert not words(report, "fault")
    assert report.workers == workers
    assert 1 <= report.samples <= 16 * max(workers, 1)
    assert "bit for bit" in str(report)


def test_equal_means_that_nan_equals_nan() -> None:
    class HasNan(Honest):
        def __getitem__(self, index: int) -> Any:
            return {
                "x": torch.tensor([index, float("nan")]),
                "y": float("nan"),
                "z": np.array([np.nan, 1]),
            }

    assert check(HasNan(), samples=8, workers=2).ok


def test_a_map_style_data_set_is_looked_at_over_its_whole_length() -> None:
    class Far(Honest):
        seen: set[int] = set()  # noqa: RUF012 - shared by the copies on purpose

        def __getitem__(self, index: int) -> int:
            self.seen.add(index)
            return index

    check(Far(10_000), samples=20, workers=2)
    assert len(Far.seen) <= 200
    assert min(Far.seen) < 1000
    assert max(Far.seen) >= 9000


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


# ---- the GIL ----


def test_pure_python_has_a_high_share_under_the_gil_and_waiting_a_low_one() -> None:
    shares: list[tuple[float, float]] = []
    for _ in range(3):  # other processes on this machine may take the cores
        python = check(HoldsTheGil(), samples=64, workers=4)
        waits = check(Honest(seconds=0.004), samples=64, workers=4)
        shares.append((python.gil_share, waits.gil_share))
        if python.gil_share > 0.6 and waits.gil_share < 0.2:
            break
    else:
        raise AssertionError(shares)
    assert 'worker_method="process"' in words(python)
    assert 'worker_method="process"' not in words(waits)
    assert python.cpu_share > waits.cpu_share
    assert waits.threads_ratio > 1.5 > python.threads_ratio


# ---- the command ----

MODULE = """
    import random, torch
    from torch.utils.data import IterableDataset

    class Good(torch.utils.data.Dataset):
        def __len__(self): return 20
        def __getitem__(self, index): return index

    class Bad(Good):
        at = 0
        def __getitem__(self, index):
            self.at += 1
            return self.at

    class Needs(Good):
        def __init__(self, root): self.root = root

    def make(): return Good()
    good, bad, number = Good(), Bad(), 7
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "sets_to_check.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "sets_to_check"
    sys.modules.pop("sets_to_check", None)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["check", *arguments])


@pytest.mark.parametrize("name", ["good", "Good", "make"])
def test_the_command_ends_with_0_where_threads_do(module: str, name: str) -> None:
    result = call(f"{module}:{name}", "--samples", "8", "--workers", "2")
    assert result.exit_code == 0, result.output
    assert "Good: 8 samples" in result.output
    assert "bit for bit" in result.output


@pytest.mark.parametrize("name", ["bad", "Bad"])
def test_the_command_ends_with_1_where_they_do_not(module: str, name: str) -> None:
    result = call(f"{module}:{name}", "--samples", "8")
    assert result.exit_code == 1, result.output
    assert "fault" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("sets_to_check", "MODULE:NAME"),
        ("sets_to_check:", "MODULE:NAME"),
        (":good", "MODULE:NAME"),
        ("no_such_module:good", "no_such_module"),
        ("sets_to_check:nothing", "nothing"),
        ("sets_to_check:number", "number|int"),
        ("sets_to_check:Needs", "Needs|root"),
    ],
)
def test_the_command_ends_with_2_and_one_line_where_it_was_called_wrongly(
    module: str, path: str, said: str
) -> None:
    result = call(path)
    assert result.exit_code == 2, result.output
    assert any(word in result.output for word in said.split("|"))
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "options", [("--samples", "0"), ("--workers", "0"), ("--workers", "x"), ()]
)
def test_wrong_options_end_with_2(module: str, options: tuple[str, ...]) -> None:
    assert call(*((f"{module}:good", *options) if options else ())).exit_code == 2


def test_python_m_fastload_check(module: str, tmp_path: Path) -> None:
    """The exit code and the words of the command are those of the process."""
    ended = subprocess.run(
        [sys.executable, "-m", "fastload", "check", f"{module}:bad", "--samples", "4"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "fault" in ended.stdout
    assert "Traceback" not in ended.stderr
