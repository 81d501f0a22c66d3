"""Promises of every `torch.distributed.Store` that fastload uses or offers (torch's TCPStore, FileStore and HashStore,
and `FolderStore`):
- Keys, counters, compare-and-set, waiting, timeouts and prefixes answer alike, for threads and for processes.
- Leases in it give each sample of an epoch to one worker, free the shards of silent workers, and end with their
  process.
- If a TCPStore or a `FolderStore` is gone, a worker gets a `StoreLostError`, and no thread is left.
- Processes that are killed leave whole values and no lock in these two. FileStore keeps half a record.

A store joins by a class of one line in `tests/elastic/test_stores.py`.
"""

from __future__ import annotations

import gc
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

import fastload
from fastload.distributed import FolderStore
from fastload.elastic import Leases
from fastload.elastic.stores import Connection
from tests.children import Python, run_python
from tests.elastic.leasing import (
    DEADLINE_S,
    LENGTH,
    SHARD,
    Make,
    lease_threads,
    loader_of,
    together,
    watch_of,
)

KEYS = ("a/b", "a%2Fb", "..", ".lock", "", "ü ", "A", "a")
COUNTS, KILLS = 20, 40

OPENING = """
import os, signal, sys
from datetime import timedelta
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore
import fastload
from fastload.distributed import FolderStore
opening, where, port, *rest = sys.argv[1:]
port = int(port)
store = eval(opening)
"""
"""How a process opens the store of a test."""

COUNTING = f"""
mine = rest[0]
print(store.compare_set("first", "", mine).decode())
for _ in range({COUNTS}):
    store.add("count", 1)
store.set(mine, mine)
"""

LEASING = """
from fastload.elastic import Leases, LeaseSampler
leases = Leases(1000, shard=10, store=store, lease_s=0.05)
loader = fastload.DataLoader(range(1000), batch_sampler=LeaseSampler(leases, 3), num_workers=2)
batches = iter(loader)
for _ in range(9):
    next(batches)
"""

LOSING = """
import threading
from fastload.elastic import Leases, LeaseSampler, stores
from fastload.errors import StoreLostError
from tests.elastic.leasing import lease_threads
stores._RETRY_S, stores._RECONNECT = (0.0, 0.0), timedelta(seconds=0.5)
gone, moment, server = rest
leases, other = (Leases(100, shard=10, store=store) for _ in range(2))
loader = fastload.DataLoader(range(100), batch_sampler=LeaseSampler(leases, 10), num_workers=0)
batches, watch = iter(loader), leases._join()
wait = watch.wait
next(batches)
if moment == "waiting":
    held = other.begin(0, order=leases._epoch._order).lease()
    watch.wait = lambda changes: (exec(gone), wait(changes))
else:
    exec(gone)
try:
    list(batches)
except StoreLostError as error:
    print(error)
leases.close()
other.close()
for thread in threading.enumerate():
    if thread.name in lease_threads():
        thread.join(30)  # torch may still try to reach the store
assert lease_threads() == []
"""

SERVING = """
import signal
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""

WRITING = """
print("begun", flush=True)
while True:  # until it is killed
    number = store.add("count", 1)
    store.set("value", f"{number} " * 5_000)
    store.compare_set("value", f"{number} " * 5_000, "-")
