"""Promises:
- The loop may keep a batch of worker processes in any way. Its memory is not written again, also in a fork of the
  loop's process that holds it.
- What a dataset keeps in its worker of what it has filled does not change.
- The memory of a steady loop stays bounded, has no name in /dev/shm, and is not shared memory of torch.
- Batches of any type and size arrive bit for bit: arrays, containers, sparse tensors, subclasses, large objects.
- An object that cannot be pickled is an error in its place, and the next batch arrives.
"""

from __future__ import annotations

import collections
import gc
import itertools
import os
import pickle
import re
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from fastload.processes.segments import ProcessMemory, Segments, rounded
from tests.fakes import Numbers
from tests.processes.holding import memfds, outcomes, processes
from tests.promises.equal import check_same
from tests.promises.test_kept_batches import ALIASES as THEIRS
from tests.promises.test_kept_batches import CHANGES, EXCHANGED, RESIZING, check_rows

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ALIASES = THEIRS | EXCHANGED
BATCH = 4
WIDTHS = {"small": 5, "large": 20_000}  # floats of a row


class Wide(Numbers):
    """Rows that are full of their index, with the index."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__(length)
        self.width = width

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((self.width,), float(index)), "y": index}


# ---- segments ----


def test_a_segment_holds_what_is_acquired_and_is_lent_again_while_it_is_large_enough() -> None:
    assert all(n <= rounded(n) < n + n // 16 + 2**16 for n in (1, 2**16, 17 * 2**20))
    pool = ProcessMemory(0, channels_last=False)
    memory, sizes = pool.begin(None), [60_000, 6_000, *[5_000] * 13]
    assert [len(memory.acquire(n)) for n in sizes] == sizes
    assert [segment for segment, _ in memory.used] == memory.created
    assert len(memory.created) == 3
    again = pool.begin(
        memory.created[0]
    )  # while its descriptor is open: another reader sends it just now
    assert len(again.acquire(60_000)) == 60_000
    assert not again.created
    segments = Segments()
    segments.limit = 1
    segments.needs(9)
    lent = segments.lend()
    assert lent is not None
    segments.give_back(lent)
    assert segments.lend() is lent
    segments.give_back(lent)
    segments.needs(2**20)
    larger = segments.lend()
    assert larger is not None
    assert larger.nbytes > 2**20
    kept = segments.loan(larger), segments.loan(lent)
    assert (larger.descriptor >= 0, lent.descriptor) == (True, -1), "one descriptor is kept"
    assert [len(each) for each in kept] == [larger.nbytes, lent.nbytes]


# ---- what the loop keeps ----


@pytest.mark.parametrize("size", WIDTHS)
def test_what_is_kept_stays(size: str, subtests: pytest.Subtests) -> None:
    """Every second batch is kept by an alias alone, each alias twice. The others are let go."""
    kept: list[tuple[str, Callable[[], Any], list[float]]] = []
    names = itertools.cycle(ALIASES)
    with processes(Wide(4 * BATCH * len(ALIASES), WIDTHS[size])) as loader:
        for number, batch in enumerate(loader):
            values = batch["y"].tolist()
            check_rows(batch["x"], values)
            if number % 2:
                name = next(names)
                kept.append((name, ALIASES[name](batch["x"]), values))
            del batch
        for name, alias, values in kept:
            with subtests.test(name):
                check_rows(alias(), values)
    del loader
    gc.collect()
    assert len(kept) == 2 * len(ALIASES)
    for name, alias, values in kept:
        with subtests.test(name, after="the loader's end takes nothing away"):
            check_rows(alias(), values)


@pytest.mark.parametrize("size", WIDTHS)
def test_what_the_user_changed_and_let_go_changes_no_later_batch(size: str) -> None:
    """Also not one that a worker writes: workers have the pages of a batch mapped."""
    names = itertools.cycle(CHANGES)
    with processes(Wide(4 * BATCH * len(CHANGES), WIDTHS[size])) as loader:
        for batch in loader:
            x, name = batch["x"], next(names)
            assert (x.shape, x.requires_grad, x.grad) == ((BATCH, WIDTHS[size]), False, None)
            assert x.is_contiguous()
            check_rows(x, batch["y"].tolist())
            with suppress(RuntimeError) if name in RESIZING else nullcontext():
                CHANGES[name](x)
            del x, batch


def test_all_batches_of_an_epoch_at_once() -> None:
    with processes(Wide(200, 2000), workers=3, in_order=False, prefetch_batches=8) as loader:
        for _ in range(2):
            batches = list(loader)
            values = [value for batch in batches for value in batch["y"].tolist()]
            assert sorted(values) == list(range(200))
            check_rows(torch.cat([batch["x"] for batch in batches]), values)
            del batches


# ---- forks of the loop's process ----


def forked(look: Callable[[], bool]) -> Callable[[], bool]:
    """Fork, and let the child call `look` as soon as the returned function is called, which returns what it saw."""
    ask = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            os.read(ask[0], 1)
            code = 0 if look() else 1
        finally:
            os._exit(code)
    os.close(ask[0])

    def asked() -> bool:
        os.write(ask[1], b"!")  # later forks hold this end too
        os.close(ask[1])
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    return asked


@pytest.mark.parametrize("size", WIDTHS)
def test_a_fork_that_holds_a_batch_sees_it_unchanged(size: str) -> None:
    """While the parent lets it go and loads on. Without a fork the same pages are lent again, which is seen too."""
    held = {0: "the batch", 1: ".numpy()", 2: "storage", 30: "the batch", 31: ".numpy()"}
    with processes(Wide(60 * BATCH, WIDTHS[size]), prefetch_batches=3) as loader:
        asked = []
        for number, batch in enumerate(loader):
            if number in held:
                alias, values = ALIASES[held[number]](batch["x"]), batch["y"].tolist()

                def look(alias: Any = alias, values: list[float] = values) -> bool:
                    check_rows(alias(), values)
                    return True

                asked.append(forked(look))
                del look, alias, values
            del batch
        assert [see() for see in asked] == [True] * 5


# ---- what the dataset keeps ----


class Keeps(Dataset[Any]):
    """Fills rows itself, and looks at each call whether the rows that it has kept are still what it wrote."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.kept: list[tuple[Any, Any]] = []

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        return torch.full((self.width,), float(index))

    def empty_sample(self) -> Any:
        return torch.empty(self.width)

    def fill_rows(self, run: Any) -> tuple[int, ...]:
        for rows, values in self.kept:
            assert torch.equal(rows[:, 0], values), "what was kept has changed"
            assert torch.equal(rows[:, -1], values), "what was kept has changed"
        for row, index in zip(run.rows, run.indices, strict=True):
            row.fill_(float(index))
        if len(self.kept) < 5:
            self.kept.append((run.rows, run.rows[:, 0].clone()))
        return ()


