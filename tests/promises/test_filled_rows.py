"""Promises:
- A dataset that fills rows gives torch's batches, for any number of workers and any cut of a batch into runs.
- Each sample is asked for once, with the key that `random_stream` gives.
- A dataset fills rows only if its class declares it. Subclasses, wrappers and patched instances that override what
  rows stand for are read sample by sample.
- Rows of a TensorDataset are the same on busy cores, and come in time there: they are gathered on one core.

See `fastload.reading.rows`. What `fill_rows` must not do is in `test_filled_rows_broken.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data import DataLoader as TorchDataLoader

from fastload import DataLoader, RankSampler, sample_rng
from fastload.reading import rows
from fastload.rows import Run
from tests.contracts.filled_rows import (
    NOWHERE,
    FilledRows,
    Keeps,
    Source,
    check_outcomes,
    outcomes,
)
from tests.promises.equal import check_same

LOW_63 = (1 << 63) - 1


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
        self.sample = self.samples[0]
        self.missing = frozenset(missing)
        self.runs: list[Any] = []
        self.reads: list[Any] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: Any) -> Any:
        self.reads.append(index)
        return self.samples[index]

    def empty_sample(self) -> Any:
        return self.sample

    def fill_rows(self, run: Run) -> Any:
        self.runs.append(list(run.indices))
        for k, index in enumerate(run.indices):
            if index not in self.missing:
                write(run.rows, k, self.samples[index])
        return [k for k, index in enumerate(run.indices) if index in self.missing]


def shaped(i: int, *shape: int) -> torch.Tensor:
    return torch.arange(i, i + int(np.prod(shape)), dtype=torch.float32).view(shape)


class TestImagesInMemory(FilledRows):
    """Of the sizes that a slot holds, and of those that torch stacks."""

    @pytest.fixture(params=[(3, 4, 5), (3, 60, 50)], ids=str)
    def source(self, request: pytest.FixtureRequest) -> Source:
        images = [shaped(i, *request.param) for i in range(10)]
        samples = [{"image": x, "array": x.numpy(), "number": -i} for i, x in enumerate(images)]
        return lambda: Filled(samples, missing={NOWHERE, NOWHERE + 1})


class TestTensors(FilledRows):
    @pytest.fixture
    def source(self) -> Source:
        return lambda: TensorDataset(torch.arange(420.0).view(10, 42), torch.arange(10))


# ---- batches equal torch's ----

SAMPLES: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: shaped(i, 3),
    "large": lambda i: shaped(i, 100, 100),
    "array": lambda i: shaped(i, 2, 3).numpy(),
    "int": lambda i: i - 2**62,
    "named": lambda i: Pair(shaped(i, 2), -i),
    "dict": lambda i: {"z": shaped(i, 2), "a": i / 7, 3: i % 2 == 0},
    "nested": lambda i: (
        {"x": [shaped(i, 2), i], "y": (shaped(i, 1).numpy(), Pair(1.5 * i, i % 2 == 1))},
        [[i], {"deep": ({"er": shaped(i, 2, 2)},)}],
    ),
    "0-dimensional": lambda i: (torch.tensor(i), np.array(i, np.int16), torch.tensor(i % 2 == 0)),
    "no elements": lambda i: (torch.empty(0), np.empty((2, 0), np.int8), i),
    "four dimensions": lambda i: (shaped(i, 2, 3, 4, 5), shaped(i, 1, 2, 3, 4).numpy()),
}
DTYPES = (
    "bfloat16 float16 float64 bool int8 uint8 int16 int32 int64 uint16 uint32 uint64 "
    "complex32 complex64 complex128 float8_e4m3fn float8_e5m2"
)
for name in DTYPES.split():
    SAMPLES[f"torch.{name}"] = lambda i, name=name: (
        torch.tensor([i, 0, 1]).to(getattr(torch, name)),
        torch.tensor(i).to(getattr(torch, name)),
    )
for code in "?bBhHiIlLefdFD":
    SAMPLES[f"NumPy {code}"] = lambda i, code=code: (np.array([i, 0], code), np.array(i, code))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", SAMPLES)
def test_samples_of_any_containers_and_leaves(kind: str) -> None:
    """With whole runs, and with one sample in each batch left to `__getitem__`."""
    samples = [SAMPLES[kind](i) for i in range(10)]
    expected = list(TorchDataLoader(Filled(samples), 4))
    for workers, missing in ((0, ()), (2, (1, 4, 9))):
        dataset = Filled(samples, missing)
        with DataLoader(dataset, 4, num_workers=workers) as loader:
            check_same(list(loader), expected)
        assert sorted(dataset.reads) == sorted(missing)
        assert sorted(index for run in dataset.runs for index in run) == list(range(10))


# ---- keys ----


class SaysStream(Filled):
    """Leaves every sample to `__getitem__`, which notes what its stream draws."""

    def __getitem__(self, index: Any) -> Any:
        self.reads.append((repr(index), torch.initial_seed(), sample_rng().random()))
        return 0

    def fill_rows(self, run: Run) -> Any:
        assert run.keys.dtype == np.uint64
        for index, key in zip(run.indices, run.keys.tolist(), strict=True):
            drawn = np.random.Generator(np.random.Philox(key=key)).random()
            self.runs.append((repr(index), key & LOW_63, drawn))
        return range(len(run))


INDICES: dict[str, list[Any]] = {
    "int": [3, 0, -1, 2**62, -(2**63)],
    "beyond 64 bits": [2**63, 2**64 - 1, -1, 2**70, 0],
    "unsigned": [2**63, 2**64 - 1, 5],
    "NumPy": [np.int64(4), np.int32(-2), np.uint8(200), np.uint64(2**64 - 1)],
    "tensor": [torch.tensor(4), torch.tensor(-2)],
    "tuple": [(1, 2), (3, 4)],
    "ragged": [(1, 2), 3, "x"],
}


@pytest.mark.parametrize(("workers", "seed"), [(0, 3), (2, None)])
@pytest.mark.parametrize("kind", [*INDICES, "of a rank"])
def test_keys_are_those_that_the_samples_alone_would_have(
    kind: str, workers: int, seed: int | None, cut: Callable[[int], None]
) -> None:
    cut(2)
    dataset = SaysStream(range(12))
    ways: dict[str, Any] = {"batch_sampler": [INDICES.get(kind), [0]]}
    if kind == "of a rank":
        ways = {"sampler": RankSampler(dataset, rank=1, world_size=3, seed=5), "batch_size": 3}
    with DataLoader(dataset, num_workers=workers, seed=seed, **ways) as loader:
        for _ in range(2):
            list(loader)
    assert sorted(dataset.runs) == sorted(dataset.reads)
    assert len({key for _, key, _ in dataset.runs}) == len(dataset.runs)


# ---- whose `fill_rows` counts ----


class Base(Filled):
    factor = 2

    def __init__(self, length: int = 8) -> None:
        super().__init__(range(length))

    def __getitem__(self, index: Any) -> Any:
        return self.factor * self.number(index) + self.thousand

    def number(self, index: int) -> int:
        return index

    @cached_property
    def thousand(self) -> int:
        return 1000  # from then on in the instance's dict

    def fill_rows(self, run: Run) -> Any:
        self.runs.append(list(run.indices))
        run.rows[:] = [self.factor * index + self.thousand for index in run.indices]
        return ()


def negative(self: Any, index: Any) -> Any:
    return -index


def all_negative(self: Any, indices: Any) -> Any:
    return [-index for index in indices]


def fill_negative(self: Any, run: Run) -> Any:
    self.runs.append(list(run.indices))
    run.rows[:] = [-index for index in run.indices]
    return ()


def child(*bases: type, **attributes: Any) -> Any:
    """Return an instance of a class derived from Base, or from `bases`, with other attributes."""
    return type("Child", bases or (Base,), {"fastload_per_worker": ()} | attributes)()


def patched(**attributes: Any) -> Any:
    return patched_with(Base(), **attributes)


def patched_with(dataset: Any, **attributes: Any) -> Any:
    vars(dataset).update(attributes)
    return dataset


class Unfilled(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    __getitem__ = negative


class OwnSubset(Subset[Any]):
    __getitem__, __getitems__ = negative, all_negative


NOT_USED: dict[str, Callable[[], Any]] = {
    "inherited": child,
    "__getitem__": lambda: child(__getitem__=negative),
    "no empty_sample": lambda: child(Unfilled, fill_rows=fill_negative),
    "instance's method": lambda: patched(number=lambda i: 10 * i),
    "wrapper": lambda: Keeps(Base()),
    "subset": lambda: Subset(child(number=negative), [3, 1, 2]),
    "part of a ConcatDataset": lambda: ConcatDataset([Base(), child(number=negative)]),
    "tensors' own __getitems__": lambda: patched_with(
        TensorDataset(torch.arange(8)), __getitems__=lambda indices: [(torch.tensor(7),)] * 3
    ),
    "own Subset": lambda: OwnSubset(Base(), range(8)),
}
USED: dict[str, Callable[[], Any]] = {
    "itself": Base,
    "declared again": lambda: child(factor=5, fill_rows=Base.fill_rows),
    "subset": lambda: Subset(Base(), [3, 1, 2]),
    "concatenated": lambda: ConcatDataset([Base(), child(fill_rows=Base.fill_rows)]),
}


@pytest.mark.parametrize("name", [*NOT_USED, *(f"used: {name}" for name in USED)])
def test_rows_are_filled_only_if_the_class_itself_declares_it(name: str) -> None:
    used = name.startswith("used: ")
    dataset = USED[name[6:]]() if used else NOT_USED[name]()
    expected = list(TorchDataLoader(dataset, 3))
    with DataLoader(dataset, 3, num_workers=2) as loader:
        check_same(list(loader), expected)
    assert any(getattr(leaf, "runs", ()) for leaf in leaves_of(dataset)) == used


def leaves_of(dataset: Any) -> list[Any]:
    """Return the datasets that torch's own ones wrap, each once."""
    if isinstance(dataset, Subset):
        return leaves_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        found = [leaf for part in dataset.datasets for leaf in leaves_of(part)]
        return [*{id(leaf): leaf for leaf in found}.values()]
    return [dataset]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_of_the_users_gets_samples(workers: int) -> None:
    dataset = Filled([SAMPLES["nested"](i) for i in range(8)])
    ways: tuple[dict[str, Any], ...] = (
        {"batch_size": 4, "collate_fn": lambda samples: default_collate(samples)},
        {"batch_size": None},
    )
    for options in ways:
        with DataLoader(dataset, num_workers=workers, **options) as loader:
            check_same(list(loader), list(TorchDataLoader(dataset, **options)))
    assert not dataset.runs


