"""Promises:
- `prepare` gives the same bytes with processes, threads or any executor, in the order of the sources.
- `prepare` makes a part again only if its source or the function changed.
- Errors of `prepare` name the source.
- A dead worker or a full memory loses no complete part of `prepare`.
- Several processes prepare a set once.
- A preparation that was killed resumes, even if processes that it had forked live on.
- `prepare` in a program without `if __name__ == "__main__":` ends with a sentence, and never waits for itself.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload import store
from fastload._kit.fingerprint import fingerprint
from fastload.errors import PrepareError, StoreFullError
from fastload.store.root import collect, sets
from tests.children import Python, run_python
from tests.contracts.sets import WRITES, at_change, killed
from tests.files import arrow_files

ROWS = 50


def rows_of(number: int) -> dict[str, Any]:
    return {"x": torch.full((ROWS, 4), number), "y": torch.arange(ROWS) + ROWS * number}


def words_of(path: str) -> dict[str, Any]:
    return {"word": Path(path).read_text().split()}


def fails_at(bad: set[int], number: int) -> dict[str, Any]:
    if number in bad:
        raise HostileError(number, "no such thing")
    return rows_of(number)


class HostileError(Exception):
    """Cannot be unpickled: it is made of two arguments, and says one."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text}: {number}")


def dies_at(bad: int, number: int) -> dict[str, Any]:
    if number == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    return rows_of(number)


