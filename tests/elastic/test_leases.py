"""Promises:
- An epoch of leases ends for all workers after all acknowledgements. The loader never waits for itself.
- Lost leases, failed shards, a full disk, Ctrl-C and fork end as documented.
- The state of a loader on leases is exact within a shard.
- The set of (sample, augmentation) of an epoch is the same for 1, 2 and 3 workers, and that of one loader.

What leases need of a store is shown by `tests/contracts/stores.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from itertools import chain, islice
from pathlib import Path
from typing import Any

import covertable
import numpy as np
import pytest
import torch
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.utils.data import Dataset

import fastload
from fastload.distributed import FolderStore, Rank, group
from fastload.elastic import Leases, LeaseSampler
from fastload.elastic import watch as watch_module
from fastload.elastic.stores import Connection, find_store
from fastload.errors import LeaseLostError, ShardError, StateError, StoreLostError
from tests.elastic.leasing import (
    BATCH,
    DEADLINE_S,
    LENGTH,
    SHARD,
    Make,
    loader_of,
    samples,
    together,
    watch_of,
)
from tests.fakes import FailingDataset
from tests.resuming import through_json


class Drawing(Dataset[Any]):
    """Samples that draw from torch, NumPy and Python."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item(), float(np.random.rand()), random.random()


def declare_dead(leases: Leases, other: Leases) -> None:
    """Let a worker take another one for dead, as if its beats had stopped."""
    watch, worker = watch_of(leases), other._join().worker
    watch._beat = lambda: None  # type: ignore[method-assign]  # it would see that the other is alive
    with watch._condition:
        watch._dead = {worker}
    watch._change()


