"""A dataset that keeps the sample at hand in itself: index, buffer, last record, seeded generator.

Eight workers give 2,048 right pairs. No library is needed: these are the forms of users' own code.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

from tests.compat.eight_workers import Pairs, filled, wrong_pairs


class ByIndex(Pairs):
    """The index is an attribute while a sample is made, and other methods read it."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.index = index
        return self.load(), self.target()

    def load(self) -> torch.Tensor:
        return filled(self.index)

    def target(self) -> torch.Tensor:
        return filled(self.index)


class Slotted(Pairs):
    """The same in slots."""

    __slots__ = ("index",)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.index = index
        return filled(self.index), self.target()

    def target(self) -> torch.Tensor:
        return filled(self.index)


class IntoABuffer(Pairs):
    """A sample is made in one buffer and copied out of it at the end."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(64, dtype=torch.int64)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.buffer.zero_()
        self.buffer += index
        return self.buffer.clone(), filled(index)


class IntoTwoViews(Pairs):
    """Two arrays are views of one buffer, in which the first is written and the second is read."""

    def __init__(self) -> None:
        self.buffer = np.zeros(128, np.int64)
        self.first, self.second = self.buffer[:64], self.buffer[64:]

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.first[:] = index
        self.second[:] = index
        return torch.from_numpy(self.buffer[:64].copy()), torch.from_numpy(self.second.copy())


class LastRecord(Pairs):
    """A cache of one record, which holds eight samples."""

    def __init__(self) -> None:
        self.key = -1
        self.record: Any = None

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index // 8 != self.key:
            self.key = index // 8
            self.record = filled(range(self.key * 8, self.key * 8 + 8)).reshape(8, 64)
        return self.record[index % 8], filled(index)


class Mirror:
    """A transform that decides once for image and mask, and remembers."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)
        self.flips: Any = None

    def draw(self) -> None:
        self.flips = self.generator.integers(2, size=3)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        for axis, flip in enumerate(self.flips):
            image = image.flip(axis) if flip else image
        return image


class Mirrored(Pairs):
    """Image and mask, mirrored alike."""

    def __init__(self, hold: Callable[[Mirror], Any]) -> None:
        self.draw, self.mirror = hold(Mirror())

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        cube = filled(index).reshape(4, 4, 4) + torch.arange(64).reshape(4, 4, 4)
        self.draw()
        return self.mirror(cube), self.mirror(cube)


def as_methods(mirror: Mirror) -> Any:
    return mirror.draw, mirror.__call__


def as_lambdas(mirror: Mirror) -> Any:
    return lambda: mirror.draw(), lambda image: mirror(image)


def as_partials(mirror: Mirror) -> Any:
    return functools.partial(Mirror.draw, mirror), functools.partial(Mirror.__call__, mirror)


def as_defaults(mirror: Mirror) -> Any:
    def draw(held: Mirror = mirror) -> None:
        held.draw()

    def flip(image: torch.Tensor, *, held: Mirror = mirror) -> torch.Tensor:
        return held(image)

    return draw, flip


@pytest.mark.parametrize("hold", [as_methods, as_lambdas, as_partials, as_defaults])
def test_two_functions_of_one_transform(hold: Callable[[Mirror], Any]) -> None:
    assert wrong_pairs(Mirrored(hold)) == 0


class Wrapped(Pairs):
    """A wrapper that hands on whatever it does not know."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.dataset.index = index
        return filled(self.index), filled(index)


class KnowsItsParts(Pairs):
    """The parts know the whole, by a reference and by a weak one."""

    def __init__(self) -> None:
        self.part = Part(self)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        self.index = index
        return self.part.strongly(), self.part.weakly()


class Part:
    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self.weak = weakref.ref(whole)

    def strongly(self) -> torch.Tensor:
        return filled(self.whole.index)

    def weakly(self) -> torch.Tensor:
        whole = self.weak()
        assert whole is not None
        return filled(whole.index)


class Masks(Pairs):
    """A mask drawn from a generator that is seeded by the name of the file, and put back."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState()

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        seed = zlib.crc32(b"file%d.h5" % (index % 50))
        with self.seeded(seed):
            offset = self.generator.randint(0, 8)
            mask = self.generator.uniform(size=64) + offset
        expected = np.random.RandomState(seed)
        offset = expected.randint(0, 8)
        return torch.from_numpy(mask), torch.from_numpy(expected.uniform(size=64) + offset)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        before = self.generator.get_state()
        self.generator.seed(seed)
        yield
        self.generator.set_state(before)


@pytest.mark.parametrize(
    "make",
    [
        *(ByIndex, Slotted, IntoABuffer, IntoTwoViews, LastRecord, KnowsItsParts, Masks),
        lambda: Wrapped(ByIndex()),
        lambda: ConcatDataset([Subset(ByIndex(), range(1_024))] * 2),
    ],
)
def test_state_of_its_own(make: Callable[[], Any]) -> None:
    assert wrong_pairs(make()) == 0


def test_state_of_a_collate_fn() -> None:
    class Collate:
        def __init__(self) -> None:
            self.rows = torch.zeros(8, 64, dtype=torch.int64)

        def __call__(self, items: list[tuple[Any, Any]]) -> tuple[Any, Any]:
            for row, (first, _) in zip(self.rows, items, strict=True):
                row[:] = first
            return self.rows.clone(), torch.stack([second for _, second in items])

    class Plain(Pairs):
        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return filled(index), filled(index)

    assert wrong_pairs(Plain(), collate_fn=Collate(), batch_size=8) == 0
