"""Promises:
- Windows of tokens at URLs are those of local files, from raw and NumPy files, in every kind of worker.
- A batch is read together, neighbours by one request, and `will_read` begins it.
- A file of tokens that is replaced after the dataset was created is an error, also in another process.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import fastload
from fastload.errors import RemoteError, SequenceError
from fastload.remote import Store, files, open_store
from fastload.sequences import TokenWindows
from tests.remote.proxy import Proxy
from tests.remote.servers import Bucket

LENGTH = 8


@pytest.fixture(autouse=True)
def _stores_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store keeps the endpoint that its first read found, and each test has another."""
    monkeypatch.setattr(files, "_store", cache(open_store))


@pytest.fixture
def local(tmp_path: Path) -> list[Path]:
    raw, saved = tmp_path / "first.bin", tmp_path / "second.npy"
    (np.arange(1000) % 251).astype(np.uint16).tofile(raw)
    np.save(saved, (np.arange(500) % 93).astype(np.int32))
    return [raw, saved]


@pytest.fixture
def uploaded(local: list[Path], bucket: Bucket, proxy: Proxy) -> list[str]:
    for path in local:
        bucket.put(f"tokens/{path.name}", path.read_bytes())
    proxy.forget()
    return [f"s3://data/tokens/{path.name}" for path in local]


def windows(paths: Any) -> TokenWindows:
    return TokenWindows(paths, LENGTH, dtype=["uint16", None], end=3)


def read(dataset: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    with fastload.DataLoader(dataset, batch_size=5, shuffle=True, seed=3, **options) as loader:
        return [*loader]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_windows_at_urls_are_those_of_local_files(
    workers: int, local: list[Path], uploaded: list[str]
) -> None:
    here, there = windows(local), windows(uploaded)
    assert there.files == uploaded
    assert (there.set_id, there.left_out, len(there)) == (here.set_id, here.left_out, len(here))
    assert there.locate(124) == f"{uploaded[1]}, token 0"
    expected = read(here)
    assert equal(read(there, num_workers=workers, worker_method="thread"), expected)
    mixed = windows([local[0], uploaded[1]])
    assert equal(read(mixed, num_workers=workers, worker_method="thread"), expected)
    assert equal([there[k] for k in range(len(there))], [here[k] for k in range(len(here))])


PROGRAM = """
import sys
import fastload
from fastload.sequences import TokenWindows
windows = TokenWindows(sys.argv[1:], 8, dtype=["uint16", None], end=3)
for context in ("fork", "spawn"):
    with fastload.DataLoader(windows, batch_size=5, num_workers=2, worker_method="process", seed=3, shuffle=True,
                             multiprocessing_context=context) as loader:
        print(sum(int(batch["tokens"].sum()) for batch in loader))
"""


def test_worker_processes_read_urls(local: list[Path], uploaded: list[str]) -> None:
    expected = sum(int(batch["tokens"].sum()) for batch in read(windows(local)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *uploaded], capture_output=True, text=True, timeout=100
    )
    assert (done.stdout.split(), done.returncode) == ([str(expected)] * 2, 0), done.stderr


def test_a_batch_is_one_request_for_each_file(uploaded: list[str], proxy: Proxy) -> None:
    there = windows(uploaded)
    proxy.forget()
    read(there, num_workers=0)
    batches = -(-len(there) // 5)
    assert batches <= len(proxy.objects()) <= 2 * batches


def test_what_will_be_read_is_begun(uploaded: list[str], proxy: Proxy) -> None:
    there = windows(uploaded)
    proxy.forget()
    assert there.will_read is not None
    proxy.hold(2)
    there.will_read([0, 1, 130])
    assert proxy.wait_for(2)
    assert [int(there[k]["tokens"][0]) for k in (0, 1, 130)] == [0, 8, 48]
    assert not proxy.gave_up
    assert len(proxy.objects()) == 2
    there.will_read([])


def test_local_files_announce_nothing(local: list[Path]) -> None:
    assert windows(local).will_read is None


def test_an_object_that_is_replaced_is_an_error(
    local: list[Path], uploaded: list[str], bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = windows(uploaded)
    there[0]
    bucket.put("tokens/first.bin", bytes(2000))
    with pytest.raises(RemoteError, match="first.bin: the object has changed since"):
        there[3]
    monkeypatch.setattr(files, "_store", cache(open_store))  # as in another process
    elsewhere = pickle.loads(pickle.dumps(there))
    with pytest.raises(SequenceError, match=r"first.bin: the object was replaced since"):
        elsewhere[0]
    with pytest.raises(SequenceError, match=r"first.bin: the object was replaced since"):
        read(elsewhere)
    assert int(elsewhere[130]["tokens"][0]) == 48  # the other file is as it was
    assert int(windows(uploaded)[0]["tokens"].sum()) == 0


def test_what_is_no_file_of_tokens_names_its_url(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("tokens/odd.bin", bytes(101))
    with pytest.raises(SequenceError, match=r"s3://data/tokens/odd.bin: expected tokens of 2"):
        TokenWindows("s3://data/tokens/odd.bin", LENGTH, dtype="uint16")
    bucket.put("tokens/odd.npy", bytes(100))
    with pytest.raises(SequenceError, match="s3://data/tokens/odd.npy: expected a NumPy file"):
        TokenWindows("s3://data/tokens/odd.npy", LENGTH)
    with pytest.raises(FileNotFoundError) as caught:
        TokenWindows("s3://data/tokens/none.bin", LENGTH, dtype="uint16")
    assert caught.value.filename == "s3://data/tokens/none.bin"


def test_one_set_of_windows_cancels_nothing_of_another(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100, dtype=np.uint16))
    sets = [TokenWindows([f"file://{tmp_path}/tokens.npy"], 10) for _ in range(2)]
    told: list[tuple[int, object]] = []
    with mock.patch.object(
        Store, "will_read", lambda _, wanted, *, owner: told.append((len(wanted), owner))
    ):
        for windows in sets:
            assert windows.will_read is not None
            windows.will_read([0, 1])
            windows.will_read([])
    assert [count for count, _ in told] == [2, 0, 2, 0]
    assert len({owner for _, owner in told}) == 2
