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
import torch.multiprocessing
from torch.utils.data import Dataset

import fastload
from tests.fakes import Numbers
from tests.processes.holding import memfds
from tests.promises.equal import check_same
from tests.promises.reading import in_batches
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


def loader_of(dataset: Any, workers: int = 2, **options: Any) -> fastload.DataLoader[Any]:
    options = {"batch_size": BATCH, **options}
    return fastload.DataLoader(dataset, num_workers=workers, worker_method="process", **options)


# ---- what the loop keeps ----


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("name", ALIASES)
def test_what_is_kept_stays(name: str, size: str) -> None:
    """Every second batch is kept by an alias alone, the others are let go."""
    kept: list[tuple[Callable[[], Any], list[float]]] = []
    with loader_of(Wide(160, WIDTHS[size])) as loader:
        for number, batch in enumerate(loader):
            values = batch["y"].tolist()
            check_rows(batch["x"], values)
            if number % 2:
                kept.append((ALIASES[name](batch["x"]), values))
            del batch
        for alias, values in kept:
            check_rows(alias(), values)
    del loader
    gc.collect()
    assert len(kept) == 20
    for alias, values in kept:  # and the loader's end takes nothing away
        check_rows(alias(), values)


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("name", CHANGES)
def test_what_the_user_changed_and_let_go_changes_no_later_batch(name: str, size: str) -> None:
    refused_or_done = suppress(RuntimeError) if name in RESIZING else nullcontext()
    with loader_of(Wide(80, WIDTHS[size])) as loader:
        for batch in loader:
            x = batch["x"]
            assert (x.shape, x.requires_grad, x.grad) == ((BATCH, WIDTHS[size]), False, None)
            assert x.is_contiguous()
            check_rows(x, batch["y"].tolist())
            with refused_or_done:
                CHANGES[name](x)
            del x, batch


def test_members_of_a_batch_are_kept_apart() -> None:
    """Of a batch with several tensors in one segment, keep now this one, now that one."""

    class Many(Wide):
        def __getitem__(self, index: int) -> Any:
            sample = super().__getitem__(index)
            return {**sample, "pair": (sample["x"] + 0.5, (sample["x"] + 0.25).numpy())}

    kept: list[tuple[torch.Tensor, list[float], float]] = []
    with loader_of(Many(240, 5000)) as loader:
        for number, batch in enumerate(loader):
            parts = [(batch["x"], 0.0), (batch["pair"][0], 0.5), (batch["pair"][1], 0.25)]
            part, offset = parts[number % 3]
            kept.append((part, batch["y"].tolist(), offset))
            del batch, parts, part
    for part, values, offset in kept:
        check_rows(part - offset, values)


@pytest.mark.parametrize("in_order", [True, False])
def test_all_batches_of_an_epoch_at_once(in_order: bool) -> None:
    with loader_of(Wide(400, 2000), 3, in_order=in_order, prefetch_batches=8) as loader:
        for _ in range(2):
            batches = list(loader)
            values = [value for batch in batches for value in batch["y"].tolist()]
            assert sorted(values) == list(range(400))
            check_rows(torch.cat([batch["x"] for batch in batches]), values)
            del batches


def test_what_the_loop_writes_into_a_batch_reaches_no_worker() -> None:
    """Workers have the pages of a batch mapped, and the loop owns them."""
    with loader_of(Wide(400, 2000), 2) as loader:
        for epoch in range(2):
            for batch in loader:
                check_rows(batch["x"], batch["y"].tolist())
                batch["x"].fill_(-1.0)
                del batch
            assert epoch < 2


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
@pytest.mark.parametrize("name", ["the batch", ".numpy()", "storage"])
def test_a_fork_that_holds_a_batch_sees_it_unchanged(name: str, size: str) -> None:
    """While the parent lets it go and loads on. Without a fork the same pages are lent again, which is seen too."""
    with loader_of(Wide(800, WIDTHS[size]), prefetch_batches=3) as loader:
        iterator = iter(loader)
        asked = []
        for number in range(100):
            batch = next(iterator)
            alias, values = ALIASES[name](batch["x"]), batch["y"].tolist()
            if number in (0, 1, 2, 30, 31):
                before = list(values)

                def look(alias: Any = alias, before: list[float] = before) -> bool:
                    check_rows(alias(), before)
                    return True

                asked.append(forked(look))
                del look
            del batch, alias, values
        assert [see() for see in asked] == [True] * 5
        del iterator