class Holds(Filled):
    fastload_per_worker = ("held",)
    held: Any = None


@pytest.mark.parametrize(("workers", "seed"), [(0, 3), (2, None)])
def test_samples_whose_dataset_holds_a_generator_are_read_one_by_one(
    workers: int, seed: int | None
) -> None:
    """Its draws are keyed for each sample."""
    dataset = Holds(range(8))
    dataset.held = {"deep": [torch.Generator()]}
    options: Any = {"copy_dataset": "state"}  # if workers share it, its generators are not keyed
    with DataLoader(dataset, 4, num_workers=workers, seed=seed, **options) as loader:
        assert torch.cat(list(loader)).tolist() == sorted(dataset.reads) == [*range(8)]


# ---- Subset and ConcatDataset ----


def wrapped() -> dict[str, Any]:
    """Some samples are left to `__getitem__`, and shuffled ones of a run come from several parts."""
    first = Filled([SAMPLES["nested"](i) for i in range(8)], {3})
    second = Filled([SAMPLES["nested"](i) for i in range(40, 45)], {0, 2})
    both = ConcatDataset([first, second])
    return {
        "subset by an array": Subset(first, np.array([5, 0, 3, 7])),  # type: ignore[arg-type]
        "subset by a tensor": Subset(first, torch.tensor([5, 0, 4, 7])),  # type: ignore[arg-type]
        "subset by negative": Subset(first, [-1, 0, -3]),
        "nested": Subset(Subset(Subset(first, range(1, 8)), [6, 0, 2, 5, 1]), [4, 3, 0, 1]),
        "concatenated with an empty one": ConcatDataset([first, Subset(second, []), second]),
        "subset of concatenated": Subset(both, [12, 0, 9, 3, 8, 7]),
        "deep": ConcatDataset([both, Subset(ConcatDataset([second]), [1])]),
        "the same twice": ConcatDataset([first, first]),
    }


