"""Promise: state that a sample leaves in dataset or transform is the worker's own, however it is held.

Two workers read a sample each, in a forced order: the first stores its value, the second stores its
value, the first reads, the second reads. Workers that share the state give the first sample the
second's value. The classes here keep state as MONAI, kornia, fastMRI and others do.
"""

# ruff: noqa: SIM115 (files that stay open are the subject)

from __future__ import annotations

import array
import bz2
import functools
import gzip
import io
import lzma
import queue
import random
import sqlite3
import tarfile
import threading
import warnings
import weakref
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

import fastload

DEADLINE_SECONDS = 30.0


class InTurn:
    """Lets sample 0 store first, sample 1 store second, sample 0 read third and sample 1 read last.

    It works across copies, because all copies share its events.
    """

    def __init__(self) -> None:
        self._stored = threading.Event()
        self._stored_again = threading.Event()
        self._read = threading.Event()

    @contextmanager
    def storing(self, index: int) -> Iterator[None]:
        if index:
            wait_for(self._stored)
        try:
            yield
        finally:
            (self._stored_again if index else self._stored).set()

    @contextmanager
    def reading(self, index: int) -> Iterator[None]:
        wait_for(self._read if index else self._stored_again)
        try:
            yield
        finally:
            if not index:
                self._read.set()

    def __deepcopy__(self, memo: object) -> InTurn:
        return self  # `copy.deepcopy` refuses events


def wait_for(event: threading.Event) -> None:
    if not event.wait(DEADLINE_SECONDS):
        raise TimeoutError("the other worker did not come")


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


def test_a_draw_for_image_and_label() -> None:
    assert_samples(Transformed(Drawing()), DRAWN)


def test_a_dict_transform_that_draws_once_for_all_keys() -> None:
    """As MONAI's: `randomize` stores the draw, and each key is transformed with it afterwards."""

    class RandomizableTransform:
        def randomize(self, data: dict[str, int]) -> None:
            self.angle = data["image"] + 10

    class Rotated(RandomizableTransform):
        def __init__(self, keys: list[str]) -> None:
            self.keys, self.in_turn = keys, InTurn()

        def __call__(self, data: dict[str, int]) -> dict[str, int]:
            index = data["image"]
            with self.in_turn.storing(index):
                self.randomize(data)
            with self.in_turn.reading(index):
                return dict.fromkeys(self.keys, self.angle)

    rotated = Rotated(["image", "label"])
    dataset = Transformed(lambda index: rotated({"image": index, "label": index}))
    assert_samples(dataset, [{"image": 10, "label": 10}, {"image": 11, "label": 11}])


def test_params_of_the_last_call() -> None:
    """As kornia's: `t(image)`, then `t(mask, params=t._params)`."""

    class Augmentation:
        _params: dict[str, int]

        def __call__(self, picture: int, params: dict[str, int] | None = None) -> int:
            self._params = {"shift": 10 * picture} if params is None else params
            return picture + self._params["shift"]

    class Pairs(TwoSamples):
        def __init__(self) -> None:
            super().__init__()
            self.t = Augmentation()

        def __getitem__(self, index: int) -> tuple[int, int]:
            with self.in_turn.storing(index):
                image = self.t(index + 1)
            with self.in_turn.reading(index):
                return image, self.t(index + 1, params=self.t._params)

    assert_samples(Pairs(), [(11, 11), (22, 22)])


def test_a_generator_that_is_a_class_attribute() -> None:
    """As MONAI's `Randomizable.R`, which all instances have in common."""

    class Randomizable:
        R = np.random.RandomState()

    class Crop(Randomizable):
        def __init__(self) -> None:
            self.in_turn = InTurn()

        def __call__(self, index: int) -> list[int]:
            with self.in_turn.storing(index):
                self.R.seed(index)
            with self.in_turn.reading(index):
                return self.R.randint(1000, size=3).tolist()

    wanted = [np.random.RandomState(index).randint(1000, size=3).tolist() for index in (0, 1)]
    assert_samples(Transformed(Crop()), wanted)


