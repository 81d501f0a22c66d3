"""Promises:
- A `FolderStore` answers as torch's stores do.
- Processes that are killed at any moment leave whole values in a `FolderStore`, and no lock.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    HashStore,
    PrefixStore,
    Store,
)

from fastload.distributed import FolderStore

DEADLINE_S = 60
KILLS = 40


def calls(store: Store) -> list[Any]:
    """Return what a store answers, also through the prefix that torch's process groups put before their keys."""
    inner = PrefixStore("a/b", store)
    return [
        store.compare_set("k", "", "1"),
        store.compare_set("k", "2", "3"),
        store.compare_set("k", "1", "4"),
        store.get("k"),
        store.compare_set("absent", "something", "new"),
        store.check(["absent"]),
        store.check(["k"]),
        store.add("n", 2),
        store.add("n", -5),
        store.set("k", b"\0bytes".decode("latin1")),
        store.get("k"),
        inner.compare_set("k", "", "of the prefix"),
        inner.get("k"),
        inner.add("count", 1),
        inner.check(["k", "count"]),
        inner.multi_get(["k", "count"]),
        inner.clone().get("k"),
        inner.num_keys(),
        inner.delete_key("k"),
        store.delete_key("k"),
        store.delete_key("k"),
        store.check(["k"]),
        store.num_keys(),
    ]


def test_it_answers_as_the_stores_of_torch_do(tmp_path: Path) -> None:
    assert calls(FolderStore(tmp_path / "store")) == calls(HashStore())


def test_it_outlives_its_name_as_other_stores_do(tmp_path: Path) -> None:
    store = PrefixStore("a", FolderStore(tmp_path))
    gc.collect()
    assert store.clone().add("count", 1) == 1


def test_keys_are_those_of_all_processes_and_any_text_is_a_key(tmp_path: Path) -> None:
    one, other = FolderStore(tmp_path / "store"), FolderStore(str(tmp_path / "store"))
    for key in ("a/b", "a%2Fb", "..", ".lock", "", "ü ", "A", "a"):
        one.set(key, f"value of {key}")
    assert one.num_keys() == 8
    for key in ("a/b", "a%2Fb", "..", ".lock", "", "ü ", "A", "a"):
        assert other.get(key) == f"value of {key}".encode()


def test_wait_returns_once_another_thread_has_set_the_key(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    looked = threading.Event()

    class Looking(FolderStore):
        def check(self, keys: Any) -> bool:
            found = super().check(keys)
            looked.set()
            return found

    def set_later() -> None:
        looked.wait(DEADLINE_S)
        store.set("key", "value")

    thread = threading.Thread(target=set_later)
    thread.start()
    assert Looking(tmp_path).get("key") == b"value"
    thread.join()


@pytest.mark.parametrize("call", [lambda s: s.get("key"), lambda s: s.wait(["key"])])
def test_a_key_that_does_not_come_is_named(tmp_path: Path, call: Callable[[Store], Any]) -> None:
    with pytest.raises(DistStoreError, match=r"has no key 'key' after 0\.01 s"):
        call(FolderStore(tmp_path, timedelta(seconds=0.01)))


def test_a_key_that_comes_at_the_last_moment_is_found(tmp_path: Path) -> None:
    class Late(FolderStore):
        def check(self, keys: Any) -> bool:
            found = super().check(keys)
            self.set("key", "value")
            return found

    store = Late(tmp_path)
    with suppress(DistStoreError):
        store.wait(["key"], timedelta(0))
    assert store.get("key") == b"value"


def test_the_timeout_can_be_set_later_as_that_of_torchs_stores(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    PrefixStore("a", store).set_timeout(timedelta(seconds=0.02))
    with pytest.raises(DistStoreError, match=r"has no key 'key' after 0\.02 s"):
        store.get("key")


def test_no_time_is_no_wait(tmp_path: Path) -> None:
    with pytest.raises(DistStoreError, match="has no key 'key' after 0 s"):
        FolderStore(tmp_path).wait(["key"], timedelta(0))


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.set("key", "value"),
        lambda s: s.add("count", 1),
        lambda s: s.compare_set("key", "", "value"),
        lambda s: s.delete_key("key"),
        lambda s: s.wait(["key"]),
        lambda s: s.check(["key"]),
    ],
)
def test_a_folder_that_is_gone_is_an_error_and_is_not_made_again(
    tmp_path: Path, call: Callable[[Store], Any]
) -> None:
    """Else a job whose store was deleted would go on in an empty one, as if it had just begun."""
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    with pytest.raises(FileNotFoundError, match="store"):
        call(PrefixStore("a", store))
    assert not (tmp_path / "store").exists()


def test_counts_of_several_threads_add_up(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)

    def count() -> None:
        for _ in range(50):
            store.add("count", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get("count") == b"200"


def _write(path: str, begun: Any) -> None:
    store = FolderStore(path)
    begun.release()
    while True:  # until it is killed
        number = store.add("count", 1)
        store.set("value", f"{number} " * 5_000)
        store.compare_set("value", f"{number} " * 5_000, "-")


@pytest.mark.slow
def test_processes_that_are_killed_leave_whole_values_and_no_lock(
    forkserver: ForkServerContext, tmp_path: Path
) -> None:
    draw = random.Random(0)
    begun = forkserver.Semaphore(0)
    store = FolderStore(tmp_path / "store")
    store.set("value", "-")
    store.add("count", 0)  # a writer may be killed before it has counted
    for _ in range(KILLS // 2):
        writers = [
            forkserver.Process(target=_write, args=(str(tmp_path / "store"), begun))
            for _ in range(2)
        ]
        for writer in writers:
            writer.start()
        for _ in writers:
            assert begun.acquire(timeout=DEADLINE_S)
        for writer in writers:
            time.sleep(draw.uniform(0.0, 0.02))
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join()
            writer.close()
        before = int(store.get("count"))
        assert store.add("count", 1) == before + 1
        values = set(store.get("value").decode().split())
        assert len(values) == 1, "a value is half of one and half of another"