@pytest.mark.parametrize("size", WIDTHS)
def test_what_a_dataset_keeps_of_the_rows_it_filled_does_not_change(size: str) -> None:
    with processes(Keeps(WIDTHS[size])) as loader:
        for number, batch in enumerate(loader):
            check_rows(batch, [*range(number * BATCH, (number + 1) * BATCH)])
            del batch


class KeepsSamples(Numbers):
    """Keeps the samples and the batches that it gave, and looks at them."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.kept: list[torch.Tensor] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        assert all((sample == sample[0]).all() for sample in self.kept)
        assert [int(sample[0]) for sample in self.kept] == sorted(int(s[0]) for s in self.kept)
        sample = torch.full((5000,), index)
        self.kept = [*self.kept[-3:], sample]
        return sample


@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_sample_that_its_dataset_keeps_is_not_the_loop_s(batch_size: int | None) -> None:
    with processes(KeepsSamples(100), batch_size=batch_size) as loader:
        for batch in loader:
            batch.zero_()


# ---- how much memory ----


@pytest.mark.parametrize(("kept", "size"), [(0, "small"), (3, "large")])
def test_a_steady_loop_has_a_bounded_number_of_segments(kept: int, size: str) -> None:
    before = len(memfds())
    with processes(Wide(60 * BATCH, WIDTHS[size]), prefetch_batches=4) as loader:
        held: collections.deque[Any] = collections.deque(maxlen=kept)
        counts = []
        for batch in loader:
            held.append(batch)
            counts.append(len(memfds()) - before)
            assert not batch["x"].is_shared()
            assert not batch["x"].untyped_storage().is_shared()
            del batch
        with open("/proc/self/maps") as maps:
            named = [line for line in maps if re.search("/dev/shm/(?!sem[.]|pym-)", line)]
        assert not named
    assert len(counts) == 60
    # In flight, kept by the loop, the one it works on, one for each worker, and one of the first batches.
    assert max(counts) <= 2 * (4 + kept + 1 + 2 + 1), (
        "each has a mapping and at most one descriptor"
    )


class Sizes(Numbers):
    """Rows of `sizes[index]` values, that are full of the index."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(len(sizes))
        self.sizes = sizes

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.sizes[index],), index, dtype=torch.int32)


