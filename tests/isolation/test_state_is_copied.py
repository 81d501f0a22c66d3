"""Promise: State that a sample stores in the dataset, a transform or a `collate_fn` is never seen by another worker.
This includes draws, indices, buffers, file positions, closures, partials and caches.

Two workers read a sample each, in a forced order: the first stores its value, the second stores its value, the first
reads, the second reads. Workers that share the state give the first sample the second's value. The classes here keep
state as MONAI, kornia, fastMRI and others do.
"""

# ruff: noqa: SIM115 (files that stay open are the subject)

from __future__ import annotations

import array
import functools
import io
import warnings
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

import fastload
from tests.fakes import Sequencer


class InTurn(Sequencer):
    """Lets sample 0 store first, sample 1 store second, sample 0 read third and sample 1 read last.

    It works across copies, because all of them share it.
    """

    fastload_per_worker = ()

    def storing(self, index: int) -> AbstractContextManager[None]:
        return self(index)

    def reading(self, index: int) -> AbstractContextManager[None]:
        return self(2 + index)

    def __deepcopy__(self, memo: object) -> InTurn:
        return self  # `copy.deepcopy` refuses locks


class TwoSamples(Dataset[Any]):
    """The samples 0 and 1, each read by a worker of its own."""

    def __init__(self) -> None:
        self.in_turn = InTurn()

    def __len__(self) -> int:
        return 2


class Transformed(TwoSamples):
    """What `transform` makes of each index."""

    def __init__(self, transform: Callable[[int], Any]) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(index)


class Drawing:
    """Stores a draw in `self`, and uses it for the image and for the label."""

    def __init__(self) -> None:
        self.in_turn = InTurn()
        self.draw = -1

    def __call__(self, index: int) -> tuple[str, str]:
        with self.in_turn.storing(index):
            self.draw = 100 + index
        with self.in_turn.reading(index):
            return f"image turned by {self.draw}", f"label turned by {self.draw}"

    def apply(self, index: int) -> tuple[str, str]:
        return self(index)


DRAWN = [(f"image turned by {draw}", f"label turned by {draw}") for draw in (100, 101)]


def as_it_is(sample: Any) -> Any:
    return sample


def assert_samples(dataset: Any, wanted: list[Any], **options: Any) -> None:
    """Read the two samples in two workers: they are those that are wanted, and nothing is warned of."""
    arguments = {"batch_size": None, "collate_fn": as_it_is, "num_workers": 2, **options}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fastload.DataLoader(dataset, **arguments) as loader:
            got = list(loader)
    assert (got, [str(warning.message) for warning in said]) == (wanted, [])


# ---- a draw that is kept in `self` ----


class Resize:
    """A transform with state, which a cached function makes."""

    size = 0


@functools.cache
def resize_for(size: int) -> Resize:
    return Resize()


class Cached(TwoSamples):
    """Gets its transform from a cached function at each sample, as one object for all samples."""

    def __init__(self, transform_for: Callable[[int], Resize]) -> None:
        super().__init__()
        self.transform_for = transform_for

    def __getitem__(self, index: int) -> int:
        with self.in_turn.storing(index):
            self.transform_for(224).size = 100 + index
        with self.in_turn.reading(index):
            return self.transform_for(224).size


@pytest.mark.parametrize(
    "made_by", [functools.lru_cache(maxsize=None)(lambda size: Resize()), resize_for]
)
def test_a_transform_made_by_a_cached_function_of_the_dataset(made_by: Any) -> None:
    assert_samples(Cached(made_by), [100, 101])


# ---- where the transform is held ----


class Nested:
    """Holds a transform in containers."""

    def __init__(self, transform: Drawing) -> None:
        self.steps = {"train": [("turn", (transform,), {transform})]}

    def __call__(self, index: int) -> Any:
        (_, (transform,), also), *_ = self.steps["train"]
        assert also == {transform}
        return transform(index)


def called(transform: Drawing, index: int) -> Any:
    return transform(index)


def in_a_closure(transform: Drawing) -> Callable[[int], Any]:
    def call(index: int) -> Any:
        return transform(index)

    return call


HELD: dict[str, Callable[[Drawing], Callable[[int], Any]]] = {
    "attribute": lambda t: t,
    "closure": in_a_closure,
    "list in a closure": lambda t: (lambda steps: lambda index: steps[0](index))([t]),
    "default argument": lambda t: lambda index, t=t: t(index),
    "partial of a closure": lambda t: functools.partial(in_a_closure(t)),
    "partial in a partial": lambda t: functools.partial(functools.partial(called), t),
    "bound method": lambda t: t.apply,
    "bound method in lru_cache": lambda t: functools.lru_cache(maxsize=None)(t.apply),
    "nested container": Nested,
}


