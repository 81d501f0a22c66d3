"""Promises:
- A packed set is staged byte for byte. Shards that are right are reused, and shards that are wrong are copied again.
- A staging that meets damage, a full disk or a kill leaves no set. Running the command again completes the copy.
- Several ranks of a node stage a packed set once.
- A set is never staged into itself.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("pyarrow")
from fastload.cli import main
from fastload.datasets import PackedDataset, PackedWriter
from fastload.datasets.packed import staging
from fastload.datasets.packed.staging import stage
from fastload.errors import PackedDataError
from tests.children import Python
from tests.contracts.sets import SetContract
from tests.files import files, flip

RECORDS, SHARDS = 40, 10


def make(path: Path, *, seed: int = 0, empty: int | None = None) -> Path:
    """A set of 40 records in 10 shards, one of which has a payload without bytes. Goes on with a stopped one."""
    with PackedWriter(path, mode="encoded", shard_bytes=400) as writer:
        for number in range(writer.done, RECORDS):
            content = bytes([(number + seed) % 256]) * (0 if number == empty else 100)
            writer.add(content, label=number, source=f"{number}.bin")
        writer.reject("bad.bin", "no picture")
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("packed") / "set")


class TestPackedSet(SetContract):
    rows = RECORDS
    has_id = False

    def write(self, path: Path, *, other: bool = False) -> None:
        make(path, seed=int(other))

    def opened(self, path: Path) -> PackedDataset:
        return PackedDataset(path, decode=False)

    def sample(self, row: int) -> Any:
        return bytes([row]) * 100, row

    def stage(self, source: Path, target: Path, **options: Any) -> Any:
        return stage(source, target, **options)


def is_no_set(path: Path) -> bool:
    with pytest.raises(FileNotFoundError):
        PackedDataset(path)
    return True


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the bytes that staging writes, by file name."""
    count: Counter[str] = Counter()
    real = staging.write_all

    def write_all(fd: int, name: str, content: Any) -> int:
        done = real(fd, name, content)
        count[os.path.basename(name)] += done
        return done

    monkeypatch.setattr(staging, "write_all", write_all)
    return count


@pytest.mark.parametrize("workers", [0, 1, 3, None])
def test_a_copy_is_the_set_byte_for_byte(source: Path, tmp_path: Path, workers: Any) -> None:
    staged = stage(source, tmp_path / "a" / "copy", workers=workers)
    assert files(tmp_path / "a" / "copy") == files(source)
    assert staged.path == str(tmp_path / "a" / "copy")
    assert staged.copied_bytes == staged.bytes == sum(map(os.path.getsize, source.glob("*.arrow")))
    assert os.listdir(tmp_path / "a" / "copy" / ".staging") == ["lock"]
    dataset = PackedDataset(staged.path, decode=False, verify="always")
    assert [dataset[k][1] for k in range(RECORDS)] == list(range(RECORDS))


def test_a_set_with_empty_payloads_is_copied(tmp_path: Path) -> None:
    source = make(tmp_path / "set", empty=0)
    stage(source, tmp_path / "copy")
    assert files(tmp_path / "copy") == files(source)


def test_a_copy_that_is_right_is_used_again(
    source: Path, tmp_path: Path, written: Counter[str]
) -> None:
    stage(source, tmp_path / "copy")
    written.clear()
    again = stage(source, tmp_path / "copy")
    assert again.copied_bytes == 0
    assert not written
    assert "were copied before" in str(again)


def test_only_shards_that_are_wrong_are_copied_again(
    source: Path, tmp_path: Path, written: Counter[str]
) -> None:
    stage(source, tmp_path / "copy")
    (tmp_path / "copy" / "shard-00003.arrow").unlink()
    os.truncate(tmp_path / "copy" / "shard-00005.arrow", 100)
    flip(tmp_path / "copy" / "shard-00007.arrow", 400)  # its size is right: only `verify` sees that
    written.clear()
    stage(source, tmp_path / "copy")
    shards = {"shard-00003.arrow", "shard-00005.arrow"}
    assert {name for name in written if name.startswith("shard")} == shards
    written.clear()
    stage(source, tmp_path / "copy", verify=True)
    assert {name for name in written if name.startswith("shard")} == {"shard-00007.arrow"}
    assert files(tmp_path / "copy") == files(source)


@pytest.mark.parametrize("where", ["columns", "payload"])
def test_a_source_that_is_damaged_is_named_and_never_becomes_a_set(
    tmp_path: Path, where: str
) -> None:
    source = make(tmp_path / "set")
    shard = source / "shard-00004.arrow"
    begin, length = json.loads((source / "index.json").read_text())["shards"][4]["payload"][0]
    flip(shard, begin + 150 if where == "payload" else begin + length + 20)
    with pytest.raises(PackedDataError, match="shard-00004.arrow.*checksum") as caught:
        stage(source, tmp_path / "copy")
    assert caught.value.record == (1 if where == "payload" else None)
    assert is_no_set(tmp_path / "copy")
    assert not (tmp_path / "copy" / ".staging" / "shard-00004.arrow").exists()


