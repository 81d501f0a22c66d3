"""Promises:
- A dataset that fills rows gives torch's batches, for any number of workers and any cut of a batch into runs.
- Each sample is asked for once, with the key that `random_stream` gives.
- A row that `fill_rows` cannot make is read by `__getitem__`: errors, notes, retries and `on_error` are the same.
- Draws from global functions in `fill_rows` are refused, and its errors are named.
- A dataset fills rows only if its class declares it. Subclasses, wrappers and patched instances that override what
  rows stand for are read sample by sample.
- Rows of a TensorDataset are the same on busy cores, and come in time there: they are gathered on one core.

See `fastload.reading.rows`. If several workers matter, the tests cut the runs and gate the calls: no test sleeps.
"""

from __future__ import annotations

import errno
import gc
import random
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Subset,
    TensorDataset,
    default_collate,
    random_split,
)
from torch.utils.data import DataLoader as TorchDataLoader

import fastload.image.kernels
import fastload.reading.failures
import fastload.reading.filling
import fastload.reading.rows
from fastload import DataLoader, RankSampler, random_stream, sample_rng
from fastload.check.equality import same
from fastload.errors import LoaderClosedError
from fastload.memory.slots import SlotPool
from fastload.reading import rows
from fastload.rows import Run
from tests.contracts.filled_rows import (
    NOWHERE,
    FilledRows,
    Source,
    outcomes,
)
from tests.fakes import Numbers
from tests.promises.equal import check_same

WORKERS = [0, 1, 8]
DEADLINE_S = 30.0  # only a deadlock waits that long
LOW_63 = (1 << 63) - 1
LAST = torch.channels_last


class Pair(NamedTuple):
    left: Any
    right: Any


def write(rows: Any, k: int, sample: Any) -> None:
    """Write a sample into its row, leaf by leaf."""
    if isinstance(sample, dict):
        for key, part in sample.items():
            write(rows[key], k, part)
    elif isinstance(sample, tuple | list):
        for leaf, part in zip(rows, sample, strict=True):
            write(leaf, k, part)
    else:
        rows[k] = sample


class Filled(Dataset[Any]):
    """Samples that lie there, by index. Notes the runs that it fills and the samples that are read one by one."""

    fastload_per_worker = ()  # one for all workers, with its notes

    def __init_subclass__(cls) -> None:
        cls.fastload_per_worker = vars(cls).get("fastload_per_worker", ())

    def __init__(self, samples: Any, missing: Any = ()) -> None:
        self.samples = list(samples)
        self.missing = frozenset(missing)
        self.runs: list[tuple[list[Any], list[int]]] = []
        self.reads: list[Any] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        self.reads.append(index)
        return self.samples[index]

    def empty_sample(self) -> Any:
        return self.samples[0]

    def fill_rows(self, run: Run) -> Any:
        self.runs.append((list(run.indices), run.keys.tolist()))
        for k, index in enumerate(run.indices):
            if index not in self.missing:
                write(run.rows, k, self.samples[index])
        return [k for k, index in enumerate(run.indices) if index in self.missing]


def plain(dataset: Filled) -> Any:
    """Return the same dataset without the protocol, under the same name."""
    kind = type(dataset)
    hidden = type(kind.__name__, (kind,), {"fill_rows": None, "empty_sample": lambda self: None})
    hidden.__module__ = kind.__module__
    twin = hidden.__new__(hidden)
    vars(twin).update(vars(dataset) | {"runs": [], "reads": []})
    return twin


class TestImagesInMemory(FilledRows):
    """Of the sizes that a slot holds, and of those that torch stacks."""

    @pytest.fixture(params=[(3, 4), (3, 60, 50)], ids=str)
    def source(self, request: pytest.FixtureRequest) -> Source:
        samples = [{"image": shaped(i, *request.param), "number": -i} for i in range(10)]
        return lambda: Filled(samples, missing={NOWHERE, NOWHERE + 1})


class TestTensors(FilledRows):
    @pytest.fixture
    def source(self) -> Source:
        return lambda: TensorDataset(torch.arange(420.0).view(10, 42), torch.arange(10))


# ---- batches equal torch's ----


def documented_example() -> Any:
    """Return the class that the documentation shows, run as it stands."""
    text = (Path(__file__).parents[2] / "docs/rows.md").read_text()
    example = next(block for block in text.split("```python\n")[1:] if "class " in block)
    names: dict[str, Any] = {"__name__": __name__}
    exec(example.partition("```")[0], names)
    return names["TokenWindows"]


OPTIONS: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 4},
    "one": {"batch_size": 1},
    "larger than all": {"batch_size": 100},
    "drop_last": {"batch_size": 4, "drop_last": True},
    "shuffle": {"batch_size": 4, "shuffle": True},
    "batch_sampler": {"batch_sampler": [[3], [0, 1, 2, 7, 7], [5, 4], [16, 6]]},
    "tuples": {"batch_sampler": [(3, 4), (1,)]},
}


@pytest.mark.parametrize("workers", WORKERS)
def test_the_example_of_the_documentation_loads_as_by_torch(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the example writes a file
    kind = documented_example()
    np.save("windows.npy", np.arange(1000, 1171, dtype=np.uint16))

    class Counts(kind):
        fastload_per_worker = ()
        asked: ClassVar[list[int]] = []

        def fill_rows(self, run: Run) -> Any:
            self.asked.append(len(run))
            return super().fill_rows(run)

    for options in OPTIONS.values():
        Counts.asked.clear()
        torch.manual_seed(5)
        expected = list(TorchDataLoader(kind("windows.npy", 10), **options))
        for read in (kind, Counts):
            torch.manual_seed(5)
            with DataLoader(read("windows.npy", 10), num_workers=workers, **options) as loader:
                check_same(list(loader), expected)
        assert sum(Counts.asked) == sum(map(len, expected))


def shaped(i: int, *shape: int) -> torch.Tensor:
    return torch.arange(i, i + int(np.prod(shape)), dtype=torch.float32).view(shape)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: shaped(i, 3),
    "large": lambda i: shaped(i, 100, 100),
    "array": lambda i: shaped(i, 2, 3).numpy(),
    "int": lambda i: i - 2**62,
    "float": lambda i: i / 3,
    "bool": lambda i: i % 3 == 0,
    "tuple": lambda i: (shaped(i, 2), i),
    "list": lambda i: [shaped(i, 2).numpy(), i],
    "named": lambda i: Pair(shaped(i, 2), -i),
    "dict": lambda i: {"z": shaped(i, 2), "a": i / 7, 3: i % 2 == 0},
    "nested": lambda i: (
        {"x": [shaped(i, 2), i], "y": (shaped(i, 1).numpy(), Pair(1.5 * i, i % 2 == 1))},
        [[i], {"deep": ({"er": shaped(i, 2, 2)},)}],
    ),
    "0-dimensional": lambda i: (torch.tensor(i), np.array(i, np.int16), torch.tensor(i % 2 == 0)),
    "no elements": lambda i: (torch.empty(0), np.empty((2, 0), np.int8), i),
    "four dimensions": lambda i: (shaped(i, 2, 3, 4, 5), shaped(i, 1, 2, 3, 4).numpy()),
    "empty containers": lambda i: (i, (), {}),
    "nothing": lambda i: (),
}
DTYPES = "bfloat16 float16 float64 bool int8 uint8 int16 int32 int64 uint16 uint32 uint64"
for name in (
    *DTYPES.split(),
    "complex32",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
):
    SAMPLES[f"torch.{name}"] = lambda i, name=name: (
        torch.tensor([i, 0, 1]).to(getattr(torch, name)),
        torch.tensor(i).to(getattr(torch, name)),
    )
