"""What every kind of worker promises. A kind joins by one line in `tests/promises/test_kinds_of_worker.py`.

- Each sample is read once and delivered once, in the sampler's order. Batches and draws are those of torch's loader.
- An error arrives in its place, keeps its type, and says where it was raised. All other batches arrive.
- `on_error` and `max_errors` change the batches that have bad samples, and no others.
- A state taken at any step resumes with the next batch, also with another kind of worker. Nothing is read for it.
- An iterable dataset has one copy for each worker, and torch's order. Its errors and its state are in their place.
- `worker_init_fn` and `get_worker_info()` are torch's, and so are `batch_size=None` and `__getitems__`.
- Every way out ends the workers, and the loader begins again.

The cases look at what arrives and at files, not at objects that only threads share, so that processes can pass them.
Torch's own processes pass those in `LikeTorch`: that shows that the expectations are torch's.
"""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import multiprocessing
import re
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import covertable
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from fastload import SKIP, DataLoader
from fastload.errors import EmptyBatchError, LoaderClosedError, StateError, TooManyErrorsError
from tests.fakes import Numbers, OwnIterator, fastload_threads, hasty
from tests.promises.reading import drain, in_batches, wait_until
from tests.resuming import resumes_twice, through_json

SEED = 7
THREADS: dict[str, Any] = {"worker_method": "thread", "worker_processes": None}
SHARD = 1000  # more than any shard holds: sample k of shard s is s * SHARD + k

# ---- datasets ----


class Notes:
    """Numbers that workers append to a file, threads or processes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, number: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{number}\n")

    def take(self) -> list[int]:
        """Return the numbers since the last call, sorted."""
        numbers = sorted(map(int, self.path.read_text().split())) if self.path.exists() else []
        self.path.unlink(missing_ok=True)
        return numbers


class Noted(Numbers):
    """Its own indices and three random numbers; notes what is read."""

    def __init__(self, length: int, notes: Notes) -> None:
        super().__init__(length)
        self.notes = notes

    def __getitem__(self, index: int) -> Any:
        self.notes.add(index)
        return torch.cat([torch.tensor([index], dtype=torch.float64), torch.rand(3).double()])


class Rows(Dataset[Any]):
    """30 samples of an index and a row; a list of indices (`batch_size=None`) gives a stack."""

    table = torch.arange(90.0).reshape(30, 3)

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int | list[int]) -> Any:
        return index, self.table[index]


class ByKey(Numbers):
    """Reads a batch in one call, whatever a batch sampler gives, and no sample alone."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError("read sample by sample")

    def __getitems__(self, key: Any) -> list[int]:
        if not isinstance(key, slice) and 42 in key:
            raise LookupError("sample 42 is bad")
        return list(range(*key.indices(12))) if isinstance(key, slice) else list(key)


class Informed(Numbers):
    """What `get_worker_info()` says, and what `worker_init_fn` did with its dataset."""

    told = -1

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return None
        assert info.dataset is self
        return info.id, info.num_workers, info.seed - info.id, self.told


class Bad(Numbers):
    """Its own indices, but reading one of `bad` raises what `bad` makes of it."""

    def __init__(self, length: int, bad: Mapping[int, Callable[[int], BaseException]]) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.bad[index](index)
        return index

    def locate(self, index: int) -> str:
        return f"shelf/{index:05}.jpg"


class Gathered(Bad):
    """A batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Unreadable(Exception):
    """An exception that cannot be rebuilt from its text."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"sample {index}: {reason}")
        self.index = index


def unreadable(*indices: int) -> dict[int, Callable[[int], BaseException]]:
    return {index: lambda index: Unreadable(index, "torn") for index in indices}


# ---- iterable datasets ----


def my_part() -> tuple[int, int]:
    """This worker's number and how many there are; (0, 1) outside of a worker."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


class Sharded(IterableDataset[Any]):
    """`lengths[s]` samples in shard s, which worker s modulo the number of workers reads."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def part(self, worker: int, workers: int) -> list[int]:
        shards = range(worker, len(self.lengths), workers)
        return [shard * SHARD + k for shard in shards for k in range(self.lengths[shard])]

    def __iter__(self) -> Iterator[Any]:
        yield from self.part(*my_part())


class Whole(IterableDataset[int]):
    """Not sharded: each worker yields all, from `start` on."""

    def __init__(self, length: int, start: int = 0) -> None:
        self.length, self.start = length, start

    def part(self, worker: int, workers: int) -> list[int]:
        return list(range(self.start, self.length))

    def __iter__(self) -> Iterator[int]:
        return iter(self.part(*my_part()))


class Sized(Whole):
    """Says that it is shorter by five samples."""

    def __len__(self) -> int:
        return self.length - 5


class CountsEpochs(IterableDataset[int]):
    """Remembers how often it was begun; an epoch is its number."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([self.epoch] * 3)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return itertools.count(my_part()[0] * SHARD)


class Hazards(IterableDataset[int]):
    """`length` samples for each worker. `faults[worker, k]` is raised in the place of sample k.

    `dies` says whether the worker's iterator is a generator, which an exception ends.
    """

    def __init__(self, length: int, faults: dict[tuple[int, int], Any], dies: bool = False) -> None:
        self.length, self.faults, self.dies = length, faults, dies

    def part(self, worker: int, workers: int) -> list[Any]:
        steps = [self.faults.get((worker, k), worker * SHARD + k) for k in range(self.length)]
        bad = [place for place, step in enumerate(steps) if isinstance(step, Exception)]
        return steps[: bad[0] + 1] if self.dies and bad else steps

    def __iter__(self) -> Iterator[int]:
        steps = map(raised_or_given, self.part(*my_part()))
        return (step for step in steps) if self.dies else steps


def raised_or_given(step: Any) -> Any:
    if isinstance(step, BaseException):
        raise step
    return step


class Drawing(Sharded):
    """Samples (value, random number), without a state: what was read is read again."""

    def make(self, value: int) -> torch.Tensor:
        return torch.tensor([value, torch.rand(()).item()])

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(self.make, super().__iter__())


class Shuffles(Drawing):
    """Draws its order at the start: only reading again, with the same numbers, gives the rest."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        values = self.part(*my_part())
        for k in torch.randperm(len(values)).tolist():
            yield self.make(values[k])


