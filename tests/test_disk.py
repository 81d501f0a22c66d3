"""Promises:
- A write that fails half way leaves the old file, and nothing beside it.
- A lock keeps other processes out until it is freed. It waits, refuses, or does without on a file system that has
  none.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload._kit.disk import lock, locked, locked_path, replace_file, sync_folder, write_all
from tests.fakes import limited_files


def fail(number: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


# ---- files ----


@pytest.mark.parametrize("name", ["partial", None], ids=["named by the caller", "beside it"])
def test_the_file_is_the_old_one_until_the_block_ends_and_then_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    """Its permissions are those of the umask. A file that a kill left does not count."""
    monkeypatch.chdir(tmp_path)
    path = Path("a")
    path.write_bytes(b"old")
    if name:
        Path(name).write_bytes(b"much that a kill left")
        Path(name).chmod(0o644)
    before = os.umask(0o027)
    try:
        with replace_file(path, partial=name and Path(name)) as file:
            file.write(b"new")
            file.flush()
            assert path.read_bytes() == b"old"
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_an_error_names_the_file_that_it_is_about(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replace_file(tmp_path / "a") as file:
        file.write((tmp_path / "source").read_bytes())
    assert caught.value.filename == str(tmp_path / "source")
    with pytest.raises(FileNotFoundError) as caught, replace_file(tmp_path / "none" / "a"):
        pass
    assert caught.value.filename == str(tmp_path / "none" / "a")


@pytest.mark.parametrize(
    ("broken", "own"),
    [("block", False), ("write", True), ("write", False), ("fsync", True), ("replace", True)],
)
def test_after_a_failure_half_way_the_old_content_stands_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, own: bool
) -> None:
    path, partial = tmp_path / "a", tmp_path / "partial"
    path.write_bytes(b"old")
    if broken in ("fsync", "replace"):
        monkeypatch.setattr(os, broken, fail(errno.EIO))
    expected = KeyboardInterrupt if broken == "block" else OSError
    with (
        limited_files(1000 if broken == "write" else 1 << 30),
        pytest.raises(expected) as caught,
        replace_file(path, partial=None if own else partial) as file,
    ):
        file.write(b"x" * 10_000)
        if broken == "block":
            raise KeyboardInterrupt
    if isinstance(caught.value, OSError):
        assert caught.value.filename == (str(path) if own else None)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_file_and_folder_are_synced_unless_that_is_not_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    with replace_file(tmp_path / "a", partial=tmp_path / "partial"):
        pass
    assert synced == [str(tmp_path / "partial"), str(tmp_path)]
    with replace_file(tmp_path / "a", durable=False):
        pass
    sync_folder(tmp_path)
    assert synced[2:] == [str(tmp_path)]


def test_everything_is_written_and_a_full_disk_is_told_with_the_name(tmp_path: Path) -> None:
    with open(tmp_path / "a", "wb") as file:
        assert write_all(file.fileno(), "a", b"x" * 800) == 800
        with limited_files(1000), pytest.raises(OSError, match=r"File too large: 'the name'"):
            write_all(file.fileno(), "the name", b"y" * 800)
    assert (tmp_path / "a").read_bytes() == b"x" * 800 + b"y" * 200


# ---- locks: two opens of one file are as two processes ----


def test_a_lock_is_held_in_the_block_and_free_after_it_or_once_its_file_is_closed(
    tmp_path: Path,
) -> None:
    with open(tmp_path / "a", "ab") as mine, open(tmp_path / "a", "ab") as theirs:
        with locked(mine), pytest.raises(BlockingIOError):
            lock(theirs, wait=False)
        assert lock(theirs, wait=False)
        theirs.close()
        assert lock(mine, wait=False)


def test_a_file_that_was_deleted_while_it_was_waited_for_is_not_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "lock"
    with locked_path(path):
        theirs = path.open("ab")
        assert path.exists()
    with theirs:
        lock(theirs)

        def delete() -> None:
            path.unlink()
            path.parent.rmdir()
            fcntl.flock(theirs, fcntl.LOCK_UN)

        with (
            locked_path(path, wait=delete),
            path.open("ab") as another,
            pytest.raises(BlockingIOError),
        ):
            lock(another, wait=False)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_without_locks_the_block_runs_if_the_lock_is_not_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", fail(number))
    with open(tmp_path / "a", "ab") as file:
        with pytest.raises(OSError, match=os.strerror(number)):
            lock(file)
        if number == errno.EIO:  # a fault of a file system that has locks
            with pytest.raises(OSError, match=os.strerror(number)):
                lock(file, needed=False)
        else:
            assert not lock(file, needed=False)
            with locked(file, needed=False):
                pass