for code in "?bBhHiIlLefdFD":
    SAMPLES[f"NumPy {code}"] = lambda i, code=code: (np.array([i, 0], code), np.array(i, code))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_of_any_containers_and_leaves(kind: str) -> None:
    """With whole runs, and with one sample in each batch left to `__getitem__`, with two workers and without."""
    samples = [SAMPLES[kind](i) for i in range(10)]
    expected = list(TorchDataLoader(plain(Filled(samples)), 4))
    for workers in (0, 2):
        for missing in ((), (1, 4, 9)):
            dataset = Filled(samples, missing)
            with DataLoader(dataset, 4, num_workers=workers) as loader:
                check_same(list(loader), expected)
            assert sorted(dataset.reads) == sorted(missing)
            assert sorted(i for indices, _ in dataset.runs for i in indices) == list(range(10))


@pytest.mark.parametrize("kind", ["nested", "0-dimensional", "NumPy e", "torch.bfloat16", "bool"])
def test_the_rest_of_a_batch_of_which_samples_are_skipped(kind: str) -> None:
    samples = [SAMPLES[kind](i) for i in range(8)]
    dataset = Raising(samples, bad={2, 7})
    expected = [default_collate([samples[i] for i in (0, 1, 3)])]
    expected.append(default_collate([samples[i] for i in (4, 5, 6)]))
    with DataLoader(dataset, 4, num_workers=2, on_error="skip") as loader:
        check_same(list(loader), expected)


