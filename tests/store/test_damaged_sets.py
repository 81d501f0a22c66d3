"""Promises:
- A set of columns with damaged offsets, lengths or metadata is a `PackedDataError` when its part is opened, for a
  sample, a loader and the commands. Opening reads no text.
- A part from a lying server or a damaged folder is refused, even if its checksum fits, and leaves nothing.
- `fastload set verify` does not call a set without checksums valid.
- A damaged Arrow table that is put is an error.

See also `tests/promises/test_damaged_files.py`.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from click.testing import CliRunner

from fastload import DataLoader, store
from fastload.cli import main
from fastload.datasets.manifest import INDEX, dump_index, read_index
from fastload.errors import PackedDataError
from fastload.store.flight import ServerSource
from fastload.store.staging import stage
from fastload.store.verifying import verify
from tests.children import run_python
from tests.forged import Liar, batch_of_too_many_rows

ROWS = 40
NAMES = [f"name-{k:05d}" for k in range(ROWS)]
PART = "shard-00000.arrow"
OFFSETS = struct.pack("<3i", 0, 10, 20)
"""The begin of the offsets of the column "name"."""


def make(path: Path, *, checksums: bool) -> Path:
    store.put({"x": torch.arange(ROWS), "name": NAMES}, path, checksums=checksums)
    return path


def change(path: Path, old: bytes, new: bytes, count: int = -1) -> None:
    """Replace `old` in the part of a set. What belongs to the schema is there twice."""
    content = (path / PART).read_bytes()
    assert content.count(old) in (1, 2)
    assert len(old) == len(new)
    (path / PART).write_bytes(content.replace(old, new, count))


def fit(path: Path) -> None:
    """Let the index say that its part is right."""
    index, content = read_index(str(path)), (path / PART).read_bytes()
    checksum = None if index.shards[0].checksum is None else zlib.crc32(content)
    shard = dataclasses.replace(index.shards[0], bytes=len(content), checksum=checksum)
    (path / INDEX).write_bytes(dump_index(dataclasses.replace(index, shards=(shard,))))


def high_offset(path: Path) -> None:
    change(path, OFFSETS, struct.pack("<3i", 0, 10 | 1 << 30, 20))


def falling_offset(path: Path) -> None:
    change(path, OFFSETS, struct.pack("<3i", 0, 21, 20))


def negative_offset(path: Path) -> None:
    change(path, OFFSETS, struct.pack("<3i", 0, -1, 20))


def other_dtype(path: Path) -> None:
    """Let the metadata name a dtype of other bytes: rows would be read beyond the column."""
    change(path, b'{"dtype": "bool"}', b'{"dtype":"float"}')


def no_json(path: Path) -> None:
    change(path, b'{"dtype": "bool"}', b'{"dtype": "bool"]')


def other_schema_at_the_begin(path: Path) -> None:
    change(path, b'{"dtype": "bool"}', b'{"dtype":"float"}', 1)


DAMAGES = [high_offset, falling_offset, negative_offset]
PROGRAM = """
import sys
from fastload import DataLoader, store
from fastload.errors import PackedDataError
dataset = store.get(sys.argv[1])
for read in (lambda: dataset[5], lambda: next(iter(DataLoader(dataset, 4, num_workers=2)))):
    try:
        print(read())
    except PackedDataError as error:
        print(error.shard, error.reason)
