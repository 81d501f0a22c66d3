"""Promises:
- A batch equals that of torch's `default_collate` in type, dtype, shape, strides, nesting and every bit of the
  values.
- If `default_collate` raises, the loader raises the same exception with the same message.
- A function that the user registered with torch's collate is called as by torch.
- Batches are never in shared memory. `check_same` asks each tensor.

The tests compare with and without workers, small rows and large rows (which are copied another way), and functions
that a user registered with torch's collate.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from fastload import DataLoader
from tests.promises.equal import check_same

# torch warns of odd samples once per process: of two that it warns of, only the first would fail.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

WORKERS = [0, 2]
DEADLINE_S = 30.0  # only a deadlock waits that long


class Raised(NamedTuple):
    kind: type[BaseException]
    text: str


def outcome(function: Callable[[], Any]) -> Any:
    """Return what a call returns, or type and text of what it raises."""
    try:
        return function()
    except Exception as error:
        return Raised(type(error), str(error))


def loaded(dataset: Any, batch_size: int | None, workers: int, **options: Any) -> list[Any]:
    """Return the outcome of every batch of an epoch."""
    with DataLoader(dataset, batch_size, num_workers=workers, **options) as loader:
        iterator = iter(loader)
        outcomes = [outcome(lambda: next(iterator)) for _ in range(len(loader))]
        assert next(iterator, None) is None
    return outcomes


def check_parity(samples: Any, batch_size: int, *kinds: int, **options: Any) -> None:
    """Compare every batch, the short last one included, with that of torch's collate, for each number of workers."""
    starts = range(0, len(samples), batch_size)
    batches = [[samples[k] for k in range(len(samples))[i : i + batch_size]] for i in starts]
    expected = [outcome(lambda batch=batch: default_collate(batch)) for batch in batches]
    for workers in kinds or WORKERS:
        got = loaded(samples, batch_size, workers, **options)
        check_same(got, expected, f"{workers} workers")


def check_table(
    subtests: pytest.Subtests,
    table: Mapping[str, Callable[[int], Any]],
    length: int,
    batch_size: int,
    turn: int,
) -> None:
    """Compare the batches of each row of a table with those of torch's collate.

    Each row has a loader of its own, as one loader for all would hide how it writes their batches. Every second row is
    read by workers, in the next turn the others.
    """
    for place, (name, make) in enumerate(table.items(), turn):
        with subtests.test(name):
            samples = [make(number) for number in range(length)]
            check_parity(samples, batch_size, WORKERS[place % 2])


# Rows, small and large: each is a function of a sample's number and of the shape.

SHAPES = {"small": (2, 3, 4), "large": (2, 128, 128)}
"""large: 32 KiB even as bytes, and no more numbers than one thread of torch works on alone."""
PATTERN = (
    torch.arange(2**21) % 97
)  # cut for each row, as computing them costs more than loading them


class Tagged(torch.Tensor):
    """A tensor of a user's own type."""


Row = Callable[[int, tuple[int, ...]], Any]