def test_a_called_instance_that_is_a_class_attribute() -> None:
    class Pictures(TwoSamples):
        transform = Drawing()

        def __getitem__(self, index: int) -> tuple[str, str]:
            return self.transform(index)

    assert_samples(Pictures(), DRAWN)


def test_a_setting_for_each_call() -> None:
    """As a tokenizer's, which is asked for two lengths: the setting is stored in it, then used."""

    class Tokenizer:
        def __init__(self) -> None:
            self.max_length: int | None = None

    class Texts(TwoSamples):
        def __init__(self) -> None:
            super().__init__()
            self.tokenizer = Tokenizer()

        def __getitem__(self, index: int) -> str:
            with self.in_turn.storing(index):
                self.tokenizer.max_length = 2 if index else 4
            with self.in_turn.reading(index):
                return "tokens"[: self.tokenizer.max_length]

    assert_samples(Texts(), ["toke", "to"])


def test_an_object_that_can_be_borrowed_once() -> None:
    """Like a tokenizer in Rust: a call during another call raises."""

    class Borrowed:
        def __init__(self) -> None:
            self.in_turn, self.borrowed = InTurn(), False

        def __call__(self, index: int) -> int:
            with self.in_turn.storing(index):
                if self.borrowed:
                    raise RuntimeError("Already borrowed")
                self.borrowed = True
            with self.in_turn.reading(index):
                self.borrowed = False
                return index

    assert_samples(Transformed(Borrowed()), [0, 1])


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


class CachedByName(TwoSamples):
    def __getitem__(self, index: int) -> int:
        with self.in_turn.storing(index):
            resize_for(224).size = 100 + index
        with self.in_turn.reading(index):
            return resize_for(224).size


def test_a_transform_made_by_a_cached_function_of_the_dataset() -> None:
    cached = functools.lru_cache(maxsize=None)(lambda size: Resize())
    assert_samples(Cached(cached), [100, 101])


def test_a_transform_made_by_a_cached_function_of_a_module() -> None:
    assert_samples(Cached(resize_for), [100, 101])


def test_a_transform_made_by_a_cached_function_used_by_name() -> None:
    assert_samples(CachedByName(), [100, 101])


# ---- where the transform is held ----


class Nested:
    """Holds a transform in containers."""

    def __init__(self, transform: Drawing) -> None:
        self.steps = {"train": [("turn", (transform,), {transform})]}

    def __call__(self, index: int) -> Any:
        (_, (transform,), also), *_ = self.steps["train"]
        assert also == {transform}
        return transform(index)


class Delegating:
    """A wrapper that asks what it wraps for all that it does not have."""

    def __init__(self, inner: Drawing) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, index: int) -> Any:
        return self.apply(index)


class Slotted:
    """Holds a transform in a slot."""

    __slots__ = ("__transform",)

    def __init__(self, transform: Drawing) -> None:
        self.__transform = transform

    def __call__(self, index: int) -> Any:
        return self.__transform(index)


def called(transform: Drawing, index: int) -> Any:
    return transform(index)


def in_a_closure(transform: Drawing) -> Callable[[int], Any]:
    def call(index: int) -> Any:
        return transform(index)

    return call


def in_a_keyword_default(given: Drawing) -> Callable[[int], Any]:
    def call(index: int, *, transform: Drawing = given) -> Any:
        return transform(index)

    return call


def in_an_attribute_of_a_function(given: Drawing) -> Callable[[int], Any]:
    def call(index: int) -> Any:
        return call.transform(index)  # type: ignore[attr-defined]

    call.transform = given  # type: ignore[attr-defined]
    return call


def behind_a_decorator(transform: Drawing) -> Callable[[int], Any]:
    @functools.wraps(transform.apply)
    def call(index: int) -> Any:
        return transform.apply(index)

    return call