@pytest.mark.parametrize("name", wrapped())
def test_wrappers_of_torch_fill_what_they_wrap(name: str, cut: Callable[[int], None]) -> None:
    dataset = wrapped()[name]
    leaves, order = leaves_of(dataset), torch.randperm(len(dataset)).tolist()
    expected = list(TorchDataLoader(dataset, 4, sampler=order))
    reads = [sorted(leaf.missing.intersection(leaf.reads)) for leaf in leaves]
    for workers, units in ((2, 1), (0, 3), (2, 100)):
        cut(units)
        for leaf in leaves:
            leaf.reads.clear()
            leaf.runs.clear()
        with DataLoader(dataset, 4, num_workers=workers, sampler=order) as loader:
            check_same(list(loader), expected)
        assert [sorted({*leaf.reads}) for leaf in leaves] == reads
        assert sum(len(run) for leaf in leaves for run in leaf.runs) == len(order)


PARTS: dict[str, Callable[[], Any]] = {
    "without the protocol": lambda: Keeps(Filled(shaped(i, 3) for i in range(5))),
    "of another shape": lambda: Filled(shaped(i, 4) for i in range(5)),
    "of other containers": lambda: Filled((shaped(i, 3),) for i in range(5)),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_not_alike_are_read_as_by_torch(name: str) -> None:
    parts = [Filled(shaped(i, 3) for i in range(6)), PARTS[name]()]
    for dataset in (ConcatDataset(parts), ConcatDataset(parts[::-1])):
        twin = ConcatDataset([Keeps(part) for part in dataset.datasets])
        found = outcomes(DataLoader(dataset, 4, num_workers=2))
        check_outcomes(found, outcomes(DataLoader(twin, 4, num_workers=2)))


# ---- any indices ----


@pytest.fixture(params=[1e-3, -1.0], ids=["idle", "busy"])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have rows of tensors gathered as on idle cores, and as beside processes that keep the cores busy."""
    monkeypatch.setattr(rows, "_LATE_S", request.param)


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64]
DTYPES += [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_are_gathered_from_several_datasets(dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 100, (2, 40, 3)).to(dtype)
    dataset = ConcatDataset([TensorDataset(part) for part in numbers])
    order = torch.randperm(len(dataset)).tolist()
    expected = list(TorchDataLoader(dataset, 16, sampler=order))
    for workers in (0, 2):
        with DataLoader(dataset, 16, sampler=order, num_workers=workers) as loader:
            check_same(list(loader), expected)


CONTAINERS: dict[str, Callable[[], Any]] = {
    "subset": lambda: Subset(Filled(range(8)), [5, 0, 3, 7]),
    "concatenated": lambda: ConcatDataset([Filled(range(8)), Filled(range(40, 45))]),
    "tensors": lambda: TensorDataset(torch.arange(30).view(10, 3)),
    "subset of tensors": lambda: Subset(TensorDataset(torch.arange(10)), [5, 0, 3, 7]),
    "concatenated tensors": lambda: ConcatDataset(
        [TensorDataset(torch.arange(4)), TensorDataset(torch.arange(40, 45))]
    ),
}


ANY_INDICES: list[list[Any]] = [
    [],
    [1, 2],
    [0, -1, 2],
    [-4, -2],
    [1, 99, 0],
    [0, -99],
    [torch.tensor(1), torch.tensor(-1)],
    [np.int64(1), np.int32(2), np.int64(-1)],
    [True, False],
    [1, True],
    [0, 2**63],
    ["a", 1],
    [1.0, 2],
    [None],
]


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("name", CONTAINERS)
def test_indices_of_any_kind(name: str) -> None:
    """None, negative, out of range, NumPy's, tensors and nonsense: what torch makes of the sample, or its error."""
    sampler = [batch for indices in ANY_INDICES for batch in ([1, 0], indices, [2, 3])]
    sampler[4] = (1, 2)  # type: ignore[call-overload]
    expected: list[Any] = []
    for batch in sampler:
        try:
            expected.append(default_collate([CONTAINERS[name]()[index] for index in batch]))
        except Exception as error:
            expected.append((type(error).__name__, str(error)))
    for workers in (0, 2):
        loader = DataLoader(CONTAINERS[name](), batch_sampler=sampler, num_workers=workers)
        found = outcomes(loader)
        check_outcomes([one[:2] if isinstance(one, tuple) else one for one in found], expected)


# ---- TensorDataset ----


@pytest.mark.usefixtures("cores")
def test_numbers_that_do_not_lie_as_they_read_are_gathered_as_they_read() -> None:
    gatherer, places, numbers = rows.Gatherer(), np.array([2, 0]), torch.randn(6, 3)
    conjugate = torch.randn(6, 3, dtype=torch.complex64).conj()
    for tensor in (numbers, numbers[::2], torch._neg_view(numbers), conjugate):
        out = torch.empty(2, 3, dtype=tensor.dtype)
        gatherer.gather(tensor, places, out)
        assert torch.equal(out, tensor[[2, 0]])
    with pytest.raises(RuntimeError, match="requires grad"):  # the caller reads sample by sample
        gatherer.gather(numbers.requires_grad_(), places, torch.empty(2, 3))


CHANGES: dict[str, Callable[[TensorDataset, torch.Tensor], Any]] = {
    "values": lambda dataset, tensor: tensor.add_(10),
    "strides": lambda dataset, tensor: tensor.t_(),
    "memory": lambda dataset, tensor: tensor.set_(torch.ones(6, 6)),  # type: ignore[call-overload]
    "gradient": lambda dataset, tensor: tensor.requires_grad_(),
    "tensors": lambda dataset, tensor: setattr(dataset, "tensors", (tensor + 1,)),
    "list": lambda dataset, tensor: setattr(dataset, "tensors", [tensor + 2]),
    "size": lambda dataset, tensor: tensor.resize_(100, 6),  # which torch refuses after `numpy()`
}


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_changes_between_epochs_is_read_as_it_is_now(
    change: str, workers: int
) -> None:
    tensor = torch.arange(36.0).view(6, 6)
    dataset = TensorDataset(tensor)
    with DataLoader(dataset, 3, sampler=range(6), num_workers=workers) as loader:
        list(loader)
        CHANGES[change](dataset, tensor)
        found = torch.cat([batch for (batch,) in loader])
    assert found.requires_grad == (change == "gradient")
    assert torch.equal(found, dataset.tensors[0][:6])


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