SIZES = [
    *range(0, 200_000, 4_000),  # growing
    *range(200_000, 0, -4_000),
    *[1, 1_000_000, 17, 70_000] * 12,
    *[0, 5] * 25,
]


def test_batches_of_other_sizes_arrive_and_their_memory_stays_bounded() -> None:
    before = len(memfds())
    with processes(Sizes(SIZES), batch_size=1, prefetch_batches=4) as loader:
        counts = []
        for index, batch in enumerate(loader):
            assert batch.shape == (1, SIZES[index])
            assert (batch == index).all()
            counts.append(len(memfds()) - before)
            del batch
    assert len(counts) == len(SIZES)
    assert max(counts) <= 2 * 2 * (4 + 1 + 2 + 1)


class View(Numbers):
    """A view of a tensor of 16 MiB."""

    def __getitem__(self, index: int) -> torch.Tensor:
        huge = torch.zeros(4 * 2**20)
        huge[100:110] = float(index)
        return huge[100:110]


def test_a_view_of_a_huge_tensor_does_not_carry_the_whole() -> None:
    with processes(View(6), batch_size=None) as loader:
        for index, sample in enumerate(loader):
            assert sample.tolist() == [float(index)] * 10
            assert sample.untyped_storage().nbytes() < 2**16
            maps = [line.split()[0].split("-") for line in memfds() if "-" in line.split()[0]]
            assert sum(int(end, 16) - int(start, 16) for start, end in maps) < 2**22


class Sharing(Numbers):
    """Tensors of one memory: a whole, a part, and its transposed."""

    def __getitem__(self, index: int) -> Any:
        whole = torch.arange(index, index + 12.0).reshape(3, 4)
        return {"whole": whole, "part": whole[1:], "t": whole.t(), "again": whole}


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_that_share_memory_share_it_in_the_batch(workers: int) -> None:
    with processes(Sharing(6), None, workers=workers) as loader:
        for index, sample in enumerate(loader):
            check_same(sample, Sharing(6)[index])
            sample["whole"][1, 2] = -7.0
            assert sample["part"][0, 2] == sample["t"][2, 1] == -7.0
            assert sample["again"] is sample["whole"]


# ---- what a batch may be ----

Point = collections.namedtuple("Point", "x y")


class Label(str):
    """A string with a class."""


def image() -> Any:
    from torchvision import tv_tensors

    return tv_tensors.Image(torch.arange(12, dtype=torch.uint8).reshape(3, 2, 2))


def boxes() -> Any:
    from torchvision import tv_tensors

    return tv_tensors.BoundingBoxes(torch.ones(2, 4), format="XYXY", canvas_size=(9, 9))


def transposed() -> torch.Tensor:
    return torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)


