"""Promises:
- Random numbers belong to the sample, for each row of the table of random numbers. Each is shown with a forced
  interleaving.
- Iterable datasets that partition by a draw all draw alike.
- Samples draw the documented numbers with `seed=None` too.

The first tests force an order between two workers, as tests/safety/test_state_is_copied.py does: one seeds, the
other seeds, the first draws, the second draws. Generators that workers share give the first sample the second's
draws. The others compare 0, 1, 2 and 8 workers, and look at what the loop's own thread draws.
"""

from __future__ import annotations

import functools
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from random import Random, randint, seed
from random import random as early_random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand
from numpy.random import randint as numpy_randint
from numpy.random import seed as numpy_seed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import fastload
from fastload.errors import SharedStateWarning
from fastload.safety import Survey, libraries
from tests.safety.test_state_is_copied import InTurn, TwoSamples, as_it_is

WORKERS = [0, 3]
SEED = 7
Draw = Callable[[], Any]


def two_samples(dataset: Any, **options: Any) -> list[Any]:
    """Return the samples 0 and 1, each read by a worker of its own. Warnings are errors here."""
    arguments = {"batch_size": None, "collate_fn": as_it_is, "num_workers": 2, **options}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with fastload.DataLoader(dataset, **arguments) as loader:
            got = list(loader)
    dataset.said = [str(warning.message) for warning in said]
    return got


# ---- two workers in a forced order ----


class SeededTwice(TwoSamples):
    """Draws for the image, seeds again, and draws for the mask: in each way in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = [(InTurn(), *way) for way in MODULE_DRAWS.values()]

    def __getitem__(self, index: int) -> list[Any]:
        pairs = []
        for in_turn, reseed, draw in self.turns:
            with in_turn.storing(index):
                reseed(index)
                image = draw()
                reseed(index)
            with in_turn.reading(index):
                pairs.append((image, draw()))
        return pairs


def shuffled(shuffle: Callable[[list[int]], None]) -> list[int]:
    numbers = list(range(50))
    shuffle(numbers)
    return numbers


# How a module is seeded, and how it draws: by its functions, by names imported early, through an object, in C.
MODULE_DRAWS: dict[str, tuple[Callable[[int], Any], Draw]] = {
    "random": (lambda n: random.seed(n), lambda: random.random()),
    "gauss": (lambda n: random.seed(n), lambda: random.gauss(0, 1)),
    "shuffle": (lambda n: random.seed(n), lambda: shuffled(random.shuffle)),
    "getrandbits": (lambda n: random.seed(n), lambda: random.getrandbits(64)),
    "early random": (lambda n: seed(n), lambda: (early_random(), randint(0, 1 << 40))),
    "held gauss": (random.seed, functools.partial(random.gauss, 0, 1)),
    "rand": (lambda n: np.random.seed(n), lambda: np.random.rand(3).tolist()),
    "randn": (lambda n: np.random.seed(n), lambda: np.random.randn(3).tolist()),
    "numpy's shuffle": (lambda n: np.random.seed(n), lambda: shuffled(np.random.shuffle)),
    "early rand": (
        lambda n: numpy_seed(n),
        lambda: (*rand(3).tolist(), int(numpy_randint(1 << 40))),
    ),
    "scipy's and scikit-learn's object": (np.random.seed, np.random.mtrand._rand.random_sample),
}


@pytest.mark.parametrize("loader_seed", [None, SEED])
def test_a_module_is_seeded_twice(loader_seed: int | None) -> None:
    """The pairs are those of a plain loop, and nothing is warned of."""
    dataset, wanted = SeededTwice(), []
    for index in (0, 1):
        wanted.append([])
        for reseed, draw in MODULE_DRAWS.values():
            reseed(index)
            wanted[-1].append((draw(),) * 2)
    assert all(one != other for one, other in zip(*wanted, strict=True)), "the draws tell nothing"
    assert two_samples(dataset, seed=loader_seed) == wanted
    assert dataset.said == []


# ---- generators that the dataset holds ----


class OfMine(Random):
    """A generator with a method and an attribute of its own."""

    sides = 1 << 40

    def roll(self) -> int:
        return self.randint(1, self.sides)


def torch_generator(value: int | None = None) -> torch.Generator:
    generator = torch.Generator()
    if value is None:
        generator.seed()
    else:
        generator.manual_seed(value)
    return generator


def bits(kind: type[Any]) -> Callable[..., np.random.Generator]:
    return lambda *seeds: np.random.Generator(kind(*seeds))


# How each kind is made with a seed and without one, and how it draws.
HELD: dict[str, tuple[Callable[..., Any], Callable[[Any], float]]] = {
    "RandomState": (np.random.RandomState, lambda rng: float(rng.rand())),
    "RandomState, normal": (np.random.RandomState, lambda rng: float(rng.randn())),
    "PCG64": (np.random.default_rng, lambda rng: float(rng.random())),
    "PCG64, 32 bits": (np.random.default_rng, lambda rng: int(rng.integers(1 << 32, dtype="u4"))),
    "Philox": (bits(np.random.Philox), lambda rng: float(rng.random())),
    "Random": (Random, lambda rng: float(rng.random())),
    "Random, gauss": (Random, lambda rng: float(rng.gauss(0, 1))),
    "subclass of Random": (OfMine, lambda rng: float(rng.roll())),
    "torch": (
        torch_generator,
        lambda rng: float(torch.randn(16, generator=rng, dtype=torch.float64).sum()),
    ),
}


class Held(Dataset[torch.Tensor]):
    """Samples of numbers that are drawn twice, from generators that are an attribute."""

    def __init__(self, rng: Any, draw: Callable[[Any], list[float]], length: int = 24) -> None:
        self.rng, self.draw, self.length = rng, draw, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.draw(self.rng) + self.draw(self.rng), dtype=torch.float64)


def draws_of_all(rngs: dict[str, Any]) -> list[float]:
    return [HELD[kind][1](rng) for kind, rng in rngs.items()]


def held(*seeds: int) -> Held:
    """Return a dataset that holds a generator of each kind."""
    return Held({kind: make(*seeds) for kind, (make, _) in HELD.items()}, draws_of_all)


class Draws(Held):
    """Samples of what a function draws."""

    def __init__(self, draw: Draw, length: int = 24) -> None:
        super().__init__(None, lambda _: [draw()], length)


def epochs(dataset: Any, workers: int, count: int = 2, **options: Any) -> list[list[Any]]:
    """Return the rows of `count` epochs, in their order."""
    options = {"batch_size": 4, "seed": SEED, **options}
    with fastload.DataLoader(dataset, num_workers=workers, **options) as loader:
        return [[tuple(row) for batch in loader for row in batch.tolist()] for _ in range(count)]


def assert_distinct(runs: list[list[Any]]) -> None:
    numbers = [number for rows in runs for row in rows for number in row]
    assert len(numbers) == len(set(numbers)) > 0


def equal_for_all_workers(make: Callable[[], Any]) -> list[list[Any]]:
    """Return the rows of two epochs after comparing the numbers of workers."""
    wanted = epochs(make(), 0)
    for workers in (1, 4):
        assert epochs(make(), workers) == wanted, f"{workers} workers"
    return wanted


class Concurrent(TwoSamples):
    """Two samples that draw twice each of each kind, one between the draws of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = [(InTurn(), make(1), draw) for make, draw in HELD.values()]

    def __getitem__(self, index: int) -> list[float]:
        drawn = []
        for in_turn, rng, draw in self.turns:
            with in_turn.storing(index):
                drawn.append(draw(rng))
            with in_turn.reading(index):
                drawn.append(draw(rng))
        return drawn