def rows_in(path: Path) -> list[int]:
    dataset = store.get(path, data="x", label="y")
    found = []
    for x, y in dataset.__getitems__(range(len(dataset))):
        assert bool((x == y // ROWS).all())
        found.append(int(y))
    return found


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers forked, which takes hundredths of a second. A spawned worker imports torch for seconds."""
    module = importlib.import_module("fastload.store.preparing")
    monkeypatch.setattr(module, "get_context", lambda _: multiprocessing.get_context("fork"))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_parts_become_a_set_in_the_order_of_their_sources(workers: int, tmp_path: Path) -> None:
    """The process is spawned, as it is for users. The bytes are the same in each case."""
    found = store.prepare(rows_of, range(10), tmp_path / "set", workers=workers)
    assert (found.rows, found.made, found.reused) == (10 * ROWS, 10, 0)
    assert rows_in(tmp_path / "set") == list(range(10 * ROWS))
    assert str(found).endswith("500 rows, 10 parts made, 0 reused")
    assert os.listdir(tmp_path / ".unsealed") == ["set.lock"]
    store.prepare(rows_of, range(10), tmp_path / "again", workers=0)
    assert arrow_files(tmp_path / "set") == arrow_files(tmp_path / "again")


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    first = store.prepare(rows_of, range(5), tmp_path / "set", workers=0)
    again = store.prepare(rows_of, range(5), tmp_path / "set", workers=0)
    assert (again.id, again.rows, again.made, again.reused) == (first.id, first.rows, 0, 5)


def test_a_set_of_other_sources_is_not_taken_for_this_one(tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.txt" for name in "abc"]
    for file in files:
        file.write_text(f"{file.stem} word")
    out = tmp_path / "set"
    store.prepare(words_of, files, out, workers=0)
    files[1].write_text("changed words")
    with pytest.raises(
        FileExistsError,
        match=r"1 of 3 sources, such as .*b.txt, are new or changed, or the function",
    ):
        store.prepare(words_of, files, out, workers=0)
    found = store.prepare(words_of, files, out, workers=0, replace=True)
    assert (found.made, found.reused) == (1, 2)
    assert list(store.get(out, data="word")) == ["a", "word", "changed", "words", "c", "word"]
    with pytest.raises(FileExistsError, match="3 of 3 sources"):
        store.prepare(words_of, files, out, workers=0, version="2")
    with pytest.raises(FileExistsError, match="in another order"):
        store.prepare(words_of, files[::-1], out, workers=0)
    store.put({"x": torch.zeros(3)}, tmp_path / "put")
    with pytest.raises(FileExistsError, match="which prepare did not make"):
        store.prepare(rows_of, range(3), tmp_path / "put", workers=0)


FAILING = {3}


def fails(number: int) -> dict[str, Any]:
    return fails_at(FAILING, number)


@pytest.mark.usefixtures("forked")
def test_a_source_that_fails_is_named_and_the_other_parts_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        PrepareError, match=r"the source 3: HostileError: no such thing: 3"
    ) as caught:
        store.prepare(fails, range(5), tmp_path / "set", workers=1)
    assert "in fails_at" in str(caught.value)  # the traceback
    assert not (tmp_path / "set").exists()
    monkeypatch.setattr(sys.modules[__name__], "FAILING", set())
    found = store.prepare(fails, range(5), tmp_path / "set", workers=0)
    assert found.reused >= 3  # a worker may have begun the last part before the error was seen
    assert rows_in(tmp_path / "set") == list(range(5 * ROWS))


@pytest.mark.usefixtures("forked")
def test_a_worker_that_dies_loses_no_complete_part(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"a worker process was killed.* Call prepare again"):
        store.prepare(functools.partial(dies_at, 4), range(5), tmp_path / "set", workers=1)
    store.prepare(rows_of, range(5), tmp_path / "set", workers=0)
    assert rows_in(tmp_path / "set") == list(range(5 * ROWS))


def test_killed_at_a_change_of_the_disk_it_leaves_nothing_half_and_loses_no_part(
    tmp_path: Path,
) -> None:
    """For `put` see `tests/contracts/sets.py`."""

    def prepared(name: str) -> store.Prepared:
        return store.prepare(rows_of, range(4), tmp_path / name, workers=0)

    with at_change(0, lambda: None, WRITES) as calls:
        prepared("whole")
    reused = []
    for number in range(1, len(calls) + 1, 3):
        name = f"set-{number}"
        assert killed(number, WRITES, functools.partial(prepared, name))
        reused.append(prepared(name).reused)
        assert arrow_files(tmp_path / name) == arrow_files(tmp_path / "whole")
    assert reused == sorted(reused)
    assert {*reused} == {*range(5)}
    collect(str(tmp_path))
    assert {path.suffix for path in (tmp_path / ".unsealed").iterdir()} == {".lock"}


def test_parts_without_rows_are_left_out_and_parts_of_other_columns_refused(tmp_path: Path) -> None:
    counts = {"a": 0, "b": 3, "c": 0, "d": 2}
    store.prepare(functools.partial(ones, counts), list(counts), tmp_path / "set", workers=0)
    assert len(store.get(tmp_path / "set")) == 5
    with pytest.raises(
        PrepareError,
        match=r"the source 1 gave the columns .*double.*, but the source 0 gave .*int64",
    ):
        store.prepare(halves, [0, 1], tmp_path / "other", workers=0)
    with pytest.raises(ValueError, match="all parts are empty"):
        store.prepare(functools.partial(ones, counts), ["a", "c"], tmp_path / "none", workers=0)
    with pytest.raises(ValueError, match="the list of sources is empty"):
        store.prepare(rows_of, [], tmp_path / "none")


def ones(counts: dict[str, int], name: str) -> dict[str, Any]:
    return {"x": torch.ones(counts[name])}


def halves(number: int) -> dict[str, Any]:
    return {"x": np.full(3, number / 2 if number else 0)}


def test_one_source_given_twice_is_made_once(tmp_path: Path) -> None:
    found = store.prepare(rows_of, [1, 0, 1], tmp_path / "set", workers=0)
    assert found.rows == 3 * ROWS
    assert rows_in(tmp_path / "set")[::ROWS] == [ROWS, 0, ROWS]


class Elsewhere(Executor):
    """Runs on a node that does not see this node's folders."""

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Any:  # type: ignore[override]
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(function, *args, **more)
        (folder,) = (path for path in Path(self.root, ".unsealed").iterdir() if path.is_dir())
        for path in folder.iterdir():
            path.unlink()
        return future

    root = ""


def test_workers_that_do_not_see_the_folder_are_told_of(tmp_path: Path) -> None:
    executor = Elsewhere()
    executor.root = str(tmp_path)
    with pytest.raises(PrepareError, match="All workers must see that folder"):
        store.prepare(rows_of, range(3), tmp_path / "set", executor=executor)


class FirstFails(Executor):
    """Like Dask's if results and a cancellation cross: a cancelled future wakes no thread that waits for it."""

    def __init__(self) -> None:
        self.first = True

    def submit(self, function: Any, /, *args: Any, **more: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self.first:
            future.set_exception(RuntimeError("no worker is left"))
        self.first = False
        return future


def test_prepare_does_not_wait_for_cancelled_calls(tmp_path: Path) -> None:
    with pytest.raises(
        PrepareError, match=r"gave up the source 0: RuntimeError: no worker is left"
    ):
        store.prepare(rows_of, range(3), tmp_path / "set", executor=FirstFails())


def test_memory_that_is_full_is_no_failed_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.store.room.free_bytes", lambda path: 1000)
    with pytest.raises(StoreFullError, match=r"needs .* 1,000 are free"):
        store.prepare(rows_of, range(3), tmp_path / "set", workers=0)
    assert list(sets(str(tmp_path))) == []


PROGRAM = """
import sys, time, torch
from fastload import store

def rows_of(number):
    time.sleep(0.004)
    return {"x": torch.full((50, 4), number), "y": torch.arange(50) + 50 * number}

if __name__ == "__main__":
    print("begin", flush=True)
    print(store.prepare(rows_of, range(20), sys.argv[1], workers=int(sys.argv[2])), flush=True)
"""


def program(tmp_path: Path, out: Path, workers: int = 0) -> subprocess.Popen[str]:
    script = tmp_path / "program.py"
    if not script.exists():  # a process that has just begun may be reading it
        script.write_text(PROGRAM)
    return Python([script, out, workers], stdout=subprocess.PIPE, text=True)


def test_several_processes_that_prepare_one_set_make_it_once(tmp_path: Path) -> None:
    running = [program(tmp_path, tmp_path / "set") for _ in range(3)]
    said = "".join(process.communicate()[0] for process in running)
    assert said.count("20 parts made") == 1
    assert said.count("0 parts made, 20 reused") == 2
    assert rows_in(tmp_path / "set") == list(range(20 * ROWS))


def test_what_is_left_of_a_preparation_is_collected_unless_it_runs(tmp_path: Path) -> None:
    with pytest.raises(PrepareError):
        store.prepare(functools.partial(fails_at, {3}), range(5), tmp_path / "set", workers=0)
    with program(tmp_path, tmp_path / "running") as process:
        folder = tmp_path / ".unsealed" / "running"
        while not folder.exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        assert [name for name, _ in collect(str(tmp_path))] == ["set"]
        process.send_signal(signal.SIGCONT)
        process.wait()
    assert rows_in(tmp_path / "running") == list(range(20 * ROWS))


class Chain:
    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)


def scaled(by: int) -> Any:
    return lambda number: number * by


def test_a_fingerprint_is_of_a_functions_own_code_and_arguments_and_of_content() -> None:
    """Parts of the sources 1 and "1" would be one, and so would those of two orders of the same steps."""
    ones = lambda: 1  # noqa: E731
    twos = lambda: 2  # noqa: E731
    tensors = torch.zeros(3), torch.ones(3), torch.zeros(3, 1), torch.zeros(3, dtype=torch.int32)
    different = [
        *(
            scaled(2),
            scaled(3),
            functools.partial(rows_of, 1),
            functools.partial(rows_of, 2),
            rows_of,
        ),
        *(ones, twos, Chain(ones, twos, ones), Chain(ones, twos, twos), Chain, Chain(1).__init__),
        *("1", 1, [1], (1,), {1: 1}, {1}, None, b"1", range(1), Path("1.txt"), *tensors),
        *(tensor.numpy() for tensor in tensors),
    ]
    found = [fingerprint(value) for value in different]
    assert len({*found}) == len(found)
    assert [fingerprint(value) for value in different] == found
    assert fingerprint(scaled(2)) == fingerprint(scaled(2))
    assert fingerprint("1", paths=True) != fingerprint(1, paths=True)


def test_a_fingerprint_is_the_same_in_every_process(tmp_path: Path) -> None:
    given = "({'b', 'a', 'c'}, ('a.jpg', 3), {'k': 1.5}, range(3), None, b'x')"
    program = f"from fastload._kit.fingerprint import fingerprint; print(fingerprint({given}))"
    found = {
        subprocess.check_output(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_texts_of_sources_are_paths_and_texts_of_functions_are_not(tmp_path: Path) -> None:
    file = tmp_path / "folder" / "a.txt"
    file.parent.mkdir()
    file.write_text("a")
    before = [
        fingerprint(str(p), paths=paths) for p in (file, file.parent) for paths in (True, False)
    ]
    file.write_text("longer")
    after = [
        fingerprint(str(p), paths=paths) for p in (file, file.parent) for paths in (True, False)
    ]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, False, True]


def test_sources_that_cannot_be_told_apart_are_refused(tmp_path):
    """Two open files would have one fingerprint, and the rows of one would stand for both."""
    for name in "ab":
        (tmp_path / name).write_text(name)
    with (
        (tmp_path / "a").open() as first,
        (tmp_path / "b").open() as second,
        pytest.raises(TypeError, match="TextIOWrapper cannot be pickled"),
    ):
        store.prepare(str, [first, second], "set", root=tmp_path, workers=0)


FORKED = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from fastload.store import prepare

def make(source):
    print(os.getpid(), flush=True)
    os.read(int(sys.argv[2]), 1)  # the test kills the parent before it lets go

prepare(make, [1], "a", root=sys.argv[1], executor=ProcessPoolExecutor(1, get_context("fork")))
"""


def test_forked_workers_do_not_hold_the_lock(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    command = ["-c", FORKED, tmp_path, reading]
    with Python(command, stdout=subprocess.PIPE, pass_fds=[reading]) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            assert store.prepare(rows_of, [1], "a", root=tmp_path, workers=0).made == 1
            os.kill(worker, 0)  # it lives
        finally:
            os.kill(worker, signal.SIGKILL)
            os.close(reading)
            os.close(writing)


@pytest.mark.slow
def test_a_program_without_guard_ends(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from fastload.store import prepare\n"
        "prepare(abs, [1, 2], 'a', root=sys.argv[1], workers=1)\n"
    )
    ended = run_python(program, tmp_path / "sets")
    assert ended.returncode == 1
    assert 'Call it under `if __name__ == "__main__":`' in ended.stderr