@pytest.mark.parametrize("workers", [1, 8])
def test_batches_that_may_come_in_any_order(workers: int) -> None:
    samples = [SAMPLES["nested"](i) for i in range(40)]
    expected = list(TorchDataLoader(plain(Filled(samples)), 4))
    with DataLoader(Filled(samples), 4, num_workers=workers, in_order=False) as loader:
        batches = sorted(loader, key=lambda batch: batch[0]["x"][1][0])
    check_same(batches, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_images_in_channels_last(workers: int, cut: Callable[[int], None]) -> None:
    """`fill_rows` sees the memory as the batch has it: colours innermost, for a tensor and for an array."""
    strides: set[tuple[int, ...]] = set()

    class Looks(Filled):
        def fill_rows(self, run: Run) -> Any:
            tensor, array, _ = run.rows
            assert tensor.shape == array.shape == (len(run), 3, 4, 5)
            strides.add(tensor.stride()[1:])
            strides.add(tuple(step // array.itemsize for step in array.strides[1:]))
            return super().fill_rows(run)

    cut(2)
    samples = [(shaped(i, 3, 4, 5), shaped(i, 3, 4, 5).numpy(), i) for i in range(10)]
    expected = []
    for k in (0, 4, 8):
        *both, numbers = default_collate(samples[k : k + 4])
        expected.append([*(images.contiguous(memory_format=LAST) for images in both), numbers])
    for missing in ((), {5}):
        options: dict[str, Any] = {"memory_format": LAST, "num_workers": workers}
        with DataLoader(Looks(samples, missing), 4, **options) as loader:
            check_same(list(loader), expected)
        assert strides == {(1, 15, 3)}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["tensor", "int", "empty containers"])
def test_an_empty_batch_is_what_torch_makes_of_it(kind: str, workers: int) -> None:
    samples = [SAMPLES[kind](i) for i in range(4)]
    dataset, sampler = Filled(samples), [[0, 1], [], [2]]
    expected = outcomes(DataLoader(plain(dataset), batch_sampler=sampler, num_workers=workers))
    found = outcomes(DataLoader(dataset, batch_sampler=sampler, num_workers=workers))
    assert [run for run, _ in dataset.runs if not run] == []
    assert same(found, expected)


# ---- runs ----


def asked(*datasets: Filled) -> dict[Any, int]:
    """Return the key with which each sample was asked for, by index; no sample was asked for twice."""
    pairs = [pair for d in datasets for run in d.runs for pair in zip(*run, strict=True)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def check_keys(keys: list[int], order: list[int], step: int = 1, start: int = 0) -> None:
    """Check that the keys are those of the streams at every `step`-th position of epoch 0 of seed 5."""
    for place, (index, key) in enumerate(zip(order, keys, strict=True)):
        with random_stream(seed=5, epoch=0, position=step * place + start, index=index):
            assert torch.initial_seed() == key & LOW_63
            drawn = sample_rng().random()
        assert np.random.Generator(np.random.Philox(key=key)).random() == drawn


@pytest.mark.parametrize("units", [1, 3, 100])
@pytest.mark.parametrize("workers", WORKERS)
def test_every_sample_is_asked_for_once_with_the_key_of_its_stream(
    workers: int, units: int, cut: Callable[[int], None]
) -> None:
    cut(units)
    dataset = Filled(range(23))
    with DataLoader(dataset, 5, seed=5, shuffle=True, num_workers=workers) as loader:
        batches = [batch.tolist() for batch in loader]
        keys = asked(dataset)
        order = [index for batch in batches for index in batch]
        assert sorted(order) == sorted(keys) == list(range(23))
        check_keys([keys[index] for index in order], order)
        for indices, _ in dataset.runs:
            at = next(batch for batch in batches if indices[0] in batch)
            first = at.index(indices[0])
            assert at[first : first + len(indices)] == indices
        if units < 5 and workers:  # without workers a batch is one run
            assert max(len(indices) for indices, _ in dataset.runs) == units
        dataset.runs.clear()
        list(loader)
        assert not {*keys.values()} & {*asked(dataset).values()}  # the next epoch's are others
    assert not dataset.reads


class SaysSeed(Filled):
    """Leaves every sample to `__getitem__`, which notes the seed of its stream."""

    def __init__(self, samples: Any) -> None:
        super().__init__(samples, missing=())
        self.seeds: list[tuple[Any, int]] = []

    def __getitem__(self, index: Any) -> Any:
        self.seeds.append((repr(index), torch.initial_seed()))
        return 0

    def fill_rows(self, run: Run) -> Any:
        indices = [repr(index) for index in run.indices]
        self.runs.append((indices, (run.keys & np.uint64(LOW_63)).tolist()))
        assert run.keys.dtype == np.uint64
        assert run.keys.shape == (len(run),)
        return range(len(run))


INDICES: dict[str, list[Any]] = {
    "int": [3, 0, -1, 2**62, -(2**63)],
    "beyond 64 bits": [2**63, 2**64 - 1, -1, 2**70, 0],
    "unsigned": [2**63, 2**64 - 1, 5],
    "NumPy": [np.int64(4), np.int32(-2), np.uint8(200), np.uint64(2**64 - 1)],
    "tensor": [torch.tensor(4), torch.tensor(-2)],
    "bool": [True, False],
    "str": ["a", "b"],
    "tuple": [(1, 2), (3, 4)],
    "ragged": [(1, 2), 3, "x"],
    "float": [1.0, 2.5],
}


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", INDICES)
def test_keys_are_those_that_the_samples_alone_would_have(
    kind: str, workers: int, seed: int | None, cut: Callable[[int], None]
) -> None:
    cut(2)
    dataset = SaysSeed([0])
    batches = [INDICES[kind], INDICES[kind][:1]]
    with DataLoader(dataset, batch_sampler=batches, num_workers=workers, seed=seed) as loader:
        list(loader)
    given = sorted((i, key) for run in dataset.runs for i, key in zip(*run, strict=True))
    assert given == sorted(dataset.seeds)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_have_the_keys_of_their_global_positions(
    workers: int, cut: Callable[[int], None]
) -> None:
    cut(2)
    for rank in range(3):
        dataset = Filled(range(20))
        sampler = RankSampler(dataset, rank=rank, world_size=3, shuffle=True, seed=5)
        with DataLoader(dataset, 4, sampler=sampler, seed=5, num_workers=workers) as loader:
            order = [index for batch in loader for index in batch.tolist()]
        keys = asked(dataset)
        check_keys([keys[index] for index in order], order, 3, rank)


def test_runs_of_one_batch_are_filled_at_once_by_several_workers(
    cut: Callable[[int], None],
) -> None:
    """Both are in `fill_rows` at the same time; the second half is written first."""

    class Meets(Filled):
        def __init__(self, samples: Any) -> None:
            super().__init__(samples)
            self.meeting, self.second = threading.Barrier(2), threading.Event()

        def fill_rows(self, run: Run) -> Any:
            self.meeting.wait(DEADLINE_S)
            if run.indices[0] % 4 == 0:
                assert self.second.wait(DEADLINE_S)
            missing = super().fill_rows(run)
            if run.indices[0] % 4:
                self.second.set()
            return missing

    cut(2)
    samples = [SAMPLES["nested"](i) for i in range(4)]
    with DataLoader(Meets(samples), 4, num_workers=2) as loader:
        check_same(list(loader), [default_collate(samples)])


# ---- samples that are left to __getitem__ ----


class Raising(Filled):
    """Cannot do its `bad` samples, neither in a row nor alone."""

    def __init__(self, samples: Any, bad: Any) -> None:
        super().__init__(samples, bad)

    def __getitem__(self, index: Any) -> Any:
        if index in self.missing:
            raise ValueError(f"sample {index} is bad")
        return super().__getitem__(index)

    fill_rows = Filled.fill_rows


ON_ERROR: dict[str, dict[str, Any]] = {
    "raise": {},
    "skip": {"on_error": "skip"},
    "callable": {"on_error": lambda index, error: (torch.full((2,), -1.0), index)},
    "SKIP": {"on_error": lambda index, error: fastload.SKIP},
    "raises": {"on_error": lambda index, error: 1 // 0},
    "max_errors": {"on_error": "skip", "max_errors": 2},
}


@pytest.mark.parametrize("units", [2, 100])
@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("how", ON_ERROR)
def test_errors_and_on_error_are_those_of_samples_read_one_by_one(
    how: str, workers: int, units: int, cut: Callable[[int], None]
) -> None:
    cut(units)
    samples = [SAMPLES["tuple"](i) for i in range(15)]
    bad = {1, 3, 5, 8, 9, 10, 11}  # batch 2 has no other
    dataset = Raising(samples, bad)
    options: dict[str, Any] = {"num_workers": workers} | ON_ERROR[how]
    expected = outcomes(DataLoader(plain(dataset), 4, **options))
    found = outcomes(DataLoader(dataset, 4, **options))
    assert dataset.runs
    assert not set(dataset.reads) - bad
    if how == "max_errors" and workers:
        found, expected = found[-1:], expected[-1:]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if isinstance(other, tuple):
            assert one == other
        else:
            check_same(one, other)


@pytest.mark.parametrize("first", [1, 6])
def test_of_several_errors_the_first_in_order_is_raised(
    first: int, cut: Callable[[int], None]
) -> None:
    """Sample 1 and sample 6, in runs of two workers, whichever fails first."""

    class InTurn(Raising):
        def __init__(self) -> None:
            super().__init__(range(8), {1, 6})
            self.meeting, self.failed = threading.Barrier(2), threading.Event()

        def fill_rows(self, run: Run) -> Any:
            self.meeting.wait(DEADLINE_S)
            return super().fill_rows(run)

        def __getitem__(self, index: Any) -> Any:
            if index == first:
                self.failed.set()
            else:
                assert self.failed.wait(DEADLINE_S)
            return super().__getitem__(index)

    cut(4)
    with (
        DataLoader(InTurn(), 8, num_workers=2) as loader,
        pytest.raises(ValueError, match="sample 1 is bad"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_that_stays_is_raised_after_the_last_retry(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fastload.reading.failures, "RETRY_SECONDS", 0.001)

    class Flaky(Filled):
        failures = 2

        def __getitem__(self, index: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EIO, "flaky")
            return super().__getitem__(index)

        fill_rows = Filled.fill_rows

    loader = DataLoader(Flaky(range(8), {5}), 4, num_workers=workers, retries=1)
    first, second = outcomes(loader)
    assert first.tolist() == [0, 1, 2, 3]
    assert second[:2] == ("OSError", "[Errno 5] flaky")


class Special(torch.Tensor):
    """A subclass of Tensor, as torchvision's."""


ODD: dict[str, Any] = {
    "shape": {"x": torch.zeros(3), "y": 1},
    "dtype": {"x": torch.zeros(2, dtype=torch.float64), "y": 1},
    "int dtype": {"x": torch.zeros(2, dtype=torch.int64), "y": 1},
    "array": {"x": np.zeros(2, np.float32), "y": 1},
    "gradient": {"x": torch.zeros(2, requires_grad=True), "y": 1},
    "subclass": {"x": torch.zeros(2).as_subclass(Special), "y": 1},
    "sparse": {"x": torch.zeros(2).to_sparse(), "y": 1},
    "strided": {"x": torch.arange(4.0)[::2], "y": 1},
    "float": {"x": torch.zeros(2), "y": 1.5},
    "NumPy's float": {"x": torch.zeros(2), "y": np.float64(1.5)},
    "NumPy's int": {"x": torch.zeros(2), "y": np.int64(1)},
    "bool": {"x": torch.zeros(2), "y": True},
    "beyond 64 bits": {"x": torch.zeros(2), "y": 2**63},
    "least": {"x": torch.zeros(2), "y": -(2**63)},
    "order of keys": {"y": 1, "x": torch.zeros(2)},
    "more keys": {"x": torch.zeros(2), "y": 1, "z": 2},
    "fewer keys": {"x": torch.zeros(2)},
    "ordered dict": OrderedDict(x=torch.zeros(2), y=1),
    "tuple": (torch.zeros(2), 1),
    "None": None,
    "text": "text",
}


@pytest.mark.parametrize("where", ["getitem", "on_error"])
@pytest.mark.parametrize("kind", ODD)
def test_a_sample_unlike_the_empty_one_is_collated_as_by_torch(kind: str, where: str) -> None:
    """Its errors included; first and last in the batch."""
    ordinary = [{"x": torch.full((2,), float(i)), "y": i} for i in range(4)]

    class Replaces(Filled):
        def __getitem__(self, index: Any) -> Any:
            if index in self.missing and where == "on_error":
                raise ValueError("bad")
            return super().__getitem__(index)

        def empty_sample(self) -> Any:
            return ordinary[0]

        fill_rows = Filled.fill_rows

    def replaced(index: int, error: Exception) -> Any:
        return ODD[kind]

    for bad, workers in (({0}, 0), ({3}, 1), ({0, 1, 2, 3}, 0)):
        samples = [ODD[kind] if i in bad else sample for i, sample in enumerate(ordinary)]
        dataset = Replaces(samples, bad)
        expected = outcomes(DataLoader(plain(dataset), 4, on_error=replaced))
        found = outcomes(DataLoader(dataset, 4, on_error=replaced, num_workers=workers))
        assert dataset.runs
        if isinstance(expected[0], tuple):
            assert found == expected
        else:
            check_same(found, expected)


# ---- fill_rows that does what it should not ----


class Misbehaves(Filled):
    """Returns, or does, what `answer` does with the run and what is missing."""

    def __init__(self, samples: Any, answer: Callable[[Run], Any], missing: Any = ()) -> None:
        super().__init__(samples, missing)
        self.answer = answer

    def fill_rows(self, run: Run) -> Any:
        super().fill_rows(run)
        return self.answer(run)


def raises_after_garbage(run: Run) -> Any:
    run.rows[...] = -99
    raise KeyError("the key that is missing")


def raises_late(run: Run) -> Iterator[int]:
    yield 0
    run.rows[...] = -99
    raise KeyError("the key that is missing")


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("answer", [raises_after_garbage, raises_late])
def test_fill_rows_that_raises_is_named_once_and_the_batches_are_right(
    answer: Callable[[Run], Any], workers: int, cut: Callable[[int], None]
) -> None:
    cut(3)
    dataset = Misbehaves(range(20), answer)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with DataLoader(dataset, 5, num_workers=workers) as loader:
            for _ in range(2):
                batches = [batch.tolist() for batch in loader]
                assert batches == [list(range(k, k + 5)) for k in range(0, 20, 5)]
    assert [w.category for w in said] == [RuntimeWarning]
    for text in ("Misbehaves", "KeyError", "the key that is missing"):
        assert text in str(said[0].message)
    assert said[0].filename == __file__


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration()], ids=repr)
@pytest.mark.parametrize("workers", [0, 2])
def test_fill_rows_that_raises_what_is_no_exception(workers: int, error: BaseException) -> None:
    def fails(run: Run) -> Any:
        raise error

    with DataLoader(Misbehaves(range(8), fails), 4, num_workers=workers) as loader:
        if workers == 0 and not isinstance(error, StopIteration):  # as of a signal handler
            with pytest.raises(type(error)):
                next(iter(loader))
            return
        with pytest.warns(RuntimeWarning, match=type(error).__name__):
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


ANSWERS: dict[str, Callable[[Run], Any]] = {
    "list": lambda run: [0, 2],
    "set": lambda run: {0, 2},
    "small array": lambda run: np.array([0, 2], np.uint8),
    "generator": lambda run: (k for k in (0, 2)),
    "dict": lambda run: {0: "why", 2: "so"},
    "empty array": lambda run: np.flatnonzero(np.zeros(3)),
    "tensor": lambda run: torch.tensor([0, 2]),
}
WRONG_ANSWERS: dict[str, Callable[[Run], Any]] = {
    "None": lambda run: None,
    "int": lambda run: 0,
    "out of range": lambda run: [len(run)],
    "negative": lambda run: [-1],
    "float": lambda run: [0.0],
    "mask": lambda run: np.zeros(len(run), bool),
    "list of bools": lambda run: [False] * len(run),
    "text": lambda run: "0",
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [*ANSWERS, *WRONG_ANSWERS])
def test_positions_come_in_any_iterable_and_what_is_no_position_is_named(
    kind: str, workers: int, cut: Callable[[int], None]
) -> None:
    """What is no position is a mistake in `fill_rows`; the batches are right nevertheless."""
    cut(4)
    dataset = Misbehaves(range(8), (ANSWERS | WRONG_ANSWERS)[kind])
    named = pytest.warns(RuntimeWarning, match="Misbehaves.*expected positions in the run")
    with (
        named if kind in WRONG_ANSWERS else nullcontext(),
        DataLoader(dataset, 4, num_workers=workers) as loader,
    ):
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_position_that_is_returned_twice_is_read_once(
    workers: int, cut: Callable[[int], None]
) -> None:
    cut(4)
    calls: list[int] = []

    def replaced(index: int, error: Exception) -> int:
        calls.append(index)
        return -1

    class Twice(Raising):
        def fill_rows(self, run: Run) -> Any:
            return [*super().fill_rows(run)] * 2

    with DataLoader(Twice(range(4), {2}), 4, num_workers=workers, on_error=replaced) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, -1, 3]]
    assert calls == [2]


DRAWS: dict[str, Callable[[], Any]] = {
    "torch.rand": lambda: torch.rand(1),
    "torch.randperm": lambda: torch.randperm(3),
    "torch.normal": lambda: torch.normal(0.0, 1.0, (2,)),
    "in place": lambda: torch.empty(2).uniform_(),
    "rand_like": lambda: torch.rand_like(torch.empty(2)),
    "random.random": lambda: random.random(),
    "random.shuffle": lambda: random.shuffle([1, 2, 3]),
    "np.random.rand": lambda: np.random.rand(),
    "np.random.permutation": lambda: np.random.permutation(4),
    "sample_rng": lambda: sample_rng().random(),
    "sample_generator": lambda: torch.rand(1, generator=fastload.sample_generator()),
}


class Draws(Filled):
    """Draws for every sample: in `fill_rows`, where it should not, and in `__getitem__`."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(range(12))
        self.draw = draw

    def __getitem__(self, index: Any) -> Any:
        self.draw()
        return float(torch.rand(())) + np.random.rand() + random.random()

    def empty_sample(self) -> Any:
        return 0.0

    def fill_rows(self, run: Run) -> Any:
        for k in range(len(run)):
            self.draw()
            run.rows[k] = float(torch.rand(())) + np.random.rand() + random.random()
        return ()


@pytest.mark.parametrize("name", DRAWS)
def test_global_random_functions_raise_in_fill_rows(name: str, cut: Callable[[int], None]) -> None:
    """And so the batches are what the samples alone draw."""
    expected = []
    for index in range(12):
        with random_stream(seed=3, epoch=0, position=index, index=index):
            expected.append(Draws(DRAWS[name])[index])
    for workers, units in ((0, 100), (1, 1), (2, 4)):
        cut(units)
        loader = DataLoader(Draws(DRAWS[name]), 4, num_workers=workers, seed=3)
        with loader, pytest.warns(RuntimeWarning, match=r"fill_rows.*RuntimeError.*run\.keys"):
            batches = list(loader)
        assert torch.cat(batches).tolist() == expected


@pytest.mark.parametrize(
    ("draw", "options"),
    [
        (lambda: torch.nn.functional.dropout(torch.ones(4)), {"num_workers": 2}),
        (np.random.rand, {"num_workers": 1, "random_modules": ()}),
    ],
    ids=["no generator", "module not routed"],
)
def test_draws_that_cannot_be_refused_are_noticed(
    draw: Callable[[], Any], options: dict[str, Any], cut: Callable[[int], None]
) -> None:
    def draws(run: Run) -> Any:
        for _ in run.indices:
            draw()
        return ()

    cut(4)
    loader = DataLoader(Misbehaves(range(80), draws), 8, seed=1, **options)
    with loader, pytest.warns((UserWarning, RuntimeWarning), match="drew|seems to draw"):
        list(loader)


@pytest.mark.parametrize("sample", ["text", OrderedDict(a=1), np.float64(1), {"a": (1, "b")}])
def test_samples_that_cannot_be_rows_are_read_one_by_one(sample: Any) -> None:
    dataset = Filled([sample] * 4)
    with warnings.catch_warnings(record=True) as said, DataLoader(dataset, 2) as loader:
        warnings.simplefilter("always")
        check_same(list(loader), list(TorchDataLoader(plain(dataset), 2)))
    assert all("Filled is read sample by sample" in str(w.message) for w in said)
    assert len(said) <= 1
    assert len(dataset.reads) == 4
    assert not dataset.runs


# ---- where it is not used ----


class Base(Filled):
    """With all that a nearer class may override."""

    factor = 2
    hook: Any = None

    def __init__(self, length: int = 8) -> None:
        super().__init__(range(length))

    def __getitem__(self, index: Any) -> Any:
        number = index if self.hook is None else self.hook(index)
        return self.factor * self.number(number) + self.offset + self.by_class() + self.thousand

    def number(self, index: int) -> int:
        return index

    @property
    def offset(self) -> int:
        return 100

    @classmethod
    def by_class(cls) -> int:
        return 0

    @cached_property
    def thousand(self) -> int:
        return 1000  # from then on in the instance's dict

    def empty_sample(self) -> Any:
        return 0

    def fill_rows(self, run: Run) -> Any:
        self.runs.append((list(run.indices), []))
        numbers = [self.factor * index + 100 + self.thousand for index in run.indices]
        run.rows[:] = numbers
        return ()


def negative(self: Any, index: Any) -> Any:
    return -index


def all_negative(self: Any, indices: Any) -> Any:
    return [-index for index in indices]


def tens(self: Any, index: int) -> int:
    return 10 * index


def fill_negative(self: Any, run: Run) -> Any:
    self.runs.append((list(run.indices), []))
    run.rows[:] = [-index for index in run.indices]
    return ()


def child(*bases: type, **attributes: Any) -> Any:
    """Return an instance of a class derived from Base, or from `bases`, with other attributes."""
    return type("Child", bases or (Base,), {"fastload_per_worker": ()} | attributes)()


def patched(**attributes: Any) -> Any:
    dataset = Base()
    vars(dataset).update(attributes)
    return dataset


class Overrides:
    number = tens


class Filling:
    """The protocol as a mixin, beside a dataset that it knows."""

    empty_sample = Base.empty_sample
    fill_rows = fill_negative


class Negative(Dataset[Any]):
    def __init__(self) -> None:
        self.runs: list[Any] = []

    def __len__(self) -> int:
        return 8

    __getitem__ = negative


class OwnSubset(Subset[Any]):
    __getitem__, __getitems__ = negative, all_negative


class OwnConcat(ConcatDataset[Any]):
    __getitem__ = negative


class OwnTensors(TensorDataset):
    __getitem__ = negative


NOT_USED: dict[str, Callable[[], Any]] = {
    "__getitem__": lambda: child(__getitem__=negative),
    "helper": lambda: child(number=tens),
    "property": lambda: child(offset=property(lambda self: 7)),
    "class method": lambda: child(by_class=classmethod(lambda cls: 5)),
    "__getitems__": lambda: child(__getitems__=all_negative),
    "mixed": lambda: child(Overrides, Base),
    "mixin": lambda: child(Filling, Negative, __getitem__=tens),
    "no empty_sample": lambda: child(Negative, fill_rows=fill_negative),
    "empty_sample is None": lambda: child(empty_sample=lambda self: None, fill_rows=Base.fill_rows),
    "instance's helper": lambda: patched(number=lambda i: 10 * i),
    "method in place of None": lambda: child(hook=negative),
    "fill_rows is None": lambda: child(fill_rows=None),
    "subset of an own": lambda: Subset(child(number=tens), [3, 1, 2]),
    "subset of a patched": lambda: Subset(patched(number=abs), range(8)),
    "own Subset": lambda: OwnSubset(Base(), range(8)),
    "own ConcatDataset": lambda: OwnConcat([Base(), Base()]),
    "own TensorDataset": lambda: OwnTensors(torch.arange(8)),
    "part of a ConcatDataset": lambda: ConcatDataset([Base(), child(number=tens)]),
}
USED: dict[str, Callable[[], Any]] = {
    "itself": Base,
    "number overridden": lambda: child(factor=5),
    "more methods": lambda: child(describe=lambda self: "more", __len__=lambda self: 6),
    "filled anew": lambda: child(__getitem__=negative, fill_rows=fill_negative),
    "filled anew with __getitems__": lambda: child(
        __getitem__=negative, __getitems__=all_negative, fill_rows=fill_negative
    ),
    "instance's number": lambda: patched(factor=9),
    "mixin": lambda: child(Filling, Negative),
    "subset": lambda: Subset(Base(), [3, 1, 2]),
    "concatenated": lambda: ConcatDataset([Base(), child(factor=5)]),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", [*NOT_USED, *(f"used: {name}" for name in USED)])
def test_rows_are_filled_only_if_nothing_nearer_overrides_what_fill_rows_stands_for(
    name: str, workers: int
) -> None:
    used = name.startswith("used: ")
    dataset = USED[name[6:]]() if used else NOT_USED[name]()
    expected = list(TorchDataLoader(dataset, 3))
    with DataLoader(dataset, 3, num_workers=workers) as loader:
        check_same(list(loader), expected)
    assert bool(filled_runs(dataset)) == used


def filled_runs(dataset: Any) -> list[Any]:
    parts = {id(leaf): leaf for leaf in leaves_of(dataset)}
    return [run for part in parts.values() for run in getattr(part, "runs", ())]


def test_a_class_that_is_patched_after_its_first_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = child()
    with DataLoader(dataset, 8) as loader:
        list(loader)
    monkeypatch.setattr(type(dataset), "__getitem__", negative, raising=False)
    with DataLoader(dataset, 8) as loader:
        assert next(iter(loader)).tolist() == [0, -1, -2, -3, -4, -5, -6, -7]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_of_the_users_gets_samples(workers: int) -> None:
    dataset = Filled([SAMPLES["nested"](i) for i in range(8)])
    for options in (
        {"batch_size": 4, "collate_fn": list},
        {"batch_size": 4, "collate_fn": lambda samples: default_collate(samples)},
        {"batch_size": None},
    ):
        with DataLoader(dataset, num_workers=workers, **options) as loader:
            check_same(list(loader), list(TorchDataLoader(plain(dataset), **options)))
    assert not dataset.runs


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(1),
        lambda generator: float(torch.rand((), generator=generator)),
    ),
    "NumPy": (lambda: np.random.default_rng(1), lambda generator: generator.random()),
    "Python": (lambda: random.Random(1), lambda generator: generator.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_that_the_dataset_holds_stays_keyed(
    kind: str, cut: Callable[[int], None]
) -> None:
    make, draw = GENERATORS[kind]

    class Holds(Numbers):
        def __init__(self) -> None:
            super().__init__(12)
            self.held = {"deep": [make()]}

        def __getitem__(self, index: int) -> Any:
            return draw(self.held["deep"][0])

        def empty_sample(self) -> Any:
            return 0.0

        def fill_rows(self, run: Run) -> Any:
            run.rows[:] = [self[index] for index in run.indices]
            return ()

    seen = []
    for workers, units in ((0, 100), (1, 2), (2, 3), (8, 1)):
        cut(units)
        with DataLoader(Holds(), 4, num_workers=workers, seed=3, copy_dataset="state") as loader:
            seen.append(torch.cat(list(loader)).tolist())
    assert seen[1:] == seen[:1] * 3
    assert len(set(seen[0])) == 12


def test_a_generator_that_fill_rows_makes_for_itself_is_noticed_as_one_of_getitem(
    cut: Callable[[int], None],
) -> None:
    class Makes(Filled):
        fastload_per_worker = ("made",)
        made: Any = None

        def __getitem__(self, index: Any) -> Any:
            self.made = self.made or torch.Generator().manual_seed(1)
            return float(torch.rand((), generator=self.made))

        def fill_rows(self, run: Run) -> Any:
            run.rows[:] = [self[index] for index in run.indices]
            return ()

    said = []
    for empty_sample in (lambda: None, lambda: 0.0):
        cut(2)
        dataset = Makes([0.0] * 200)
        dataset.empty_sample = empty_sample  # type: ignore[method-assign]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with DataLoader(dataset, 4, num_workers=1, seed=3) as loader:
                list(loader)
        said.append({w.category for w in caught})
    assert said[1] == said[0]


# ---- datasets around datasets ----


def wrapped() -> dict[str, Any]:
    first, second = (
        Filled(shaped(i, 3) for i in range(8)),
        Filled(shaped(i, 3) for i in range(40, 45)),
    )
    torch.manual_seed(0)
    return {
        "subset": Subset(first, [5, 0, 3, 3, 7, 1, 2]),
        "subset of a range": Subset(first, range(7, 0, -1)),
        "subset by an array": Subset(first, np.array([5, 0, 3, 7])),  # type: ignore[arg-type]
        "subset by a tensor": Subset(first, torch.tensor([5, 0, 3, 7])),  # type: ignore[arg-type]
        "subset by negative": Subset(first, [-1, 0, -3]),
        "nested": Subset(Subset(Subset(first, range(1, 8)), [6, 0, 2, 5, 1]), [4, 3, 0, 1]),
        "split": random_split(first, [5, 3])[0],
        "concatenated": ConcatDataset([first, second]),
        "concatenated with an empty one": ConcatDataset([first, Subset(second, []), second]),
        "concatenated alone": ConcatDataset([first]),
        "concatenated subsets": ConcatDataset([Subset(first, [4, 1]), Subset(second, [2, 0, 1])]),
        "subset of concatenated": Subset(ConcatDataset([first, second]), [12, 0, 9, 3, 8, 7]),
        "deep": ConcatDataset(
            [ConcatDataset([first, second]), Subset(ConcatDataset([second]), [1])]
        ),
        "the same twice": ConcatDataset([first, first]),
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", wrapped())
def test_wrappers_of_torch_fill_what_they_wrap(
    name: str, workers: int, cut: Callable[[int], None]
) -> None:
    """With the keys of the loader's samples, whose indices are those that the sampler gave."""
    dataset = wrapped()[name]
    order, seeds = torch.randperm(len(dataset)).tolist(), []
    for position, index in enumerate(order):
        with random_stream(seed=5, epoch=0, position=position, index=index):
            seeds.append(torch.initial_seed())
    expected = list(TorchDataLoader(dataset, 4, sampler=order))
    for units in (1, 3, 100):
        cut(units)
        for leaf in leaves_of(dataset):
            leaf.reads.clear()
            leaf.runs.clear()
        with DataLoader(dataset, 4, num_workers=workers, sampler=order, seed=5) as loader:
            check_same(list(loader), expected)
        assert not any(leaf.reads for leaf in leaves_of(dataset))
        keys = [key & LOW_63 for _, run in filled_runs(dataset) for key in run]
        assert sorted(keys) == sorted(seeds)


def leaves_of(dataset: Any) -> list[Any]:
    if isinstance(dataset, Subset):
        return leaves_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return [leaf for part in dataset.datasets for leaf in leaves_of(part)]
    return [dataset]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["nested", "torch.bfloat16", "0-dimensional", "four dimensions"])
def test_parts_that_lie_apart_in_a_run(kind: str, workers: int) -> None:
    """Shuffled, the samples of a run come from several parts, and some of them are left to `__getitem__`."""
    first = Filled([SAMPLES[kind](i) for i in range(8)], {3})
    second = Filled([SAMPLES[kind](i) for i in range(20, 26)], {2, 5})
    dataset = ConcatDataset([first, second])
    torch.manual_seed(2)
    expected = list(TorchDataLoader(dataset, 7, shuffle=True))
    first.reads.clear()
    second.reads.clear()
    torch.manual_seed(2)
    options: dict[str, Any] = {"shuffle": True, "num_workers": workers}
    with DataLoader(dataset, 7, **options) as loader:
        check_same(list(loader), expected)
    assert sorted(first.reads) == [3]
    assert sorted(second.reads) == [2, 5]


PARTS: dict[str, Any] = {
    "without the protocol": lambda: plain(Filled(shaped(i, 3) for i in range(5))),
    "of another dtype": lambda: Filled(shaped(i, 3).double() for i in range(5)),
    "of another shape": lambda: Filled(shaped(i, 4) for i in range(5)),
    "of another type": lambda: Filled(shaped(i, 3).numpy() for i in range(5)),
    "of other containers": lambda: Filled((shaped(i, 3),) for i in range(5)),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_not_alike_are_read_as_by_torch(name: str, first: bool) -> None:
    parts = [Filled(shaped(i, 3) for i in range(6)), PARTS[name]()]
    dataset = ConcatDataset(parts[::-1] if first else parts)
    twin = ConcatDataset([plain(part) for part in dataset.datasets])  # type: ignore[arg-type]
    found = outcomes(DataLoader(dataset, 4, num_workers=2))
    expected = outcomes(DataLoader(twin, 4, num_workers=2))
    assert [type(f) for f in found] == [type(e) for e in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == other if isinstance(other, tuple) else same(one, other)


CONTAINERS: dict[str, Callable[[], Any]] = {
    "subset": lambda: Subset(Filled(range(8)), [5, 0, 3, 7]),
    "concatenated": lambda: ConcatDataset([Filled(range(8)), Filled(range(40, 45))]),
    "tensors": lambda: TensorDataset(torch.arange(30).view(10, 3)),
    "subset of tensors": lambda: Subset(TensorDataset(torch.arange(10)), [5, 0, 3, 7]),
    "concatenated tensors": lambda: ConcatDataset(
        [TensorDataset(torch.arange(4)), TensorDataset(torch.arange(40, 45))]
    ),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "indices",
    [
        [0, -1, 2],
        [-4, -2],
        [1, 99, 0],
        [0, -99],
        [torch.tensor(1), torch.tensor(-1)],
        [np.int64(1), np.int32(2), np.int64(-1)],
        [np.int64(1), np.int64(3)],
        [True, False],
        [1, True],
        [0, 2**63],
        ["a", 1],
        [1.0, 2],
        [None],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", CONTAINERS)
def test_indices_of_any_kind(name: str, indices: list[Any], workers: int) -> None:
    """Negative, out of range, NumPy's, tensors and nonsense: what torch makes of the sample, or its error."""
    dataset = CONTAINERS[name]()
    sampler = [[1, 0], indices, [2, 3]]
    expected = []
    for batch in sampler:
        try:
            expected.append(default_collate([dataset[index] for index in batch]))
        except Exception as error:
            expected.append((type(error).__name__, str(error)))
    found = outcomes(DataLoader(dataset, batch_sampler=sampler, num_workers=workers))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one[:2] == other if isinstance(other, tuple) else same(one, other)


# ---- TensorDataset ----


@pytest.fixture(params=[1e-3, -1.0], ids=["idle", "busy"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rows gathered as on idle cores, and as beside processes that keep the cores busy."""
    monkeypatch.setattr(rows, "_LATE_S", request.param)


@pytest.mark.usefixtures("cores")
def test_a_tensor_dataset_that_comes_to_need_a_gradient() -> None:
    tensor = torch.randn(6, 3)
    with DataLoader(TensorDataset(tensor), 3) as loader:
        list(loader)
        tensor.requires_grad_()
        assert all(batch.requires_grad for (batch,) in loader)


def test_a_tensor_that_is_changed_or_replaced_between_epochs_is_seen() -> None:
    dataset = TensorDataset(torch.arange(6))
    for workers in (0, 2):
        tensor = torch.arange(6)
        dataset.tensors = (tensor,)
        with DataLoader(dataset, 6, num_workers=workers) as loader:
            assert next(iter(loader))[0].tolist() == [0, 1, 2, 3, 4, 5]
            tensor.add_(10)
            assert [b[0].tolist() for b in loader] == [[10, 11, 12, 13, 14, 15]]
            tensor.set_(torch.arange(20, 26))  # type: ignore[call-overload]
            assert [b[0].tolist() for b in loader] == [[20, 21, 22, 23, 24, 25]]
            dataset.tensors = (torch.arange(30, 36),)
            assert [b[0].tolist() for b in loader] == [[30, 31, 32, 33, 34, 35]]


def test_the_tensors_of_a_dataset_stay_resizable() -> None:
    """Torch refuses to resize a tensor after `numpy()` was called on it, so the loader must not call that."""
    tensor = torch.arange(6)
    with DataLoader(TensorDataset(tensor), 6) as loader:
        list(loader)
    tensor.resize_(100)


def test_a_class_of_the_users_is_not_kept() -> None:
    """What its methods refer to, a memory map say, would be kept with it."""
    dataset = child()
    gone = weakref.ref(type(dataset))
    with DataLoader(dataset, 4, num_workers=1) as loader:
        list(loader)
    del dataset, loader
    gc.collect()
    assert gone() is None


# ---- images ----


# ---- memory ----


def test_memory_that_the_loop_lets_go_is_used_again() -> None:
    dataset = Filled([torch.full((20_000,), float(i)) for i in range(24)])
    addresses = set()
    with DataLoader(dataset, 4, num_workers=1) as loader:
        for _ in range(5):
            for batch in loader:
                addresses.add(batch.data_ptr())
                del batch
    assert len(addresses) <= 5 * 4, (
        "of 30 batches, an epoch has three in flight and one in the loop"
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_that_on_error_keeps_holds_no_memory_of_its_batch(
    workers: int, pools: list[SlotPool], cut: Callable[[int], None]
) -> None:
    cut(3)
    errors: list[BaseException] = []

    def replaced(index: int, error: Exception) -> Any:
        errors.append(error)
        return shaped(0, 10_000)

    dataset = Raising([shaped(i, 10_000) for i in range(12)], {1, 5})
    with DataLoader(dataset, 4, num_workers=workers, on_error=replaced) as loader:
        list(loader)
    del loader
    assert len(errors) == 2
    assert all(error.__traceback__ is not None for error in errors)
    gc.collect()
    assert [pool.lent for pool in pools] == [0] * len(pools)


# ---- stopping ----


class Gated(Filled):
    """From index 8 on, `fill_rows` waits until the gate is open; `waiting` counts the calls that came to it."""

    def __init__(self, length: int = 24) -> None:
        super().__init__(range(length))
        self.gate, self.waiting = threading.Event(), threading.Semaphore(0)

    def fill_rows(self, run: Run) -> Any:
        if run.indices[0] >= 8:
            self.waiting.release()
            assert self.gate.wait(DEADLINE_S)
        return super().fill_rows(run)


def test_close_during_fill_rows_waits_for_it_and_begins_no_other(
    cut: Callable[[int], None],
) -> None:
    cut(4)
    dataset = Gated()
    loader = DataLoader(dataset, 4, num_workers=2)
    iterator = iter(loader)
    assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    outcome: list[object] = []

    def loop() -> None:
        try:
            outcome.append(next(iterator))
        except BaseException as error:
            outcome.append(error)

    waiter = threading.Thread(target=loop)
    waiter.start()
    for _ in range(2):
        assert dataset.waiting.acquire(timeout=DEADLINE_S)
    state = loader.state_dict()
    closer = threading.Thread(target=loader.close)
    closer.start()
    waiter.join(DEADLINE_S)
    assert isinstance(outcome[0], LoaderClosedError)
    calls = len(dataset.runs)
    dataset.gate.set()
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert len(dataset.runs) <= calls + 2
    again = Filled(range(24))
    with DataLoader(again, 4, num_workers=2) as resumed:
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == [
            list(range(k, k + 4)) for k in range(8, 24, 4)
        ]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_abandoned_iterator_ends_its_threads(workers: int) -> None:
    dataset = Gated()
    loader = DataLoader(dataset, 4, num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    gone = weakref.ref(iterator)
    assert dataset.waiting.acquire(timeout=DEADLINE_S)
    del iterator
    gc.collect()
    assert gone() is None
    dataset.gate.set()
    loader.close()


@pytest.mark.usefixtures("cores")
def test_a_tensor_that_changes_in_place_is_read_as_it_is_now() -> None:
    tensor = torch.arange(36).view(6, 6)
    for workers in (0, 2):
        with DataLoader(TensorDataset(tensor), 3, num_workers=workers) as loader:
            list(loader)
            tensor.t_()  # other strides
            assert torch.equal(torch.cat([batch for (batch,) in loader]), tensor)
            tensor.set_(torch.arange(36, 72).view(6, 6))  # type: ignore[call-overload]
            assert torch.equal(torch.cat([batch for (batch,) in loader]), tensor)
    dataset = TensorDataset(tensor)
    dataset.tensors = [tensor]  # type: ignore[assignment]
    loader = DataLoader(dataset, 3)
    list(loader)
    batches = iter(loader)
    next(batches)
    dataset.tensors[0] = tensor + 1  # type: ignore[index]
    assert torch.equal(next(batches)[0], tensor[3:] + 1)


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.complex128])
def test_rows_of_every_dtype_are_gathered(dtype: torch.dtype) -> None:
    order = torch.randperm(50).tolist()
    tensor = torch.randint(2, (50, 3)).to(dtype)
    with DataLoader(TensorDataset(tensor), 10, sampler=order, num_workers=2) as loader:
        batches = torch.cat([batch for (batch,) in loader])
    assert batches.dtype is dtype
    assert torch.equal(batches, tensor[order])


@pytest.mark.usefixtures("cores")
def test_indices_out_of_range_are_torchs_beside_busy_processes_too() -> None:
    dataset = TensorDataset(torch.arange(6))
    loader = DataLoader(dataset, 2, sampler=[0, 1, 2, -1, 3, 6])
    batches = iter(loader)
    assert [next(batches)[0].tolist() for _ in range(2)] == [[0, 1], [2, 5]]
    with pytest.raises(IndexError):
        next(batches)


@pytest.mark.usefixtures("cores")
def test_a_tensor_without_memory_of_its_own_is_not_read_out_of_range() -> None:
    zeros = DataLoader(TensorDataset(torch._efficientzerotensor((40, 2))), 4)
    assert not torch.cat([batch for (batch,) in zeros]).any()
    tensor = torch.ones(40, 2)
    batches = iter(DataLoader(TensorDataset(tensor), 4))
    next(batches)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="storage"):
        next(batches)
