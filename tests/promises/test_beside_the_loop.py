"""Promises:
- With persistent workers the next epoch is under way before the loop asks for it. It is thrown away if the loop asks
  for another one.
- `prefetch_bytes` bounds the bytes in flight for samples of any size.
- `retries` reads again after a transient error, with a back-off that `close()` ends.
- `on_stats` gives a logger the figures of the loader.
- A trace has the spans of the worker threads.
"""

from __future__ import annotations

import errno
import gc
import json
import multiprocessing
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastload
import fastload.engine.epoch_counts
from fastload import DataLoader, RankSampler, Stats
from tests.fakes import Numbers, fastload_threads
from tests.promises.reading import Watched, in_batches, wait_until

GRACE_S = 0.05  # what a loader that reads too much is given to do so
KIB = 1024


def given(loader: Any) -> list[Any]:
    return [batch.tolist() for batch in loader]


# ---- bytes in flight ----


class Sized(Watched):
    """Sample k is `sizes[k]` bytes; what is read and was not taken by the loop is in flight."""

    fastload_per_worker = ()

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(len(sizes))
        self.sizes = sizes
        self.in_flight = self.most = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.turn:
            self.in_flight += self.sizes[index]
            self.most = max(self.most, self.in_flight)
        super().__getitem__(index)
        return torch.full((self.sizes[index],), index % 251, dtype=torch.uint8)

    def taken(self, count: int) -> None:
        with self.turn:
            self.in_flight -= count


def take_all(
    loader: DataLoader[Any], dataset: Sized, *, pause_at: tuple[int, ...] = ()
) -> list[int]:
    """The sizes of all samples in order; at some batches the loop stands until no more is read."""
    sizes: list[int] = []
    iterator = iter(loader)
    for step in range(10**6):
        if step in pause_at:
            dataset.wait_for_reads(len(sizes) + 1)
            time.sleep(GRACE_S)
        batch = next(iterator, None)
        if batch is None:
            return sizes
        samples = batch if isinstance(batch, list) else [batch]
        sizes += [sample.numel() for sample in samples]
        dataset.taken(sum(sample.numel() for sample in samples))
    raise AssertionError("no end")


SIZES = [64 * KIB] + [(KIB, 64 * KIB, 4 * KIB, 16 * KIB, 2 * KIB, KIB)[k % 6] for k in range(200)]
LIMIT = 256 * KIB


@pytest.mark.parametrize(("batch_size", "workers"), [(None, 1), (None, 4), (2, 2)])
def test_bytes_in_flight_are_bounded_for_samples_of_different_size(
    batch_size: int | None, workers: int
) -> None:
    dataset = Sized(SIZES)
    collate_fn: Any = {} if batch_size is None else {"collate_fn": list}
    loader = DataLoader(
        dataset,
        batch_size,
        num_workers=workers,
        prefetch_bytes=LIMIT,
        prefetch_batches=1000,
        **collate_fn,
    )
    assert take_all(loader, dataset, pause_at=(0, 1, 2, 20, 50)) == SIZES
    largest = 64 * KIB * (batch_size or 1)
    # A worker may begin a batch that turns out larger than the largest before it. `next()` makes room for more by the
    # batch that it is about to return, which is counted here until it has.
    assert dataset.most <= LIMIT + (workers + 1) * largest, f"{dataset.most / KIB} KiB"
    assert dataset.most > LIMIT / 2, "what there is room for is used"


@pytest.mark.parametrize("workers", [0, 4])
def test_a_batch_larger_than_the_bound_is_let_in_alone(workers: int) -> None:
    sizes = [KIB, 64 * KIB, KIB, 64 * KIB, 64 * KIB, KIB, KIB]
    dataset = Sized(sizes)
    loader = DataLoader(dataset, None, num_workers=workers, prefetch_bytes=KIB)
    assert take_all(loader, dataset) == sizes


# ---- transient errors ----


class Flaky(Watched):
    """Index k raises `failures[k]` as often as that list is long, then is read; then draws a number."""

    fastload_per_worker = ()

    def __init__(self, length: int, failures: dict[int, list[BaseException]]) -> None:
        super().__init__(length)
        self.failures = {k: list(errors) for k, errors in failures.items()}

    def __getitem__(self, index: int) -> torch.Tensor:
        number = torch.rand((), dtype=torch.double)
        super().__getitem__(index)
        left = self.failures.get(index)
        if left:
            raise left.pop(0)
        return torch.stack([torch.tensor(index, dtype=torch.double), number])