def in_a_closure_of_a_method(transform: Drawing) -> Callable[[int], Any]:
    class Local:
        def __call__(self, index: int) -> Any:
            return transform(index)

    return Local()


HELD: dict[str, Callable[[Drawing], Callable[[int], Any]]] = {
    "attribute": lambda t: t,
    "lambda": lambda t: lambda index: t(index),
    "closure": in_a_closure,
    "closure in a closure": lambda t: in_a_closure(in_a_closure(t)),  # type: ignore[arg-type]
    "list in a closure": lambda t: (lambda steps: lambda index: steps[0](index))([t]),
    "default argument": lambda t: lambda index, t=t: t(index),
    "keyword default": in_a_keyword_default,
    "attribute of a function": in_an_attribute_of_a_function,
    "decorator": behind_a_decorator,
    "partial": lambda t: functools.partial(called, t),
    "partial with a keyword": lambda t: functools.partial(called, transform=t),
    "partial of a closure": lambda t: functools.partial(in_a_closure(t)),
    "partial in a partial": lambda t: functools.partial(functools.partial(called), t),
    "bound method": lambda t: t.apply,
    "bound __call__": lambda t: t.__call__,
    "bound method in lru_cache": lambda t: functools.lru_cache(maxsize=None)(t.apply),
    "closure in lru_cache": lambda t: functools.lru_cache(maxsize=8)(in_a_closure(t)),
    "nested container": Nested,
    "wrapper with __getattr__": Delegating,
    "slot": Slotted,
}
NO_KEYWORD = {"partial with a keyword"}  # a partial with `transform=t` is called with `index=`


def made(held: str) -> Callable[[int], Any]:
    transform = HELD[held](Drawing())
    if held in NO_KEYWORD:
        return lambda index: transform(index=index)  # type: ignore[call-arg]
    return transform


@pytest.mark.parametrize("held", HELD)
def test_a_transform_held_in(held: str) -> None:
    assert_samples(Transformed(made(held)), DRAWN)


# `copy.deepcopy` copies no function, and so nothing that a function holds.
FUNCTIONS = [
    "lambda",
    "closure",
    "closure in a closure",
    "list in a closure",
    "default argument",
    "keyword default",
    "attribute of a function",
    "decorator",
    "partial of a closure",
    "bound method in lru_cache",
    "closure in lru_cache",
]


@pytest.mark.parametrize("held", FUNCTIONS)
def test_a_transform_held_in_a_function_if_data_is_copied_too(held: str) -> None:
    assert_samples(Transformed(made(held)), DRAWN, copy_dataset=True)


def test_a_transform_that_a_method_of_a_local_class_closes_over() -> None:
    assert_samples(Transformed(in_a_closure_of_a_method(Drawing())), DRAWN)


def test_a_dataset_class_in_a_function() -> None:
    def dataset_with(transform: Drawing) -> TwoSamples:
        class Local(TwoSamples):
            def __getitem__(self, index: int) -> Any:
                return transform(index)

        return Local()

    assert_samples(dataset_with(Drawing()), DRAWN)


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
        return f"picture {self.i}"


def test_the_current_index() -> None:
    assert_samples(CurrentIndex(), ["picture 0", "picture 1"])


def test_the_current_indices() -> None:
    class CurrentIndices(TwoSamples):
        def __getitems__(self, indices: list[int]) -> list[int]:
            with self.in_turn.storing(indices[0]):
                self.indices = indices
            with self.in_turn.reading(indices[0]):
                return [10 * index for index in self.indices]

    assert_samples(CurrentIndices(), [[0], [10]], batch_size=1)


def test_the_current_index_of_a_counter_in_a_closure() -> None:
    def counter(in_turn: InTurn) -> Callable[[int], int]:
        current = -1

        def call(index: int) -> int:
            nonlocal current
            with in_turn.storing(index):
                current = index
            with in_turn.reading(index):
                return current

        return call

    assert_samples(Transformed(counter(InTurn())), [0, 1])