def tensor(number: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values of which no two samples have the same."""
    count = int(np.prod(shape, dtype=int))
    whole = PATTERN[number * 7 % 97 :][:count]
    return (whole % 2 if dtype is torch.bool else whole).reshape(shape).to(dtype, copy=True)


def of_dtype(dtype: torch.dtype) -> Row:
    return lambda number, shape: tensor(number, shape, dtype)


def ndarray(number: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return tensor(number, shape, torch.int64).numpy().astype(dtype)


def of_numpy_dtype(dtype: Any) -> Row:
    return lambda number, shape: ndarray(number, shape, dtype)


def with_specials(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    row = tensor(number, shape)
    row.view(-1)[:4] = torch.tensor([float("nan"), -0.0, float("inf"), float("-inf")])
    return row


def on_turns(*rows: Row) -> Row:
    """Return a row that is now of one kind, now of another."""
    return lambda number, shape: rows[number % len(rows)](number, shape)


def complexes(number: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.complex(tensor(number, shape), tensor(number + 1, shape))


TENSOR_DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]

ROWS: dict[str, Row] = {
    **{str(dtype): of_dtype(dtype) for dtype in TENSOR_DTYPES},
    "special values": with_specials,
    "transposed": lambda n, shape: tensor(n, shape[::-1]).permute(2, 1, 0),
    "HWC seen as CHW": lambda n, shape: tensor(n, (*shape[1:], shape[0])).permute(2, 0, 1),
    "channels last": lambda n, shape: tensor(n, (2, *shape)).contiguous(
        memory_format=torch.channels_last
    ),
    "now contiguous, now transposed": on_turns(
        tensor, lambda n, shape: tensor(n, shape[::-1]).permute(2, 1, 0)
    ),
    "now channels last, now not": on_turns(
        lambda n, shape: tensor(n, (2, *shape)),
        lambda n, shape: tensor(n, (2, *shape)).to(memory_format=torch.channels_last),
    ),
    "conjugate": lambda n, shape: complexes(n, shape).conj(),
    "wanting a gradient": lambda n, shape: tensor(n, shape).requires_grad_(),
    "of a subclass": lambda n, shape: tensor(n, shape).as_subclass(Tagged),
    "on the meta device": lambda n, shape: torch.empty(shape, device="meta"),
    "float32, then float64": on_turns(of_dtype(torch.float32), of_dtype(torch.float64)),
    "sparse": lambda n, shape: tensor(n, shape).to_sparse(),
    "nested": lambda n, shape: torch.nested.nested_tensor([tensor(n, shape), tensor(n, shape)]),
    "ragged": lambda n, shape: tensor(n, (*shape[:-1], shape[-1] + n % 2)),
    "same size, other shape": on_turns(tensor, lambda n, shape: tensor(n, shape[::-1])),
    "another shape in each batch": lambda n, shape: tensor(n, (*shape[:-1], shape[-1] + n // 3)),
    "another dtype in each batch": lambda n, shape: tensor(
        n, shape, [torch.float32, torch.int64, torch.uint8][n // 3]
    ),
    "another nesting in each batch": lambda n, shape: [
        tensor(n, shape),
        (tensor(n, shape), n),
        {"row": tensor(n, shape)},
    ][n // 3],
    **{
        f"array of {np.dtype(dtype)}": of_numpy_dtype(dtype)
        for dtype in (
            *(np.bool_, np.int8, np.int16, np.int32, np.int64),
            *(np.uint8, np.uint16, np.uint32, np.uint64),
            *(np.float16, np.float32, np.float64, np.longdouble),
            *(np.complex64, np.complex128, np.clongdouble),
            *(">f4", ">i8", "<i2", "datetime64[s]", "timedelta64[s]"),
            *("S3", "U3", "O"),
        )
    },
    "array in Fortran's order": lambda n, shape: np.asfortranarray(ndarray(n, shape)),
    "array, backwards": lambda n, shape: ndarray(n, shape)[..., ::-1],
    "array, now masked": on_turns(
        ndarray, lambda n, shape: np.ma.masked_equal(ndarray(n, shape), 3)
    ),
    "array, unaligned": lambda n, shape: np.frombuffer(
        b"\0" + ndarray(n, shape).tobytes(), np.float32, offset=1
    ),
    "array, then tensor": on_turns(ndarray, tensor),
    "tensor, then array": on_turns(tensor, ndarray),
    "image and label": lambda n, shape: (tensor(n, shape, torch.uint8), n),
    "row as dict member": lambda n, shape: {"x": ndarray(n, shape), "name": f"sample {n}"},
    "two rows": lambda n, shape: [tensor(n, shape), (ndarray(n, shape), {"z": tensor(-n, shape)})],
}


@pytest.mark.parametrize("size", SHAPES)
def test_rows(size: str, subtests: pytest.Subtests) -> None:
    shape = SHAPES[size]
    table = {name: functools.partial(turned, row, shape) for name, row in ROWS.items()}
    check_table(subtests, table, 7, 3, [*SHAPES].index(size))


def turned(row: Row, shape: tuple[int, ...], number: int) -> Any:
    return row(number, shape)


EDGE_SHAPES = [(), (0,), (0, 3), (3, 0), (1,), (1, 1, 1), (0, 200_000), (70_000,), (1, 70_000)]


def test_shapes(subtests: pytest.Subtests) -> None:
    table: dict[str, Sample] = {
        f"{make.__name__} {shape}": functools.partial(turned, make, shape)
        for make in (tensor, ndarray)
        for shape in EDGE_SHAPES
    }
    members = {f"{name}, member": member_and_number(make) for name, make in table.items()}
    check_table(subtests, table | members, 5, 2, 0)


def member_and_number(make: Sample) -> Sample:
    return lambda number: {"a": make(number), "b": number}


# Samples of other kinds: each a function of a sample's number.


class Point(NamedTuple):
    x: Any
    y: Any


class Labelled(dict[str, Any]):
    """A dict with an attribute, which torch's collate takes from the first sample."""

    label = ""


def labelled(number: int) -> Labelled:
    sample = Labelled(x=number)
    sample.label = f"label {number}"
    return sample


def turns(*samples: Any) -> Callable[[int], Any]:
    return lambda number: samples[number % len(samples)]


Sample = Callable[[int], Any]

NUMBERS: dict[str, Sample] = {
    "int": lambda n: n,
    "largest int64": lambda n: 2**63 - 1 - n,
    "int, then one too big": lambda n: n if n % 3 < 2 else 2**64,
    "float": lambda n: n / 3,
    "special floats": turns(float("nan"), -0.0, float("inf"), 1e-320, 1e308),
    "bool": lambda n: n % 2 == 0,
    "complex": lambda n: complex(n, 1),
    "int, then float": lambda n: [n, n + 0.5][n % 2],
    "float, then int": lambda n: [n + 0.5, n][n % 2],
    "bool, then int": lambda n: [True, n][n % 2],
    "int, then text": lambda n: [n, "text"][n % 2],
    "int, then tensor": lambda n: [n, torch.tensor(n)][n % 2],
    "float, then NumPy's": lambda n: [n + 0.5, np.float32(n)][n % 2],
    "NumPy's float32, then float64": lambda n: [np.float32(n), np.float64(n)][n % 2],
    **{
        f"NumPy's {kind.__name__}": kind
        for kind in (
            *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16),
            *(np.uint32, np.uint64, np.float16, np.float32, np.float64, np.longdouble),
            *(np.complex64, np.complex128, np.str_),
        )
    },
}