class Remembers(Drawing):
    """The dataset has the state, as torchdata's users write it."""

    at = start = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.start = self.start, 0  # the epoch after starts at the front
        values = self.part(*my_part())
        while self.at < len(values):
            self.at += 1
            yield self.make(values[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class IteratorRemembers(Drawing):
    """Its iterator has the state."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return Remembering(self)


class Remembering:
    def __init__(self, dataset: IteratorRemembers) -> None:
        self.dataset, self.values, self.at = dataset, dataset.part(*my_part()), 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        if self.at == len(self.values):
            raise StopIteration
        self.at += 1
        return self.dataset.make(self.values[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


STREAMS = [Drawing, Shuffles, Remembers, IteratorRemembers]
ITERABLE: dict[str, Callable[[], Any]] = {
    "uneven": lambda: Sharded([7, 1, 0, 13, 4, 9, 2]),
    "fewer shards than workers": lambda: Sharded([5]),
    "unsharded": lambda: Whole(10),
    "empty": lambda: Sharded([]),
}

# ---- samplers ----


class Shuffled(Sampler[int]):
    """A new order each epoch; `epochs` holds those it gave."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs: list[list[int]] = []
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(len(self.epochs))
        self.epochs.append(torch.randperm(self.length, generator=generator).tolist())
        for index in self.epochs[-1]:
            self.threads.add(threading.get_ident())
            yield index


class Breaking(Sampler[int]):
    """Raises in `__iter__` (`after=None`) or after that many indices."""

    def __init__(self, after: int | None, kind: type[BaseException] = OSError) -> None:
        self.after, self.kind = after, kind

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        if self.after is None:
            raise self.kind("out of the sampler")
        return self.indices(self.after)

    def indices(self, after: int) -> Iterator[int]:
        yield from range(after)
        raise self.kind("out of the sampler")


TORCH_ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "as it comes": lambda: {"batch_size": 7},
    "one by one": lambda: {},
    "shuffle": lambda: {"batch_size": 7, "shuffle": True},
    "shuffle, drop_last": lambda: {"batch_size": 7, "shuffle": True, "drop_last": True},
    "all dropped": lambda: {"batch_size": 500, "drop_last": True},
    "generator": lambda: {
        "batch_size": 7,
        "shuffle": True,
        "generator": torch.Generator().manual_seed(3),
    },
    "generator, sampler of its own": lambda: {
        "batch_size": 7,
        "sampler": RandomSampler(range(30), generator=torch.Generator().manual_seed(4)),
        "generator": torch.Generator().manual_seed(3),
    },
    "with replacement": lambda: {
        "batch_size": 7,
        "sampler": RandomSampler(range(30), replacement=True, num_samples=70),
    },
    "weighted": lambda: {
        "batch_size": 7,
        "sampler": WeightedRandomSampler([1.0 + i % 5 for i in range(30)], 25),
    },
    "subset": lambda: {"batch_size": 7, "sampler": SubsetRandomSampler(range(5, 25))},
    "sampler that is a list": lambda: {"batch_size": 7, "sampler": [5, 5, 3, 29, 0, 1, 2, 3, 4]},
    "distributed": lambda: {
        "batch_size": 7,
        "sampler": DistributedSampler(range(30), num_replicas=3, rank=1, seed=5),
    },
    "batch sampler": lambda: {
        "batch_sampler": BatchSampler(RandomSampler(range(30)), 9, drop_last=True)
    },
    "batches of any size": lambda: {
        "batch_sampler": [[3], [1, 4, 1, 5, 9, 2, 6], [5, 3], list(range(20)), [8, 9, 7], [9, 3]]
    },
    "no batches": lambda: {"batch_size": None},
    "no batches, sampler of lists": lambda: {
        "batch_size": None,
        "sampler": BatchSampler(SequentialSampler(range(30)), 6, drop_last=False),
    },
}

# ---- what a loop sees ----


def plain(batch: Any) -> Any:
    """Return a batch as Python lists, which compare by value."""
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [plain(part) for part in batch] if isinstance(batch, list | tuple) else batch


def epochs(loader: Any, count: int) -> list[list[Any]]:
    return [[plain(batch) for batch in loader] for _ in range(count)]


def epochs_and_draws(loader: Any) -> list[Any]:
    """Return each of two epochs' batches, its length, and the state of torch's generator after it."""
    seen: list[Any] = []
    for epoch in range(2):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        seen.append([plain(batch) for batch in loader])
        seen += [len(loader), bytes(torch.random.get_rng_state().numpy())]
    return seen


@functools.cache
def torchs_own(name: str, persistent: bool) -> list[Any]:
    """Return what torch's loader gives: serially, or if its workers persist, with one worker process.

    Persistent workers take fewer draws of the generator.
    """
    more = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    torch.manual_seed(11)
    options: dict[str, Any] = {**TORCH_ARGUMENTS[name](), **(more if persistent else {})}
    return epochs_and_draws(torch.utils.data.DataLoader(Rows(), **options))


def heard(loop: Any) -> list[Any]:
    """Return what each `next()` gave: batches as lists, errors as the names of their types."""
    return [
        type(what).__name__ if isinstance(what, BaseException) else plain(what)
        for what in drain(loop)
    ]


def in_turn(lanes: list[list[Any]]) -> list[Any]:
    """Return torch's order: a batch of each worker in turn, without those that have ended."""
    none = object()
    turns = itertools.zip_longest(*lanes, fillvalue=none)
    return [batch for turn in turns for batch in turn if batch is not none]


def lane(steps: list[Any], batch_size: int | None, drop_last: bool = False) -> list[Any]:
    """Return what comes out of one worker's steps. An error costs what its batch had by then."""
    events: list[Any] = []
    batch: list[Any] = []
    for step in steps:
        if isinstance(step, BaseException):
            events.append(type(step).__name__)
            batch = []
        elif batch_size is None:
            events.append(step)
        else:
            batch.append(step)
            if len(batch) == batch_size:
                events.append(batch)
                batch = []
    return [*events, batch] if batch and not drop_last else events


def only_error(got: list[Any], expected: list[Any], place: int) -> Any:
    """Return what is at `place`; all else must be `expected`."""
    assert got[:place] + got[place + 1 :] == expected[:place] + expected[place + 1 :]
    return got[place]


def text_of(error: BaseException) -> str:
    """Return an error's text with its traceback and notes."""
    return "".join(traceback.format_exception(error))


def running() -> list[str]:
    """Return the workers that are there: threads and processes."""
    return fastload_threads() + [child.name for child in multiprocessing.active_children()]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
class LikeTorch:
    """What torch's own workers do too."""

    options: ClassVar[dict[str, Any]]

    def __init_subclass__(cls, **options: Any) -> None:
        cls.options = options

    @property
    def workers(self) -> int:
        return int(self.options.get("num_workers", 0))

    @property
    def lanes(self) -> int:
        """How many copies of an iterable dataset are read."""
        return max(1, self.workers)

    @property
    def persistent(self) -> bool:
        return bool(self.options.get("persistent_workers"))

    def some(self, cases: Iterable[Any], turn: int = 0, step: int = 3) -> list[Any]:
        """Return all cases, or every third if each starts processes. Another turn has others."""
        cases = list(cases)
        if "worker_method" not in self.options:
            return cases
        return cases[turn % min(step, len(cases)) :: step]

    @pytest.fixture
    def notes(self, tmp_path: Path) -> Notes:
        return Notes(tmp_path / "notes")

    def loader(self, dataset: Any, *args: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, *args, **{**self.options, **options})

    def drain(self, dataset: Any, *args: Any, **options: Any) -> list[Any]:
        """Return what each `next()` of one epoch gave."""
        with self.loader(dataset, *args, **options) as loader:
            return drain(loader)

    # -- order, exactly once --

    @pytest.mark.parametrize(("batch_size", "drop_last"), [(7, False), (64, True)])
    def test_each_sample_is_read_and_delivered_once_in_the_samplers_order(
        self, batch_size: int, drop_last: bool, notes: Notes
    ) -> None:
        sampler = Shuffled(200)
        options = {"sampler": sampler, "drop_last": drop_last}
        with hasty(), self.loader(Noted(200, notes), batch_size, **options) as loader:
            for epoch in range(2):
                got = [[int(index) for index in batch[:, 0]] for batch in loader]
                expected = in_batches(sampler.epochs[epoch], batch_size)
                assert got == (expected[:-1] if drop_last else expected)
                assert len(got) == len(loader)
                assert notes.take() == sorted(itertools.chain(*got))
        assert len(sampler.epochs) == 2
        assert sampler.threads == {threading.get_ident()}, "the sampler runs in the loop's thread"

    def test_the_end_stays_the_end(self) -> None:
        with self.loader(Numbers(0), 4) as empty:
            assert len(empty) == 0
            assert epochs(empty, 2) == [[], []]
        with self.loader(Numbers(10), 4) as loader:
            iterator = iter(loader)
            assert len(list(iterator)) == 3
            for _ in range(3):
                with pytest.raises(StopIteration):
                    next(iterator)

    def test_an_epoch_left_in_the_middle_takes_nothing_from_the_next(self) -> None:
        whole = in_batches(range(100), 7)
        with self.loader(Numbers(100), 7) as loader:
            for taken in self.some((0, 1, 5, 14)):
                iterator = iter(loader)
                assert [next(iterator).tolist() for _ in range(taken)] == whole[:taken]
                del iterator
            assert epochs(loader, 1) == [whole]

    # -- batch_size=None, __getitems__ --

    @pytest.mark.parametrize("part", [None, range(20, 60)])
    def test_a_batch_is_read_in_one_call(self, part: range | None) -> None:
        """By `__getitems__`, if the dataset has it, or the dataset of which it is a subset."""
        whole = ByKey(100)
        dataset = whole if part is None else Subset(Subset(whole, [*part]), range(40))
        got = self.drain(dataset, 10)
        error = only_error(got, in_batches(part or range(100), 10), 4 if part is None else 2)
        assert type(error) is LookupError
        assert "sample 42 is bad" in text_of(error)

    def test_a_batch_sampler_may_give_what_is_no_list(self) -> None:
        keys: Any = [slice(0, 4), slice(7, 12, 2), [1, 2], (3,), range(2)]
        with self.loader(ByKey(12), batch_sampler=keys) as loader:
            assert epochs(loader, 1) == [[[0, 1, 2, 3], [7, 9, 11], [1, 2], [3], [0, 1]]]

    # -- errors --

    @pytest.mark.parametrize("batch_size", [1, 7, None])
    def test_one_bad_sample_costs_no_other_batch(self, batch_size: int | None) -> None:
        dataset = Bad(100, {53: lambda index: LookupError(f"sample {index} is bad")})
        got = self.drain(dataset, batch_size)
        expected: list[Any] = (
            [*range(100)] if batch_size is None else in_batches(range(100), batch_size)
        )
        error = only_error(got, expected, 53 // (batch_size or 1))
        assert type(error) is LookupError
        assert "sample 53 is bad" in text_of(error)
        assert "in __getitem__" in text_of(error), "with the worker's traceback"

    # -- the worker --

    def test_what_a_worker_knows_of_itself(self, notes: Notes) -> None:
        """`worker_init_fn` runs once for each worker, and what it does to the dataset is there in its samples."""

        def init(worker: int) -> None:
            info = get_worker_info()
            assert info is not None
            assert info.id == worker
            info.dataset.told = 10 + worker
            notes.add(worker)

        options = {
            "worker_init_fn": init,
            "copy_dataset": "state",
        }  # each worker tells its own copy
        with self.loader(Informed(60), None, **options) as loader:
            for epoch in range(2):
                samples = list(loader)
                inits = notes.take()
                if not self.workers:
                    assert (set(samples), inits) == ({None}, [])
                    continue
                assert {worker for worker, *_ in samples} <= set(range(self.workers))
                assert {n for _, n, _, _ in samples} == {self.workers}
                assert len({seed for _, _, seed, _ in samples}) == 1
                assert all(told == 10 + worker for worker, _, _, told in samples)
                assert inits == ([] if epoch and self.persistent else list(range(self.workers)))
            assert get_worker_info() is None, "the loop is not a worker"

    # -- iterable datasets --

    @pytest.mark.parametrize("name", ITERABLE)
    def test_batches_of_an_iterable_dataset_come_of_each_worker_in_turn(self, name: str) -> None:
        dataset = ITERABLE[name]()
        parts = [dataset.part(worker, self.lanes) for worker in range(self.lanes)]
        ways = ((4, False), (4, True), (None, False))
        for batch_size, drop_last in self.some(ways, [*ITERABLE].index(name)):
            options = {"batch_size": batch_size, "drop_last": drop_last}
            with self.loader(dataset, **options) as loader:
                expected = in_turn([lane(part, batch_size, drop_last) for part in parts])
                assert epochs(loader, 1) == [expected], options

    def test_a_copy_of_an_iterable_dataset_lives_as_long_as_its_worker(self) -> None:
        """Without workers it is the dataset itself."""
        goes_on = self.persistent or not self.workers
        with self.loader(CountsEpochs(), 3) as loader:
            expected = [[[e if goes_on else 1] * 3] * self.lanes for e in (1, 2)]
            assert epochs(loader, 2) == expected
        dataset = OwnIterator(9)
        with self.loader(dataset, 4) as loader:
            whole = in_turn([in_batches(range(9), 4)] * self.lanes)
            assert epochs(loader, 2) == [whole, [] if goes_on else whole]
        assert dataset.at == (0 if self.workers else 9)

    def test_worker_init_fn_may_shard_the_worker_s_copy(self) -> None:
        """The second example in the documentation of torch's IterableDataset."""

        def shard(worker: int) -> None:
            info = get_worker_info()
            assert info is not None
            part = info.dataset
            per = -(-(part.length - part.start) // info.num_workers)
            part.start += worker * per
            part.length = min(part.start + per, part.length)

        per = -(-23 // self.lanes)
        parts = [list(range(3 + w * per, min(3 + (w + 1) * per, 26))) for w in range(self.lanes)]
        expected = in_turn([lane(part, 4) for part in parts])
        with self.loader(Whole(26, 3), 4, worker_init_fn=shard) as loader:
            assert epochs(loader, 2) == [expected] * 2

    def test_more_samples_than_the_length_says_give_torchs_warning(self) -> None:
        with self.loader(Sized(12), 1) as loader:
            assert len(loader) == 7
            iterator = iter(loader)
            for _ in range(7):
                next(iterator)  # warnings are errors here
            with pytest.warns(UserWarning, match="Length of IterableDataset"):
                assert len([next(iterator), *iterator]) == 12 * self.lanes - 7

    @pytest.mark.parametrize(
        ("batch_size", "dies"), [(4, True), (4, False), (1, True), (None, False)]
    )
    def test_an_error_of_an_iterable_dataset_is_in_its_place(
        self, dies: bool, batch_size: int | None
    ) -> None:
        faults = {
            (0, 5): ValueError("five"),
            (0, 8): KeyError("eight"),
            (1, 0): OSError(errno.ENOENT, "zero"),
        }
        dataset = Hazards(11, faults, dies)
        lanes = [lane(dataset.part(w, self.lanes), batch_size) for w in range(self.lanes)]
        with self.loader(dataset, batch_size) as loader:
            assert heard(loader) == in_turn(lanes)


def collate(samples: list[int]) -> torch.Tensor:
    if 42 in samples:
        raise OSError("out of collate_fn")
    return torch.tensor(samples)


def collate_that_ends(samples: list[int]) -> torch.Tensor:
    return next(iter(())) if 42 in samples else torch.tensor(samples)


RANGE: Any = range(100)
UNLIKE = [torch.zeros(2) if k == 42 else torch.tensor(k) for k in RANGE]
BEYOND = [1042 if k == 42 else k for k in RANGE]
CALL = "[40, 41, 42, 43, 44, 45, 46, 47, ... 10 in all]"
SKIPPING = {"collate_fn": collate, "on_error": "skip"}
STAGES: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "whole": (Gathered(100, unreadable(42)), {}, Unreadable, [f"({CALL})", "in __getitems__"]),
    "no such index": (RANGE, {"sampler": BEYOND}, IndexError, ["1042"]),
    "collate": (RANGE, {"collate_fn": collate}, OSError, ["stage: collate", "42", "in collate"]),
    "skipping": (RANGE, SKIPPING, OSError, ["stage: collate"]),
    "ends": (RANGE, {"collate_fn": collate_that_ends}, RuntimeError, ["stage: collate", "StopIteration"]),
    "unlike samples": (UNLIKE, {}, RuntimeError, ["stage: collate", "42"]),
}  # fmt: skip

STATES: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "batch sampler": {"batch_sampler": [[1, 2], [3], [3, 3, 0], [13]], "batch_size": 1},
    "no batches": {"batch_size": None, "sampler": range(8, 3, -1)},
    "any order": {"in_order": False},
}


class Workers(LikeTorch):
    """What fastload's workers do: all of it."""

    @pytest.mark.parametrize("name", TORCH_ARGUMENTS)
    def test_the_batches_and_the_draws_are_those_of_torch(self, name: str) -> None:
        expected = torchs_own(name, self.persistent)
        torch.manual_seed(11)
        with self.loader(Rows(), **TORCH_ARGUMENTS[name]()) as loader:
            assert epochs_and_draws(loader) == expected

    def test_in_any_order_of_arrival_nothing_is_lost_or_doubled(self) -> None:
        with hasty(), self.loader(Numbers(500), 7, in_order=False) as loader:
            for epoch in epochs(loader, 2):
                assert sorted(epoch) == in_batches(range(500), 7)
        got = self.drain(Bad(100, unreadable(31, 77)), 10, in_order=False)
        assert sorted(b.index for b in got if isinstance(b, Unreadable)) == [31, 77]
        whole = in_batches(range(100), 10)
        assert sorted(b for b in got if isinstance(b, list)) == [
            batch for place, batch in enumerate(whole) if place not in (3, 7)
        ]

    def test_an_endless_sampler_is_never_drained(self) -> None:
        drawn: list[int] = []

        class Counting(Sampler[int]):
            def __iter__(self) -> Iterator[int]:
                for number in itertools.count():
                    drawn.append(number)
                    yield number % 10

        with self.loader(Numbers(10), 5, sampler=Counting()) as loader:
            for number, batch in enumerate(islice(loader, 50)):
                assert batch.tolist() == [(number * 5 + i) % 10 for i in range(5)]
                assert len(drawn) <= (number + 1 + loader.stats().depth) * 5

    def test_a_seed_makes_the_order_a_function_of_seed_and_epoch(self) -> None:
        state = torch.random.get_rng_state()
        inline = DataLoader(Numbers(100), 7, shuffle=True, seed=SEED)
        expected = epochs(inline, 5)
        assert all(sorted(itertools.chain(*epoch)) == [*range(100)] for epoch in expected)
        assert len({str(epoch) for epoch in expected}) == 5, "each epoch has an order of its own"
        other = DataLoader(Numbers(100), 7, shuffle=True, seed=SEED + 1)
        assert epochs(other, 1) != expected[:1]
        with self.loader(Numbers(100), 7, shuffle=True, seed=SEED) as loader:
            assert epochs(loader, 2) == expected[:2]
            for epoch in self.some((3, 0, 4, 2)):
                loader.set_epoch(epoch)
                assert epochs(loader, 1) == [expected[epoch]]
                assert loader.stats().epoch == epoch
            assert epochs(loader, 1) == [expected[3]], "after epoch 2 comes epoch 3"
            assert loader.stats().epoch == 3
        assert torch.equal(torch.random.get_rng_state(), state), "torch's generator is not asked"

    def test_the_report_counts_what_was_delivered(self) -> None:
        for dataset, samples in ((Numbers(26), 26), (Sharded([5, 3, 4]), 12)):
            with self.loader(dataset, 4) as loader:
                for _ in range(2):
                    batches = len(list(loader))
                    stats = loader.stats()
                    assert (stats.batches, stats.samples) == (batches, samples)
                    assert (stats.errors, stats.workers) == (0, self.workers)

    def test_no_worker_in_collate_fn(self) -> None:
        """Torch's collate would allocate shared memory there."""
        with self.loader(Numbers(8), 4, collate_fn=lambda _: get_worker_info()) as loader:
            assert list(loader) == [None, None]

    # -- errors --

    def test_an_error_says_where_it_was_raised(self) -> None:
        """The index is the dataset's, the position the sampler's."""
        sampler = [9, 8, 7, 6, 5, 42, 4]
        with self.loader(Bad(100, unreadable(42)), 4, sampler=sampler) as loader:
            for epoch in range(2):
                first, error = drain(loader)
                assert first == [9, 8, 7, 6]
                assert (type(error), error.index) == (Unreadable, 42)
                where = ("index 42", "position 1 of batch 1", f"epoch {epoch}", "shelf/00042.jpg")
                text = text_of(error)
                assert [
                    w for w in (*where, "stage: sample", "in __getitem__") if w not in text
                ] == []
        (*_, error, _) = self.drain(Bad(20, unreadable(18)), None)
        assert "shelf/00018.jpg" in text_of(error)

    def test_a_bad_sample_of_a_subset_is_named(self) -> None:
        """By the index that the sampler gave, and by its file, which the whole dataset knows."""
        part = Subset(Subset(Bad(100, unreadable(42)), range(0, 100, 2)), range(10, 30))
        got = self.drain(part, 4)
        whole = [[20 + 2 * i for i in batch] for batch in in_batches(range(20), 4)]
        error = only_error(got, whole, 2)
        assert "sample index 11, position 3 of batch 2 of epoch 0" in text_of(error)
        assert "stage: sample; file: shelf/00042.jpg" in text_of(error)

    def test_a_bad_epoch_leaves_the_next_one_whole(self) -> None:
        with self.loader(Bad(100, unreadable(31, 32, 77)), 10) as loader:
            for _ in range(2):
                got = drain(loader)
                assert [k for k, b in enumerate(got) if isinstance(b, Unreadable)] == [3, 7]
                assert loader.stats().batches == 10
                iterator = iter(loader)  # left at its error
                for _ in range(3):
                    next(iterator)
                with pytest.raises(Unreadable):
                    next(iterator)
                del iterator

    @pytest.mark.parametrize("stage", STAGES)
    def test_an_error_of_any_stage_arrives_in_its_place(self, stage: str) -> None:
        dataset, options, kind, words = STAGES[stage]
        error = only_error(self.drain(dataset, 10, **options), in_batches(RANGE, 10), 4)
        assert type(error) is kind
        assert all(word in text_of(error) for word in words), text_of(error)

    @pytest.mark.parametrize(
        ("kind", "dataset_class"),
        [
            (StopIteration, Bad),
            (StopIteration, Gathered),
            (GeneratorExit, Bad),
            (SystemExit, Gathered),
            (KeyboardInterrupt, Bad),
        ],
    )
    def test_what_would_end_a_loop_or_a_worker_is_an_error(
        self, kind: type[BaseException], dataset_class: type[Bad]
    ) -> None:
        if not self.workers and not issubclass(kind, StopIteration | GeneratorExit):
            return  # without workers these end the loop's own thread, as they should
        dataset = dataset_class(100, {42: lambda _: kind("out of a sample")})
        error = only_error(self.drain(dataset, 10), in_batches(RANGE, 10), 4)
        assert type(error) is RuntimeError
        assert type(error.__cause__) is kind
        assert kind.__name__ in str(error)
        assert "42" in text_of(error)

    @pytest.mark.parametrize(
        ("after", "kind"),
        [(0, OSError), (42, OSError), (100, OSError), (42, StopIteration), (42, GeneratorExit)],
    )
    def test_a_sampler_that_raises_midway(self, after: int, kind: type[BaseException]) -> None:
        """As in torch, the batch that it was filling is lost with it; those before it are not."""
        with self.loader(RANGE, 10, sampler=Breaking(after, kind)) as loader:
            for _ in range(2):
                *got, error = drain(loader)
                assert got == in_batches(RANGE, 10)[: after // 10]
                assert type(error) is (OSError if kind is OSError else RuntimeError)
                assert kind is not OSError or "stage: sampler" in text_of(error)
                assert "in indices" in text_of(error)

    def test_a_sampler_that_gives_no_indices(self) -> None:
        with self.loader(RANGE, 10, sampler=Breaking(None)) as loader:
            for _ in range(2):
                with pytest.raises(OSError, match="out of the sampler"):
                    next(iter(loader))
        given: Any = [[1, 2], 3, range(4, 6)]
        got = self.drain(RANGE, batch_sampler=given)
        assert isinstance(only_error(got, [[1, 2], [3], [4, 5]], 1), TypeError)

    @pytest.mark.parametrize("kind", [OSError, StopIteration, SystemExit])
    def test_a_worker_init_fn_that_raises(self, kind: type[BaseException]) -> None:
        """Without workers it is not called."""

        def init(worker: int) -> None:
            if worker == self.workers - 1:
                raise kind("out of worker_init_fn")
            assert self.workers

        with self.loader(RANGE, 10, worker_init_fn=init) as loader:
            if not self.workers:
                assert drain(loader) == in_batches(RANGE, 10)
                return
            for _ in range(2):
                with pytest.raises((OSError, RuntimeError), match="worker_init_fn") as caught:
                    next(iter(loader))
                if kind is OSError:
                    assert type(caught.value) is OSError
                else:
                    assert isinstance(caught.value.__cause__, kind)
                text = text_of(caught.value)
                for words in (f"worker {self.workers - 1}", "stage: worker_init_fn", "in init"):
                    assert words in text

    # -- on_error, max_errors --

    @pytest.mark.parametrize(("kind", "collate_fn"), [(Bad, None), (Bad, list), (Gathered, None)])
    def test_skip_shortens_the_batch_and_moves_no_other(
        self, kind: type[Bad], collate_fn: Any
    ) -> None:
        bad = [0, 9, 10, 11, 12, 45, 99]
        options = {"on_error": "skip", "collate_fn": collate_fn}
        kept = [[i for i in batch if i not in bad] for batch in in_batches(RANGE, 10)]
        with self.loader(kind(100, unreadable(*bad)), 10, **options) as loader:
            for _ in range(2):
                assert drain(loader) == kept
                stats = loader.stats()
                assert (stats.samples, stats.errors, stats.batches) == (93, 7, 10)

    def test_a_batch_that_lost_every_sample_raises(self) -> None:
        got = self.drain(Bad(20, unreadable(5, 6, 7, 8, 9)), 5, on_error="skip")
        error = only_error(got, in_batches(range(20), 5), 1)
        assert type(error) is EmptyBatchError
        assert "batch 1" in str(error)
        assert isinstance(error.__cause__, Unreadable)

    @pytest.mark.parametrize("kind", [Bad, Gathered])
    def test_a_callable_replaces_or_skips(self, kind: type[Bad], notes: Notes) -> None:
        def decide(index: int, error: BaseException) -> Any:
            assert isinstance(error, Unreadable)
            assert error.index == index
            notes.add(index)
            return SKIP if index == 12 else -index

        with self.loader(kind(20, unreadable(3, 11, 12, 14)), 5, on_error=decide) as loader:
            assert drain(loader) == [
                [0, 1, 2, -3, 4],
                [5, 6, 7, 8, 9],
                [10, -11, 13, -14],
                [15, 16, 17, 18, 19],
            ]
            assert (loader.stats().errors, loader.stats().samples) == (4, 19)
            asked = notes.take()
        # Persistent workers begin the next epoch early.
        assert (sorted({*asked}) if self.persistent else asked) == [3, 11, 12, 14]

    @pytest.mark.parametrize("through", [False, True])
    def test_a_callable_that_raises_is_an_error_in_its_place(self, through: bool) -> None:
        """Its own, or the error of the sample that it lets through."""

        def decide(index: int, error: BaseException) -> Any:
            raise error if through else OSError("out of on_error")

        got = self.drain(Bad(20, unreadable(13)), 5, on_error=decide)
        error = only_error(got, in_batches(range(20), 5), 2)
        assert "index 13" in text_of(error)
        assert type(error) is (Unreadable if through else OSError)
        assert through or isinstance(error.__context__, Unreadable)

    @pytest.mark.parametrize("on_error", ["skip", lambda index, _: -index], ids=["skip", "call"])
    @pytest.mark.parametrize(("max_errors", "whole"), [(0, 0), (2, 3), (4, 10)])
    def test_max_errors_bounds_an_epoch(self, on_error: Any, max_errors: int, whole: int) -> None:
        """Errors are counted anew in each epoch."""
        bad = (5, 15, 35, 36)
        kept = [
            [-i if i in bad else i for i in batch if on_error != "skip" or i not in bad]
            for batch in in_batches(RANGE, 10)
        ]
        options = {"on_error": on_error, "max_errors": max_errors}
        with self.loader(Bad(100, unreadable(*bad)), 10, **options) as loader:
            for _ in range(2):
                iterator = iter(loader)
                assert [next(iterator).tolist() for _ in range(whole)] == kept[:whole]
                if whole < 10:
                    with pytest.raises(TooManyErrorsError, match=str(max_errors)) as caught:
                        next(iterator)
                    assert isinstance(caught.value.__cause__, Unreadable)
                del iterator

    # -- state --

    @pytest.mark.parametrize("shape", STATES)
    def test_a_state_taken_at_any_step_resumes_with_the_next_batch(
        self, shape: str, notes: Notes
    ) -> None:
        """Bit for bit, here and without workers, and from there. No sample is read for it."""

        def make(here: bool) -> DataLoader[Any]:
            options = {"batch_size": 4, "seed": SEED, **STATES[shape]}
            dataset = Noted(14, notes)
            return self.loader(dataset, **options) if here else DataLoader(dataset, **options)

        order: Callable[[Any], Any] = sorted if shape == "any order" else list
        for here in (True, False):
            states: list[tuple[Any, int, int]] = []
            batches: list[list[Any]] = []
            with make(here) as loader:
                for epoch in range(2):
                    states.append((loader.state_dict(), epoch, 0))
                    batches.append([])
                    for batch in loader:
                        batches[-1].append(plain(batch))
                        states.append((loader.state_dict(), epoch, len(batches[-1])))
            for place in self.some(range(len(states)), [*STATES].index(shape) + here, 5):
                state, epoch, done = states[place]
                rest = batches[epoch][done:]
                if shape == "any order" and here and self.workers:
                    rest = [b for b in batches[epoch] if b not in batches[epoch][:done]]
                with make(not here or place % 2 == 0) as loader:
                    loader.load_state_dict(through_json(state))
                    assert loader.state_dict() == state, "until something happens"
                    notes.take()
                    (got,) = epochs(loader, 1)
                    assert order(got) == order(rest), (epoch, done)
                    if not loader.persistent_workers:  # which begin the next epoch early
                        rows = got if shape == "no batches" else itertools.chain(*got)
                        assert notes.take() == sorted(int(row[0]) for row in rows)
                    if epoch == 0:
                        assert order(*epochs(loader, 1)) == order(batches[1]), (epoch, done)

    @pytest.mark.parametrize("shape", [shape for shape in STATES if shape != "any order"])
    def test_a_second_resume_and_two_epochs_after_it(self, shape: str, notes: Notes) -> None:
        options = {"batch_size": 4, "seed": SEED, **STATES[shape]}
        self.resumes_twice(lambda: Noted(14, notes), [*STATES].index(shape), **options)

    def resumes_twice(self, dataset: Callable[[], Any], turn: int, **options: Any) -> None:
        """Process workers resume to what threads give, in one of the two ways."""
        resumes_twice(
            lambda: self.loader(dataset(), **options),
            whole_by=lambda: self.loader(dataset(), **options, **THREADS),
            ways=self.some((False, True), turn),
        )

    def test_a_state_taken_after_an_error_counts_the_batch_that_raised(self) -> None:
        """Skipped samples shift nothing either."""
        dataset = Bad(26, unreadable(1, 9, 10, 25))
        for options, outcomes in (
            ({}, [Unreadable, list, Unreadable, list, list, list, Unreadable]),
            ({"on_error": "skip"}, [list] * 7),
        ):
            loader = self.loader(dataset, 4, seed=SEED, **options)
            iterator, got, states = iter(loader), [], []
            for _ in range(7):
                try:
                    got.append(next(iterator).tolist())
                except Unreadable as error:
                    got.append(error.index)
                states.append(through_json(loader.state_dict()))
            assert [type(what) is list for what in got] == [kind is list for kind in outcomes]
            loader.close()
            for done, state in self.some(enumerate(states, 1), len(options)):
                with self.loader(dataset, 4, seed=SEED, **options) as resumed:
                    resumed.load_state_dict(state)
                    rest = [b.index if isinstance(b, Unreadable) else b for b in drain(resumed)]
                    assert rest == got[done:], (options, done)

    # -- iterable datasets --

    def test_skip_takes_the_next_samples_of_an_iterable_dataset(self) -> None:
        """A batch holds what `batch_size` steps gave. It is never refilled."""
        faults = {(0, 1): ValueError("one"), (0, 6): ValueError("six"), (1, 3): OSError("three")}
        with self.loader(Hazards(10, faults), 4, on_error="skip") as loader, ignored():
            got = epochs(loader, 1)[0]
            assert loader.stats().errors == (3 if self.workers > 1 else 2)
        kept = [w * SHARD + k for w in range(self.lanes) for k in range(10) if (w, k) not in faults]
        assert sorted(itertools.chain(*got)) == kept
        assert [batch for batch in got if batch[0] < SHARD] == [[0, 2, 3], [4, 5, 7], [8, 9]]

        faults = {(0, k): ValueError(k) for k in (2, 3)}
        with self.loader(Hazards(6, faults), 2, on_error="skip") as loader, ignored():
            parts = [in_batches([w * SHARD + k for k in range(6)], 2) for w in range(self.lanes)]
            parts[0][1] = EmptyBatchError.__name__  # type: ignore[call-overload]
            assert heard(loader) == in_turn(parts)

        with self.loader(Hazards(6, faults), 2, on_error="skip", max_errors=1) as loader, ignored():
            assert heard(loader)[self.lanes] == TooManyErrorsError.__name__

    def test_skip_gives_what_a_generator_had_before_it_broke(self) -> None:
        dataset = Hazards(10, {(0, 6): ValueError("six")}, True)
        with self.loader(dataset, 4, on_error="skip") as loader:
            with pytest.warns(RuntimeWarning, match="generator that raises has ended.*Hazards"):
                (got,) = epochs(loader, 1)
            assert loader.stats().errors == 1
        assert [batch for batch in got if batch[0] < SHARD] == [[0, 1, 2, 3], [4, 5]]
        assert len([batch for batch in got if batch[0] >= SHARD]) == 3 * (self.lanes - 1)

    def test_an_error_in_iter_comes_in_place_of_that_worker_s_first_batch(self) -> None:
        class NoStart(Whole):
            def __iter__(self) -> Iterator[int]:
                if my_part()[0] == 0:
                    raise ValueError("no start")
                return super().__iter__()

        lanes: list[Any] = [["ValueError"], *[[[0, 1], [2]]] * (self.lanes - 1)]
        with self.loader(NoStart(3), 2) as loader:
            assert [heard(loader) for _ in range(2)] == [in_turn(lanes)] * 2

    @pytest.mark.parametrize("fault", [StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt])
    def test_what_would_end_a_worker_in_iter_is_an_error(self, fault: type[BaseException]) -> None:
        """Or later, in the place of a sample, where a StopIteration is the end."""
        if not self.workers and fault is not StopIteration:
            return

        class NoStart(Whole):
            def __iter__(self) -> Iterator[int]:
                raise fault("no start")

        errors = self.drain(NoStart(3), 2)
        assert [type(error) for error in errors] == [RuntimeError] * self.lanes
        assert {type(error.__cause__) for error in errors} == {fault}
        if fault is not StopIteration:
            got = self.drain(Hazards(4, {(0, 1): fault("out")}), 1)
            (error,) = [what for what in got if isinstance(what, RuntimeError)]
            assert type(error.__cause__) is fault
            lanes = [[[w * SHARD + k] for k in range(4)] for w in range(self.lanes)]
            assert only_error(got, in_turn(lanes), self.lanes) is error

    @pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"seed": None}], ids=str)
    @pytest.mark.parametrize("kind", [Drawing, Shuffles, Remembers, IteratorRemembers])
    def test_a_state_of_an_iterable_dataset_gives_the_rest_bit_for_bit(
        self, kind: type[Drawing], options: dict[str, Any]
    ) -> None:
        def make() -> DataLoader[torch.Tensor]:
            return self.loader(kind([3, 1, 4]), **{"batch_size": 2, "seed": 5, **options})

        seeded = "seed" not in options
        torch.manual_seed(11)
        with make() as loader:
            states, batches = [through_json(loader.state_dict())], []
            for batch in loader:
                batches.append(plain(batch))
                states.append(through_json(loader.state_dict()))
            following = epochs(loader, 1)
        for step, state in self.some(enumerate(states), STREAMS.index(kind)):
            if not step and not seeded:
                continue  # the numbers of an epoch are yet to be drawn from torch then
            torch.manual_seed(step)  # another process: whatever it drew before
            with make() as resumed:
                resumed.load_state_dict(state)
                rest = epochs(resumed, 1)[0]
                if step == len(batches):
                    assert rest == [], "after the last batch, the epoch gives nothing more"
                    continue
                assert rest == batches[step:], step
                assert not seeded or epochs(resumed, 1) == following, step

    @pytest.mark.parametrize("kind", STREAMS)
    def test_a_second_resume_and_two_epochs_after_it_of_an_iterable_dataset(
        self, kind: type[Drawing]
    ) -> None:
        turn = STREAMS.index(kind)
        self.resumes_twice(lambda: kind([5, 1, 8, 3]), turn, batch_size=2, seed=5)

    def test_a_state_of_an_iterable_dataset_fits_its_number_of_workers_only(self) -> None:
        with self.loader(Sharded([5, 1, 8]), 2, seed=1) as loader:
            next(iter(loader))
            state = through_json(loader.state_dict())
        other = DataLoader(Sharded([5, 1, 8]), 2, num_workers=self.workers + 1, seed=1)
        with pytest.raises(StateError, match="num_workers") as caught:
            other.load_state_dict(state)
        for number in (self.workers, self.workers + 1):
            assert re.search(rf"\b{number}\b", str(caught.value)), caught.value

    def test_an_error_of_an_iterable_dataset_counts_as_delivered(self) -> None:
        dataset = Hazards(6, {(0, 2): ValueError("two")})
        with self.loader(dataset, 2, seed=1) as loader:
            iterator = iter(loader)
            for _ in range(self.lanes):
                next(iterator)
            with pytest.raises(ValueError, match="two"):
                next(iterator)
            state = through_json(loader.state_dict())
            expected = [plain(batch) for batch in iterator]
        with self.loader(dataset, 2, seed=1) as resumed:
            resumed.load_state_dict(state)
            assert epochs(resumed, 1) == [expected]
        assert [k for batch in expected for k in batch if k < SHARD] == [3, 4, 5]

    # -- closing --

    @pytest.mark.parametrize("way", ["close", "with", "break", "del", "error"])
    def test_every_way_out_of_an_endless_epoch_ends_the_workers(self, way: str) -> None:
        loader = self.loader(Endless(), 4)
        expected = in_turn(
            [[[w * SHARD + k + i for i in range(4)] for k in (0, 4, 8)] for w in range(self.lanes)]
        )
        got: list[Any] = []
        if way == "with":
            with loader:
                got += [plain(batch) for batch in islice(loader, len(expected))]
            assert not running(), "the block was left before its workers had ended"
        elif way in ("break", "error"):
            try:
                for batch in loader:
                    got.append(plain(batch))
                    if len(got) == len(expected):
                        if way == "break":
                            break
                        raise ZeroDivisionError
            except ZeroDivisionError:
                pass
            del batch
        else:
            iterator = iter(loader)
            got += [plain(next(iterator)) for _ in expected]
            if way == "close":
                loader.close()
                assert not running(), "close() returned before its workers had ended"
            del iterator
        assert got == expected
        if self.persistent:
            del loader  # with which they end, at the latest
        gc.collect()
        wait_until(lambda: not running(), "no worker is left")

    def test_close_ends_every_iterator_and_the_loader_begins_again(self) -> None:
        loader = self.loader(Numbers(10), 4)
        loader.close()
        iterators = [iter(loader) for _ in range(3)]
        next(iterators[-1])
        for _ in range(2):
            loader.close()
            assert not running()
            for iterator in iterators:
                with pytest.raises(LoaderClosedError):
                    next(iterator)
        assert epochs(loader, 2) == [in_batches(range(10), 4)] * 2
        loader.close()