def test_a_source_without_a_shard_is_named(tmp_path: Path) -> None:
    source = make(tmp_path / "set")
    (source / "shard-00009.arrow").unlink()
    with pytest.raises(PackedDataError, match="shard-00009.arrow: the file is missing"):
        stage(source, tmp_path / "copy")
    assert is_no_set(tmp_path / "copy")


def test_space_is_seen_to_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Counter[str]
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(
        OSError, match=r"the copy needs [\d,]+ bytes, but only 1,000 are free"
    ) as caught:
        stage(source, tmp_path / "copy")
    assert caught.value.errno == errno.ENOSPC
    assert set(written) == {"partial"}  # the note of what is to come
    assert is_no_set(tmp_path / "copy")


def test_a_full_disk_leaves_no_set_and_no_piece_and_is_gone_on_from(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Counter[str]
) -> None:
    counting = staging.write_all

    def full(fd: int, name: str, content: Any) -> int:
        if name.endswith("shard-00006.arrow"):
            os.write(fd, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return counting(fd, name, content)

    monkeypatch.setattr(staging, "write_all", full)
    with pytest.raises(OSError, match="No space left.*shard-00006"):
        stage(source, tmp_path / "copy", workers=1)
    assert is_no_set(tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy" / ".staging")) == ["index.json", "lock"]
    complete = {path.name for path in (tmp_path / "copy").glob("*.arrow")}
    assert {f"shard-{k:05d}.arrow" for k in range(6)} <= complete

    monkeypatch.setattr(staging, "write_all", counting)
    written.clear()
    stage(source, tmp_path / "copy")
    assert not complete & set(written)
    assert files(tmp_path / "copy") == files(source)


def stage_until_killed(source: Path, target: Path, *, renames: int) -> None:
    """Stage in a child, which is killed where it would give a file its name for the `renames + 1`-th time."""
    pid = os.fork()
    if not pid:
        real, left = os.replace, iter(range(renames))

        def replace(old: str, new: str) -> None:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            real(old, new)

        os.replace = replace  # type: ignore[assignment]
        try:
            stage(source, target, workers=0)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("renames", [1, 5, SHARDS + 2])
def test_a_killed_copy_is_no_set_frees_its_lock_and_is_gone_on_from(
    source: Path, tmp_path: Path, renames: int, written: Counter[str]
) -> None:
    stage_until_killed(source, tmp_path / "copy", renames=renames)
    assert is_no_set(tmp_path / "copy")
    complete = {path.name for path in (tmp_path / "copy").glob("*.arrow")}
    assert len(complete) == min(renames - 1, SHARDS)
    stage(source, tmp_path / "copy")
    assert not complete & set(written)
    assert files(tmp_path / "copy") == files(source)


def test_a_stopped_copy_of_another_set_is_replaced(source: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", seed=1)  # as many bytes: sizes cannot tell
    stage_until_killed(other, tmp_path / "copy", renames=5)
    stage(source, tmp_path / "copy")
    assert files(tmp_path / "copy") == files(source)


def test_what_is_there_and_no_copy_is_left_alone(source: Path, tmp_path: Path) -> None:
    other = make(tmp_path / "other", seed=1)
    before = files(other)
    with pytest.raises(FileExistsError, match="the folder holds another set. Delete that set"):
        stage(source, other)
    assert files(other) == before
    (tmp_path / "arrows").mkdir()
    (tmp_path / "arrows" / "mine.arrow").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="the folder holds mine.arrow, but neither an index"):
        stage(source, tmp_path / "arrows")
    assert files(tmp_path / "arrows") == {"mine.arrow": b"mine"}
    with pytest.raises(ValueError, match="this is the folder of the set"):
        stage(source, source)
    with pytest.raises(FileNotFoundError, match="no packed set"):
        stage(tmp_path / "nowhere", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_of_the_ranks_of_a_node_one_copies_and_the_others_wait(
    source: Path, tmp_path: Path
) -> None:
    """The lock is held until all ranks have said that they wait for it: then one of them copies."""
    copy = tmp_path / "copy"
    (copy / ".staging").mkdir(parents=True)
    command = ["-m", "fastload", "stage", source, copy, "--workers", "1"]
    with (copy / ".staging" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ranks = [
            Python(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        for rank in ranks:
            assert rank.stderr is not None
            assert "another process that copies into this folder" in rank.stderr.readline()
        assert [rank.poll() for rank in ranks] == [None] * 2
    said = []
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert (rank.returncode, out) == (0, f"{copy}\n")
        said.append(err)
    assert sorted("were copied before" in err for err in said) == [False, True]
    assert files(copy) == files(source)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (lambda set_, tmp: [set_, set_], 2, "this is the folder of the set"),
        (
            lambda set_, tmp: [set_, set_ / "copy"],
            2,
            "this is the folder of the set itself, or is inside it",
        ),
        (lambda set_, tmp: [tmp, tmp / "copy"], 1, "no packed set"),
        (lambda set_, tmp: [set_, __file__], 2, "is a file"),
    ],
    ids=["itself", "within itself", "no set", "a file"],
)
def test_a_users_error_is_one_sentence(
    source: Path, tmp_path: Path, arguments: Callable[..., Any], status: int, said: str
) -> None:
    result = CliRunner().invoke(main, ["stage", *map(str, arguments(source, tmp_path))])
    assert result.exit_code == status
    assert said in result.output
    assert not (source / "copy").exists()