"""


class Opened:
    """The store of a test. Each call is another connection, as another process would open it.

    A test's arguments live longer than the test. So they hold this, which `close` empties, and not a store.
    """

    def __init__(self, opening: str, folder: Path) -> None:
        self._opening, self._where = opening, str(folder / "store")
        self._server = None
        if "TCPStore" in opening:
            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._kept: Store | None = None

    @property
    def arguments(self) -> list[str]:
        """How a process opens it, after `OPENING`."""
        return [self._opening, self._where, str(self._server.port if self._server else 0)]

    def __call__(self) -> Store:
        if self._kept is not None:
            return self._kept
        names = {"where": self._where, "port": int(self.arguments[2]), "FolderStore": FolderStore}
        store: Store = eval(self._opening, {**vars(dist), **names})
        if "HashStore" in self._opening:
            self._kept = store  # a second one would be another store
        return store

    def close(self) -> None:
        self._kept = self._server = None


class StoreContract:
    """What every store shows.

    Attributes:
        opening: an expression that opens the store in any process, of `where`, a path, and `port`, that of a TCPStore.
        shared: other processes can open it.
        deletes: a key that was deleted is absent.
    """

    opening: ClassVar[str]
    shared: ClassVar[bool] = True
    deletes: ClassVar[bool] = True

    @pytest.fixture
    def opens(self, tmp_path: Path) -> Iterator[Opened]:
        opened = Opened(self.opening, tmp_path)
        yield opened
        opened.close()

    # ---- a store ----

    def test_values_counters_and_comparisons(self, opens: Opened) -> None:
        store, other = opens(), opens()
        assert store.compare_set("k", "", "1") == b"1"
        assert store.compare_set("k", "2", "3") == b"1"
        assert other.compare_set("k", "1", "4") == b"4"
        assert store.get("k") == b"4"
        assert store.compare_set("absent", "something", "new") == b"something"
        assert not other.check(["absent"])
        assert other.check(["k"])
        assert not other.check(["k", "absent"])
        assert store.add("n", 2) == 2
        assert other.add("n", -5) == -3
        assert store.get("n") == b"-3"
        store.set("k", b"\0bytes".decode("latin1"))
        store.set("empty", "")
        assert other.get("k") == b"\0bytes"
        assert other.check(["empty"])
        assert other.multi_get(["k", "empty"]) == [b"\0bytes", b""]

    def test_any_text_is_a_key_and_keys_can_be_deleted(self, opens: Opened) -> None:
        store, other = opens(), opens()
        before = store.num_keys()
        for key in KEYS:
            store.set(key, f"value of {key}")
        assert other.num_keys() == before + len(KEYS)
        assert other.multi_get(list(KEYS)) == [f"value of {key}".encode() for key in KEYS]
        assert other.delete_key("a")
        assert store.num_keys() == before + len(KEYS) - 1
        if self.deletes:
            assert not store.delete_key("a")
            assert not store.check(["a"])

    def test_a_prefix_tells_keys_apart_and_keeps_the_store_alive(self, opens: Opened) -> None:
        store = opens()
        inner = PrefixStore("a/b", opens())
        gc.collect()
        store.set("k", "of the store")
        assert not inner.check(["k"])
        assert inner.compare_set("k", "", "of the prefix") == b"of the prefix"
        assert inner.add("count", 1) == 1
        assert inner.clone().multi_get(["k", "count"]) == [b"of the prefix", b"1"]
        assert store.get("a/b/k") == inner.get("k")
        assert inner.delete_key("k")
        assert store.get("k") == b"of the store"

    def test_a_clone_waits_until_the_store_sets_the_key(self, opens: Opened) -> None:
        """Each worker of leases waits on a clone while it asks on another."""
        store = opens()
        waits, begun = store.clone(), threading.Event()

        def wait() -> bytes:
            begun.set()
            waits.wait(["one", "two"], timedelta(seconds=DEADLINE_S))
            return waits.get("two")

        def set_later() -> None:
            assert begun.wait(DEADLINE_S)
            for key in ("one", "two"):
                store.set(key, f"value of {key}")

        assert together(wait, set_later)[0] == b"value of two"

    def test_a_key_that_does_not_come_is_an_error_after_the_timeout(self, opens: Opened) -> None:
        store, soon = opens(), timedelta(seconds=0.02)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="(?i)wait timeout|has no key"):
            store.wait(["key"], soon)
        PrefixStore("a", store).set_timeout(soon)
        with pytest.raises(RuntimeError, match="(?i)timeout|has no key"):
            store.get("key")
        assert time.monotonic() - began >= 2 * soon.total_seconds()

    def test_workers_that_count_at_once_lose_no_count_and_have_one_first(
        self, opens: Opened
    ) -> None:
        """Two threads, and two processes if they can share it."""
        store, names = opens(), ["a", "b", *(["c", "d"] if self.shared else [])]

        def process(name: str) -> str:
            ended = run_python("-c", OPENING + COUNTING, *opens.arguments, name, check=True)
            return ended.stdout.strip()

        def thread(name: str) -> str:
            mine = opens()
            first = mine.compare_set("first", "", name).decode()
            for _ in range(COUNTS):
                mine.add("count", 1)
            mine.set(name, name)
            return first

        found = together(*(partial(process if name in "cd" else thread, name) for name in names))
        assert set(found) == {store.get("first").decode()}
        assert store.get("count") == str(COUNTS * len(names)).encode()
        assert store.multi_get(names) == [name.encode() for name in names]

    # ---- what leases ask of it ----

    def test_a_connection_reads_agrees_and_tells(self, opens: Opened) -> None:
        ours, theirs = (Connection(PrefixStore("x", opens())) for _ in range(2))
        ours.set("a", "1")
        assert theirs.read_all(["a", "b"]) == ["1", ""]
        assert theirs.read_all(["a"]) == ["1"]
        assert ours.compare_set("b", "", "2") == "2" == theirs.compare_set("b", "", "3")
        assert ours.compare_set("b", "2", "") == ""
        assert theirs.compare_set("b", "", "4") == "4", "a key without a text is free"
        assert (ours.add("n", 1), theirs.add_once("n", 1)) == (1, 2)
        ours.agree("length", "9")
        theirs.agree("length", "9")
        with pytest.raises(ValueError, match=r"length '8', .* another worker .* have '9'"):
            theirs.agree("length", "8")
        assert ours.tell("event", "ours")
        assert ours.tell("event", "ours"), "as after a broken connection"
        assert not theirs.tell("event", "theirs")
        theirs.cloned().wait("event", threading.Event())

    def test_three_workers_read_each_sample_of_each_epoch_once(
        self, opens: Opened, closing: Make
    ) -> None:
        store, all_begun = opens(), threading.Barrier(3)

        def train() -> list[list[list[int]]]:
            loader = loader_of(closing(store))
            first = iter(loader)
            all_begun.wait(DEADLINE_S)  # a worker that came later would be warned of
            return [[batch.tolist() for batch in each] for each in (first, loader, loader)]

        found = together(train, train, train)
        for epoch in range(3):
            read = [batch for worker in found for batch in worker[epoch]]
            assert sorted(chain(*read)) == list(range(LENGTH))
            order = fastload.RankSampler(LENGTH, rank=0, world_size=1).indices_of(epoch, 0, LENGTH)
            places = {int(index): place for place, index in enumerate(order)}
            for batch in read:
                first, last = places[batch[0]], places[batch[-1]]
                assert [places[index] for index in batch] == list(range(first, last + 1))
                assert first // SHARD == last // SHARD, "a batch has samples of two shards"
            assert sorted(map(len, read)) == sorted([40, 40, 16] * 10 + [40])

    def test_beats_that_stop_free_the_shards_within_a_lease(
        self, opens: Opened, closing: Make
    ) -> None:
        store = opens()
        silent, other = closing(store, lease_s=0.4), closing(store, lease_s=0.4)
        next(silent.shards())
        watch_of(silent)._beat = lambda: None  # type: ignore[method-assign]
        assert len(list(other.shards())) == 11

    def test_an_old_state_in_a_used_store_is_warned_of(self, opens: Opened, closing: Make) -> None:
        store = opens()
        leases = closing(store)
        assert len(list(leases.shards(0))) == len(leases)
        late = closing(store)
        with pytest.warns(
            UserWarning, match="epoch 0 of these leases had ended before this worker"
        ):
            assert list(late.shards(0)) == []
        assert len(list(late.shards(1))) == len(late)
        old = closing(store)
        old.load_state_dict({**late.state_dict(), "done": [[0, 1]]})
        with pytest.warns(UserWarning, match="epoch 1 .* give the leases a new store"):
            assert list(old.shards(1)) == []

    def test_no_thread_is_left(self, opens: Opened) -> None:
        leases = Leases(10, shard=5, store=opens())
        assert lease_threads() == []
        leases.begin(0)
        leases.close()  # with nothing to give back, so no other event wakes its thread
        assert lease_threads() == []
        next(leases.shards())
        assert len(lease_threads()) == 2
        leases.close()
        assert lease_threads() == []
        leases.close()
        assert len(list(leases.shards())) == 2, "closed leases may be used again"
        assert len(lease_threads()) == 2
        del leases
        gc.collect()
        assert lease_threads() == []

    def test_a_process_that_ends_with_leases_ends_well(self, opens: Opened) -> None:
        # Under this name the process takes down its modules, as every Python does: the threads must have ended.
        ended = run_python("-c", OPENING + LEASING, *opens.arguments, name="script")
        assert (ended.returncode, ended.stderr) == (0, "")


class JobStoreContract(StoreContract):
    """What a store shows that processes share which may be killed.

    Attributes:
        gone: a statement that takes the store away, of `where` and `server`, the process id of a TCPStore's server.
    """

    gone: ClassVar[str]

    @pytest.mark.slow
    @pytest.mark.parametrize("moment", ["waiting", "training"])
    def test_a_store_that_is_gone_is_an_error_and_not_the_end(
        self, moment: str, tmp_path: Path
    ) -> None:
        """In a process of its own: torch closes the sockets of a store that is gone when it likes."""
        with ExitStack() as ends:
            port, pid = "0", "0"
            if "TCPStore" in self.opening:
                server = ends.enter_context(Python(["-c", SERVING], stdout=subprocess.PIPE))
                ends.callback(server.kill)
                port, pid = server.stdout.readline().decode().strip(), str(server.pid)  # type: ignore[union-attr]
            arguments = [self.opening, str(tmp_path / "store"), port, self.gone, moment, pid]
            ended = run_python("-c", OPENING + LOSING, *arguments)
        assert "The epoch is not complete" in ended.stdout, ended.stderr
        assert ended.returncode == 0, ended.stderr

    @pytest.mark.slow
    def test_processes_that_are_killed_leave_whole_values_and_no_lock(self, opens: Opened) -> None:
        draw, store = random.Random(0), opens()
        store.set("value", "-")
        store.add("count", 0)  # a writer may be killed before it has counted
        for _ in range(KILLS // 2):
            program = ["-c", OPENING + WRITING, *opens.arguments]
            writers = [Python(program, stdout=subprocess.PIPE) for _ in range(2)]
            for writer in writers:
                assert writer.stdout is not None
                assert writer.stdout.readline() == b"begun\n"
            for writer in writers:
                time.sleep(draw.uniform(0.0, 0.02))
                writer.kill()
                writer.communicate()
            before = int(store.get("count"))
            assert store.add("count", 1) == before + 1
            values = set(store.get("value").decode().split())
            assert len(values) == 1, "a value is half of one and half of another"