class InPairs(Workers):
    """A kind that has each test in every run, but of its cases a part. The other cases are slow."""


class Late(Workers):
    """A kind that differs from another in its number of workers only. All its cases are slow."""


IN_THE_LOOP = {
    "test_the_batches_and_the_draws_are_those_of_torch",
    "test_a_sampler_that_raises_midway",
    "test_max_errors_bounds_an_epoch",
    "test_a_state_of_an_iterable_dataset_gives_the_rest_bit_for_bit",
    "test_a_second_resume_and_two_epochs_after_it_of_an_iterable_dataset",
    "test_a_state_taken_at_any_step_resumes_with_the_next_batch",
    "test_a_second_resume_and_two_epochs_after_it",
}
"""Their cases differ in what the loop does. So of these all kinds of processes have a part."""

OF_PERSISTENCE = {
    "test_the_batches_and_the_draws_are_those_of_torch",
    "test_an_epoch_left_in_the_middle_takes_nothing_from_the_next",
    "test_what_a_worker_knows_of_itself",
    "test_a_copy_of_an_iterable_dataset_lives_as_long_as_its_worker",
    "test_a_bad_epoch_leaves_the_next_one_whole",
    "test_a_worker_init_fn_that_raises",
    "test_a_callable_replaces_or_skips",
    "test_a_state_taken_at_any_step_resumes_with_the_next_batch",
    "test_a_second_resume_and_two_epochs_after_it_of_an_iterable_dataset",
    "test_every_way_out_of_an_endless_epoch_ends_the_workers",
    "test_close_ends_every_iterator_and_the_loader_begins_again",
}
"""Their outcome depends on workers that stay. Persistent processes have a part of these, and the others are slow."""