# `copy.deepcopy` copies no function, and so nothing that a function holds.
@pytest.mark.parametrize("copy_dataset", ["state", True])
@pytest.mark.parametrize("held", HELD)
def test_a_transform_held_in(held: str, copy_dataset: Any) -> None:
    assert_samples(Transformed(HELD[held](Drawing())), DRAWN, copy_dataset=copy_dataset)


def test_a_transform_below_datasets_of_torch() -> None:
    dataset = Subset(Subset(Transformed(in_a_closure(Drawing())), [0, 1]), range(2))
    assert_samples(dataset, DRAWN)


# ---- an attribute that one method sets and another reads ----


class CurrentIndex(TwoSamples):
    """Sets `self.i`, which another method reads."""

    def __getitem__(self, index: int) -> str:
        with self.in_turn.storing(index):
            self.i = index
        with self.in_turn.reading(index):
            return self.name()

    def name(self) -> str:
        return f"image {self.i}"


def test_the_current_index() -> None:
    assert_samples(CurrentIndex(), ["image 0", "image 1"])


def test_the_current_indices() -> None:
    class CurrentIndices(TwoSamples):
        def __getitems__(self, indices: list[int]) -> list[int]:
            with self.in_turn.storing(indices[0]):
                self.indices = indices
            with self.in_turn.reading(indices[0]):
                return [10 * index for index in self.indices]

    assert_samples(CurrentIndices(), [[0], [10]], batch_size=1)


# ---- a buffer ----


class Buffers(TwoSamples):
    """Writes each sample into `self.written`, and reads it from `self.read`: the same memory."""

    def __init__(self, written: Any, read: Any) -> None:
        super().__init__()
        self.written, self.read = written, read

    def __getitem__(self, index: int) -> list[int]:
        with self.in_turn.storing(index):
            for place in range(3):
                self.written[place] = 100 + index
        with self.in_turn.reading(index):
            return [int(number) for number in self.read[:3]]


class ReadFirst(Buffers):
    """The same, with the attributes in the other order."""

    def __init__(self, written: Any, read: Any) -> None:
        super().__init__(None, read)
        del self.written
        self.written = written


def same(buffer: Any) -> tuple[Any, Any]:
    return buffer, buffer


def with_a_view(a: Any) -> tuple[Any, Any]:
    return a[2:], a[2:8]


def array_and_tensor() -> tuple[Any, Any]:
    a = np.zeros(8, np.float32)
    return a, torch.from_numpy(a)


def read_only_view() -> tuple[Any, Any]:
    a = np.zeros(8)
    view = a[:]
    view.flags.writeable = False
    return a, view


def detached() -> tuple[Any, Any]:
    parameter = torch.nn.Parameter(torch.zeros(8))
    return parameter.detach(), parameter


BUFFERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "list": lambda: same([0, 0, 0]),
    "array.array": lambda: same(array.array("i", [0, 0, 0])),
    "two views of one array": lambda: with_a_view(np.zeros(16)),
    "two views of one tensor": lambda: with_a_view(torch.zeros(16)),
    "a reversed view and a view of its end": lambda: (lambda a: (a[::-1], a[-3:]))(np.zeros(8)),
    "a row of a grid and an array": lambda: (lambda a: (a.reshape(2, 4)[0], a))(np.zeros(8)),
    "a view of another type": lambda: (lambda a: (a, a.view(np.int8)))(np.zeros(8, np.uint8)),
    "an array and a tensor of its memory": array_and_tensor,
    "a memoryview and its bytearray": lambda: (lambda raw: (memoryview(raw), raw))(bytearray(8)),
    "an array of a bytearray": lambda: (lambda raw: (np.frombuffer(raw, np.uint8), raw))(
        bytearray(8)
    ),
    "an array and a read-only view of it": read_only_view,
    "a parameter and its data": detached,
}


@pytest.mark.parametrize("kind", [Buffers, ReadFirst])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer(name: str, kind: type[Buffers]) -> None:
    assert_samples(kind(*BUFFERS[name]()), [[100] * 3, [101] * 3])


# ---- collate_fn and iterable datasets ----


class Numbers(TwoSamples):
    def __getitem__(self, index: int) -> int:
        return index