def test_the_current_index_behind_a_weak_reference_to_the_dataset() -> None:
    class Step:
        """Acts on the dataset that it belongs to, as a part of it."""

        def __init__(self, dataset: CurrentIndex) -> None:
            self.dataset = weakref.ref(dataset)

        def __call__(self, index: int) -> int:
            dataset: Any = self.dataset()
            dataset.i = index
            return index

    class Stepping(CurrentIndex):
        def __init__(self) -> None:
            super().__init__()
            self.step, self.i = Step(self), -1

        def __getitem__(self, index: int) -> str:
            with self.in_turn.storing(index):
                self.step(index)
            with self.in_turn.reading(index):
                return self.name()

    assert_samples(Stepping(), ["picture 0", "picture 1"])


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
            return [int(number) for number in self.read][:3]


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


def tensor_and_array() -> tuple[Any, Any]:
    t = torch.zeros(8)
    return t, t.numpy()


def bytes_and_memoryview() -> tuple[Any, Any]:
    raw = bytearray(8)
    return memoryview(raw), raw


def bytes_and_array() -> tuple[Any, Any]:
    raw = bytearray(8)
    return raw, np.frombuffer(raw, np.uint8)


def bytes_and_tensor() -> tuple[Any, Any]:
    raw = bytearray(8)
    return raw, torch.frombuffer(raw, dtype=torch.uint8)


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
    "array": lambda: same(np.zeros(3, int)),
    "array of 12 MiB": lambda: same(np.zeros(3 << 20, np.float32)),
    "tensor": lambda: same(torch.zeros(3)),
    "bytearray": lambda: same(bytearray(3)),
    "array.array": lambda: same(array.array("i", [0, 0, 0])),
    "two views of one array": lambda: with_a_view(np.zeros(16)),
    "two views of one tensor": lambda: with_a_view(torch.zeros(16)),
    "two views of one row": lambda: with_a_view(np.zeros((2, 16))[1]),
    "an array and a tensor of its memory": array_and_tensor,
    "a tensor and an array of its memory": tensor_and_array,
    "a memoryview and its bytearray": bytes_and_memoryview,
    "a bytearray and an array of its memory": bytes_and_array,
    "a bytearray and a tensor of its memory": bytes_and_tensor,
    "an array and a read-only view of it": read_only_view,
    "a parameter and its data": detached,
}


@pytest.mark.parametrize("kind", [Buffers, ReadFirst])
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer(name: str, kind: type[Buffers]) -> None:
    assert_samples(kind(*BUFFERS[name]()), [[100] * 3, [101] * 3])


def test_a_list_of_two_buffers_of_three_mebibytes() -> None:
    class Frames(TwoSamples):
        def __init__(self) -> None:
            super().__init__()
            self.buffers = [bytearray(3 << 20), bytearray(3 << 20)]

        def __getitem__(self, index: int) -> list[int]:
            with self.in_turn.storing(index):
                for buffer in self.buffers:
                    buffer[0] = 100 + index
            with self.in_turn.reading(index):
                return [buffer[0] for buffer in self.buffers]

    assert_samples(Frames(), [[100, 100], [101, 101]])


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


def test_a_transform_in_a_closure_of_an_iterable_dataset() -> None:
    class Stream(IterableDataset[Any]):
        def __init__(self, transform: Callable[[int], Any]) -> None:
            self.transform = transform

        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            assert worker is not None
            yield self.transform(worker.id)

    assert_samples(Stream(in_a_closure(Drawing())), DRAWN)


# ---- generators that a sample seeds ----