OTHERS: dict[str, Sample] = {
    "text": lambda n: f"sample {n}",
    "bytes": lambda n: f"sample {n}".encode(),
    "text, then bytes": turns("text", b"bytes"),
    "text, then None": turns("text", None),
    "None": lambda n: None,
}

CONTAINERS: dict[str, Sample] = {
    "list": lambda n: [n, n + 0.5, f"{n}"],
    "empty list": lambda n: [],
    "tuple": lambda n: (n, n + 0.5, f"{n}"),
    "result of torch.max": lambda n: torch.max(tensor(n, (3, 4)), dim=0),
    "ragged list": lambda n: list(range(n % 2 + 1)),
    "list, then tuple": turns([1, 2], (3, 4)),
    "list, then int": turns([1, 2], 3),
    "member None": lambda n: (n, None),
    "member None now and then": lambda n: (n, None if n % 2 else n),
    "named tuple": lambda n: Point(n, f"{n}"),
    "named tuple, then tuple": turns(Point(1, 2), (3, 4)),
    "dict": lambda n: {"x": n, "y": tensor(n, (2,)), "z": f"{n}"},
    "empty dict": lambda n: {},
    "keys in another order": lambda n: {"x": n, "y": -n} if n % 2 else {"y": -n, "x": n},
    "keys too many": lambda n: {"x": n} if n % 2 == 0 else {"x": n, "y": 1},
    "keys too few": lambda n: {"x": n, "y": 1} if n % 2 == 0 else {"x": n},
    "dict, then OrderedDict": turns({"x": 1}, OrderedDict(x=2)),
    "dict of a subclass": labelled,
    "OrderedDict": lambda n: OrderedDict(b=n, a=-n),
    "defaultdict": lambda n: defaultdict(list, x=n),
    "UserDict": lambda n: UserDict(x=n, y=f"{n}"),
    "deep": lambda n: {"a": [(n, {"b": Point([n / 2], {"c": (tensor(n, (2, 3)), f"{n}")})})]},
    "deep, with an error": lambda n: {"a": [{"b": (n, None)}], "c": n},
}