def test_a_process_of_multiprocessing_that_holds_a_batch_sees_it_unchanged() -> None:
    context = torch.multiprocessing.get_context("fork")
    with loader_of(Wide(400, 20_000), prefetch_batches=3) as loader:
        iterator = iter(loader)
        held = next(iterator)
        go, answers = context.Event(), context.SimpleQueue()
        child = context.Process(target=look_when, args=(held, go, answers))
        child.start()
        del held
        gc.collect()
        child._args = ()  # the Process object holds its arguments
        for batch in iterator:
            del batch
        go.set()
        assert answers.get() == [0.0, 1.0, 2.0, 3.0]
        child.join()
        child.close()
        answers.close()
        del iterator


def look_when(held: Any, go: Any, answers: Any) -> None:
    go.wait()
    rows = held["x"].numpy()  # a fork has no threads of OpenMP, which torch would ask
    assert (rows == rows[:, :1]).all()
    answers.put(rows[:, 0].tolist())


# ---- what the dataset keeps ----


class Keeps(Dataset[Any]):
    """Fills rows itself, and looks at each call whether the rows that it has kept are still what it wrote."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.kept: list[tuple[Any, Any]] = []

    def __len__(self) -> int:
        return 400

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
    with loader_of(Keeps(WIDTHS[size])) as loader:
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


@pytest.mark.parametrize("batch_size", [None, 1, 4])
def test_a_sample_that_its_dataset_keeps_is_not_the_loop_s(batch_size: int | None) -> None:
    with loader_of(KeepsSamples(100), batch_size=batch_size) as loader:
        for batch in loader:
            batch.zero_()


# ---- how much memory ----


@pytest.mark.parametrize("size", WIDTHS)
@pytest.mark.parametrize("kept", [0, 3])
def test_a_steady_loop_has_a_bounded_number_of_segments(kept: int, size: str) -> None:
    before = len(memfds())
    with loader_of(Wide(200 * BATCH, WIDTHS[size]), prefetch_batches=4) as loader:
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
    assert len(counts) == 200
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


SIZES = {
    "growing": [1000 * k for k in range(200)],
    "shrinking": [1000 * k for k in range(200, 0, -1)],
    "very different": [(1, 3_000_000, 17, 70_000)[k % 4] for k in range(200)],
    "empty ones": [(0, 5)[k % 2] for k in range(200)],
}


@pytest.mark.parametrize("name", SIZES)
def test_batches_of_other_sizes_arrive_and_their_memory_stays_bounded(name: str) -> None:
    sizes = SIZES[name]
    before = len(memfds())
    with loader_of(Sizes(sizes), batch_size=1, prefetch_batches=4) as loader:
        counts = []
        for index, batch in enumerate(loader):
            assert batch.shape == (1, sizes[index])
            assert (batch == index).all()
            counts.append(len(memfds()) - before)
            del batch
    assert len(counts) == 200
    assert max(counts) <= 2 * 2 * (4 + 1 + 2 + 1)


def test_batches_of_other_lengths_arrive() -> None:
    lengths = [(1, 2, 64, 5, 33)[k % 5] for k in range(60)]
    ends = [*itertools.accumulate(lengths)]
    batches = [[*range(end - length, end)] for length, end in zip(lengths, ends, strict=True)]
    with loader_of(Wide(ends[-1], 500), batch_size=1, batch_sampler=batches) as loader:
        kept = [(batch["x"], batch["y"].tolist()) for batch in loader]
    assert [values for _, values in kept] == batches
    for x, values in kept:
        check_rows(x, values)


class View(Numbers):
    """A view of a tensor of 64 MiB."""

    def __getitem__(self, index: int) -> torch.Tensor:
        huge = torch.zeros(16 * 2**20)
        huge[100:110] = float(index)
        return huge[100:110]


def test_a_view_of_a_huge_tensor_does_not_carry_the_whole() -> None:
    with loader_of(View(6), batch_size=None) as loader:
        for index, sample in enumerate(loader):
            assert sample.tolist() == [float(index)] * 10
            assert sample.untyped_storage().nbytes() < 2**16
            maps = [line.split()[0].split("-") for line in memfds() if "-" in line.split()[0]]
            assert sum(int(end, 16) - int(start, 16) for start, end in maps) < 2**24


class Sharing(Numbers):
    """Tensors of one memory: a whole, a part, and its transposed."""

    def __getitem__(self, index: int) -> Any:
        whole = torch.arange(index, index + 12.0).reshape(3, 4)
        return {"whole": whole, "part": whole[1:], "t": whole.t(), "again": whole}


@pytest.mark.parametrize("workers", [0, 2])
def test_tensors_that_share_memory_share_it_in_the_batch(workers: int) -> None:
    with loader_of(Sharing(6), workers, batch_size=None) as loader:
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
    "nested": lambda: {"a": [1, (2.5, {"b": torch.ones(2)}), Point(torch.zeros(1), "y")], 3: None},
    "strings": lambda: ["", "é", "x" * 5000, Label("class")],
    "bytes": lambda: os.urandom(8) * (10 * 2**20 // 8),
    "many bytes": lambda: [bytes([k]) * 10 * 2**20 for k in range(3)],
    "bytearray": lambda: bytearray(b"abc" * 100),
    "large integers": lambda: [2**100, -(2**63)],
    "sets": lambda: [{1, 2}, frozenset("ab")],
    "dictionary with a default": lambda: collections.defaultdict(list, a=[1]),
    "queue": lambda: collections.deque([1, torch.ones(1)], maxlen=3),
    "nothing": lambda: None,
}


class Of(Numbers):
    """The sample that a function makes, which a seed makes equal."""

    def __init__(self, length: int, make: Callable[[], Any]) -> None:
        super().__init__(length)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(3)
        return self.make()


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support", "ignore:.*quantize", "ignore:TypedStorage"
)
@pytest.mark.parametrize("name", KINDS)
def test_a_sample_of_any_type_arrives_bit_for_bit(name: str) -> None:
    if name == "bytes":
        data = KINDS[name]()
        dataset = Of(3, lambda: data)
    else:
        dataset = Of(3, KINDS[name])
    for options in ({"batch_size": None}, {"batch_size": 2, "collate_fn": list}):
        try:
            expected = list(loader_of(dataset, 0, **options))
        except (TypeError, ValueError):
            continue  # arrays that torch's default_convert refuses
        with loader_of(dataset, **options) as loader:
            check_same(list(loader), expected)
    assert len(expected) == 2, "a collate_fn was used last"


@pytest.mark.parametrize(
    "name",
    [
        "float32", "bfloat16", "bool", "complex", "number", "no values", "transposed", "array",
        "array without values", "number of NumPy", "nested", "strings",
    ],
)  # fmt: skip
def test_batches_of_the_default_collate_are_those_without_workers(name: str) -> None:
    make = KINDS[name]
    if name == "nested":
        make = lambda: {"a": [1, (2.5, {"b": torch.ones(2)}), Point(torch.zeros(1), "y")], "c": "d"}  # noqa: E731
    expected = list(fastload.DataLoader(Of(10, make), 4))
    for _ in range(2):
        with loader_of(Of(10, make)) as loader:
            for batch, other in zip(loader, expected, strict=True):
                check_same(batch, other)


def test_a_tensor_with_a_graph_of_gradients_is_an_error_in_its_place() -> None:
    class Graph(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            leaf = torch.ones(2, requires_grad=True)
            return leaf * 2 if index == 1 else torch.full((2,), float(index))

    with loader_of(Graph(6), batch_size=None) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0.0, 0.0]
        with pytest.raises((RuntimeError, TypeError), match=r"detach\(\)"):
            next(iterator)
        assert [sample[0].item() for sample in iterator] == [2.0, 3.0, 4.0, 5.0]


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
    """An object that `make` makes at index 5, else the index."""

    def __init__(self, length: int, make: Callable[[], Any]) -> None:
        super().__init__(length)
        self.make = make

    def __getitem__(self, index: int) -> Any:
        return self.make() if index == 5 else torch.full((3000,), index)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (Unpicklable, TypeError, "stays at home"),
        (lambda: lambda: None, (pickle.PicklingError, AttributeError), "lambda"),
        (lambda: threading.Lock(), TypeError, "pickle"),
        (Unloadable, OSError, "not here"),
    ],
    ids=["an object", "a lambda", "a lock", "an object that raises as it arrives"],
)
def test_an_object_that_cannot_travel_is_an_error_in_its_place(
    make: Callable[[], Any], kind: Any, words: str
) -> None:
    with loader_of(Odd(24, make), collate_fn=list) as loader:
        for _ in range(2):
            iterator = iter(loader)
            assert [int(s[0]) for s in next(iterator)] == [0, 1, 2, 3]
            with pytest.raises(kind, match=words) as caught:
                next(iterator)
            assert "batch 1" in "".join(getattr(caught.value, "__notes__", []))
            rest = [[int(sample[0]) for sample in batch] for batch in iterator]
            assert rest == in_batches(range(8, 24), 4)
