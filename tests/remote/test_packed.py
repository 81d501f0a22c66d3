"""Promises:
- A packed set at a URL gives the samples of the same set here, to the bit, by threads and processes, with or without
  a local cache.
- What a cache keeps is not asked for again, by later runs and by other processes. Without one, nothing is kept, and
  each payload is asked for once.
- Samples that will be read are fetched together. What was announced is forgotten when told so.
- A missing shard, a damaged one, and one that changes are errors that name the URL.
- The temporary cache goes with its process, and that of a killed one with the next process.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.datasets import PackedDataset
from fastload.errors import PackedDataError, RemoteError, UsageError
from fastload.image import RandomResizedCrop
from fastload.remote import files, open_store
from tests.children import ROOT
from tests.datasets.test_packed import write
from tests.remote.proxy import Proxy
from tests.remote.servers import Bucket
from tests.remote.test_images import equal

PLAN = RandomResizedCrop(8)
COUNT = 40


@pytest.fixture(autouse=True)
def _stores_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store keeps the endpoint that its first read found, and each test has another."""
    monkeypatch.setattr(files, "_store", cache(open_store))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / "temporary"


@pytest.fixture(params=["encoded", "raw"])
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A set in several shards."""
    return write(tmp_path / request.param, request.param, COUNT, shard_bytes=2000)


def upload(bucket: Bucket, local: Path) -> str:
    for path in local.iterdir():
        bucket.put(f"packed/{local.name}/{path.name}", path.read_bytes())
    return f"s3://data/packed/{local.name}"


@pytest.fixture
def url(local: Path, bucket: Bucket, proxy: Proxy) -> str:
    """The URL of the same set in the bucket."""
    return upload(bucket, local)


def read(dataset: Any, **options: Any) -> list[Any]:
    options = {"batch_size": 7, "shuffle": True, "seed": 3, **options}
    with fastload.DataLoader(dataset, **options) as loader:
        return [*loader]


@pytest.mark.parametrize("kept", ["temporary", "named", "nothing"])
@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_those_of_the_set_here(
    kept: str, workers: int, local: Path, url: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "temporary": {},
        "named": {"cache_dir": tmp_path / "cache"},
        "nothing": {"cache_bytes": 0},
    }[kept]
    remote = PackedDataset(url, transform=PLAN, **options)
    expected = read(PackedDataset(local, transform=PLAN))
    for _ in range(2):  # blocks are filled, and then there
        assert equal(read(remote, num_workers=workers, worker_method="thread"), expected)
    plain = PackedDataset(url, decode=False, **options)
    here = PackedDataset(local, decode=False)
    assert [plain.read(k) for k in range(COUNT)] == [here.read(k) for k in range(COUNT)]
    assert plain.targets.tolist() == here.targets.tolist()
    assert plain.locate(5) == here.locate(5).replace(str(local), url)


PROGRAM = """
import sys, torch, fastload
from fastload.datasets import PackedDataset
from fastload.image import RandomResizedCrop
url, local, folder, method = sys.argv[1:]
plan = RandomResizedCrop(8)
found = []
for path in url, local:
    dataset = PackedDataset(path, transform=plan, cache_dir=folder or None)
    with fastload.DataLoader(dataset, batch_size=7, shuffle=True, seed=3, num_workers=2, worker_method="process",
                             multiprocessing_context=method) as loader:
        found.append([*loader] + [*loader])
for x, y in zip(*found, strict=True):
    assert all(map(torch.equal, x, y))