@pytest.mark.parametrize(
    ("code", "workers"), [(errno.EIO, 0), (errno.ESTALE, 1), (errno.ETIMEDOUT, 3)]
)
def test_a_transient_error_is_read_again_after_a_pause_with_the_same_numbers(
    code: int, workers: int
) -> None:
    dataset = Flaky(12, {5: [OSError(code, "simulated"), OSError(code, "simulated")]})
    loader = DataLoader(dataset, 4, num_workers=workers, retries=2, seed=3)
    got = [*loader]
    expected = [*DataLoader(Flaky(12, {}), 4, seed=3)]
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    first, second, third = (
        at for index, at in zip(dataset.reads, dataset.moments, strict=True) if index == 5
    )
    assert second - first >= 0.1
    assert third - second >= 0.2, "the pause doubles"
    assert Counter(dataset.reads) == Counter([*range(12), 5, 5])
    stats = loader.stats()
    assert (stats.errors, stats.retries) == (0, 2), "it did not fail in the end"
    assert "2 reads retried" in str(stats)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("retries", [0, 1])
def test_after_the_last_attempt_the_error_arrives_in_its_place(workers: int, retries: int) -> None:
    dataset = Flaky(8, {3: [OSError(errno.EIO, "gone", "scan-7.tif")] * 9})
    iterator = iter(DataLoader(dataset, 2, num_workers=workers, retries=retries))
    assert next(iterator)[:, 0].tolist() == [0, 1]
    with pytest.raises(OSError, match="scan-7") as caught:
        next(iterator)
    assert caught.value.errno == errno.EIO
    assert dataset.reads.count(3) == 1 + retries
    assert [batch[:, 0].tolist() for batch in iterator] == [[4, 5], [6, 7]]


