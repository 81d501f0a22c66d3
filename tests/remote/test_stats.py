"""Promises:
- `loader.stats().remote` has what an epoch read from stores: in threads, in processes, without workers, exactly.
- It has what a store read that is gone. Of local files there is no such part.
- All epochs together, and a part of one, have sums. The report names requests, bytes and retries.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import fastload
from fastload.datasets import ImageFolder
from fastload.image import RandomResizedCrop
from fastload.remote import files, open_store
from fastload.telemetry.snapshot import RemoteReads
from fastload.telemetry.sums import less
from tests.image_files import listed_images
from tests.remote.proxy import Proxy
from tests.remote.servers import Bucket

SIZES = [1000 + k for k in range(12)]


class Objects(Dataset[int]):
    """Reads each object by a store: its own, or one for each sample."""

    def __init__(self, folder: Path, *, keeps: bool = True) -> None:
        for k, size in enumerate(SIZES):
            (folder / f"{k}").write_bytes(bytes(size))
        self.url = f"file://{folder}"
        self.store = open_store(self.url) if keeps else None

    def __len__(self) -> int:
        return len(SIZES)

    def __getitem__(self, index: int) -> int:
        store = open_store(self.url) if self.store is None else self.store
        return len(store.read(str(index)))


def remote_of(loader: Any) -> RemoteReads:
    found = loader.stats().remote
    assert isinstance(found, RemoteReads)
    return found


WORKERS = [
    {},
    {"num_workers": 2, "worker_method": "thread"},
    {"num_workers": 2, "worker_method": "process", "persistent_workers": True},
    {
        "num_workers": 2,
        "worker_method": "process",
        "multiprocessing_context": "spawn",
        "persistent_workers": True,
    },
]


@pytest.mark.parametrize("options", WORKERS, ids=["none", "threads", "forks", "spawn"])
@pytest.mark.parametrize("keeps", [True, False], ids=["one store", "a store a sample"])
def test_an_epoch_counts_what_it_read(options: dict[str, Any], keeps: bool, tmp_path: Path) -> None:
    dataset = Objects(tmp_path, keeps=keeps)
    open_store(dataset.url).read("0")  # before the loop: it isn't the epoch's
    with fastload.DataLoader(dataset, batch_size=4, **options) as loader:
        for _ in range(2):
            assert sum(batch.sum().item() for batch in loader) == sum(SIZES)
            remote = remote_of(loader)
            assert remote.requests == len(SIZES)
            assert remote.bytes_wanted == remote.bytes_fetched == sum(SIZES)
            assert 0 < remote.p50_s <= remote.p99_s
            assert 0 < remote.seconds < 60
            assert remote.in_flight_limit >= 4
            assert remote.retries == remote.throttled == remote.cache_hits == 0
        total = loader.stats(total=True).remote
        assert total is not None
        assert total.requests == 2 * len(SIZES)
    report = str(loader.stats())
    assert re.search(r"^requests +12  p50 [\d.]+ .s, p99 .* in flight$", report, re.MULTILINE)
    assert re.search(r"^fetched +12\.1 kB  12\.1 kB wanted$", report, re.MULTILINE)


def test_local_files_have_no_part(tmp_path: Path) -> None:
    open_store(Objects(tmp_path).url).read("0")
    loader = fastload.DataLoader([1, 2, 3], batch_size=2)
    assert [*loader]
    assert loader.stats().remote is None
    assert "requests" not in str(loader.stats())


@pytest.fixture
def uploaded(tmp_path: Path, bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a folder of twelve images."""
    monkeypatch.setattr(files, "_store", cache(open_store))  # each test has another endpoint
    listed_images(tmp_path / "train", 12)
    for path in (tmp_path / "train").rglob("*.jpg"):
        bucket.put(f"counted/{path.parent.name}/{path.name}", path.read_bytes())
    proxy.forget()
    return "s3://data/counted"


@pytest.mark.parametrize("options", [WORKERS[1], WORKERS[3]], ids=["threads", "spawn"])
def test_workers_count_what_a_server_sees(
    options: dict[str, Any], uploaded: str, proxy: Proxy
) -> None:
    images = ImageFolder(uploaded, transform=RandomResizedCrop(16))
    proxy.forget()
    with fastload.DataLoader(images, 4, **options) as loader:
        assert len([*loader]) == 3
    remote = remote_of(loader)
    assert remote.requests == len(proxy.objects()) == 12
    assert remote.bytes_wanted == remote.bytes_fetched > 12 * 100


class Fails:
    """Fails at the first read of each object."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def read(self, url: str) -> bytes:
        if url not in self.seen:
            self.seen.add(url)
            raise TimeoutError("too slow")
        return b"ab"


class ByStore(Dataset[int]):
    def __init__(self) -> None:
        self.store = open_store(Fails())

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return len(self.store.read(str(index)))


def test_retries_and_throttling_are_counted() -> None:
    loader = fastload.DataLoader(ByStore(), batch_size=3)
    assert [len(batch) for batch in loader] == [3, 3]
    remote = remote_of(loader)
    assert (remote.requests, remote.retries, remote.throttled) == (12, 6, 6)
    assert remote.bytes_fetched == 12
    assert "6 retried, 6 throttled" in str(loader.stats())


def test_a_part_of_an_epoch_is_a_difference() -> None:
    loader = fastload.DataLoader(ByStore(), batch_size=2)
    iterator = iter(loader)
    next(iterator)
    before = loader.stats()
    assert len([*iterator]) == 2
    part = less(loader.stats(), before).remote
    assert part is not None
    assert (part.requests, part.retries, part.bytes_fetched) == (8, 4, 8)