class Collating:
    """Collects a batch in a buffer of its own."""

    def __init__(self) -> None:
        self.in_turn, self.buffer = InTurn(), np.zeros(1, int)

    def __call__(self, samples: list[int]) -> list[int]:
        (index,) = samples
        with self.in_turn.storing(index):
            self.buffer[0] = 100 + index
        with self.in_turn.reading(index):
            return self.buffer.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("held", ["attribute", "closure", "partial"])
def test_a_buffer_of_collate_fn(held: str) -> None:
    collate = Collating()
    collate_fn = {
        "attribute": collate,
        "closure": lambda samples: collate(samples),
        "partial": functools.partial(Collating.__call__, collate),
    }[held]
    assert_samples(Numbers(), [[100], [101]], batch_size=1, collate_fn=collate_fn)


def test_a_buffer_that_dataset_and_collate_fn_have_in_common() -> None:
    class Common(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.row = bytearray(1)

        def __getitem__(self, index: int) -> int:
            with self.in_turn.storing(index):
                self.row[0] = 100 + index
            return index

        def collate(self, samples: list[int]) -> list[int]:
            with self.in_turn.reading(samples[0]):
                return list(self.row)

    dataset = Common()
    assert_samples(dataset, [[100], [101]], batch_size=1, collate_fn=dataset.collate)


# ---- generators that a sample seeds ----


def test_a_random_state_seeded_by_file_name() -> None:
    """As fastMRI's mask function."""

    class Mask:
        def __init__(self) -> None:
            self.in_turn, self.rng = InTurn(), np.random.RandomState()

        def __call__(self, index: int) -> list[int]:
            with self.in_turn.storing(index):
                self.rng.seed(list(b"file%d.h5" % index))
            with self.in_turn.reading(index):
                return self.rng.randint(1000, size=4).tolist()

    seeded = [np.random.RandomState(list(b"file%d.h5" % index)) for index in (0, 1)]
    assert_samples(Transformed(Mask()), [rng.randint(1000, size=4).tolist() for rng in seeded])


# ---- files ----

TEXT = "first line\nsecond line\n"
PLACES = (0, len("first line\n"))
WANTED = ["first line", "second line"]


class Lines(TwoSamples):
    """Seeks, then reads a line, in a file that is open already."""

    def __init__(self, file: Any, places: tuple[int, int] = PLACES) -> None:
        super().__init__()
        self.file, self.places = file, places

    def __getitem__(self, index: int) -> str:
        with self.in_turn.storing(index):
            self.file.seek(self.places[index])
        with self.in_turn.reading(index):
            line = self.file.readline()
        return (line if isinstance(line, str) else line.decode()).rstrip()


def plain(folder: Path) -> Path:
    path = folder / "lines.txt"
    path.write_text(TEXT)
    return path


OPENED: dict[str, Callable[[Path], Any]] = {
    "text": lambda folder: open(plain(folder)),
    "binary": lambda folder: open(plain(folder), "rb"),
    "raw": lambda folder: open(plain(folder), "rb", buffering=0),
    "text over binary": lambda folder: io.TextIOWrapper(open(plain(folder), "rb")),
    "in memory": lambda folder: io.BytesIO(TEXT.encode()),
    "text in memory": lambda folder: io.StringIO(TEXT),
}


@pytest.mark.parametrize("kind", OPENED)
def test_a_file_opened_early(kind: str, tmp_path: Path) -> None:
    with OPENED[kind](tmp_path) as file:
        assert_samples(Lines(file), WANTED)
        assert not file.closed
        file.seek(0)
        assert len(file.readlines()) == 2, "the original reads on"


class Members(TwoSamples):
    """Seeks and reads in the file of an archive, as code does that reads stored members by itself."""

    def __init__(self, archive: Any, find: Callable[[Any, int], tuple[Any, int, int]]) -> None:
        super().__init__()
        self.archive, self.find = archive, find

    def __getitem__(self, index: int) -> str:
        file, place, size = self.find(self.archive, index)
        with self.in_turn.storing(index):
            file.seek(place)
        with self.in_turn.reading(index):
            return file.read(size).decode()  # type: ignore[no-any-return]


def in_a_zip_file(archive: zipfile.ZipFile, index: int) -> tuple[Any, int, int]:
    info = archive.infolist()[index]
    return archive.fp, info.header_offset + 30 + len(info.filename), info.file_size


def test_a_zip_file_opened_early(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "lines.zip", "w") as archive:
        for line in WANTED:
            archive.writestr(line, line)
    with zipfile.ZipFile(tmp_path / "lines.zip") as archive:
        assert_samples(Members(archive, in_a_zip_file), WANTED)
        assert [archive.read(line).decode() for line in WANTED] == WANTED
