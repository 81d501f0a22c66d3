"""Promises:
- `stage`, `get(source=)`, `put` and packing write their temporary files through no link. `gc` deletes nothing that a
  link leads to.
- An entry of a root that cannot be read is named by `set ls` and `set gc`, and the other sets are listed and
  collected. Such are a link to itself, a pipe or a folder called index.json.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload import store
from fastload._kit.disk import locked_path
from fastload.datasets import PackedDataset, PackedWriter
from fastload.datasets.manifest import INDEX, read_index
from fastload.errors import PackedDataError
from fastload.store.root import collect, sets
from fastload.store.staging import stage
from tests.contracts.sets import call
from tests.files import files

PART = "shard-00000.arrow"
MINE = b"a file of the user, elsewhere"


def make(path: Path, **options: Any) -> Path:
    store.put({"x": torch.arange(10)}, path, **options)
    return path


def make_packed(path: Path) -> Path:
    with PackedWriter(path, mode="encoded") as writer:
        writer.add(b"bytes", label=3, source="a.bin")
    return path


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def hard_link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.hardlink_to(target)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine"
    path.write_bytes(MINE)
    return path


# ---- writing ----


@pytest.mark.parametrize("plant", [link, hard_link])
@pytest.mark.parametrize("name", [PART, f"{PART}.partial"])
@pytest.mark.parametrize("kind", ["columns", "packed"])
def test_staging_writes_through_no_link(
    kind: str, name: str, plant: Callable[[Path, Path], None], mine: Path, tmp_path: Path
) -> None:
    source = (make if kind == "columns" else make_packed)(tmp_path / "set")
    copying = tmp_path / ".unsealed" / "copy"
    plant(copying / name, mine)
    (copying / INDEX).write_bytes((source / INDEX).read_bytes())
    stage(source, tmp_path / "copy")
    assert mine.read_bytes() == MINE
    assert files(tmp_path / "copy") == files(source)
    assert not (tmp_path / "copy" / PART).is_symlink()


@pytest.mark.parametrize("plant", [link, hard_link])
def test_a_fetched_part_is_written_through_no_link(
    plant: Callable[[Path, Path], None], mine: Path, tmp_path: Path
) -> None:
    there, here = make(tmp_path / "there" / "set"), tmp_path / "here" / "set"
    here.mkdir(parents=True)
    (here / INDEX).write_bytes((there / INDEX).read_bytes())
    plant(here / f"{PART}.partial", mine)
    assert store.get(here, data="x", source=there)[3] == 3
    assert mine.read_bytes() == MINE


def test_a_packed_shard_is_written_through_no_link(mine: Path, tmp_path: Path) -> None:
    writer = PackedWriter(tmp_path / "set", mode="encoded")
    link(tmp_path / ".unsealed" / "set" / PART, mine)
    writer.add(b"bytes", label=3, source="a.bin")
    writer.finish()
    assert mine.read_bytes() == MINE
    assert PackedDataset(tmp_path / "set", decode=False)[0] == (b"bytes", 3)


def test_a_lock_that_is_a_link_makes_no_file(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"), locked_path(tmp_path / "lock"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_of_a_copy_that_is_a_link_is_refused(tmp_path: Path) -> None:
    other = make(tmp_path / "other")
    before = files(other)
    there, copy = make(tmp_path / "there" / "set"), tmp_path / "copy"
    link(tmp_path / ".unsealed" / "copy", other)
    with pytest.raises(OSError, match="is a link, and what it leads to is not touched"):
        stage(there, copy)
    copy.mkdir()
    link(copy / INDEX, there / INDEX)
    with pytest.raises(OSError, match="symbolic link"):
        store.get(copy, source=there)
    assert files(other) == before


def test_a_folder_of_unsealed_sets_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    (home / "work" / "thesis").write_bytes(MINE)
    root = tmp_path / "root"
    make(root / "kept")
    (root / ".unsealed").rmdir()
    link(root / ".unsealed", home)
    result = call("set", "gc", "--root", root)
    assert result.exit_code == 0
    assert f"passed over: {root / '.unsealed'}: is a link" in result.output
    with pytest.raises(OSError, match="is a link"):
        make(root / "new")
    assert files(home / "work") == {"thesis": MINE}
    (root / ".unsealed").unlink()
    link(root / ".unsealed" / "work", home / "work")
    said: list[str] = []
    assert collect(str(root), say=said.append) == []
    assert len(said) == 1
    assert files(home / "work") == {"thesis": MINE}


# ---- a root ----


def loop(path: Path) -> None:
    path.symlink_to(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


def damaged(path: Path) -> None:
    path.write_bytes(b"{}")


@pytest.mark.parametrize("plant", [loop, os.mkfifo, Path.mkdir, device, damaged])
def test_a_bad_index_is_named_and_passed_over(
    plant: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "a")
    make(tmp_path / "c")
    (tmp_path / "b").mkdir()
    plant(tmp_path / "b" / INDEX)
    listed = call("set", "ls", "--root", tmp_path)
    assert listed.exit_code == 0, listed.output
    assert [line.split()[0] for line in listed.output.splitlines()[1:3]] == ["a", "c"]
    assert listed.output.splitlines()[-1].startswith(f"passed over: {tmp_path / 'b'}")
    assert call("set", "gc", "--root", tmp_path).exit_code == 0
    with pytest.raises((OSError, PackedDataError)):
        read_index(str(tmp_path / "b"))
    with pytest.raises(FileNotFoundError, match="The sets here are a, c"):
        store.get("z", root=tmp_path)
    assert store.get("a", data="x", root=tmp_path)[3] == 3


def test_other_bad_entries_are_named_and_passed_over(tmp_path: Path) -> None:
    make(tmp_path / "a")
    loop(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / ".unsealed" / "stopped").mkdir()
    os.mkfifo(tmp_path / ".unsealed" / "stopped.lock")
    loop(tmp_path / "a" / "loop")
    said: list[str] = []
    assert [found.name for found in sets(str(tmp_path), say=said.append)] == ["a"]
    assert said == [f"passed over: {tmp_path / 'loop'}: Too many levels of symbolic links"]
    said.clear()
    assert collect(str(tmp_path), say=said.append) == []
    assert said == [f"passed over: {tmp_path / '.unsealed/stopped.lock'}: is not a regular file"]
    assert call("set", "ls", "--root", tmp_path).exit_code == 0


def test_a_part_that_is_no_file_is_an_error_at_once(tmp_path: Path) -> None:
    path = make(tmp_path / "set")
    (path / PART).unlink()
    os.mkfifo(path / PART)
    with pytest.raises(OSError, match="is not a regular file"):
        store.get(path, data="x")[0]
    assert call("set", "ls", "--root", tmp_path).exit_code == 0
    assert call("set", "verify", path).exit_code == 1