ZOO = {**NUMBERS, **OTHERS, **CONTAINERS}


def test_samples(subtests: pytest.Subtests) -> None:
    check_table(subtests, ZOO, 5, 2, 0)


def as_member(make: Sample) -> Sample:
    return lambda number: {"large": tensor(number, (20_000,)), "member": (make(number), number)}


def test_samples_as_members(subtests: pytest.Subtests) -> None:
    check_table(subtests, {name: as_member(make) for name, make in ZOO.items()}, 5, 2, 1)


def small(row: Row) -> Sample:
    return functools.partial(turned, row, SHAPES["small"])


def test_the_first_in_order_decides_not_the_first_to_arrive(subtests: pytest.Subtests) -> None:
    large = {f"large {n}": functools.partial(turned, r, SHAPES["large"]) for n, r in ROWS.items()}
    for name, make in (ZOO | {name: small(row) for name, row in ROWS.items()} | large).items():
        if "then" in name or "now" in name or "keys" in name:
            with subtests.test(name):
                check_late_first([make(number) for number in range(3)])


class LateFirst(Dataset[Any]):
    """Sample 0 comes when one worker has read sample 1, handed it over, and begun sample 2."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.last_begun = threading.Event()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == 2:
            self.last_begun.set()
        if index == 0:
            assert self.last_begun.wait(DEADLINE_S)
        return self.samples[index]


def check_late_first(samples: list[Any]) -> None:
    (got,) = loaded(LateFirst(samples), 3, 2)
    check_same(got, outcome(lambda: default_collate(samples)))


def test_without_batches_samples_are_converted(subtests: pytest.Subtests) -> None:
    """A tensor stays as it is, though each worker may have its own copy; an array becomes a tensor."""
    table = ZOO | {name: small(row) for name, row in ROWS.items()}
    for place, (name, make) in enumerate(table.items()):
        with subtests.test(name):
            samples = [make(number) for number in range(4)]
            workers = WORKERS[place % 2]
            batches = loaded(samples, None, workers, worker_method="thread")
            for got, sample in zip(batches, samples, strict=True):
                if isinstance(sample, torch.Tensor) and not workers:
                    assert got is sample
                else:
                    check_same(got, outcome(lambda sample=sample: default_convert(sample)))


# Nothing is shared with the samples.


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("size", SHAPES)
def test_writing_to_a_batch_changes_no_sample(size: str, workers: int) -> None:
    shape = SHAPES[size]
    samples = [
        {"x": tensor(n, shape), "y": [ndarray(n, shape), n], "z": {"list": [n, f"{n}"]}}
        for n in range(5)
    ]
    reference = default_collate(samples[:2])
    loader = DataLoader(samples, 2, num_workers=workers)
    for _ in range(2):
        batches = list(loader)
        check_same(batches[0], reference)
        for batch in batches:
            batch["x"].zero_()
            batch["y"][0].zero_()
            batch["y"].clear()
            batch["z"]["list"][0].zero_()
            batch["z"]["list"] = None
            batch["new"] = 1


# Types that a user registered with torch's collate.


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class BigBox(Box):
    pass


def registered(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return ["registered", len(batch), [getattr(sample, "value", sample) for sample in batch]]


def registered_and_broken(batch: Any, *, collate_fn_map: Any = None) -> Any:
    raise OSError("out of a registered function")


REGISTERED: dict[str, tuple[Any, Sample]] = {
    "a class": (Box, Box),
    "its subclass": (Box, BigBox),
    "a member": (Box, lambda n: {"large": tensor(n, (20_000,)), "box": (Box(n), n)}),
    "tensors": (torch.Tensor, lambda n: tensor(n, (20_000,))),
    "arrays": (np.ndarray, lambda n: ndarray(n, (20_000,))),
    "ints": (int, lambda n: (n, n + 0.5)),
    "dicts": (dict, lambda n: {"x": n}),
    "a dict subclass": (Labelled, labelled),
    "named tuples": (Point, lambda n: {"p": Point(n, n)}),
}


@pytest.mark.parametrize(
    ("function", "workers"), [(registered, 0), (registered, 2), (registered_and_broken, 2)]
)
def test_registered_types(
    function: Callable[..., Any],
    workers: int,
    subtests: pytest.Subtests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, (kind, sample) in REGISTERED.items():
        with subtests.test(name), monkeypatch.context() as patch:
            patch.setitem(default_collate_fn_map, kind, function)
            check_parity([sample(number) for number in range(5)], 2, workers)


def test_each_error_of_a_registered_function_reaches_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def every_second(batch: Any, *, collate_fn_map: Any = None) -> Any:
        calls.append(len(batch))
        return "collated" if len(calls) % 2 else registered_and_broken(batch)

    monkeypatch.setitem(default_collate_fn_map, Box, every_second)
    got = loaded([(n, Box(n)) for n in range(6)], 1, 0)
    assert [isinstance(each, Raised) for each in got] == [False, True] * 3


@pytest.mark.parametrize("workers", WORKERS)
def test_a_type_registered_between_epochs(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [tensor(number, (20_000,)) for number in range(4)]
    loader = DataLoader(samples, 4, num_workers=workers)
    (batch,) = loader
    check_same(batch, torch.stack(samples))
    with monkeypatch.context() as patch:
        patch.setitem(default_collate_fn_map, torch.Tensor, registered)
        (batch,) = loader
        check_same(batch, ["registered", 4, samples])
    (batch,) = loader
    check_same(batch, torch.stack(samples))


# A TensorDataset is gathered whole, other datasets of torch's give a batch in one call.

TABLES: dict[str, Row] = {
    **{str(dtype): of_dtype(dtype) for dtype in TENSOR_DTYPES},
    "transposed": lambda n, shape: tensor(n, shape[::-1]).permute(*range(len(shape))[::-1]),
    "HWC seen as CHW": lambda n, shape: tensor(n, (shape[0], *shape[2:], shape[1])).permute(
        0, 3, 1, 2
    ),
    "channels last": lambda n, shape: tensor(n, shape).to(memory_format=torch.channels_last),
    "channels last samples": lambda n, shape: tensor(
        n, (shape[0], 2, *shape[2:], shape[1])
    ).permute(0, 1, 4, 2, 3),
    "unaligned": lambda n, shape: torch.frombuffer(
        bytearray(1 + int(np.prod(shape))), dtype=torch.uint8
    )[1:].view(shape),
    "empty rows": lambda n, shape: tensor(n, (shape[0], 0, 3)),
    "conjugate": lambda n, shape: complexes(n, shape).conj(),
    "wanting a gradient": lambda n, shape: tensor(n, shape).requires_grad_(),
    "of a subclass": lambda n, shape: tensor(n, shape).as_subclass(Tagged),
    "on the meta device": lambda n, shape: torch.empty(shape, device="meta"),
    "sparse": lambda n, shape: tensor(n, shape).to_sparse(),
}
TABLE_SHAPES = {"small": (7, 3, 4, 2), "large": (7, 3, 200, 200)}  # a batch of over 1 MiB


class Doubled(TensorDataset):
    """A user's own, whose samples are not what its tensors hold."""

    def __getitem__(self, index: int) -> Any:
        return {"x": super().__getitem__(index)[0] * 2}


