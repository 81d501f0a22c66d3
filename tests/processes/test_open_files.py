"""Promises:
- A forked worker has its own position in every regular file that it inherited. An attribute, a module, a closure or a
  library in C may hold the file.
- The descriptor of a file that a worker opens again keeps its number, position and flags.
- What forks would share nevertheless is named once: pipes, sockets, a library's connections and connections to
  databases at `iter()`, before a worker starts; files that a worker cannot open again with the first batch.
- An open handle that hangs in every fork is an error at `iter()`.
- A file that is read and written and stands at its end is written there only, so no line of a log is lost.
"""

# ruff: noqa: SIM115 (files that stay open are the subject)

from __future__ import annotations

import gzip
import multiprocessing
import os
import socket
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import fastload
from fastload.errors import DatasetCopyError
from fastload.processes import open_files, starting
from fastload.safety import libraries

FORK: dict[str, Any] = {"worker_method": "process", "multiprocessing_context": "fork"}
RECORD = 100_000
DATA = b"".join(bytes([k]) * RECORD for k in range(4))


def records(path: Path) -> Path:
    path.write_bytes(DATA)
    return path


def temporary(whence: int = os.SEEK_SET) -> Any:
    file = tempfile.TemporaryFile()
    file.write(DATA)
    file.seek(0, whence)
    return file


def compressed(path: Path) -> Any:
    path.write_bytes(gzip.compress(DATA))
    return gzip.open(path)


HELD: list[Any] = []