@pytest.mark.parametrize("loader_seed", [None, SEED])
def test_copies_draw_differently(loader_seed: int | None) -> None:
    dataset = Concurrent()
    assert_distinct([two_samples(dataset, copy_dataset="state", seed=loader_seed)])
    assert dataset.said == []


def test_a_held_generator_draws_the_same_for_any_number_of_workers() -> None:
    assert_distinct(equal_for_all_workers(held))


def test_with_a_seed_that_decides_and_the_state_of_a_held_generator_does_not_enter() -> None:
    rows = epochs(held(1), 2)
    assert rows == epochs(held(2), 2)
    assert_distinct([*rows, *epochs(held(1), 2, seed=SEED + 1)])


# ---- the two modules ----


def test_a_module_draws_the_same_for_any_number_of_workers() -> None:
    class Hashed(Draws):
        """Draws once in each way, and says of any draw a number."""

        def __getitem__(self, index: int) -> torch.Tensor:
            drawn = [repr(draw()).encode() for _, draw in MODULE_DRAWS.values()]
            return torch.tensor([zlib.crc32(one) + (zlib.adler32(one) << 31) for one in drawn])

    rows = equal_for_all_workers(lambda: Hashed(lambda: 0.0))
    columns = zip(*(row for epoch in rows for row in epoch), strict=True)
    assert [len(set(column)) for column in columns] == [48] * len(MODULE_DRAWS)