RANDOM = os.urandom(8)
KINDS: dict[str, Callable[[], Any]] = {
    "float32": lambda: torch.rand(3, 4),
    "bfloat16": lambda: torch.rand(3).bfloat16(),
    "float8": lambda: torch.rand(3).to(torch.float8_e4m3fn),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j, float("nan")]),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "number": lambda: torch.tensor(3.5),
    "no values": lambda: torch.empty(0),
    "no values in two dimensions": lambda: torch.empty(3, 0, dtype=torch.int64),
    "transposed": transposed,
    "channels last": lambda: torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.ones(1).expand(1000),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse rows": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 3, torch.quint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "leaf with a gradient": lambda: torch.ones(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "storage": lambda: torch.arange(5, dtype=torch.uint8).untyped_storage(),
    "generator": lambda: torch.Generator().manual_seed(5),
    "tv_tensors.Image": image,
    "tv_tensors.BoundingBoxes": boxes,
    "array": lambda: np.arange(6.0).reshape(2, 3),
    "array of strings": lambda: np.array(["a", "bcd"]),
    "array of objects": lambda: np.array([1, "two", None], dtype=object),
    "structured array": lambda: np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "array, Fortran order": lambda: np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "array, big-endian": lambda: np.arange(3, dtype=">i4"),
    "array without values": lambda: np.empty((0, 4)),
    "number of NumPy": lambda: np.float32(2.5),
    "time of NumPy": lambda: np.datetime64("2026-11-26"),
    "nested": lambda: {"a": [1, (2.5, {"b": torch.ones(2)}), Point(torch.zeros(1), "y")], "c": "d"},
    "a number as a key": lambda: {3: None},
    "strings": lambda: ["", "é", "x" * 5000, Label("class")],
    "bytes": lambda: RANDOM * 2**17,
    "many bytes": lambda: [bytes([k]) * 10 * 2**20 for k in range(3)],
    "bytearray": lambda: bytearray(b"abc" * 100),
    "large integers": lambda: [2**100, -(2**63)],
    "sets": lambda: [{1, 2}, frozenset("ab")],
    "dictionary with a default": lambda: collections.defaultdict(list, a=[1]),
    "queue": lambda: collections.deque([1, torch.ones(1)], maxlen=3),
    "nothing": lambda: None,
}


class EachTwice(Numbers):
    """Each kind of sample twice, which a seed makes equal."""

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(3)
        return [*KINDS.values()][index // 2]()


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support", "ignore:.*quantize", "ignore:TypedStorage"
)
@pytest.mark.parametrize(
    "options", [{"batch_size": None}, {"batch_size": 2, "collate_fn": list}, {"batch_size": 2}],
    ids=["alone", "in a list", "collated"],
)  # fmt: skip
def test_a_sample_of_any_type_arrives_bit_for_bit(
    options: dict[str, Any], subtests: pytest.Subtests
) -> None:
    """What torch's functions refuse is an error in its place."""
    dataset = EachTwice(2 * len(KINDS))
    with processes(dataset, workers=0, **options) as here, processes(dataset, **options) as there:
        expected, got = outcomes(iter(here)), outcomes(iter(there))
    places = len(expected) // len(KINDS)
    assert len(got) == len(expected) == places * len(KINDS)
    for place, (one, other) in enumerate(zip(got, expected, strict=True)):
        with subtests.test([*KINDS][place // places]):
            if isinstance(other, Exception):
                assert "collate_fn" not in options
                assert type(one) is type(other)
            elif getattr(other, "grad_fn", None):  # only a process of its own has its graph
                assert isinstance(one, TypeError)
                assert "detach()" in str(one)
            else:
                check_same(one, other)


# ---- what cannot travel ----


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this object stays at home")


class Unloadable:
    """Can be pickled, and raises as it is unpickled."""

    def __reduce__(self) -> Any:
        return arrive, ()


def arrive() -> None:
    raise OSError("not here")


class Odd(Numbers):
    """Tensors, but what cannot travel at indices 5, 13, 21 and 29."""

    def __getitem__(self, index: int) -> Any:
        if index % 8 == 5:
            return STAYS[index // 8][0]()
        return torch.full((3000,), index)


STAYS: list[tuple[Callable[[], Any], Any, str]] = [
    (Unpicklable, TypeError, "stays at home"),
    (lambda: lambda: None, (pickle.PicklingError, AttributeError), "lambda"),
    (threading.Lock, TypeError, "pickle"),
    (Unloadable, OSError, "not here"),
]


def test_an_object_that_cannot_travel_is_an_error_in_its_place() -> None:
    with processes(Odd(36), collate_fn=list) as loader:
        iterator = iter(loader)
        for first, (_, kind, words) in zip(range(0, 32, 8), STAYS, strict=True):
            assert [int(sample[0]) for sample in next(iterator)] == [*range(first, first + 4)]
            with pytest.raises(kind, match=words) as caught:
                next(iterator)
            assert f"batch {first // 4 + 1}" in "".join(getattr(caught.value, "__notes__", []))
        assert [[int(sample[0]) for sample in batch] for batch in iterator] == [[*range(32, 36)]]