print(len(found[0]))
"""


@pytest.mark.parametrize("local", ["encoded"], indirect=True)
@pytest.mark.parametrize(("method", "folder"), [("fork", "cache"), ("fork", ""), ("spawn", "")])
def test_worker_processes_share_a_cache(
    method: str,
    folder: str,
    local: Path,
    url: str,
    proxy: Proxy,
    tmp_path: Path,
    temporary: Path,
) -> None:
    at = folder and str(tmp_path / folder)
    proxy.forget()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, url, str(local), at, method],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert (done.stdout.split(), done.returncode) == (["12"], 0), done.stderr
    blocks = [x for x in proxy.objects() if x[1:] != (0, 1) and x[0].endswith(".arrow")]
    shards = len([*local.glob("*.arrow")])
    assert shards <= len(blocks) <= 2 * shards  # two processes may ask at once
    assert not [*temporary.glob("fastload-*")]


def test_what_is_kept_is_not_asked_for_again(url: str, proxy: Proxy, tmp_path: Path) -> None:
    read(PackedDataset(url, transform=PLAN, cache_dir=tmp_path / "cache"))
    files.store_of.__globals__["_store"].cache_clear()  # as in another process
    proxy.forget()
    again = PackedDataset(url, transform=PLAN, cache_dir=tmp_path / "cache")
    read(again)
    asked = [x[1:] for x in proxy.objects() if x[0].endswith(".arrow")]
    assert asked == [(0, 1)] * len(again._index.shards)  # only whether they are the same
    assert files.store_of(url).stats()["cache_hits"] >= COUNT // 7


def test_without_a_cache_each_payload_is_asked_for_once(
    url: str, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.remote.store.GAP", -1)  # no two are merged
    dataset = PackedDataset(url, decode=False, cache_bytes=0)
    assert len(dataset.targets) == COUNT
    proxy.forget()
    read(dataset, collate_fn=list, num_workers=2, worker_method="thread")
    columns = dataset._shards.columns
    stops = columns.begins + columns.lengths
    payloads = {*zip(columns.begins.tolist(), stops.tolist(), strict=True)}
    asked = [x for x in proxy.objects() if x[1:] in payloads]
    assert len(asked) == len({*asked}) == COUNT


def test_what_will_be_read_is_begun_together(url: str, proxy: Proxy) -> None:
    dataset = PackedDataset(url, transform=PLAN)
    proxy.forget()
    assert dataset.will_read is not None
    dataset.will_read(range(COUNT))
    assert (shards := len(dataset._index.shards)) > 1
    assert len(proxy.objects()) == 2 * shards  # a byte, and the block
    dataset.will_read([0, COUNT + 5, -1])
    read(dataset)
    assert len(proxy.objects()) == 2 * shards


def test_columns_of_all_shards_are_fetched_at_once(url: str, proxy: Proxy) -> None:
    dataset = PackedDataset(url, transform=PLAN)
    proxy.forget()
    proxy.hold(shards := len(dataset._index.shards))
    assert dataset.will_read is not None
    dataset.will_read(range(COUNT))
    assert not proxy.gave_up
    assert proxy.most_in_flight >= shards


def test_what_is_no_more_read_is_forgotten(url: str, proxy: Proxy) -> None:
    dataset = PackedDataset(url, decode=False, cache_bytes=0)
    assert len(dataset.targets) == COUNT
    proxy.forget()
    proxy.hold()
    assert dataset.will_read is not None
    dataset.will_read([3])
    assert proxy.wait_for(1)
    dataset.will_read([])
    proxy.release()
    dataset.read(3)
    assert len(proxy.objects()) == 2


def test_a_local_set_hears_nothing(local: Path) -> None:
    assert PackedDataset(local).will_read is None


def test_faults_name_the_url(local: Path, bucket: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    url = upload(bucket, local)
    with pytest.raises(FileNotFoundError, match="the folder holds no set") as caught:
        PackedDataset(f"{url}/none")
    assert caught.value.filename == f"{url}/none/index.json"
    first = f"packed/{local.name}/shard-00000.arrow"
    content = (local / "shard-00000.arrow").read_bytes()
    dataset = PackedDataset(url, decode=False, cache_bytes=0)
    bucket.delete(first)
    with pytest.raises(
        PackedDataError, match=f"{url}, shard shard-00000.arrow: the file is missing"
    ):
        dataset[0]
    dataset.close()
    bucket.put(first, content)
    [(begin, _), *_] = dataset._index.shards[0].payload
    wrong = content[: begin + 3] + bytes([content[begin + 3] ^ 1]) + content[begin + 4 :]
    assert dataset[1]
    bucket.put(first, wrong)
    with pytest.raises(RemoteError, match=f"{url}/shard-00000.arrow.*has changed"):
        read(dataset, collate_fn=list)
    files.store_of.__globals__["_store"].cache_clear()
    damaged = PackedDataset(url, decode=False, cache_dir=tmp_path / "cache")
    with pytest.raises(
        PackedDataError, match=f"{url}, shard shard-00000.arrow, record 0: .*checksum"
    ):
        damaged[0]


def test_arguments_are_checked(url: str) -> None:
    with pytest.raises(UsageError, match="cache_bytes"):
        PackedDataset(url, cache_bytes=-1)
    with pytest.raises(ValueError, match="read_ahead_bytes"):
        PackedDataset(url, read_ahead_bytes=1)


KILLED = """
import os, signal, sys
from fastload.datasets import PackedDataset
dataset = PackedDataset(sys.argv[1])
dataset.read(0)
print(dataset._cache._folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_temporary_cache_goes_with_its_process(url: str, temporary: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, url], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [str(x) for x in temporary.glob("fastload-*")] == [done.stdout.strip()]
    first = PackedDataset(url)
    folder = first._cache._folder
    assert not os.path.exists(done.stdout.strip())
    copy = pickle.loads(pickle.dumps(first))
    second = PackedDataset(url)  # leaves that of a process that lives
    assert copy.read(1) == first.read(1) == second.read(1)
    assert len([*temporary.glob("fastload-cache-*")]) == 2
    del first
    assert not os.path.exists(folder)
    assert copy.read(30)  # it makes one of its own
    del copy, second
    assert not [*temporary.glob("fastload-*")]