def states() -> Any:
    """Return the states of the loop's own thread, as values that can be compared."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, bytes(keys), *rest), torch.get_rng_state().tolist()  # type: ignore[union-attr]


# ---- iterable datasets ----


class Parts(IterableDataset[int]):
    """Each worker takes its part of what all workers draw alike."""

    def __init__(self, length: int = 40) -> None:
        self.length, self.epoch = length, 3

    def part(self) -> tuple[int, int]:
        info = get_worker_info()
        return (info.id, info.num_workers) if info else (0, 1)


def permuted(rng: Any, length: int) -> list[int]:
    if isinstance(rng, torch.Generator):
        return torch.randperm(length, generator=rng).tolist()  # type: ignore[no-any-return]
    if isinstance(rng, Random):
        return rng.sample(range(length), length)
    return rng.permutation(length).tolist()  # type: ignore[no-any-return]


class DecidedOneByOne(Parts):
    """A worker for each sample is drawn, between the samples that are yielded."""

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        worker, workers = self.part()
        for index in range(self.length):
            if permuted(self.rng, workers)[0] == worker:
                yield index


class ShuffledAlike(Parts):
    """The files are shuffled after a seed that all workers have, by both modules."""

    def __iter__(self) -> Iterator[int]:
        worker, workers = self.part()
        files = list(range(self.length))
        random.seed(self.epoch)
        random.shuffle(files)
        np.random.seed(self.epoch)
        yield from np.random.permutation(files).tolist()[worker::workers]


GENERATORS = {
    "RandomState": np.random.RandomState,
    "Generator": np.random.default_rng,
    "Random": Random,
    "torch": torch_generator,
}
PARTITIONS: dict[str, Callable[[], Parts]] = {
    **{k: lambda make=make: DecidedOneByOne(make()) for k, make in GENERATORS.items()},  # type: ignore[misc]
    "shuffled alike": ShuffledAlike,
}


@pytest.mark.parametrize(("workers", "loader_seed"), [(0, None), (3, None), (3, SEED)])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_workers_that_partition_by_drawing_alike(
    partition: str, workers: int, loader_seed: int | None
) -> None:
    """Nothing is lost or repeated, in each of two epochs."""
    dataset = PARTITIONS[partition]()
    with fastload.DataLoader(dataset, 2, num_workers=workers, seed=loader_seed) as loader:
        got = [sorted(torch.cat(list(loader)).tolist()) for _ in range(2)]
    assert got == [list(range(40))] * 2


# ---- without workers ----


def drawing_from_all() -> tuple[Any, Callable[[Any], list[float]]]:
    """Return a generator of each kind, and a function that draws of all and of both modules."""
    rngs = [make(4) for make in GENERATORS.values()]

    def draw(rngs: list[Any]) -> list[float]:
        state, generator, python, torchs = rngs
        drawn = state.randn() + generator.random() + python.gauss(0, 1) + random.gauss(0, 1)
        return [float(drawn + torch.rand((), generator=torchs) + np.random.randn() + rand())]

    return rngs, draw


def test_without_workers_and_seed_it_draws_as_a_plain_loop() -> None:
    def run(read: Callable[[Any], Any]) -> Any:
        random.seed(1)
        np.random.seed(1)
        return read(Held(*drawing_from_all())), random.random(), np.random.randn()

    plain = run(lambda dataset: [tuple(dataset[i].tolist()) for i in [*range(24)] * 2])
    rows = lambda dataset: [row for epoch in epochs(dataset, 0, seed=None) for row in epoch]  # noqa: E731
    assert run(rows) == plain


def states_of(rngs: list[Any]) -> Any:
    state, generator, python, torchs = rngs
    (kind, keys, *rest), bits = state.get_state(), generator.bit_generator.state
    return kind, keys.tolist(), rest, bits, python.getstate(), torchs.get_state().tolist()


@pytest.mark.parametrize("workers", WORKERS)
def test_the_user_s_generators_have_their_old_state_after_each_batch(workers: int) -> None:
    rngs, draw = drawing_from_all()
    for rng in (rngs[0], np.random):
        rng.randn()  # leaves a second number
    before, here = states_of(rngs), states()
    with fastload.DataLoader(Held(rngs, draw), 4, num_workers=workers, seed=SEED) as loader:
        seen = 0
        for _ in loader:
            assert states_of(rngs) == before
            assert states() == here
            seen += 1
    assert seen == 6


# ---- with workers and without a seed ----


def test_without_a_seed_the_user_s_seed_decides() -> None:
    """`RandomState(0)` draws the same run after run, and for 1 and more workers; RandomState(1) draws others."""
    wanted = epochs(held(0), 1, seed=None)
    torch.manual_seed(4)
    assert epochs(held(0), 3, seed=None) == wanted
    assert_distinct([*wanted, *epochs(held(1), 2, seed=None)])


# ---- the settings ----


class FromPython(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return random.random()


class FromNumPy(FromPython):
    def __getitem__(self, index: int) -> Any:
        return np.random.rand()


@pytest.mark.parametrize("kind", [FromPython, FromNumPy])
def test_a_module_that_is_turned_off_is_read_by_processes_and_named_in_threads(
    kind: type[FromPython], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_allowed", set())  # so that the code of this file is read
    dataset = kind()

    def plain(*chosen: str) -> bool:
        return Survey(dataset).code(chosen).plain

    assert plain("python", "numpy")
    assert not plain()
    with (
        fastload.DataLoader(
            dataset, num_workers=1, random_modules=(), worker_method="thread"
        ) as loader,
        pytest.warns(SharedStateWarning, match="draws from a global generator"),
    ):
        assert len([*loader]) == 8