def test_a_random_state_seeded_by_file_name() -> None:
    """As fastMRI's mask function."""

    class Mask:
        def __init__(self) -> None:
            self.in_turn, self.rng = InTurn(), np.random.RandomState()

        def __call__(self, index: int) -> list[int]:
            with self.in_turn.storing(index):
                self.rng.seed(name_as_seed(index))
            with self.in_turn.reading(index):
                return self.rng.randint(1000, size=4).tolist()

    def name_as_seed(index: int) -> tuple[int, ...]:
        return tuple(map(ord, f"file{index}.h5"))

    wanted = [
        np.random.RandomState(name_as_seed(index)).randint(1000, size=4).tolist()
        for index in (0, 1)
    ]
    assert_samples(Transformed(Mask()), wanted)


SEEDED: dict[str, tuple[Callable[[], Any], Callable[[Any, int], Any], Callable[[Any], Any]]] = {
    "random.Random": (random.Random, lambda rng, seed: rng.seed(seed), lambda rng: rng.random()),
    "torch.Generator": (
        torch.Generator,
        lambda rng, seed: rng.manual_seed(seed),
        lambda rng: float(torch.rand(1, generator=rng)),
    ),
    "numpy.random.Generator": (
        np.random.default_rng,
        lambda rng, seed: setattr(
            rng.bit_generator, "state", np.random.default_rng(seed).bit_generator.state
        ),
        lambda rng: rng.random(),
    ),
}


@pytest.mark.parametrize("kind", SEEDED)
def test_a_generator_seeded_by_the_index(kind: str) -> None:
    make, seed, draw = SEEDED[kind]

    class Seeding(TwoSamples):
        def __init__(self) -> None:
            super().__init__()
            self.rng, self.draw = make(), draw

        def __getitem__(self, index: int) -> float:
            with self.in_turn.storing(index):
                seed(self.rng, index)
            with self.in_turn.reading(index):
                return self.draw(self.rng)  # type: ignore[no-any-return]

    wanted = []
    for index in (0, 1):
        rng = make()
        seed(rng, index)
        wanted.append(draw(rng))
    assert_samples(Seeding(), wanted)


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


def compressed(folder: Path, compress: Callable[[bytes], bytes]) -> Path:
    path = folder / "lines.compressed"
    path.write_bytes(compress(TEXT.encode()))
    return path


