"""Promises:
- A stream of shards at URLs has the samples of the local ones, and resumes as exactly.
- Opened again in the middle, a shard is not read from its beginning if its format can seek.
- A shard read in order takes a size and one request for each part.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastload
from fastload.remote import files, open_store
from fastload.remote.files import apart
from fastload.streams import Shards
from fastload.streams.adapters import from_webdataset
from fastload.streams.formats import format_of
from tests.remote.proxy import Proxy
from tests.remote.servers import Bucket
from tests.streams.chains import id_of, write
from tests.streams.test_resume import check_other_readers, check_same_readers, reading

KINDS = ("jsonl", "jsonl.gz", "parquet", "arrow", "tar")
SIZES = (50, 0, 31, 7, 20)


@pytest.fixture(autouse=True)
def _stores_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store keeps the endpoint that its first read found, and each test has another."""
    monkeypatch.setattr(files, "_store", cache(open_store))


def shards(folder: Path, kind: str) -> list[Path]:
    """Write shards of several sizes."""
    paths = [folder / f"{number}.{kind}" for number in range(len(SIZES))]
    for number, (path, size) in enumerate(zip(paths, SIZES, strict=True)):
        write(kind.removesuffix(".gz"), path, [1000 * number + k for k in range(size)])
        if kind.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
    return paths


def uploaded(bucket: Bucket, paths: list[Path], prefix: str) -> list[str]:
    """Put files into the bucket, and return their URLs."""
    for path in paths:
        bucket.put(f"{prefix}/{path.name}", path.read_bytes())
    return [f"s3://data/{prefix}/{path.name}" for path in paths]


def check_same(urls: list[str], paths: list[Path]) -> None:
    """Read and resume both."""
    remote, local = Shards(urls, seed=1).map(id_of), Shards(paths, seed=1).map(id_of)
    for reader in range(3):
        assert [*reading(remote, 0, reader, 3)] == [*reading(local, 0, reader, 3)]
    check_same_readers(random.Random(1), remote)
    check_other_readers(random.Random(2), remote)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_file_urls_resume(kind: str, tmp_path: Path) -> None:
    paths = shards(tmp_path, kind)
    apart(check_same, [f"file://{path}" for path in paths], paths)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_a_bucket_resume(
    kind: str, tmp_path: Path, bucket: Bucket, proxy: Proxy
) -> None:
    paths = shards(tmp_path, kind)
    apart(check_same, uploaded(bucket, paths, f"streams-{kind}"), paths)


def large(kind: str, path: Path) -> None:
    """Write a shard of 4 MB or more in several row groups or batches, with ids from 0."""
    noise = random.Random(1)
    table = pa.table({"id": range(400), "x": [noise.randbytes(10_000).hex() for _ in range(400)]})
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=50, compression="none")
    elif kind == "arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    elif kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    else:
        write("tar", path, [*range(4000)])


def rest(url: str, start: int) -> list[int]:
    form = format_of(None, url)
    return [id_of(form.sample(record)) for _, _, record in form.read(url, start, None)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "tar"])
def test_a_shard_opened_in_the_middle_is_not_read_from_its_beginning(
    kind: str, tmp_path: Path, bucket: Bucket, proxy: Proxy
) -> None:
    large(kind, path := tmp_path / f"large.{kind}")
    (url,) = uploaded(bucket, [path], "middle")
    form, size = format_of(None, path), path.stat().st_size
    records = [*form.read(path, 0, None)]
    at, ids = records[len(records) // 2][0], [id_of(form.sample(r)) for _, _, r in records]
    assert apart(rest, url, at) == ids[len(ids) // 2 :]
    assert proxy.bytes_sent < 0.75 * size, proxy.objects()
    proxy.forget()
    assert apart(rest, url, 0) == ids
    assert proxy.bytes_sent < 1.1 * size
    assert [request.method for request in proxy.requests].count("HEAD") <= 1
    assert len(proxy.objects()) <= 9


def loaded(urls: list[str], found: list[int], state: Any, count: int | None) -> Any:
    """Read on with worker processes, from a state."""
    stream = Shards(urls, seed=1).map(id_of)
    with fastload.DataLoader(
        stream, batch_size=4, num_workers=2, worker_method="process"
    ) as loader:
        if state is not None:
            loader.load_state_dict(state)
        ids = [n for batch in itertools.islice(loader, count) for n in batch.tolist()]
        return [*found, *ids], loader.state_dict()


def test_worker_processes_read_and_resume(tmp_path: Path) -> None:
    """The loop's process opens no client, so its workers fork, twice."""
    paths = shards(tmp_path, "tar")
    found, state = loaded([f"file://{path}" for path in paths], [], None, 5)
    found, _ = loaded([f"file://{path}" for path in paths], found, state, None)
    assert Counter(found) == Counter(
        1000 * n + k for n, size in enumerate(SIZES) for k in range(size)
    )


def webdataset(urls: list[str]) -> list[str]:
    wds = pytest.importorskip("webdataset")
    pipeline = wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("id")
    return sorted(str(sample[0]) for sample in from_webdataset(pipeline))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_pipeline_of_webdataset_reads_urls(tmp_path: Path) -> None:
    paths = shards(tmp_path, "tar")
    found = apart(webdataset, [f"file://{path}" for path in paths])
    assert found == webdataset([str(path) for path in paths])
    assert len(found) == sum(SIZES)


def test_a_missing_shard_names_its_url(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/nowhere.tar"
    with pytest.raises(FileNotFoundError) as caught:
        apart(list, Shards([url]))
    assert caught.value.filename == url