"""


@pytest.mark.parametrize(
    ("damage", "checksums"), [(damage, bool(k % 2)) for k, damage in enumerate(DAMAGES)]
)
def test_damaged_offsets_are_an_error_and_end_no_process(
    damage: Callable[[Path], None], checksums: bool, tmp_path: Path
) -> None:
    path = make(tmp_path / "set", checksums=checksums)
    damage(path)
    run = run_python("-c", PROGRAM, path)
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        assert line.startswith(f"{PART} is damaged: ")
        assert "ffset" in line
    assert len(run.stdout.splitlines()) == 2
    (bad,) = verify(path).bad
    assert PART in bad


@pytest.mark.parametrize("damage", [other_dtype, no_json, other_schema_at_the_begin])
def test_metadata_that_does_not_fit_is_an_error(
    damage: Callable[[Path], None], tmp_path: Path
) -> None:
    store.put({"x": torch.arange(ROWS) % 2 == 0}, tmp_path / "set")
    damage(tmp_path / "set")
    dataset = store.get(tmp_path / "set", data="x")
    with pytest.raises(PackedDataError, match=f"{PART}: is (damaged|not)"):
        dataset[0]
    with pytest.raises(PackedDataError, match=f"{PART}: is (damaged|not)"):
        list(DataLoader(dataset, 4))
    result = CliRunner().invoke(main, ["set", "ls", "--root", str(tmp_path)])
    assert result.exit_code == 0
    assert "set " in result.output


def test_opening_reads_no_text_and_only_the_damaged_row_is_an_error(tmp_path: Path) -> None:
    path = make(tmp_path / "set", checksums=False)
    change(path, NAMES[7].encode(), b"\xff" + NAMES[7].encode()[1:])
    dataset = store.get(path, data="name")
    assert [dataset[k] for k in range(ROWS) if k != 7] == NAMES[:7] + NAMES[8:]
    with pytest.raises(PackedDataError, match=r"column 'name' has no valid value") as caught:
        dataset[7]
    assert (caught.value.shard, caught.value.record) == (PART, 7)
    (bad,) = verify(path).bad
    assert "UTF8" in bad
    with pytest.raises(PackedDataError, match="UTF8"):
        stage(path, tmp_path / "copy")


# ---- what is copied ----


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("checksums", [False, True])
def test_a_part_that_lies_is_never_copied(
    damage: Callable[[Path], None], checksums: bool, tmp_path: Path
) -> None:
    there = make(tmp_path / "there" / "set", checksums=checksums)
    damage(there)
    fit(there)
    with pytest.raises(PackedDataError, match=f"{PART}: the copy from {there.parent}: is damaged"):
        store.get(tmp_path / "here" / "set", source=there.parent)
    assert not list((tmp_path / "here").rglob("*.arrow"))
    if not checksums:
        with pytest.raises(PackedDataError, match=f"{PART}: is damaged"):
            stage(there, tmp_path / "copy")
        assert not (tmp_path / "copy" / INDEX).exists()


def test_a_source_that_does_not_end_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "there" / "set", checksums=False)
    given = []

    def endless(*_: object) -> Iterator[memoryview]:
        while True:
            given.append(1)
            assert len(given) < 100, "the copy takes what is beyond the size of the part"
            yield memoryview(bytes(1000))

    monkeypatch.setattr("fastload.store.fetch.FolderSource.read", endless)
    with pytest.raises(PackedDataError, match=r"the file has [\d,]+ bytes, expected"):
        store.get(tmp_path / "here" / "set", source=tmp_path / "there")


def test_a_server_that_lies_is_an_error(tmp_path: Path) -> None:
    path = make(tmp_path / "there" / "set", checksums=False)
    answers = [(path / INDEX).read_bytes(), PART.encode()]
    with Liar(batch_of_too_many_rows(2**30), answers) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        with pytest.raises(PackedDataError, match="cannot be read from"):
            store.get(tmp_path / "here" / "set", source=url)


def test_a_server_without_a_sensible_answer_is_an_error(tmp_path: Path) -> None:
    index = (make(tmp_path / "set", checksums=False) / INDEX).read_bytes()
    for answer in ([b"1"], [b"1", b"2"], [b"\xff", index], [index, b"\xff"]):
        with Liar(batch_of_too_many_rows(64), answer) as server:
            source = ServerSource(f"grpc://127.0.0.1:{server.port}")
            with pytest.raises(PackedDataError):
                source.find("set")


# ---- verify ----


def test_what_was_not_looked_at_is_not_called_valid(tmp_path: Path) -> None:
    path = make(tmp_path / "set", checksums=False)
    change(path, struct.pack("<2q", 1, 2), struct.pack("<2q", 1, 3))
    result = CliRunner().invoke(main, ["set", "verify", str(path)])
    assert result.exit_code == 0
    assert "valid" not in result.output
    assert "1 of these parts have no checksums" in result.output
    assert result.output.endswith("not their values\nNo damage was found.\n")
    make(tmp_path / "checked", checksums=True)
    result = CliRunner().invoke(main, ["set", "verify", str(tmp_path / "checked")])
    assert result.output.endswith("All checked parts are valid.\n")


# ---- put ----

PUT = """
import sys
import pyarrow as pa
from fastload import store
table = pa.ipc.open_file(pa.memory_map(sys.argv[1])).read_all()
try:
    store.put(table, sys.argv[2])
except ValueError as error:
    print(error)
"""


def test_a_damaged_table_cannot_be_put(tmp_path: Path) -> None:
    table = pa.table({"name": NAMES})
    with pa.ipc.new_file(tmp_path / PART, table.schema) as writer:
        writer.write_table(table)
    high_offset(tmp_path)
    run = run_python("-c", PUT, tmp_path / PART, tmp_path / "set")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("part 0: ")
    assert "ffset" in run.stdout
    assert not (tmp_path / "set").exists()