def waits(leases: Leases, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event that is set when a worker begins to wait for others."""
    found, watch = threading.Event(), watch_of(leases)
    wait = watch.wait

    def noted(changes: int) -> None:
        found.set()
        wait(changes)

    monkeypatch.setattr(watch, "wait", noted)
    return found


@pytest.fixture(scope="module")
def tcp() -> Store:
    """Of the module: its server's descriptors are there before a test begins."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# ---- an epoch ----


def test_the_length_of_a_loader_is_that_of_all_workers(closing: Make) -> None:
    leases = closing(HashStore())
    assert len(loader_of(leases)) == 31 == sum(1 for _ in loader_of(leases))
    assert len(leases) == 11


@pytest.mark.parametrize("length", [0, 1, SHARD, SHARD + 1])
def test_small_datasets(length: int, closing: Make) -> None:
    assert sorted(samples(loader_of(closing(HashStore(), length)))) == list(range(length))


def test_an_epoch_ends_for_all_once_all_shards_are_acknowledged(
    closing: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ends = HashStore(), []
    holder, other = closing(store), closing(store)
    mine = holder.shards()
    held = [next(mine)]
    waiting = waits(other, monkeypatch)

    def train() -> list[int]:
        read = samples(loader_of(other, batch=SHARD))
        ends.append("other")
        return read

    def hold() -> None:
        assert waiting.wait(DEADLINE_S)
        ends.append("holder")
        held.extend(mine)

    monkeypatch.setattr(Connection, "agree", lambda *_: None)  # one has an order, the other none
    read, _ = together(train, hold)
    assert ends == ["holder", "other"]
    assert held == [range(SHARD)]
    assert len(set(read)) == len(read) == LENGTH - SHARD


def test_an_epoch_ends_if_an_acknowledgement_was_not_counted(
    closing: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker was killed between the two, and all others have looked before the last acknowledgement."""
    store = HashStore()
    killed, last, waiter = closing(store, 2, 1), closing(store, 2, 1), closing(store, 2, 1)
    first = killed.begin(0)
    lease = first.lease()
    assert lease is not None
    held = last.shards()
    assert next(held) == range(1, 2)
    waiting = waits(waiter, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(Connection, "add_once", lambda *_: 1)  # the counter stays at 0
        first.trained(lease)

    def end() -> None:
        assert waiting.wait(DEADLINE_S)
        assert list(held) == []

    assert together(lambda: list(waiter.shards()), end)[0] == []


@pytest.mark.parametrize(
    ("num_workers", "in_order", "depth"), covertable.make([[0, 1, 4], [True, False], [1, 100]])
)
def test_a_loader_never_waits_for_itself(
    num_workers: int, in_order: bool, depth: int, closing: Make
) -> None:
    options: dict[str, Any] = {"prefetch_batches": depth} if num_workers else {}
    loader = loader_of(closing(HashStore()), num_workers=num_workers, in_order=in_order, **options)
    for _ in range(2):
        assert sorted(samples(loader)) == list(range(LENGTH))


def test_persistent_workers(closing: Make) -> None:
    with loader_of(closing(HashStore()), persistent_workers=True) as loader:
        for _ in range(3):
            assert sorted(samples(loader)) == list(range(LENGTH))


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_sample_that_fails_is_delivered(on_error: str, closing: Make) -> None:
    """Its shard is acknowledged like any other."""
    bad = dict.fromkeys([3, *range(500, 600)], ValueError("no such sample"))
    leases = closing(HashStore())
    dataset = FailingDataset(range(LENGTH), failures=bad)
    batch = 1 if on_error == "raise" else BATCH
    loader = loader_of(leases, dataset, batch=batch, on_error=on_error, max_errors=None)
    read, errors, batches = [], 0, iter(loader)
    while True:
        try:
            read += next(batches).tolist()
        except StopIteration:
            break
        except ValueError:
            errors += 1
    assert sorted(read) == sorted(set(range(LENGTH)) - set(bad))
    assert errors == (len(bad) if on_error == "raise" else 0)
    assert leases.state_dict()["done"] == [[0, 11]]


@pytest.mark.usefixtures("forks")
def test_torchs_loader_raises_rather_than_hang(closing: Make) -> None:
    sampler = LeaseSampler(closing(HashStore()), BATCH)
    for workers in (0, 1):
        loader: Any = torch.utils.data.DataLoader(
            range(LENGTH),  # type: ignore[arg-type]
            batch_sampler=sampler,
            num_workers=workers,
        )
        with pytest.raises(RuntimeError, match="Only fastload.DataLoader tells"):
            list(loader)


# ---- workers that stop, leave and come ----


@pytest.mark.parametrize("on_lost", ["raise", "warn"])
def test_a_worker_taken_for_dead_loses_its_shards_and_is_told(on_lost: str, closing: Make) -> None:
    store = HashStore()
    silent, other = closing(store, on_lost=on_lost), closing(store)
    mine = silent.shards()
    assert next(mine) == range(SHARD)
    other.begin(0)
    declare_dead(other, silent)
    assert len(list(other.shards())) == 11, "the other reads all shards, the lost one too"
    if on_lost == "raise":
        with pytest.raises(LeaseLostError, match="another worker has leased shard 0 of epoch 0"):
            next(mine)
    else:
        with pytest.warns(UserWarning, match="another worker has leased shard 0 of epoch 0"):
            assert list(mine) == []
    assert other.state_dict()["done"] == [[0, 11]]


def test_workers_that_were_stopped_together_are_not_taken_for_dead(
    closing: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler suspends a job by SIGSTOP. The worker that goes on first finds all others silent."""
    clock = [0.0]
    monkeypatch.setattr(watch_module, "monotonic", lambda: clock[0])
    store = HashStore()
    first, other = closing(store, lease_s=800), closing(store, lease_s=800)
    watch, worker = watch_of(first), other._join().worker
    watch._beat()
    clock[0] += 3600
    watch._beat()
    assert not watch.is_dead(worker)
    for _ in range(6):
        clock[0] += 100
        watch._beat()
    assert watch.is_dead(worker), "it was stopped for longer than the first"


def test_a_loop_learns_that_it_was_taken_for_dead(closing: Make) -> None:
    store = HashStore()
    silent, other = closing(store), closing(store)
    batches = iter(loader_of(silent, num_workers=0))
    next(batches)
    declare_dead(other, silent)
    assert sum(len(batch) for batch in loader_of(other)) == LENGTH
    with pytest.raises(LeaseLostError):
        list(batches)


def test_leases_are_given_back_by_close_and_by_an_exception(closing: Make) -> None:
    store = HashStore()
    with closing(store) as left:
        next(left.shards())
    with pytest.raises(KeyboardInterrupt), closing(store) as raised:
        next(raised.shards())
        raise KeyboardInterrupt
    with closing(store, max_tries=3) as last:
        assert len(list(last.shards())) == 11
        first, *_ = last.begin(0)._read([0])
        assert first == (0, f"done {last._join().worker} 1 0"), "no try was lost"


def test_leases_close_after_a_break_and_the_next_epoch_begins(closing: Make) -> None:
    store = HashStore()
    one, two = closing(store), closing(store)
    loader = loader_of(one)
    for _ in range(2):
        assert len(list(islice(loader, 3))) == 3
    assert sum(len(batch) for batch in loader) == LENGTH
    one.close()
    other = loader_of(two)
    assert [sum(map(len, other)) for _ in range(2)] == [LENGTH, LENGTH]
    assert list(other) == [], "the third epoch is over"


def test_two_loops_over_the_same_leases_end_with_an_error(closing: Make) -> None:
    leases = closing(HashStore())
    loader = loader_of(leases, batch=SHARD, num_workers=0)
    first = iter(loader)
    next(first)
    assert sum(map(len, loader)) == LENGTH
    with pytest.raises(LeaseLostError, match="Use one loop at a time"):
        next(first)


def test_a_shard_that_fails_too_often_raises_on_all_workers(
    closing: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    options = {"max_tries": 2, "shard": 1, "length": 2}
    with pytest.raises(ValueError, match="bad"), closing(store, **options) as first:
        next(first.shards())
        raise ValueError("bad")
    second, waiter = closing(store, **options), closing(store, **options)
    held = second.shards()
    assert [next(held)] == [range(1, 2)]
    retried = second.begin(0).lease()  # gives shard 1 back, and takes shard 0 or 1
    assert retried is not None
    waiting = waits(waiter, monkeypatch)

    def fail() -> None:
        assert waiting.wait(DEADLINE_S)
        second.close(failed=True)

    def wait() -> None:
        shards = waiter.shards()
        with pytest.raises(ShardError, match=r"shard 0 of epoch 0 \(positions 0 to 0 .* 2 times"):
            list(shards)

    together(fail, wait)
    with pytest.raises(ShardError):  # again: the epoch has not ended
        list(waiter.shards())
    monkeypatch.setattr(Connection, "agree", lambda *_: None)
    for num_workers in (0, 2):
        with pytest.raises(ShardError, match="shard 0 of epoch 0"):
            list(loader_of(waiter, num_workers=num_workers))


def test_a_worker_that_starts_late_gets_what_is_left(closing: Make) -> None:
    store = HashStore()
    loader = loader_of(closing(store))
    assert sum(map(len, loader)) == LENGTH
    early = iter(loader)  # epoch 1
    first = next(early)
    late = loader_of(closing(store))
    with pytest.warns(UserWarning, match="epoch 0 of these leases had ended"):
        assert list(late) == []
    rest, others = together(lambda: list(early), lambda: list(late))
    assert sorted(samples([first, *rest, *others])) == list(range(LENGTH))


# ---- state ----


def saved_after(batches: int, closing: Make, **options: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the samples that one worker has trained, and its state."""
    leases = closing(HashStore())
    loader = loader_of(leases, **options)
    return samples(islice(loader, batches)), leases.state_dict()


def test_the_end_of_an_epoch_that_the_state_knows_is_no_warning(closing: Make) -> None:
    _, state = saved_after(100, closing)
    assert state["done"] == [[0, 11]]
    resumed = [closing(store) for store in [HashStore()] * 2]
    for leases in resumed:
        leases.load_state_dict(state)
        assert list(loader_of(leases)) == []


@pytest.mark.filterwarnings(  # the first may do all before the other begins
    "ignore:fastload. epoch 0 of these leases had ended"
)
@pytest.mark.parametrize("batches", [2, 3, 31])
def test_a_run_resumes_in_the_middle_of_a_shard(batches: int, closing: Make) -> None:
    read, state = saved_after(batches, closing)
    resumed = [closing(store) for store in [HashStore()] * 2]
    for leases in resumed:
        leases.load_state_dict(state)
    loaders = [loader_of(leases, batch=32) for leases in resumed]
    rest = together(*(lambda loader=loader: list(loader) for loader in loaders))
    assert sorted([*read, *samples(chain(*rest))]) == list(range(LENGTH))
    again = together(*(lambda loader=loader: list(loader) for loader in loaders))
    assert sorted(samples(chain(*again))) == list(range(LENGTH))


def test_a_second_resume_and_two_epochs_after_it(closing: Make) -> None:
    read, state = saved_after(5, closing)
    leases = closing(HashStore())
    leases.load_state_dict(state)
    read += samples(islice(loader_of(leases), 2))
    state = through_json(leases.state_dict())
    leases = closing(HashStore())
    leases.load_state_dict(state)
    loader = loader_of(leases)
    assert sorted([*read, *samples(loader)]) == list(range(LENGTH))
    for _ in range(2):
        assert sorted(samples(loader)) == list(range(LENGTH))


def test_out_of_order_no_sample_is_left_out(closing: Make) -> None:
    """The state counts what was received without a gap. The second batch is read twice, the first not never."""
    free = threading.Event()

    class Held(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            if index == order[0]:
                assert free.wait(DEADLINE_S)
            return index

    order = fastload.RankSampler(LENGTH, rank=0, world_size=1).indices(0, LENGTH).tolist()
    leases = closing(HashStore())
    loader = loader_of(leases, Held(), in_order=False, copy_dataset=False)
    batches = iter(loader)
    assert next(batches).tolist() == order[40:80]
    assert leases.state_dict()["partial"] == {}
    free.set()
    read = order[40:80]
    while leases.state_dict()["partial"].get("0", 0) == 0 and 0 not in _done(leases):
        read += next(batches).tolist()
    assert set(order[:40]) <= set(read)


def _done(leases: Leases) -> set[int]:
    return {k for first, end in leases.state_dict()["done"] for k in range(first, end)}


def test_the_epochs_before_a_state_are_over(closing: Make) -> None:
    leases = closing(HashStore())
    loader = loader_of(leases)
    assert sum(map(len, loader)) == LENGTH
    read = samples(islice(loader, 4))
    state = leases.state_dict()
    assert (state["epoch"], state["done"], state["partial"]) == (1, [[0, 1]], {"1": 40})
    resumed = closing(HashStore())
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    loader = loader_of(resumed)
    assert list(loader) == []
    assert sorted([*read, *samples(loader)]) == list(range(LENGTH))
    assert sum(map(len, loader)) == LENGTH


def test_a_state_of_something_else_is_refused(closing: Make) -> None:
    _, state = saved_after(1, closing)
    with pytest.raises(StateError, match="length: the state has 1000, these leases 999"):
        closing(HashStore(), 999).load_state_dict(state)
    with pytest.raises(StateError, match="shard: the state has 96, these leases 95"):
        closing(HashStore(), shard=95).load_state_dict(state)
    with pytest.raises(StateError, match="version"):
        closing(HashStore()).load_state_dict(state | {"version": 99})
    with pytest.raises(StateError, match="not the state of leases"):
        closing(HashStore()).load_state_dict({"model": 1})
    other = closing(HashStore())
    other.load_state_dict(state)
    loader = fastload.DataLoader(
        range(LENGTH), batch_sampler=LeaseSampler(other, BATCH, seed=1), num_workers=0
    )
    with pytest.raises(StateError, match=r"order: .*seed=0.*seed=1"):
        list(loader)
    begun = closing(HashStore())
    next(begun.shards())
    with pytest.raises(StateError, match="have already begun"):
        begun.load_state_dict(state)


def test_the_loaders_own_state_names_that_of_the_leases(closing: Make) -> None:
    loader = loader_of(closing(HashStore()))
    for _ in islice(loader, 2):
        with pytest.raises(StateError, match=r"leases\.state_dict\(\)"):
            loader.state_dict()


# ---- stores ----


@pytest.mark.parametrize(
    "options", [{"length": 999}, {"shard": 95}, {"lease_s": 7.0}, {"max_tries": 9}]
)
def test_workers_that_disagree_are_told(options: dict[str, Any], closing: Make) -> None:
    store = HashStore()
    next(closing(store).shards())
    other = closing(store, **options)
    for _ in range(2):
        with pytest.raises(ValueError, match="Give all workers the same arguments"):
            next(other.shards())


def test_workers_of_different_orders_are_told(closing: Make) -> None:
    store = HashStore()
    next(iter(loader_of(closing(store))))
    sampler = LeaseSampler(closing(store), BATCH, seed=1)
    with pytest.raises(ValueError, match="these leases have order"):
        next(iter(sampler))


@pytest.mark.parametrize(
    "options",
    [
        {"shard": 0},
        {"length": -1},
        {"lease_s": 0},
        {"lease_s": float("inf")},
        {"lease_s": float("nan")},
        {"max_tries": 0},
        {"on_lost": "ignore"},
    ],
)
def test_wrong_arguments(options: dict[str, Any], closing: Make) -> None:
    with pytest.raises(ValueError, match="must be"):
        closing(HashStore(), **options)


def test_leases_take_the_store_of_the_ranks_before_that_of_torchrun(
    monkeypatch: pytest.MonkeyPatch, tcp: Store
) -> None:
    """Nodes of torchrun may have different restart counts, and so different parts of its store."""
    store, rank = HashStore(), Rank(0, 1, 0, 1, "torchrun")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(tcp.port))  # type: ignore[attr-defined]
    assert find_store() is not store
    monkeypatch.setattr(group, "_joined", group._Joined(rank, store=store))
    assert find_store() is store


def test_processes_without_a_common_store_are_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with Leases(10, shard=5) as leases, pytest.warns(UserWarning, match="reads all samples"):
        assert len(list(leases.shards())) == 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_folder_on_a_full_disk_is_an_error_and_not_the_end(
    waits: bool, tmp_path: Path, closing: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is left either, although no key can wake it: the fixture of all tests looks for threads."""
    monkeypatch.setattr("fastload.elastic.stores._RETRY_S", (0.0, 0.0))
    store = FolderStore(tmp_path / "store")
    leases, other = (closing(store, 2, 1, lease_s=0.4) for _ in range(2))
    shards, held = leases.shards(), other.shards()
    next(shards), next(held)

    def fails() -> None:
        monkeypatch.setattr(store, "_write", full)

    def full(key: str, value: bytes) -> None:
        raise OSError(28, "No space left on device", key)

    watch = watch_of(leases)
    wait = watch.wait
    if waits:
        monkeypatch.setattr(watch, "wait", lambda changes: (fails(), wait(changes)))
    else:
        fails()
    with pytest.raises(StoreLostError, match="No space left"):
        list(shards)
    leases.close()
    other.close()


# ---- the ends ----


def test_ctrl_c_ends_a_loaders_wait(closing: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    leases, other = closing(store), closing(store)
    monkeypatch.setattr(Connection, "agree", lambda *_: None)
    held = other.shards()
    next(held)
    watch = watch_of(leases)
    wait = watch.wait

    def interrupted(changes: int) -> None:
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT)).start()
        wait(changes)

    with monkeypatch.context() as patch:
        patch.setattr(watch, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(loader_of(leases))
    leases.close()
    assert list(held) == [], "what the interrupted worker had acknowledged is done"


def _forked(leases: Leases, loader: Any, answers: Any) -> None:
    before = leases._epoch is not None
    batches = iter(loader)
    first = next(batches)
    answers.put(None)
    answers.put((before, len(first) + sum(map(len, batches)), leases._join().worker))
    leases.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_a_worker_of_its_own(tmp_path: Path, closing: Make) -> None:
    """It gives back nothing of its parent's, and leaves the parent's connections alone."""
    leases = closing(FolderStore(tmp_path / "store"), lease_s=5.0)
    loader = loader_of(leases, num_workers=0)
    batches = iter(loader)
    first = next(batches)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(
        target=_forked, args=(leases, loader_of(leases, num_workers=0), answers)
    )
    child.start()
    answers.get()  # it has begun: the epoch must not end before
    rest = sum(map(len, batches))
    begun, read, worker = answers.get()
    child.join(DEADLINE_S)
    assert (child.exitcode, begun, worker) == (0, True, 2)
    assert len(first) + rest + read == LENGTH
    answers.close()


# ---- random streams ----


def test_the_samples_and_draws_of_an_epoch_are_those_of_one_loader(closing: Make) -> None:
    sampler = fastload.RankSampler(LENGTH, rank=0, world_size=1, seed=7)
    plain = fastload.DataLoader(Drawing(), BATCH, sampler=sampler, num_workers=2, seed=5)
    expected = [drawn(plain) for _ in range(2)]
    assert expected[0] != expected[1]
    for workers in (1, 2, 3):
        store = HashStore()

        def train(store: Store = store) -> list[set[Any]]:
            sampler = LeaseSampler(closing(store), 32, seed=7)
            loader = fastload.DataLoader(Drawing(), batch_sampler=sampler, num_workers=2, seed=5)
            return [drawn(loader) for _ in range(2)]

        found = together(*[train] * workers)
        for epoch in range(2):
            assert sum(len(worker[epoch]) for worker in found) == LENGTH
            assert set().union(*(worker[epoch] for worker in found)) == expected[epoch]


def drawn(loader: Any) -> set[Any]:
    """Return (sample, what it drew) of an epoch."""
    return {row for batch in loader for row in zip(*(each.tolist() for each in batch), strict=True)}