OPENED: dict[str, Callable[[Path], Any]] = {
    "text": lambda folder: open(plain(folder)),
    "binary": lambda folder: open(plain(folder), "rb"),
    "raw": lambda folder: open(plain(folder), "rb", buffering=0),
    "text over binary": lambda folder: io.TextIOWrapper(open(plain(folder), "rb")),
    "gzip": lambda folder: gzip.open(compressed(folder, gzip.compress)),
    "gzip text": lambda folder: gzip.open(compressed(folder, gzip.compress), "rt"),
    "bz2": lambda folder: bz2.open(compressed(folder, bz2.compress)),
    "bz2 text": lambda folder: bz2.open(compressed(folder, bz2.compress), "rt"),
    "lzma": lambda folder: lzma.open(compressed(folder, lzma.compress)),
    "lzma text": lambda folder: lzma.open(compressed(folder, lzma.compress), "rt"),
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


def test_a_text_file_opened_lazily(tmp_path: Path) -> None:
    class Lazy(Lines):
        def __init__(self, path: Path) -> None:
            super().__init__(None)
            self.path = path
            self.opened: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def __getitem__(self, index: int) -> str:
            with self.in_turn.storing(index):
                if self.file is None:
                    self.file = open(self.path)
                    self.opened.put(self.file)
                self.file.seek(self.places[index])
            with self.in_turn.reading(index):
                return self.file.readline().rstrip()  # type: ignore[no-any-return]

    dataset = Lazy(plain(tmp_path))
    try:
        assert_samples(dataset, WANTED)
        assert dataset.file is None
    finally:
        while not dataset.opened.empty():
            dataset.opened.get().close()


@pytest.mark.parametrize(
    "how", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"]
)
def test_a_member_of_a_zip_file_opened_early(how: int, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "lines.zip", "w", how) as archive:
        archive.writestr("lines.txt", TEXT)
    with zipfile.ZipFile(tmp_path / "lines.zip") as archive, archive.open("lines.txt") as member:
        assert_samples(Lines(member), WANTED)


def test_a_zip_file_opened_early(tmp_path: Path) -> None:
    """Its own file is at the place of a member, as in code that reads stored members by itself."""
    with zipfile.ZipFile(tmp_path / "lines.zip", "w") as archive:
        for line in WANTED:
            archive.writestr(line, line)

    class Members(TwoSamples):
        def __init__(self, archive: zipfile.ZipFile) -> None:
            super().__init__()
            self.archive = archive

        def __getitem__(self, index: int) -> str:
            info, file = self.archive.infolist()[index], self.archive.fp
            assert file is not None
            with self.in_turn.storing(index):
                file.seek(info.header_offset + 30 + len(info.filename))
            with self.in_turn.reading(index):
                return file.read(info.file_size).decode()

    with zipfile.ZipFile(tmp_path / "lines.zip") as archive:
        assert_samples(Members(archive), WANTED)
        assert [archive.read(line).decode() for line in WANTED] == WANTED


@pytest.mark.parametrize("mode", ["r:", "r:gz"])
def test_a_tar_file_opened_early(mode: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "lines.tar", mode.replace("r", "w")) as archive:
        for line in WANTED:
            info = tarfile.TarInfo(line)
            info.size = len(line)
            archive.addfile(info, io.BytesIO(line.encode()))

    class Members(TwoSamples):
        def __init__(self, archive: tarfile.TarFile) -> None:
            super().__init__()
            self.archive = archive

        def __getitem__(self, index: int) -> str:
            member, file = self.archive.getmember(WANTED[index]), self.archive.fileobj
            assert file is not None
            with self.in_turn.storing(index):
                file.seek(member.offset_data)
            with self.in_turn.reading(index):
                return file.read(member.size).decode()

    with tarfile.open(tmp_path / "lines.tar", mode) as archive:
        archive.getmembers()
        assert_samples(Members(archive), WANTED)


def test_a_clip_with_a_finalizer() -> None:
    """As SoundFile's: a position in an object that closes itself at its end."""

    class Clip:
        def __init__(self) -> None:
            self.position, self.open = 0, True

        def __del__(self) -> None:
            self.open = False

    class Clips(TwoSamples):
        def __init__(self, clip: Clip) -> None:
            super().__init__()
            self.clip = clip

        def __getitem__(self, index: int) -> str:
            with self.in_turn.storing(index):
                self.clip.position = PLACES[index]
            with self.in_turn.reading(index):
                assert self.clip.open
                return TEXT[self.clip.position :].split("\n")[0]

    clip = Clip()
    assert_samples(Clips(clip), WANTED)
    assert clip.open


@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
def test_a_database_opened_lazily(tmp_path: Path) -> None:
    """A connection of sqlite3 serves only the thread that made it."""
    with sqlite3.connect(tmp_path / "lines.db") as database:
        database.execute("create table lines (id integer primary key, line text)")
        database.executemany("insert into lines values (?, ?)", enumerate(WANTED))
    database.close()

    class Rows(TwoSamples):
        def __init__(self, path: Path) -> None:
            super().__init__()
            self.path = path
            self.database: sqlite3.Connection | None = None

        def __getitem__(self, index: int) -> str:
            with self.in_turn.storing(index):
                if self.database is None:
                    self.database = sqlite3.connect(self.path)
            with self.in_turn.reading(index):
                query = "select line from lines where id = ?"
                return self.database.execute(query, (index,)).fetchone()[0]  # type: ignore[no-any-return]

    assert_samples(Rows(tmp_path / "lines.db"), WANTED)