class Records:
    """Two samples of each file, each of which moves before either reads."""

    def __init__(self, *files: Any) -> None:
        self.files = files
        self.meeting = multiprocessing.Barrier(2)

    def __len__(self) -> int:
        return 2 * len(HELD or self.files)

    def __getitem__(self, index: int) -> list[int]:
        file, index = (HELD or self.files)[index // 2], index % 2
        if isinstance(file, int):  # as a library in C holds it
            os.lseek(file, index * RECORD, os.SEEK_SET)
            self.meeting.wait()
            return list(os.read(file, 3))
        file.seek(index * RECORD)
        self.meeting.wait()
        return list(file.read(3))


def read_by_two(dataset: Any) -> list[Any]:
    with fastload.DataLoader(dataset, None, num_workers=2, **FORK) as loader:
        return [sample if isinstance(sample, list) else sample.tolist() for sample in loader]


def test_workers_move_in_a_file_independently(tmp_path: Path) -> None:
    with (
        open(records(tmp_path / "raw"), "rb", buffering=0) as raw,
        compressed(tmp_path / "gzip") as zipped,
        temporary() as begun,
        temporary(os.SEEK_END) as ended,
    ):
        assert read_by_two(Records(raw, zipped, begun, ended)) == [[0] * 3, [1] * 3] * 4


def test_a_descriptor_that_a_module_holds(tmp_path: Path) -> None:
    HELD.append(os.open(records(tmp_path / "records"), os.O_RDONLY))
    os.lseek(HELD[0], 7, os.SEEK_SET)
    try:
        assert read_by_two(Records()) == [[0] * 3, [1] * 3]
        assert os.lseek(HELD[0], 0, os.SEEK_CUR) == 7  # the program's own file stays where it is
    finally:
        os.close(HELD.pop())


def in_fork(call: Callable[[], Any]) -> Any:
    """Return what a call returns in a forked process."""
    ours, theirs = multiprocessing.Pipe()
    if not (pid := os.fork()):
        with suppress(BaseException):
            theirs.send(call())
        os._exit(0)
    theirs.close()
    try:
        return ours.recv()
    finally:
        ours.close()
        os.waitpid(pid, 0)


def test_descriptors_keep_numbers_positions_and_flags(tmp_path: Path) -> None:
    path = records(tmp_path / "records")
    flags = {
        "reads": os.O_RDONLY | os.O_NONBLOCK,
        "deleted": os.O_RDWR | os.O_APPEND | os.O_CLOEXEC,
        "writes": os.O_WRONLY,
        "path": os.O_PATH,
    }
    opened = {name: os.open(path, flag) for name, flag in flags.items()}
    opened["memory"] = os.memfd_create("fastload-test")
    os.write(opened["memory"], DATA)
    path.unlink()
    for name in ("reads", "deleted", "writes", "memory"):
        os.lseek(opened[name], 5, os.SEEK_SET)
    os.set_inheritable(opened["reads"], True)

    def look() -> Any:
        return [
            (open_files.fcntl.fcntl(number, open_files.fcntl.F_GETFL), os.get_inheritable(number))
            for number in opened.values()
        ]

    def moved() -> Any:
        shared, positions = open_files.take_positions(), {}
        for name in opened.keys() - {"path"}:
            positions[name] = os.lseek(opened[name], 0, os.SEEK_CUR)
            os.lseek(opened[name], 50, os.SEEK_SET)
        return shared, positions, look()

    try:
        shared, positions, seen = in_fork(moved)
        assert shared == []
        assert positions == {"reads": 5, "deleted": 5, "writes": 5, "memory": 5}
        assert seen == look()
        now = {name: os.lseek(opened[name], 0, os.SEEK_CUR) for name in positions}
        # Lines that several processes write into one file still follow one another.
        assert now == {**positions, "writes": 50}
    finally:
        for number in opened.values():
            os.close(number)


class Logs(Records):
    """Two samples, of which both workers write a line."""

    def __getitem__(self, index: int) -> list[int]:
        self.meeting.wait()
        self.files[0].write(f"line {index}\n")
        self.files[0].flush()
        return [index]


@pytest.mark.parametrize("head", ["", "head\n"])
def test_two_workers_write_one_log(head: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with open(path, "w+") as file:
        file.write(head)
        file.flush()
        assert read_by_two(Logs(file)) == [[0], [1]]
    assert sorted(path.read_text().splitlines()) == [*head.splitlines(), "line 0", "line 1"]


def pipe() -> Any:
    reads, writes = os.pipe()
    os.close(writes)
    return open(reads, "rb")


class Connection:
    """As a library in C holds a socket."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self._number = ours.detach()

    def __getstate__(self) -> Any:
        raise AssertionError("it is only looked at")

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        os.close(self._number)
        self._theirs.close()


class Holds(torch.utils.data.Dataset[int]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (pipe, "dataset.held"),
        (Connection, "collate_fn (held)"),
        (lambda: sqlite3.connect(":memory:"), "dataset.held"),
    ],
    ids=["pipe", "connection", "sqlite"],
)
def test_what_forks_share_is_named_once_before_a_worker_starts(
    make: Callable[[], Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = make()

    def collated(batch: Any, at: Any = None) -> Any:
        return batch if held else at

    options = FORK | ({} if "dataset" in where else {"collate_fn": collated})
    dataset = Holds(held if "dataset" in where else None)
    loader = fastload.DataLoader(dataset, num_workers=1, **options)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(starting, "_start", refusing)
            with (
                pytest.warns(RuntimeWarning, match="Open them in `__getitem__`") as caught,
                pytest.raises(NoStartError),
            ):
                iter(loader)
        assert [where in str(one.message) for one in caught] == [True]
        assert caught[0].filename == __file__
        assert len([*loader]) == 2
    finally:
        held.close()


class NoStartError(Exception):
    pass


def refusing(*_: Any) -> None:
    raise NoStartError


class VideoReader:
    """As decord's, of which `tests/compat` reads a real one."""

    __module__ = "decord.video_reader"

    def __reduce__(self) -> Any:
        raise AssertionError("a worker would start")


@pytest.mark.parametrize("method", ["process", "auto"])
def test_a_handle_that_hangs_in_every_fork_is_an_error(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_allowed", set())  # so that the code of this file is read
    loader = fastload.DataLoader(
        Holds({"video": VideoReader()}), num_workers=1, worker_method=method
    )
    with pytest.raises(
        DatasetCopyError, match=r"dataset\.held\['video'\] .*VideoReader.* hangs in a fork"
    ) as caught:
        iter(loader)
    assert "Open it in `__getitem__`" in str(caught.value)


@pytest.mark.parametrize("refused", ["records", "/proc/self/fd"])
def test_a_file_that_a_worker_cannot_open_again_is_named(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, path = os.open, records(tmp_path / "records")

    def refusing(name: Any, *options: Any) -> int:
        if str(name).startswith("/proc/self/fd/") and os.readlink(name) == str(path):
            raise PermissionError(13, "Permission denied")
        return real(name, *options)

    def without_list(name: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    if refused == "records":
        monkeypatch.setattr(os, "open", refusing)
    else:  # the worker inherits it
        monkeypatch.setattr(open_files.os, "listdir", without_list)
    named = pytest.warns(RuntimeWarning, match=rf"{refused} \(Permission denied\)")
    loader = fastload.DataLoader(Holds(0), num_workers=1, **FORK)
    with open(path, "rb"), loader, named:
        assert len([*loader]) == 2
