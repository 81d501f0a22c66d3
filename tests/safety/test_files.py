"""Promises:
- A regular file that is open for reading is opened again for each worker, at the same position. This holds for raw,
  buffered, text and zip files. See also `tests/safety/test_state_is_copied.py`.
- Open compressed files and tar archives have no copy for threads: auto takes processes, and threads that were asked for
  name them.
"""

# ruff: noqa: SIM115 (files that stay open are the subject)

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastload import DataLoader
from fastload.errors import SharedStateWarning
from fastload.safety import libraries
from fastload.safety.files import CannotReopen, reopened

LINES = [f"{i:04d} é 日本 😀 {'x' * (i % 61)}" for i in range(2_000)]
NEWLINES = [None, "", "\n", "\r", "\r\n"]
MIXED = "".join(line + ("\n", "\r\n", "\r")[i % 3] for i, line in enumerate(LINES))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_bytes(MIXED.encode())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "lines.txt").write_bytes(MIXED.encode())
    return folder


def text(path: Path, **options: Any) -> Any:
    return open(path, encoding="utf-8", **options)


KINDS: dict[str, Callable[[Path], Any]] = {
    "raw": lambda p: open(p / "lines.txt", "rb", buffering=0),
    "buffered": lambda p: open(p / "lines.txt", "rb"),
    "small buffer": lambda p: open(p / "lines.txt", "rb", buffering=7),
    "text": lambda p: text(p / "lines.txt"),
    "untranslated": lambda p: text(p / "lines.txt", newline=""),
}


def close(*files: Any) -> None:
    for file in files:
        file.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[], [1], [10, 5_000, 33_333], [10_000_000]])
def test_both_go_on_as_if_alone_from_where_the_file_stood(
    kind: str, sizes: list[int], folder: Path
) -> None:
    file, control = KINDS[kind](folder), KINDS[kind](folder)
    for size in sizes:
        assert file.read(size) == control.read(size)
    file.readline(), control.readline()
    new = reopened(file)
    assert new.tell() == file.tell() == control.tell()
    for size in (3, 1_000, 0, 40_000, 17):
        want = control.read(size), control.readline()
        assert (new.read(size), new.readline()) == want
        assert (file.read(size), file.readline()) == want
    assert new.read() == file.read() == control.read()
    close(file, control, new)


@pytest.mark.parametrize("newline", NEWLINES)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-be", "utf-7"])
def test_text_keeps_its_encoding_and_its_newline_mode_at_any_place(
    tmp_path: Path, encoding: str, newline: str | None
) -> None:
    """The newline mode has no getter: this test fails on a Python that shows it in another way."""
    (plain := tmp_path / "t").write_bytes(MIXED[:9_000].encode(encoding))

    def fresh() -> Any:
        options: dict[str, Any] = {"encoding": encoding, "newline": newline, "errors": "replace"}
        return open(plain, **options)

    rng = random.Random(0)
    for reads in range(12):
        file, control = fresh(), fresh()
        for _ in range(reads):
            size = rng.choice([0, 1, 5, 900, 3_000])
            assert file.read(size) == control.read(size)
            if rng.random() < 0.5:
                assert file.readline() == control.readline()
        new = reopened(file)
        assert (new.encoding, new.errors) == (encoding, "replace")
        want = control.readline(), control.read(77), control.readlines()
        assert (new.readline(), new.read(77), new.readlines()) == want
        assert (file.readline(), file.read(77), file.readlines()) == want
        new.seek(0), control.seek(0)
        assert new.read() == control.read()  # from the start, too
        close(file, control, new)


def test_a_deleted_and_a_renamed_file_are_opened_once_more(path: Path) -> None:
    with open(path, "rb") as file:
        file.seek(1_000)
        path.rename(path.with_name("other"))
        path.write_bytes(b"another file")
        with reopened(file) as new:
            assert new.read(100) == MIXED.encode()[1_000:1_100]
        path.with_name("other").unlink()
        with reopened(file) as new:
            assert new.read() == file.read() == MIXED.encode()[1_000:]


def writing_gzip(path: Path) -> Any:
    return gzip.GzipFile(fileobj=io.BytesIO(), mode="wb")


def in_a_loop(path: Path) -> Any:
    file = text(path)
    next(iter(file))
    return file


class Subclass(io.TextIOWrapper):
    pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: open(p, "r+b"), "BufferedRandom"),
        (lambda p: open(p, "r+b", buffering=0), "writing"),
        (lambda p: open(p, "ab"), "BufferedWriter"),
        (lambda p: text(p, mode="a"), "BufferedWriter"),
        (writing_gzip, "GzipFile"),
        (in_a_loop, "next"),
        (lambda p: open(os.devnull, "rb"), "regular"),
        (lambda p: Subclass(open(p, "rb")), "Subclass"),
        (lambda p: io.TextIOWrapper(io.BytesIO(b"a")), "BytesIO"),
    ],
)
def test_other_files_are_refused_with_the_reason_and_stay_as_they_are(
    path: Path, make: Callable[[Path], Any], reason: str
) -> None:
    file = make(path)
    with pytest.raises(CannotReopen, match=reason):
        reopened(file)
    assert not file.closed
    close(file)


class Opened:
    def __init__(self, file: Any) -> None:
        self.file = file

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("opener", [gzip.open, tarfile.open])
def test_open_compressed_files_and_archives_are_read_by_processes_and_named_in_threads(
    opener: Callable[..., Any], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_allowed", set())  # so that the code of this file is read
    opener(path, "w").close()
    with opener(path) as file:
        chosen = DataLoader(Opened(file), num_workers=1, worker_method="auto").chosen()
        assert chosen.kind == "process"
        assert "`dataset.file`" in chosen.reason
        with pytest.warns(SharedStateWarning, match=r"cannot be copied: dataset\.file"):
            [*DataLoader(Opened(file), num_workers=1, worker_method="thread")]