WRAPPED: dict[str, Callable[[torch.Tensor], Dataset[Any]]] = {
    "TensorDataset": lambda x: TensorDataset(x, torch.arange(len(x))),
    "of one tensor": TensorDataset,
    "of a subclass": Doubled,
    "Subset": lambda x: Subset(TensorDataset(x), [6, 5, 4, 3, 2, 1, 0]),
    "ConcatDataset": lambda x: ConcatDataset([TensorDataset(x[:3]), TensorDataset(x[3:])]),
    "StackDataset": lambda x: StackDataset(x=TensorDataset(x), y=range(len(x))),
}


def check_gathered(dataset: Any, *kinds: int) -> None:
    """Compare batches of indices that come twice, from the end, or as other integers than int."""
    index = [[0, 1, 2], [3, 3, 3], [6, 0], [-1, 5, -7], [np.int64(4), torch.tensor(2)], [1]]
    expected = [
        outcome(lambda b=batch: default_collate([dataset[i] for i in b])) for batch in index
    ]
    for workers in kinds or WORKERS:
        with DataLoader(dataset, batch_sampler=index, num_workers=workers) as loader:
            iterator = iter(loader)
            got = [outcome(functools.partial(next, iterator)) for _ in index]
        check_same(got, expected, f"{workers} workers")


