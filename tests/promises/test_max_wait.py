"""Promises:
- With `max_wait_ms` a batch of an iterable dataset comes by size or by deadline, and is never empty.
- With `max_wait_ms` a silent worker does not hold up the others.
- Draws, states, errors, bounds and ends are the same as without `max_wait_ms`.
- Samples of one stream are decoded on all workers as they arrive, and batches have them in the stream's order.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from fastload import DataLoader, sample_generator
from fastload.errors import LoaderClosedError
from tests.contracts.workers import Drawing, KeepsItsState, Remembers
from tests.fakes import hasty
from tests.promises.reading import wait_until
from tests.resuming import resumes_twice

LONG = 3_600_000.0  # a deadline that no test reaches


class Stream(IterableDataset[int]):
    """Gives what a test puts into it. None ends it, and an exception is raised."""

    fastload_per_worker = ()

    def __init__(self, *values: Any) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.put(*values)

    def put(self, *values: Any) -> None:
        for value in values:
            self.queue.put(value)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        value = self.queue.get()
        if value is None:
            self.queue.put(None)
            raise StopIteration
        if isinstance(value, Exception):
            raise value
        return int(value)


class Numbers(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        for k in range(self.n):
            yield k, torch.rand(()), random.random()


def lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(batches: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(batches))


def test_full_batches_do_not_wait_for_the_deadline() -> None:
    stream = Stream(*range(8))
    with DataLoader(stream, 4, num_workers=1, max_wait_ms=LONG) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        stream.put(None)
        assert lists(batches) == []


def test_a_batch_comes_with_what_is_there_at_the_deadline() -> None:
    stream = Stream(0, 1)
    with DataLoader(stream, 4, num_workers=1, max_wait_ms=500) as loader:
        batches = iter(loader)
        began = time.perf_counter()
        assert next(batches).tolist() == [0, 1]
        assert time.perf_counter() - began < 5
        stream.put(2)
        assert next(batches).tolist() == [2]
        stream.put(3, 4, 5, 6, None)
        assert lists(batches) == [[3, 4, 5, 6]]


def test_a_deadline_counts_from_the_first_sample_not_from_the_call() -> None:
    stream = Stream()
    with DataLoader(stream, 4, num_workers=1, max_wait_ms=300) as loader:
        batches = iter(loader)
        began = time.perf_counter()
        threading.Timer(0.6, stream.put, (1,)).start()
        assert next(batches).tolist() == [1]
        assert time.perf_counter() - began >= 0.85
        stream.put(None)


class GatedCollate:
    """Holds the worker at its first batch until `gate` is set."""

    fastload_per_worker = ()

    def __init__(self) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()

    def __call__(self, samples: list[int]) -> list[int]:
        self.reached.set()
        assert self.gate.wait(30)
        return samples


def test_samples_that_waited_past_the_deadline_come_in_full_batches() -> None:
    stream, collate = Stream(0), GatedCollate()
    with DataLoader(stream, 4, num_workers=1, max_wait_ms=0, collate_fn=collate) as loader:
        batches = iter(loader)
        assert collate.reached.wait(30)
        stream.put(*range(1, 12), None)
        wait_until(lambda: stream.queue.qsize() == 8, "the line is full")
        collate.gate.set()
        got = list(batches)
    assert got[:2] == [[0], [1, 2, 3, 4]]
    assert flat(got) == list(range(12))


@pytest.mark.parametrize("num_workers", [2, 3])
def test_a_silent_worker_does_not_hold_the_others_up(num_workers: int) -> None:
    talking = Stream()
    silent = threading.Event()

    class Either(IterableDataset[int]):
        fastload_per_worker = ()

        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            assert info is not None
            if info.id == num_workers - 1:
                return iter(talking)
            silent.wait()
            return iter(())

    talking.put(*range(400), None)
    with DataLoader(Either(), 4, num_workers=num_workers, max_wait_ms=LONG) as loader:
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(100)] == [
            [k, k + 1, k + 2, k + 3] for k in range(0, 400, 4)
        ]
        silent.set()
        assert lists(batches) == []


def test_a_sample_draws_the_same_with_and_without_a_deadline() -> None:
    plain, timed = (
        [
            sample
            for batch in DataLoader(Numbers(50), 7, num_workers=1, seed=3, **how)
            for sample in zip(*batch, strict=True)
        ]
        for how in ({}, {"max_wait_ms": 5.0})
    )
    assert timed == plain


@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_of_a_finite_dataset_have_all_samples(persistent: bool) -> None:
    with DataLoader(
        Numbers(50), 7, num_workers=2, max_wait_ms=1, persistent_workers=persistent
    ) as loader:
        for _ in range(3):
            got = sorted(k for batch in loader for k in batch[0].tolist())
            assert got == sorted([*range(50), *range(50)])


def test_another_epoch_begins_anew_when_the_first_is_left_early() -> None:
    with DataLoader(
        Numbers(50), 7, num_workers=1, max_wait_ms=1, persistent_workers=True
    ) as loader:
        for _ in range(20):
            for batch in loader:
                assert batch[0][0] == 0
                break
        assert [k for batch in loader for k in batch[0].tolist()] == list(range(50))


def test_it_resumes_after_the_samples_that_the_loop_had() -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Numbers(50), 7, num_workers=1, max_wait_ms=LONG, seed=1)

    first = make()
    batches = iter(first)
    had = [next(batches)[0].tolist() for _ in range(3)]
    state = first.state_dict()
    first.close()
    second = make()
    second.load_state_dict(state)
    rest = [batch[0].tolist() for batch in second]
    assert flat(had + rest) == list(range(50))


class Stateful(IterableDataset[int]):
    def __init__(self) -> None:
        self.at = 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        while self.at < 40:
            self.at += 1
            self.read.append(self.at)
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def test_a_state_is_that_after_the_last_delivered_sample_not_that_of_the_reader() -> None:
    first = DataLoader(Stateful(), 4, num_workers=1, max_wait_ms=LONG)
    batches = iter(first)
    assert next(batches).tolist() == [1, 2, 3, 4]
    time.sleep(0.1)  # the reader reads on
    state = first.state_dict()
    assert state["lanes"][0]["state"] == {"at": 4}
    first.close()
    second = DataLoader(Stateful(), 4, num_workers=1, max_wait_ms=LONG)
    second.load_state_dict(state)
    assert flat(lists(second)) == list(range(5, 41))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [Drawing, Remembers, KeepsItsState])
def test_a_second_resume_and_two_epochs_after_it(kind: type[Drawing], persistent: bool) -> None:
    options = {"num_workers": 1, "persistent_workers": persistent, "max_wait_ms": LONG, "seed": 1}
    resumes_twice(lambda: DataLoader(kind([9, 6]), 3, **options))


def test_errors_come_in_their_place_and_on_error_handles_them() -> None:
    wrong = ValueError("wrong")
    stream = Stream(0, 1, 2, wrong, 4, 5, 6, 7, None)
    with DataLoader(stream, 2, num_workers=1, max_wait_ms=LONG) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == [0, 1]
        with pytest.raises(ValueError, match="wrong"):
            next(batches)
        assert lists(batches) == [[4, 5], [6, 7]]
    stream = Stream(0, wrong, 2, 3, None)
    with DataLoader(stream, 2, num_workers=1, max_wait_ms=LONG, on_error="skip") as loader:
        assert lists(loader) == [[0], [2, 3]]


def test_an_error_of_iter_is_raised_whatever_on_error_says() -> None:
    class Broken(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            raise OSError("no connection")

    with DataLoader(Broken(), 2, num_workers=1, max_wait_ms=5, on_error="skip") as loader:
        batches = iter(loader)
        with pytest.raises(OSError, match="no connection") as caught:
            next(batches)
        assert any("stage: iter" in note for note in caught.value.__notes__)
        assert lists(batches) == []


def test_the_reader_stops_at_a_bound() -> None:
    stream = Stream(*range(1000))
    with DataLoader(stream, 4, num_workers=1, max_wait_ms=LONG, prefetch_batches=2) as loader:
        batches = iter(loader)
        next(batches)
        time.sleep(0.3)
        taken = 1000 - stream.queue.qsize()
        assert taken <= 4 * (1 + 2 + 1) + 1, (
            "the loop's batch, two in flight, the line, and the one in hand"
        )
        stream.put(None)
        assert flat(lists(batches)) == list(range(4, 1000))


def test_worker_init_fn_and_worker_info_belong_to_the_thread_of_the_dataset() -> None:
    class Seen(dict[str, str]):
        fastload_per_worker = ()

    seen = Seen()

    def init(worker: int) -> None:
        seen[f"init {worker}"] = threading.current_thread().name

    class Where(IterableDataset[int]):
        fastload_per_worker = ()

        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            assert info is not None
            seen[f"iter {info.id}"] = threading.current_thread().name
            yield info.id

    def collate(samples: list[int]) -> list[int]:
        assert get_worker_info() is None
        return samples

    with DataLoader(
        Where(), 2, num_workers=2, max_wait_ms=5, worker_init_fn=init, collate_fn=collate
    ) as loader:
        assert sorted(loader) == [[0], [1]]
    assert seen == {
        f"{stage} {k}": f"fastload-reader-{k}" for stage in ("init", "iter") for k in range(2)
    }


def test_close_ends_the_threads_and_the_waiting_loop() -> None:
    stream = Stream()
    loader = DataLoader(stream, 2, num_workers=1, max_wait_ms=5)
    batches = iter(loader)
    threads = list(batches.threads)  # type: ignore[attr-defined]
    waits = threading.Thread(target=lambda: raised.append(closes(batches)))
    raised: list[BaseException | None] = []
    waits.start()
    stream.put(1)  # `next()` gives it, and the loop asks again
    batches.close()  # type: ignore[attr-defined]
    waits.join(10)
    assert not waits.is_alive()
    assert isinstance(raised[0], LoaderClosedError)
    stream.put(None)  # the reader's call returns
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def closes(batches: Iterator[Any]) -> BaseException | None:
    try:
        while True:
            next(batches)
    except LoaderClosedError as error:
        return error


def test_an_iterator_that_is_dropped_ends_its_threads() -> None:
    loader = DataLoader(Numbers(1000), 2, num_workers=2, max_wait_ms=5)
    batches = iter(loader)
    next(batches)
    threads = list(batches.threads)  # type: ignore[attr-defined]
    assert len(threads) == 4
    gone = weakref.ref(batches)
    del batches
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_wait_ms": -1}, "max_wait_ms must be a number"),
        ({"max_wait_ms": "5"}, "max_wait_ms must be a number"),
        ({"max_wait_ms": float("inf")}, "max_wait_ms must be a number"),
        ({"max_wait_ms": 5, "drop_last": True}, "drop_last=True"),
        ({"max_wait_ms": 5, "batch_size": None}, "batch_size=None"),
        ({"max_wait_ms": 5, "prefetch_bytes": 100}, "prefetch_bytes"),
        ({"max_wait_ms": 5, "worker_method": "process"}, "max_wait_ms: only for"),
    ],
)
def test_what_it_cannot_be_combined_with(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataLoader(Numbers(3), num_workers=1, **arguments)


def test_it_is_for_iterable_datasets_with_workers() -> None:
    with pytest.raises(ValueError, match="for iterable datasets"):
        DataLoader([1, 2, 3], num_workers=1, max_wait_ms=5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs num_workers > 0"):
        iter(DataLoader(Numbers(3), max_wait_ms=5))


def test_a_sampler_that_says_not_yet_does_not_keep_back_batches_in_flight() -> None:
    """A loader is the batch sampler of another: the outer one gets a batch while the inner one waits for the next."""
    stream = Stream(0, 1)
    inner = DataLoader(stream, 2, num_workers=1, max_wait_ms=LONG, collate_fn=list)
    with inner, DataLoader(list(range(10)), batch_sampler=inner, num_workers=2, seed=0) as outer:  # type: ignore[arg-type]
        batches = iter(outer)
        assert next(batches).tolist() == [0, 1]  # asks for [2, 3] only if it is there
        stream.put(2, 3, 4, 5, None)
        assert lists(batches) == [[2, 3], [4, 5]]


# ---- one reader, and workers that decode ----


class Decoded(IterableDataset[Any]):
    """A stream, of which workers decode the samples; a test holds them back one by one."""

    def __init__(self, *values: Any, hold: Iterable[int] = ()) -> None:
        self.stream = Stream(*values)
        self.gates = Gates(hold)

    def __iter__(self) -> Iterator[int]:
        return self.stream

    def fastload_decode(self, value: int) -> tuple[int, float]:
        self.gates.pass_by(value)
        return value, random.random()


class Gates:
    """Where samples wait until a test opens their gate."""

    fastload_per_worker = ()

    def __init__(self, hold: Iterable[int]) -> None:
        self.gates = {value: threading.Event() for value in hold}
        self.reached: SimpleQueue[int] = SimpleQueue()

    def pass_by(self, value: int) -> None:
        self.reached.put(value)
        if (gate := self.gates.get(value)) is not None:
            assert gate.wait(30)


def values(batch: list[tuple[int, float]]) -> list[int]:
    return [value for value, _ in batch]


def decoding(dataset: Decoded, batch_size: int, num_workers: int, **how: Any) -> DataLoader[Any]:
    how = {"max_wait_ms": LONG, **how}
    return DataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=list, **how)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_a_sample_is_decoded_while_its_batch_waits_for_others(num_workers: int) -> None:
    dataset = Decoded()
    with decoding(dataset, 3, num_workers) as loader:
        batches = iter(loader)
        for value in range(3):
            dataset.stream.put(value)
            assert dataset.gates.reached.get(timeout=30) == value
        assert values(next(batches)) == [0, 1, 2]
        dataset.stream.put(None)
        assert lists_of(batches) == []


def lists_of(batches: Iterable[Any]) -> list[list[int]]:
    return [values(batch) for batch in batches]


def test_workers_decode_side_by_side_and_the_batch_keeps_the_order() -> None:
    dataset = Decoded(0, 1, 2, hold=[0, 1, 2])
    with decoding(dataset, 3, 3) as loader:
        batches = iter(loader)
        assert sorted(dataset.gates.reached.get(timeout=30) for _ in range(3)) == [0, 1, 2]
        for value in (2, 0, 1):
            dataset.gates.gates[value].set()
        assert values(next(batches)) == [0, 1, 2]
        dataset.stream.put(None)


def test_a_slow_sample_holds_its_batch_back_and_no_later_one_overtakes_it() -> None:
    dataset = Decoded(*range(6), hold=[1])
    with decoding(dataset, 2, 2) as loader:
        batches = iter(loader)
        seen = {dataset.gates.reached.get(timeout=30) for _ in range(4)}
        assert seen == {0, 1, 2, 3}, "the second batch is made beside the first"
        dataset.gates.gates[1].set()
        dataset.stream.put(None)
        assert lists_of(batches) == [[0, 1], [2, 3], [4, 5]]


def test_batches_of_one_stream_come_in_order_even_with_in_order_false() -> None:
    """Or a state would lose the batches that were overtaken."""
    dataset = Decoded(*range(4), hold=[0])
    with decoding(dataset, 2, 4, in_order=False) as loader:
        batches = iter(loader)
        assert {dataset.gates.reached.get(timeout=30) for _ in range(4)} == {0, 1, 2, 3}
        window = batches._window  # type: ignore[attr-defined]
        wait_until(lambda: len(window._ready_tickets) == 1, "the second batch is complete")
        dataset.gates.gates[0].set()
        dataset.stream.put(None)
        assert lists_of(batches) == [[0, 1], [2, 3]]


def test_the_deadline_closes_a_batch_whose_samples_are_still_decoded() -> None:
    dataset = Decoded(0, hold=[0])
    with decoding(dataset, 3, 2, max_wait_ms=20) as loader:
        batches = iter(loader)
        assert dataset.gates.reached.get(timeout=30) == 0
        window = batches._window  # type: ignore[attr-defined]
        wait_until(lambda: window.oldest().closed, "the deadline has passed")
        dataset.stream.put(1)
        assert dataset.gates.reached.get(timeout=30) == 1
        dataset.gates.gates[0].set()
        dataset.stream.put(None)
        assert lists_of(batches) == [[0], [1]]


def test_draws_of_decoding_depend_on_the_sample_alone() -> None:
    def draws(num_workers: int, batch_size: int, **how: Any) -> list[tuple[int, float]]:
        dataset = Decoded(*range(40), None)
        with decoding(dataset, batch_size, num_workers, seed=3, **how) as loader:
            return list(chain.from_iterable(loader))

    expected = draws(1, 40)
    assert [value for value, _ in expected] == list(range(40))
    assert len({draw for _, draw in expected}) == 40
    assert draws(4, 3) == draws(2, 7, max_wait_ms=0) == expected


def test_a_sample_that_is_decoded_draws_other_numbers_than_the_reader() -> None:
    class Drawn(Decoded):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(20):
                yield torch.rand((), generator=sample_generator()).item()

        def fastload_decode(self, value: Any) -> Any:
            return value, torch.rand((), generator=sample_generator()).item()

    with decoding(Drawn(), 5, 2, seed=3) as loader:
        pairs = list(chain.from_iterable(loader))
    assert len({number for pair in pairs for number in pair}) == 40


def test_the_reader_and_each_worker_have_copies_of_their_own() -> None:
    class Held(Decoded):
        """Reading and decoding change the same attributes."""

        def __init__(self) -> None:
            super().__init__()
            self.rng = torch.Generator()
            self.last = -1

        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            assert info is not None
            for value in range(info.id, 60, info.num_workers):
                self.last = value
                drawn = [torch.rand((), generator=self.rng).item() for _ in range(2)]
                assert self.last == value
                yield value, *drawn

        def fastload_decode(self, sample: Any) -> Any:
            self.last = sample[0]
            drawn = [torch.rand((), generator=self.rng).item() for _ in range(2)]
            assert self.last == sample[0]
            return *sample, *drawn

    def draws(num_workers: int) -> list[Any]:
        with decoding(Held(), 4, num_workers, seed=3) as loader:
            return list(chain.from_iterable(loader))

    with hasty():
        expected = draws(1)
        assert [value for value, *_ in expected] == list(range(60))
        assert len({number for _, *drawn in expected for number in drawn}) == 240
        assert draws(3) == draws(8) == expected


def test_worker_init_fn_runs_for_the_reader_and_for_each_worker() -> None:
    called: SimpleQueue[tuple[int, int]] = SimpleQueue()

    class Log:
        fastload_per_worker = ()

        def __call__(self, worker_id: int) -> None:
            info = get_worker_info()
            assert info is not None
            called.put((worker_id, info.num_workers))

    with decoding(Decoded(0, 1, None), 2, 2, worker_init_fn=Log()) as loader:
        assert lists_of(loader) == [[0, 1]]
    assert sorted(called.get() for _ in range(called.qsize())) == [(0, 1), (0, 2), (1, 2)]


def test_an_error_of_decoding_is_raised_in_its_place() -> None:
    class Broken(Decoded):
        def fastload_decode(self, value: int) -> Any:
            if value == 3:
                raise ValueError("not three")
            return super().fastload_decode(value)

    with decoding(Broken(*range(8), None), 2, 2) as loader:
        batches = iter(loader)
        assert values(next(batches)) == [0, 1]
        with pytest.raises(ValueError, match="not three"):
            next(batches)
        assert lists_of(batches) == [[4, 5], [6, 7]]
    with decoding(Broken(*range(8), None), 2, 2, on_error="skip") as loader:
        assert lists_of(loader) == [[0, 1], [2], [4, 5], [6, 7]]


class Faulty(IterableDataset[Any]):
    """A stream with an error in it, after which it goes on."""

    def __iter__(self) -> Iterator[int]:
        return Counter(10, bad=1)


class FaultyDecoded(Faulty):
    def fastload_decode(self, value: int) -> int:
        return value


class Counter(Iterator[int]):
    def __init__(self, n: int, bad: int = -1) -> None:
        self.left = iter(range(n))
        self.bad = bad

    def __next__(self) -> int:
        number = next(self.left)
        if number == self.bad:
            raise ValueError(f"number {number}")
        return number


def of_faulty(dataset: Any, **how: Any) -> list[Any]:
    """Return the batches, and the errors in their places."""
    found: list[Any] = []
    with DataLoader(dataset, 4, num_workers=1, collate_fn=list, **how) as loader:
        batches = iter(loader)
        while True:
            try:
                found.append(next(batches))
            except StopIteration:
                return found
            except Exception as error:
                found.append(str(error))


def broken_handler(index: int, error: Exception) -> Any:
    raise LookupError(f"no answer to {error}")


def ignore(index: int, error: Exception) -> int:
    return -1


@pytest.mark.parametrize("on_error", ["raise", "skip", ignore, broken_handler])
def test_errors_of_a_stream_cost_the_same_samples_as_without_a_deadline(on_error: Any) -> None:
    expected = of_faulty(Faulty(), on_error=on_error)
    assert of_faulty(Faulty(), on_error=on_error, max_wait_ms=LONG) == expected
    decoded = of_faulty(FaultyDecoded(), on_error=on_error, max_wait_ms=LONG)
    if on_error is broken_handler:  # it runs beside decoding, so the whole batch fails
        assert decoded == ["no answer to number 1", [4, 5, 6, 7], [8, 9]]
    else:
        assert decoded == expected


class Shrunk(IterableDataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class ShrunkDecoded(Shrunk):
    def fastload_decode(self, value: int) -> int:
        return value


@pytest.mark.parametrize("kind", [Shrunk, ShrunkDecoded])
def test_a_stream_that_became_shorter_than_its_state_ends(kind: type[Shrunk]) -> None:
    def loader(n: int) -> DataLoader[Any]:
        return DataLoader(kind(n), 2, num_workers=1, collate_fn=list, max_wait_ms=LONG)

    with loader(20) as long:
        assert list(islice(iter(long), 3)) == [[0, 1], [2, 3], [4, 5]]
        state = long.state_dict()
    with loader(3) as short:
        short.load_state_dict(state)
        assert list(short) == []


def test_the_time_in_which_workers_wait_for_the_stream_is_no_work() -> None:
    dataset = Decoded(*range(4))
    with decoding(dataset, 4, 3) as loader:
        batches = iter(loader)
        next(batches)
        time.sleep(0.3)
        stats = loader.stats()
        assert stats.worker_wait_s > 0.9 * 3 * 0.3
        assert stats.busy_s < 0.2 * stats.worker_wait_s
        dataset.stream.put(None)
        assert lists_of(batches) == []


def test_a_dataset_that_decodes_needs_a_deadline() -> None:
    with pytest.raises(ValueError, match="Decoded has fastload_decode, which needs max_wait_ms"):
        DataLoader(Decoded(1, None), 2, num_workers=1)


@pytest.mark.parametrize("num_workers", [1, 2, 6])
def test_errors_of_decoding_cost_the_same_samples_with_any_number_of_workers(
    num_workers: int,
) -> None:
    class Broken(Decoded):
        def fastload_decode(self, value: int) -> Any:
            if value in (0, 17, 18):
                raise ValueError(str(value))
            return super().fastload_decode(value)

    found: list[Any] = []
    with decoding(Broken(*range(40), None), 8, num_workers) as loader:
        batches = iter(loader)
        while True:
            try:
                found.append(values(next(batches)))
            except ValueError as error:
                found.append(str(error))
            except StopIteration:
                break
    rest = [list(range(first, first + 8)) for first in (8, 24, 32)]
    assert found == ["0", rest[0], "17", *rest[1:]]


def test_a_slow_sample_holds_no_other_back_even_if_all_before_were_quick() -> None:
    dataset = Decoded(*range(72), hold=[64])
    with decoding(dataset, 8, 2) as loader:
        batches = iter(loader)
        assert lists_of(islice(batches, 8)) == [list(range(k, k + 8)) for k in range(0, 64, 8)]
        assert {dataset.gates.reached.get(timeout=30) for _ in range(72)} == set(range(72))
        dataset.gates.gates[64].set()
        dataset.stream.put(None)
        assert lists_of(batches) == [list(range(64, 72))]


def test_an_epoch_of_decoding_that_is_left_leaves_nothing_in_the_next() -> None:
    class Finite(Decoded):
        def __iter__(self) -> Iterator[int]:
            return iter(range(50))

    with decoding(Finite(), 3, 4, max_wait_ms=1, persistent_workers=True) as loader:
        for _ in range(20):
            for batch in loader:
                assert batch[0][0] == 0
                break
        assert flat(lists_of(loader)) == list(range(50))


def test_a_stream_that_is_decoded_resumes_exactly_with_any_number_of_workers() -> None:
    class Walk(Decoded):
        """Each value depends on the draws of all values before."""

        def __iter__(self) -> Iterator[Any]:
            value = 0.0
            for _ in range(20):
                value += torch.rand((), generator=sample_generator()).item()
                yield value

        def fastload_decode(self, value: Any) -> Any:
            return value, random.random()

    def loader(num_workers: int) -> DataLoader[Any]:
        return decoding(Walk(), 3, num_workers, seed=3)

    with loader(4) as whole:
        expected = list(whole)
    with loader(2) as left:
        batches = iter(left)
        first = [next(batches) for _ in range(3)]
        state = left.state_dict()
    with loader(5) as resumed:
        resumed.load_state_dict(state)
        assert first + list(resumed) == expected
    for persistent in (False, True):
        resumes_twice(lambda: decoding(Walk(), 3, 2, seed=3, persistent_workers=persistent))  # noqa: B023


def test_the_reader_of_a_stream_that_is_decoded_stops_at_a_bound() -> None:
    dataset = Decoded(*range(1000))
    with decoding(dataset, 4, 3, prefetch_batches=2) as loader:
        batches = iter(loader)
        next(batches)
        time.sleep(0.3)
        taken = 1000 - dataset.stream.queue.qsize()
        assert taken <= 4 * (1 + 2 + 2) + 1, (
            "the loop's batch, two in flight, the line, the one in hand"
        )
        dataset.stream.put(None)
        assert flat(lists_of(batches)) == list(range(4, 1000))


def test_close_ends_workers_that_wait_for_their_turn() -> None:
    dataset = Decoded(0)
    loader = decoding(dataset, 3, 4)
    batches = iter(loader)
    threads = list(batches.threads)  # type: ignore[attr-defined]
    assert len(threads) == 5
    assert dataset.gates.reached.get(timeout=30) == 0
    batches.close()  # type: ignore[attr-defined]
    dataset.stream.put(None)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
