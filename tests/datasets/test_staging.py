"""Promises:
- A packed set is staged byte for byte. Shards of a stopped copy are reused.
- A staging that meets damage, a full disk or a kill leaves no set. Running the command again completes the copy.
- Several ranks of a node stage a packed set once.
- A set is never staged into itself.
"""

from __future__ import annotations

import fcntl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
from fastload.datasets import PackedDataset, PackedWriter
from fastload.store import shard_bytes
from fastload.store.staging import stage
from fastload.store.verifying import faults_of
from tests.children import Python
from tests.contracts.sets import SetContract, call
from tests.files import files

RECORDS, SHARDS = 40, 10


def content(number: int, seed: int = 0) -> bytes:
    """Return a payload. The first one has no bytes."""
    return bytes([(number + seed) % 256]) * (100 if number else 0)


def make(path: Path, *, seed: int = 0) -> Path:
    """Make a set of 40 records in 10 shards."""
    with PackedWriter(path, mode="encoded", shard_bytes=400) as writer:
        for number in range(RECORDS):
            writer.add(content(number, seed), label=number, source=f"{number}.bin")
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
        return content(row), row

    def stage(self, source: Path, target: Path, **options: Any) -> Any:
        return stage(source, target, **options)


def test_of_the_ranks_of_a_node_one_copies_and_the_others_wait(
    source: Path, tmp_path: Path
) -> None:
    """The lock is held until all ranks have said that they wait for it: then one of them copies."""
    copy = tmp_path / "copy"
    (tmp_path / ".unsealed").mkdir()
    command = ["-m", "fastload", "set", "stage", source, copy, "--workers", "1"]
    with (tmp_path / ".unsealed" / "copy.lock").open("w") as lock:
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


def test_a_users_error_is_one_sentence(source: Path, tmp_path: Path) -> None:
    for arguments, status, said in [
        ((tmp_path, tmp_path / "copy"), 1, "holds no set"),
        ((source, __file__), 2, "is a file"),
    ]:
        result = call("set", "stage", *arguments)
        assert result.exit_code == status
        assert said in result.output


def test_ctrl_c_ends_each_thread_after_its_present_piece(source: Path) -> None:
    """A shard may take minutes to copy or to check."""
    index = shard_bytes.read_set(str(source))
    begun = threading.Barrier(3)
    first, *_ = index.shards

    def endless(shard: Any, bad: Any) -> Iterator[memoryview]:
        if shard is first:
            return
        begun.wait(30)
        while True:
            yield memoryview(b"")

    how: Any = {"workers": 2, "progress": False, "what": "Verifying"}
    passed: Any = shard_bytes.each(faults_of, endless, index.shards[:3], **how)
    next(passed)
    begun.wait(30)
    with pytest.raises(KeyboardInterrupt):
        passed.throw(KeyboardInterrupt())