@pytest.mark.parametrize("size", TABLE_SHAPES)
def test_tensor_datasets(size: str, subtests: pytest.Subtests) -> None:
    for place, (name, make) in enumerate(TABLES.items(), [*TABLE_SHAPES].index(size)):
        with subtests.test(name):
            table = WRAPPED["TensorDataset"](make(0, TABLE_SHAPES[size]))
            check_gathered(table, WORKERS[place % 2])


@pytest.mark.parametrize("size", TABLE_SHAPES)
def test_datasets_of_torchs(size: str, subtests: pytest.Subtests) -> None:
    for name, wrapped in WRAPPED.items():
        with subtests.test(name):
            check_gathered(wrapped(tensor(0, TABLE_SHAPES[size])))


@pytest.mark.parametrize("kind", [torch.Tensor, tuple])
def test_a_tensor_dataset_of_registered_types(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, kind, registered)
    check_gathered(WRAPPED["TensorDataset"](tensor(0, TABLE_SHAPES["small"])))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("size", TABLE_SHAPES)
def test_writing_to_a_gathered_batch_changes_no_sample(size: str, workers: int) -> None:
    table = tensor(0, TABLE_SHAPES[size])
    before = table.clone()
    for x, y in DataLoader(TensorDataset(table, table[:, 0]), 3, num_workers=workers):
        x.zero_()
        y.zero_()
    assert torch.equal(table, before)


# Samples that nobody thought of.

LEAF_SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 3), (4, 1, 2), (18_000,), (3, 90, 80)])
LEAVES = st.one_of(
    st.builds(
        lambda dtype, shape: lambda n: tensor(n, shape, dtype),
        st.sampled_from(TENSOR_DTYPES),
        LEAF_SHAPES,
    ),
    st.builds(
        lambda shape: lambda n: tensor(n, shape[::-1]).permute(tuple(range(len(shape))[::-1])),
        LEAF_SHAPES,
    ),
    st.builds(
        lambda dtype, shape: lambda n: ndarray(n, shape, dtype),
        st.sampled_from(["u1", "i4", "i8", "f2", "f4", "f8", "c8", "?", "U2", "O", ">f4"]),
        LEAF_SHAPES,
    ),
    st.sampled_from(list({**NUMBERS, "text": OTHERS["text"], "bytes": OTHERS["bytes"]}.values())),
)


def list_of(parts: list[Sample]) -> Sample:
    return lambda n: [part(n) for part in parts]


def tuple_of(parts: list[Sample]) -> Sample:
    return lambda n: tuple(part(n) for part in parts)


def dict_of(parts: dict[str, Sample]) -> Sample:
    return lambda n: {key: part(n) for key, part in parts.items()}


def point_of(x: Sample, y: Sample) -> Sample:
    return lambda n: Point(x(n), y(n))


SAMPLES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(list_of, st.lists(inner, max_size=3)),
        st.builds(tuple_of, st.lists(inner, max_size=3)),
        st.builds(dict_of, st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
        st.builds(point_of, inner, inner),
    ),
    max_leaves=6,
)


@hypothesis.given(sample=SAMPLES, length=st.integers(1, 9), batch_size=st.integers(1, 5))
def test_any_samples(sample: Sample, length: int, batch_size: int) -> None:
    samples = [sample(number) for number in range(length)]
    check_parity(samples, batch_size)


@hypothesis.given(
    samples=st.lists(SAMPLES, min_size=2, max_size=3),
    choice=st.lists(st.integers(0, 2), min_size=2, max_size=9),
    batch_size=st.integers(2, 5),
)
def test_any_mixture_of_samples(samples: list[Sample], choice: list[int], batch_size: int) -> None:
    mixture = [samples[which % len(samples)](number) for number, which in enumerate(choice)]
    check_parity(mixture, batch_size)
