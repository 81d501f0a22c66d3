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
from contextlib import AbstractContextManager, ExitStack
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

    def __getitem__(self, index: int) -> Any:
        return index


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


# ---- where a transform is held ----


class Drawing:
    """Stores a draw in `self`, and uses it for the image and for the label."""

    def __init__(self) -> None:
        self.in_turn = InTurn()
        self.draw = -1

    def __call__(self, index: int) -> tuple[int, int]:
        with self.in_turn.storing(index):
            self.draw = 100 + index
        with self.in_turn.reading(index):
            return self.draw, self.draw


class Nested:
    """Holds a transform in containers."""

    def __init__(self, transform: Drawing) -> None:
        self.steps = {"train": [("turn", (transform,), {transform})]}

    def __call__(self, index: int) -> Any:
        (_, (transform,), also), *_ = self.steps["train"]
        assert also == {transform}
        return transform(index)


def in_a_closure(transform: Drawing) -> Callable[[int], Any]:
    return lambda index: transform(index)


HELD: dict[str, Callable[[Drawing], Callable[[int], Any]]] = {
    "attribute": lambda t: t,
    "closure": in_a_closure,
    "list in a closure": lambda t: (lambda steps: lambda index: steps[0](index))([t]),
    "default argument": lambda t: lambda index, t=t: t(index),
    "partial of a closure": lambda t: functools.partial(in_a_closure(t)),
    "partial in a partial": lambda t: functools.partial(functools.partial(Drawing.__call__), t),
    "bound method": lambda t: t.__call__,
    "bound method in lru_cache": lambda t: functools.lru_cache(maxsize=None)(t.__call__),
    "nested container": Nested,
}


class Transformed(TwoSamples):
    """What each transform makes of each index."""

    def __init__(self) -> None:
        self.held = {kind: hold(Drawing()) for kind, hold in HELD.items()}

    def __getitem__(self, index: int) -> Any:
        return {kind: transform(index) for kind, transform in self.held.items()}


# `copy.deepcopy` copies no function, and so nothing that a function holds.
@pytest.mark.parametrize("copy_dataset", ["state", True])
def test_a_transform_held_in_any_way_below_datasets_of_torch(copy_dataset: Any) -> None:
    wanted = [dict.fromkeys(HELD, (draw, draw)) for draw in (100, 101)]
    dataset = Subset(Subset(Transformed(), [0, 1]), range(2))
    assert_samples(dataset, wanted, copy_dataset=copy_dataset)


class Resize:
    """A transform with state, which a cached function makes."""

    size = 0


@functools.cache
def resize_for(size: int) -> Resize:
    return Resize()


def test_transforms_made_by_cached_functions_of_the_dataset() -> None:
    class Cached(TwoSamples):
        def __init__(self) -> None:
            super().__init__()
            self.functions = functools.lru_cache(maxsize=None)(lambda size: Resize()), resize_for

        def __getitem__(self, index: int) -> list[int]:
            with self.in_turn.storing(index):
                for made in self.functions:
                    made(224).size = 100 + index
            with self.in_turn.reading(index):
                return [made(224).size for made in self.functions]

    assert_samples(Cached(), [[100] * 2, [101] * 2])


def test_the_current_indices() -> None:
    class CurrentIndices(TwoSamples):
        def __getitems__(self, indices: list[int]) -> list[int]:
            with self.in_turn.storing(indices[0]):
                self.indices = indices
            with self.in_turn.reading(indices[0]):
                return [10 * index for index in self.indices]

    assert_samples(CurrentIndices(), [[0], [10]], batch_size=1)


# ---- a buffer ----


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


# Each is written, and read through the other: the same memory.
BUFFERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "list": lambda: same([0, 0, 0]),
    "array.array": lambda: same(array.array("i", [0, 0, 0])),
    "two views of one array": lambda: with_a_view(np.zeros(16)),
    "two views of one tensor": lambda: with_a_view(torch.zeros(16)),
    "a reversed view and a view of its end": lambda: (lambda a: (a[::-1], a[-3:]))(np.zeros(8)),
    "a row of a grid and an array": lambda: (lambda a: (a.reshape(2, 4)[0], a))(np.zeros(8)),
    "a view of another type": lambda: (lambda a: (a, a.view(np.int8)))(np.zeros(8, np.uint8)),
    "an array and a tensor of its memory": array_and_tensor,
    "an array of a bytearray": lambda: (lambda raw: (np.frombuffer(raw, np.uint8), raw))(
        bytearray(8)
    ),
    "an array and a read-only view of it": read_only_view,
    "a parameter and its data": detached,
}


class Buffers(TwoSamples):
    def __init__(self, buffers: list[dict[str, Any]]) -> None:
        super().__init__()
        self.buffers = buffers

    def __getitem__(self, index: int) -> list[list[int]]:
        with self.in_turn.storing(index):
            for buffer in self.buffers:
                for place in range(3):
                    buffer["written"][place] = 100 + index
        with self.in_turn.reading(index):
            return [[int(number) for number in buffer["read"][:3]] for buffer in self.buffers]


@pytest.mark.parametrize("reverse", [False, True])
def test_a_buffer_whichever_of_two_views_comes_first(reverse: bool) -> None:
    pairs = [dict(zip(("written", "read"), make(), strict=True)) for make in BUFFERS.values()]
    dataset = Buffers([dict(sorted(pair.items(), reverse=reverse)) for pair in pairs])
    assert_samples(dataset, [[[100] * 3] * len(BUFFERS), [[101] * 3] * len(BUFFERS)])


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
    assert_samples(TwoSamples(), [[100], [101]], batch_size=1, collate_fn=collate_fn)


def test_a_buffer_that_dataset_and_collate_fn_have_in_common() -> None:
    class Common(TwoSamples):
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


# ---- files ----

LINES = ["first line\n", "second line\n"]
PLACES = (0, len(LINES[0]))


class Lines(TwoSamples):
    """Seeks, then reads a line, in files that are open already. Of an archive too."""

    def __init__(self, files: list[Any]) -> None:
        super().__init__()
        self.files = files

    def __getitem__(self, index: int) -> list[str]:
        with self.in_turn.storing(index):
            for file in self.files:
                if isinstance(file, zipfile.ZipFile):
                    info = file.infolist()[index]
                    file.fp.seek(info.header_offset + 30 + len(info.filename))  # type: ignore[union-attr]
                else:
                    file.seek(PLACES[index])
        with self.in_turn.reading(index):
            lines = [getattr(file, "fp", file).readline() for file in self.files]
        return [line if isinstance(line, str) else line.decode() for line in lines]


def test_files_opened_early(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("".join(LINES))
    with zipfile.ZipFile(tmp_path / "lines.zip", "w") as archive:
        for line in LINES:
            archive.writestr(line, line)
    with ExitStack() as stack:
        files: list[Any] = [
            open(path),
            open(path, "rb"),
            open(path, "rb", buffering=0),
            io.TextIOWrapper(open(path, "rb")),
            io.BytesIO(path.read_bytes()),
            io.StringIO(path.read_text()),
            zipfile.ZipFile(tmp_path / "lines.zip"),
        ]
        for file in files:
            stack.enter_context(file)
        assert_samples(Lines(files), [[line] * len(files) for line in LINES])
        for file in files[:-1]:
            file.seek(0)
            assert len(file.readlines()) == 2, "the original reads on"
        assert [files[-1].read(info).decode() for info in files[-1].infolist()] == LINES
