"""Promises:
- An object at a URL is a file: it seeks, and gzip, tarfile, pyarrow and loops over lines read it as a local one.
- Read in order, it is fetched in parts that grow, ahead of the reader. A short read fetches little.
- A local path is opened by `open`, and no store is asked.
- What this process asks of a child leaves no client here, and its errors arrive.
"""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastload.errors import RemoteError
from fastload.remote import files
from fastload.remote.files import apart, is_url, open_binary, root_of, size_of
from fastload.remote.remote_file import RemoteFile

KIB, MIB = 1 << 10, 1 << 20


class Counting:
    """A store with one object, which counts. `begun` has what was announced and not yet read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []
        self.begun: list[tuple[int, int]] = []
        self.most_begun = 0

    def size(self, path: str) -> int:
        return len(self.data)

    def read(self, path: str, start: int, stop: int) -> bytes:
        assert 0 <= start < stop <= len(self.data), (start, stop)
        if (start, stop) in self.begun:
            self.begun.remove((start, stop))
        self.reads.append((start, stop))
        return self.data[start:stop]

    def will_read(self, requests: list[tuple[str, int, int]]) -> None:
        self.begun += [(start, stop) for _, start, stop in requests]
        self.most_begun = max(self.most_begun, len(self.begun))

    def forget(self, requests: list[tuple[str, int, int]]) -> None:
        for _, start, stop in requests:
            self.begun.remove((start, stop))


def opened(store: Counting, until: int | None = None) -> io.BufferedReader:
    return io.BufferedReader(RemoteFile(store, "s3://b/x", until), 64 * KIB)


@pytest.mark.parametrize("seed", range(20))
def test_any_reads_and_seeks_give_what_a_file_in_memory_gives(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([0, 1, 300 * KIB, 256 * KIB, 5 * MIB, 20 * MIB])
    store = Counting(rng.randbytes(size))
    plain = io.BytesIO(store.data)
    with opened(store) as file:
        for _ in range(60):
            if rng.random() < 0.3:
                way = rng.choice([0, 1, 2])
                by = rng.randint(-min(size, 100_000), 100_000) if way else rng.randint(0, size)
                if way == 1 and plain.tell() + by < 0:
                    continue
                assert file.seek(by, way) == plain.seek(by, way)
            count = rng.choice([0, 1, 100, 70_000, 3 * MIB])
            assert file.read(count) == plain.read(count)
            assert file.tell() == plain.tell()
        file.seek(0)
        assert file.read() == store.data
    assert not store.begun


def test_a_shard_read_in_order_takes_few_requests_and_those_ahead_are_begun() -> None:
    store = Counting(bytes(64 * MIB))
    with opened(store) as file:
        while file.read(100_000):
            pass
    lengths = [stop - start for start, stop in store.reads]
    assert lengths[:5] == [256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB]
    assert max(lengths) == 4 * MIB
    assert len(lengths) == 20
    assert store.most_begun == 5  # with the one that is asked for then
    assert [0, *(stop for _, stop in store.reads)] == [start for start, _ in store.reads] + [
        64 * MIB
    ]


def test_a_short_read_fetches_little_and_begins_nothing() -> None:
    store = Counting(bytes(64 * MIB))
    with opened(store) as file:
        for at in (30 * MIB, 5 * MIB, 0):
            file.seek(at)
            file.read(1000)
    assert [stop - start for start, stop in store.reads] == [256 * KIB] * 3
    assert store.most_begun == 0


def test_one_long_read_is_begun_at_once_and_no_more() -> None:
    store = Counting(bytes(64 * MIB))
    with opened(store) as file:
        file.seek(MIB)
        file.read(15 * MIB)
    assert store.most_begun >= 3
    assert max(stop for _, stop in store.reads) < 21 * MIB


def test_the_end_of_a_file_is_fetched_once() -> None:
    store = Counting(bytes(64 * MIB))
    with opened(store) as file:
        for before in (8, 1000, 100_000):
            file.seek(-before, os.SEEK_END)
            file.read(before)
    assert store.reads == [(64 * MIB - 256 * KIB, 64 * MIB)]


def test_nothing_after_the_end_of_a_range_is_begun() -> None:
    store = Counting(bytes(64 * MIB))
    with opened(store, 3 * MIB) as file:
        file.read(3 * MIB)
    assert max(stop for _, stop in store.reads) < 8 * MIB
    assert not store.begun


def test_what_was_begun_is_forgotten_after_a_jump_and_at_the_end() -> None:
    store = Counting(bytes(64 * MIB))
    file = opened(store)

    def read_on() -> None:
        for _ in range(10):
            file.read(100_000)

    read_on()
    assert len(store.begun) == 4
    file.seek(50 * MIB)
    file.read(1)
    assert not store.begun
    read_on()
    assert len(store.begun) == 4
    file.close()
    assert not store.begun


def gzipped(file: Any) -> Any:
    return gzip.open(file).read()


def in_a_tar(file: Any) -> Any:
    with tarfile.open(fileobj=file) as tar:
        return [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]


def parquet(file: Any) -> Any:
    return pq.ParquetFile(file).read().to_pydict()


def arrow(file: Any) -> Any:
    return pa.ipc.open_file(file).read_all().to_pydict()


def written(read: Callable[[Any], Any]) -> bytes:
    """Return a file of 400 KiB or more that `read` reads."""
    file, noise = io.BytesIO(), random.Random(1).randbytes(MIB)
    table = pa.table({"id": range(1000), "x": [noise[400 * k :][:400] for k in range(1000)]})
    if read is gzipped:
        file.write(gzip.compress(noise))
    elif read is in_a_tar:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for k in range(5):
                info = tarfile.TarInfo(f"{k}.bin")
                info.size = 200_000
                tar.addfile(info, io.BytesIO(noise[200_000 * k :]))
    elif read is parquet:
        pq.write_table(table, file, row_group_size=300)
    elif read is arrow:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    else:
        file.write(b"\n".join(noise[:400_000].split(b"\0")))
    return file.getvalue()


@pytest.mark.parametrize("read", [gzipped, in_a_tar, parquet, arrow, list])
def test_readers_of_files_read_it(read: Callable[[Any], Any]) -> None:
    data = written(read)
    with opened(Counting(data)) as file:
        assert read(file) == read(io.BytesIO(data))


def test_a_url_is_no_local_path(tmp_path: Path) -> None:
    assert is_url("s3://bucket/x")
    assert is_url("file:///x")
    for path in ("/s3://x", "s3:/x", "x.tar", tmp_path, b"s3://x", 3):
        assert not is_url(path)
    assert root_of("s3://bucket/a/b.tar") == root_of("s3://bucket") == "s3://bucket/"
    assert root_of("file:///a/b") == "file:///"


def test_a_local_file_asks_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(files, "store_of")
    (tmp_path / "x").write_bytes(b"abc")
    for path in (tmp_path / "x", str(tmp_path / "x")):
        with open_binary(path) as file:
            assert type(file) is io.BufferedReader
            assert file.read() == b"abc"
        assert size_of(path) == 3


def test_one_store_serves_all_urls_of_a_bucket() -> None:
    assert files.store_of("s3://one/a") is files.store_of("s3://one/b/c")
    assert files.store_of("s3://two/a") is not files.store_of("s3://one/a")


def missing(url: str) -> None:
    open_binary(url)


@pytest.mark.parametrize("ask", [missing, size_of, files.read_whole])
def test_a_missing_object_names_its_url(ask: Callable[[str], Any], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/nowhere.tar"
    with pytest.raises(FileNotFoundError) as caught:
        apart(ask, url)
    assert caught.value.filename == url


def died() -> None:
    os._exit(3)


def test_a_child_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_obstore_runs", lambda: False)
    assert apart(os.getpid) != os.getpid()
    assert apart(divmod, 7, 4) == (1, 3)
    with pytest.raises(ZeroDivisionError):
        apart(divmod, 7, 0)
    with pytest.raises(RemoteError, match="ended with exit code 3"):
        apart(died)