@pytest.mark.parametrize(("code", "workers"), [(errno.ENOENT, 0), (errno.ENOSPC, 2), (None, 2)])
def test_an_error_that_does_not_pass_is_not_read_again(
    workers: int, code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.reading.failures.RETRY_SECONDS", 60.0)
    error = ValueError("no") if code is None else OSError(code, "no")
    kind, dataset = type(error), Flaky(4, {1: [error]})
    del error  # raised, it holds the frames that it came through
    iterator = iter(DataLoader(dataset, 2, num_workers=workers, retries=5))
    started = time.monotonic()
    with pytest.raises(kind):
        next(iterator)
    assert time.monotonic() - started < 30, "no pause"
    assert dataset.reads.count(1) == 1
    assert next(iterator)[:, 0].tolist() == [2, 3]


@pytest.mark.parametrize("way", ["close", "del"])
def test_close_wakes_a_worker_that_waits_to_read_again(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.reading.failures.RETRY_SECONDS", 60.0)
    dataset = Flaky(4, {0: [OSError(errno.EIO, "simulated")] * 99})
    loader = DataLoader(dataset, 1, num_workers=1, retries=20)
    iterator = iter(loader)
    dataset.wait_for_reads([0])
    started = time.monotonic()
    if way == "close":
        loader.close()
        assert not fastload_threads()
    else:
        del iterator
        gc.collect()
        wait_until(lambda: not fastload_threads(), "no thread is left", 10)
    assert time.monotonic() - started < 10
    assert dataset.reads.count(0) == 1


# ---- the next epoch ----

LENGTH, BATCH = 24, 4


def order_of(kind: str, epoch: int) -> list[int]:
    """The order of the epoch as a sampler of its own gives it."""
    if kind == "sequential":
        return [*range(LENGTH)]
    sampler = RankSampler(LENGTH, rank=0, world_size=1, seed=9)
    sampler.set_epoch(epoch)
    return [*sampler]


def persistent(kind: str, dataset: Any, **options: Any) -> DataLoader[Any]:
    how: dict[str, Any] = {
        "sequential": {},
        "rank sampler": {"sampler": RankSampler(LENGTH, rank=0, world_size=1, seed=9)},
        "seed": {"shuffle": True, "seed": 9},
    }[kind]
    # Workers that share one dataset begin nothing early: `copy_dataset=False` is no default for these tests.
    options = {"copy_dataset": "state", **options}
    return DataLoader(dataset, BATCH, num_workers=2, persistent_workers=True, **how, **options)


@pytest.mark.parametrize("kind", ["sequential", "rank sampler", "seed"])
def test_the_next_epoch_is_under_way_before_it_is_asked_for(kind: str) -> None:
    dataset = Watched(LENGTH)
    with persistent(kind, dataset) as loader:
        for epoch in range(4):
            assert given(loader) == in_batches(order_of(kind, epoch), BATCH)
            assert loader.stats().epoch == epoch
            assert loader.stats().batches == LENGTH // BATCH
            ahead = loader.stats().depth * BATCH
            dataset.wait_for_reads((epoch + 1) * LENGTH + ahead)
            time.sleep(GRACE_S)
            # The first of an epoch may be read before the last of the one before.
            wanted = [*range(LENGTH)] * (epoch + 1) + order_of(kind, epoch + 1)[:ahead]
            assert Counter(dataset.reads) == Counter(wanted), "what the window holds, and no more"


@pytest.mark.parametrize("how", ["not persistent", "torch's draws"])
def test_where_the_order_is_not_known_or_threads_end_nothing_is_read_ahead(how: str) -> None:
    dataset = Watched(LENGTH)
    options: Any = {"persistent_workers": True, "shuffle": True} if how != "not persistent" else {}
    with DataLoader(dataset, BATCH, num_workers=2, **options) as loader:
        state = torch.get_rng_state() if not options else None
        list(loader)
        time.sleep(GRACE_S)
        assert len(dataset.reads) == LENGTH
        if state is None:
            torch.manual_seed(5)
            got = given(loader)
            theirs = torch.utils.data.DataLoader(Numbers(LENGTH), BATCH, num_workers=2, **options)
            list(theirs)
            torch.manual_seed(5)
            expected = given(theirs)
            assert got == expected, "the draws are made when the epoch is asked for"


IN_SHARED_MEMORY = multiprocessing.Value("i", 1)  # its memory stays open


class Scaled(Watched):
    """The loop sets the factor of the samples between two epochs."""

    fastload_per_worker = ()

    def __init__(self, factor: Any) -> None:
        super().__init__(LENGTH)
        self.factor = factor

    def __getitem__(self, index: int) -> int:
        factor = self.factor[0] if isinstance(self.factor, torch.Tensor) else self.factor.value
        return super().__getitem__(index) * int(factor)


class Told(Scaled):
    """The loop calls the dataset."""

    fastload_per_worker = ()

    def set_epoch(self, epoch: int) -> None:
        self.factor.value = epoch + 1


@pytest.mark.parametrize("what", ["Value", "tensor", "set_epoch", "one dataset", "begin_early"])
def test_an_epoch_does_not_begin_early_if_the_loop_may_still_change_its_samples(what: str) -> None:
    one, options = SimpleNamespace(value=1), {}
    dataset = Scaled(one)
    if what == "Value":
        dataset.factor = IN_SHARED_MEMORY
        dataset.factor.value = 1
    elif what == "tensor":
        dataset.factor = torch.ones(1).share_memory_()
    elif what == "set_epoch":
        dataset = Told(one)
    elif what == "one dataset":
        options = {"copy_dataset": False}
    else:
        options = {"begin_early": False}
    with persistent("sequential", dataset, **options) as loader:
        for epoch in range(3):
            assert given(loader) == in_batches([k * (epoch + 1) for k in range(LENGTH)], BATCH)
            time.sleep(GRACE_S)
            assert len(dataset.reads) == (epoch + 1) * LENGTH
            if what == "set_epoch":
                dataset.set_epoch(epoch + 1)  # type: ignore[attr-defined]
            elif what == "tensor":
                dataset.factor.fill_(epoch + 2)
            else:
                dataset.factor.value = epoch + 2


@pytest.mark.parametrize("kind", ["rank sampler", "seed"])
@pytest.mark.parametrize("other", [0, 7])
def test_set_epoch_to_another_epoch_discards_what_was_begun(kind: str, other: int) -> None:
    """The sampler's own too, which the usual loop calls."""
    dataset = Flaky(LENGTH, {})
    with persistent(kind, dataset) as loader:
        list(loader)
        dataset.wait_for_reads(LENGTH + 1)
        (loader if kind == "seed" else loader.sampler).set_epoch(other)
        got = [*loader]
        assert [batch[:, 0].int().tolist() for batch in got] == in_batches(
            order_of(kind, other), BATCH
        )
        assert loader.stats().epoch == other
        assert loader.stats().samples == LENGTH
        again = [batch[:, 0].int().tolist() for batch in loader]
        assert again == in_batches(order_of(kind, other + 1), BATCH)
    if kind == "seed":
        fresh = DataLoader(Flaky(LENGTH, {}), BATCH, shuffle=True, seed=9)
        fresh.set_epoch(other)
        assert all(torch.equal(a, b) for a, b in zip(got, fresh, strict=True)), "random numbers too"


def test_the_state_between_epochs_does_not_see_what_was_begun() -> None:
    dataset = Flaky(LENGTH, {})
    with persistent("seed", dataset) as loader:
        list(loader)
        dataset.wait_for_reads(LENGTH + BATCH)
        state = json.loads(json.dumps(loader.state_dict()))
        expected = [*loader]
        iterator = iter(loader)
        next(iterator)
        middle = json.loads(json.dumps(loader.state_dict()))
        rest = [*iterator]
        loader.load_state_dict(state)
        assert all(torch.equal(a, b) for a, b in zip(loader, expected, strict=True))
        loader.load_state_dict(middle)
        assert all(torch.equal(a, b) for a, b in zip(loader, rest, strict=True))
    resumed = DataLoader(Flaky(LENGTH, {}), BATCH, shuffle=True, seed=9)
    resumed.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(resumed, expected, strict=True))


# ---- for loggers ----


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_on_stats_is_called_at_the_end_of_each_epoch_in_the_loop_s_thread(
    keep: bool, workers: int
) -> None:
    told: list[tuple[Stats, int]] = []

    def tell(stats: Stats) -> None:
        told.append((stats, threading.get_ident()))

    loader = DataLoader(
        Watched(10), 4, num_workers=workers, persistent_workers=keep and workers > 0, on_stats=tell
    )
    with loader:
        for epoch in range(3):
            assert len(given(loader)) == 3
            assert len(told) == epoch + 1
            stats, thread = told[-1]
            assert thread == threading.get_ident()
            assert (stats.epoch, stats.samples, stats.batches) == (epoch, 10, 3)
            assert str(stats)
        next(iter(loader))
    assert len(told) == 3, "an epoch that the loop leaves has no end"


def test_on_stats_is_called_every_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fastload.engine.epoch_counts.TELL_SECONDS == 10
    now_s = 100.0
    monkeypatch.setattr(fastload.engine.epoch_counts, "perf_counter", lambda: now_s)
    told: list[Stats] = []
    with DataLoader(Watched(100), 4, num_workers=2, on_stats=told.append) as loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        assert told == []
        now_s += 10.1
        next(iterator)
        next(iterator)
        assert len(told) == 1
        assert told[0].batches in (3, 4, 5)
        now_s += 9.9
        next(iterator)
        assert len(told) == 1


# ---- a profiler's trace ----


class Staged(Watched):
    def __getitem__(self, index: int) -> int:
        with fastload.stage("read"):
            super().__getitem__(index)
        with fastload.stage("decode"):
            torch.ones(4).sum()
        return index


def spans(path: Path) -> dict[str, set[Any]]:
    """The threads in which each span of a trace was seen."""
    found: dict[str, set[Any]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") == "X":
            found.setdefault(event["name"], set()).add(event["tid"])
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_torch_trace_has_the_stages_of_worker_threads(tmp_path: Path) -> None:
    """Also of threads that ran before the profile began."""
    dataset = Staged(4000)
    with DataLoader(dataset, 8, num_workers=2, prefetch_batches=4) as loader:
        iterator: Any = iter(loader)
        next(iterator)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            experimental_config=fastload.profiler_config(),
        ) as profile:
            for _ in range(30):
                with torch.profiler.record_function("step of the loop"):
                    next(iterator)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    found = spans(tmp_path / "trace.json")
    (loop,) = found["step of the loop"]
    for name in ("fastload.read", "fastload.decode"):
        assert name in found, sorted(n for n in found if "fastload" in n)
        assert loop not in found[name]
    assert found["fastload.read"] == found["fastload.decode"], "the same worker threads"