FIFTHS = 5


@functools.cache
def choice() -> dict[tuple[str, str], int]:
    """Return which fifth of the cases of a test a kind has, by both names.

    The kinds together have each case, as a test and a fifth are a pair, too.
    """
    whole = [kind for kind in Workers.__subclasses__() if "worker_method" in kind.options]
    kinds = [kind.__name__ for kind in (*whole, *InPairs.__subclasses__())]
    tests = [name for name in dir(InPairs) if name.startswith("test_")]
    rows = covertable.make([kinds, tests, list(range(FIFTHS))])
    return {(kind, test): fifth for kind, test, fifth in rows}


def waits(item: Any) -> bool:
    """Return whether a case is left to the slow tests."""
    if not (item.cls and issubclass(item.cls, Workers)):
        return False
    if issubclass(item.cls, Late):
        return True
    processes = "worker_method" in item.cls.options
    if processes and issubclass(item.cls, InPairs) and item.originalname not in OF_PERSISTENCE:
        return True
    in_the_loop = processes and item.originalname in IN_THE_LOOP
    if not in_the_loop and not issubclass(item.cls, InPairs):
        return False
    places, last = 0, 0
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
        places += item.callspec.indices[names[0].strip()]
        last += len(mark.args[1]) - 1
    parts = min(FIFTHS, last + 1)
    return bool(places % parts != choice()[item.cls.__name__, item.originalname] % parts)


def mark_what_waits(items: list[pytest.Item]) -> None:
    for item in filter(waits, items):
        item.add_marker(pytest.mark.slow)


def ignored() -> Any:
    """Ignore the warnings that samples are skipped."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)
