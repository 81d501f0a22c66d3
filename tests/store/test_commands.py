"""Promises:
- `fastload set verify` finds any flipped bit, parts that are cut off and parts that are missing, and names the part. It
  mentions parts without checksums and of other nodes.
- `fastload set stage` copies byte for byte, with the same `set_id`. Several processes copy once, as
  `tests/datasets/test_staging.py` shows.
- A staging that meets damage, a kill at any step or a full memory leaves no set. The copy resumes after its last
  complete part.
- `fastload set gc` collects what stopped copies left, and nothing that is in progress.
- A staging that waits for a folder while the folder is collected starts again. See also `tests/test_disk.py`.
- `rm` removes all of a set or none of it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload import store
from fastload.cli import main
from fastload.datasets.manifest import INDEX, dump_index, read_index
from fastload.errors import PackedDataError
from fastload.store import shard_bytes
from fastload.store.root import collect, sets, this_node
from fastload.store.staging import stage
from fastload.store.verifying import verify
from tests.children import Python, run_python
from tests.contracts.sets import SetContract, call, killed
from tests.files import files, flip

ROWS, PARTS = 90, 3
X = torch.randint(0, 255, (ROWS, 8, 4), dtype=torch.uint8)
Y = torch.arange(ROWS)


def parts() -> Iterator[dict[str, Any]]:
    for begin in range(0, ROWS, ROWS // PARTS):
        rows = slice(begin, begin + ROWS // PARTS)
        yield {"x": X[rows], "y": Y[rows], "text": [f"row {k}" for k in Y[rows].tolist()]}


def make(path: Path, *, checksums: bool | None = True, **options: Any) -> Path:
    store.put(parts(), path, checksums=checksums, **options)
    return path


@pytest.fixture(autouse=True)
def in_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_bytes, "PIECE_BYTES", 500)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make(tmp_path / "source")


class TestColumns(SetContract):
    rows = ROWS

    def write(self, path: Path, *, other: bool = False) -> None:
        store.put((part | {"y": part["y"] + int(other)} for part in parts()), path, checksums=True)

    def opened(self, path: Path) -> store.SetDataset:
        return store.get(path, data="x", label="y")

    def sample(self, row: int) -> Any:
        return X[row], Y[row]

    def stage(self, source: Path, target: Path, **options: Any) -> Any:
        return stage(source, target, **options)


def has_all_rows(path: Path) -> bool:
    dataset = store.get(path, data="x", label="y")
    return all(torch.equal(x, X[y]) and y == k for k, (x, y) in enumerate(dataset))


def on_nodes(path: Path, *nodes: str) -> Path:
    """Have the index of a set say on which node each part lies."""
    index = read_index(os.fspath(path))
    pairs = zip(index.shards, nodes, strict=True)
    shards = tuple(dataclasses.replace(shard, node=node) for shard, node in pairs)
    (path / INDEX).write_bytes(dump_index(dataclasses.replace(index, shards=shards)))
    return path


# ---- verify ----


def test_parts_without_checksums_are_said_and_their_form_is_checked(tmp_path: Path) -> None:
    path = make(tmp_path / "set", checksums=False)
    result = call("set", "verify", path)
    assert result.exit_code == 0
    assert "checked, 0 bytes read\n" in result.output
    assert (
        "3 of these parts have no checksums, so only their form was checked, not their values"
        in result.output
    )
    stage(path, tmp_path / "whole")
    assert files(tmp_path / "whole") == files(path)
    store.put({"z": X}, tmp_path / "other", checksums=False)
    for number, harm, said in [
        (0, lambda part: os.truncate(part, 700), "the file has 700 bytes, expected"),
        (1, lambda part: flip(part, -1), "the file does not end like an Arrow file"),
        (
            2,
            lambda part: shutil.copy(tmp_path / "other" / "shard-00000.arrow", part),
            "the file has ",
        ),
        (2, os.unlink, "the file is missing"),
    ]:
        part = path / f"shard-0000{number}.arrow"
        harm(part)
        assert f"{part.name}: {said}" in verify(path).bad[number]
        assert len(verify(path).bad) == number + 1
        with pytest.raises(PackedDataError):
            stage(path, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
        assert not list((tmp_path / ".unsealed" / "copy").glob("*.partial"))


def test_parts_of_other_nodes_are_not_here_and_not_bad(source: Path) -> None:
    on_nodes(source, this_node(), "node-b", "node-c")
    assert verify(source).elsewhere == {}  # they are all here
    (source / "shard-00001.arrow").unlink()
    (source / "shard-00002.arrow").unlink()
    result = call("set", "verify", source)
    assert result.exit_code == 0
    assert "1 part checked" in result.output
    assert "2 parts are not here, but on node-b (1), node-c (1)" in result.output
    with pytest.raises(PackedDataError, match="2 of 3 parts are not here, but on node-b, node-c"):
        stage(source, source.parent / "copy")
    assert not (source.parent / "copy").exists()
    (source / "shard-00000.arrow").unlink()
    (bad,) = verify(source).bad
    assert "shard-00000.arrow: the file is missing" in bad


# ---- inspect ----


def test_a_set_is_described(source: Path) -> None:
    result = call("set", "inspect", source)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == f"{source}: 90 rows, mode columns, 0 classes"
    assert lines[1].startswith("3 parts, ")
    assert lines[1].endswith("3 with checksums; 3 here")
    assert lines[2:5] == ["column x: uint8[8, 4]", "column y: int64", "column text: string"]
    assert lines[5] == f"id: {read_index(os.fspath(source)).id}"
    assert lines[6:] == ["made: -", f"index: {source / INDEX}"]


def test_parts_are_counted_by_node(source: Path) -> None:
    on_nodes(source, "node-a", this_node(), "node-b")
    (source / "shard-00000.arrow").unlink()
    lines = call("set", "inspect", source).output.splitlines()
    assert f"2 here; by node: node-a 1, {this_node()} 1, node-b 1" in lines[1]
    for part in source.glob("*.arrow"):
        part.unlink()
    assert "column y: int64" in call("set", "inspect", source).output


# ---- stage ----


def test_the_default_root_is_made_for_this_user_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FASTLOAD_STORE", raising=False)
    monkeypatch.setattr(store.root, "SHARED_MEMORY", os.fspath(tmp_path))
    root = Path(store.root.default_root())
    stage(source, root / "mnist")
    assert root.stat().st_mode & 0o777 == 0o700
    assert has_all_rows(root / "mnist")
    assert len(store.get("mnist")) == ROWS


def test_a_copy_has_no_nodes(tmp_path: Path) -> None:
    source = make(tmp_path / "set", made={"by": "a test"})
    on_nodes(source, "node-a", "node-b", "node-c")
    stage(source, tmp_path / "copy")
    index = read_index(os.fspath(tmp_path / "copy"))
    assert index.made == {"by": "a test"}
    assert {shard.node for shard in index.shards} == {""}
    assert index.id == read_index(os.fspath(source)).id
    assert has_all_rows(tmp_path / "copy")


def test_a_target_that_cannot_be_a_set_is_refused_in_one_line(source: Path, tmp_path: Path) -> None:
    result = call("set", "stage", source, tmp_path / "my set")
    assert result.exit_code == 2
    assert "the name of a set must have 1 to 128 letters" in result.output
    assert not (tmp_path / "my set").exists()


# ---- gc ----


def stop_copy(source: Path, target: Path) -> None:
    """Stage in a child that is killed after the first part."""
    assert killed(3, ("replace",), lambda: stage(source, target, workers=0))


def test_a_stopped_copy_is_collected_and_a_copy_under_way_is_not(
    source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    stage(source, root / "whole")
    stop_copy(source, root / "stopped")
    with (root / ".unsealed" / "stopped.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert collect(os.fspath(root)) == []
    result = call("set", "gc", "--root", root)
    assert "removed stopped: " in result.output
    assert not (root / ".unsealed" / "stopped").exists()
    assert has_all_rows(root / "whole")
    assert call("set", "gc", "--root", root).output == f"{root}: 0 B freed\n"


def test_a_copy_that_waits_while_its_folder_is_collected_begins_anew(
    source: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    stop_copy(source, root / "copy")
    command = ["-m", "fastload", "set", "stage", source, root / "copy"]
    with (root / ".unsealed" / "copy.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with Python(command, stderr=subprocess.PIPE, text=True) as rank:
            assert rank.stderr is not None
            assert "waiting for another process" in rank.stderr.readline()
            shutil.rmtree(root / ".unsealed")
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert rank.wait(60) == 0
    assert files(root / "copy") == files(source)


# ---- ls, info, rm ----


def test_sets_are_listed_with_the_room_that_is_left(source: Path) -> None:
    root = source.parent
    on_nodes(source, this_node(), "node-b", "node-c")
    (source / "shard-00002.arrow").unlink()
    header, line, total = call("set", "ls", "--root", root).output.splitlines()
    assert header.split() == ["NAME", "ROWS", "PARTS", "SIZE", "WRITTEN", "COLUMNS"]
    assert line.startswith("source  90    3 (2 here)  ")
    assert line.endswith("x uint8[8, 4], y int64, text string")
    assert total.startswith(f"{root}: 1 set, ")
    assert total.endswith(" are free")


def test_a_root_that_is_not_there_has_no_sets_and_is_not_made(tmp_path: Path) -> None:
    root = tmp_path / "nowhere"
    assert call("set", "ls", "--root", root).output == f"{root}: no sets\n"
    assert call("set", "gc", "--root", root).exit_code == 0
    assert call("set", "rm", "set", "--root", root).exit_code == 1
    assert call("set", "inspect", "set", "--root", root).exit_code == 1
    assert not root.exists()


def test_a_set_is_described_by_its_name_or_its_path(source: Path) -> None:
    by_path = call("set", "inspect", source)
    assert by_path.exit_code == 0
    assert call("set", "inspect", "source", "--root", source.parent).output == by_path.output
    result = call("set", "inspect", "sauce", "--root", source.parent)
    assert (result.exit_code, "The sets here are source" in result.output) == (1, True)
    assert call("set", "inspect", source, "--root", source.parent).exit_code == 2


def test_sets_are_removed_all_or_none_and_what_that_freed_is_said(tmp_path: Path) -> None:
    for name in "abc":
        make(tmp_path / name)
    result = call("set", "rm", "a", "x", "--root", tmp_path)
    assert result.exit_code == 1
    assert "the set 'x' does not exist. The sets here are a, b, c" in result.output
    result = call("set", "rm", "a", "b", "--root", tmp_path)
    first, second = result.output.splitlines()
    assert first.startswith(f"removed {tmp_path / 'a'}: ")
    assert second.startswith(f"removed {tmp_path / 'b'}: ")
    assert call("set", "rm", tmp_path / "c").exit_code == 0
    assert list(sets(os.fspath(tmp_path))) == []


def test_every_command_has_help_with_an_example() -> None:
    group: Any = main.commands["set"]
    for name in group.commands:
        shown = call("set", name, "--help")
        assert f"fastload set {name}" in shown.output.partition("Example")[2]


WITHOUT_PYARROW = """
import sys
sys.modules["pyarrow"] = None
from click.testing import CliRunner
from fastload.cli import main
for command in ("verify .", "inspect .", "stage . copy", "ls", "rm mnist", "gc", "pack . out"):
    print(CliRunner().invoke(main, ["set", *command.split()]).output, end="")
"""


def test_without_pyarrow_every_command_names_what_to_install() -> None:
    said = run_python("-c", WITHOUT_PYARROW, check=True).stdout.splitlines()
    assert len(said) == 7
    ending = "which is not installed. Run pip install 'torch-fastload[arrow]'"
    assert all(line.startswith("Error: ") and line.endswith(ending) for line in said), said
