"""Promises:
- A generator that the dataset holds is keyed for each sample by stream and place.
- Without workers, a generator that the dataset holds is put back bit for bit after each sample.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import MT19937, PCG64, PCG64DXSM, SFC64, BitGenerator, Philox, RandomState

from fastload._kit.hashing import mix64
from fastload.random.held import Keyed

HOOKED = [MT19937, PCG64, PCG64DXSM, Philox, SFC64]
PLACE = "dataset.transform.R"


class Counted(random.Random):
    """A user's own, with methods of its own."""

    draws = 0

    def seed(self, a: Any = None, version: int = 2) -> None:
        super().seed(0 if a is None else a * 2, version)

    def random(self) -> float:
        self.draws += 1
        return super().random()


class MyPCG64(PCG64):
    """A user's own bit generator."""


MAKERS: dict[str, Callable[[int], Any]] = {
    **{f"Generator-{k.__name__}": lambda s, k=k: np.random.Generator(k(s)) for k in HOOKED},
    **{f"RandomState-{k.__name__}": lambda s, k=k: RandomState(k(s)) for k in HOOKED},
    **{f"bare-{k.__name__}": lambda s, k=k: k(s) for k in HOOKED},
    "RandomState": RandomState,
    "Generator-MyPCG64": lambda s: np.random.Generator(MyPCG64(s)),
    "Random": random.Random,
    "Random-Counted": Counted,
    "torch": lambda s: torch.Generator().manual_seed(s),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], Any]:
    return MAKERS[request.param]


def one(g: Any) -> Any:
    """Draw once so that something is kept for the next draw: a normal number or half a word."""
    if isinstance(g, torch.Generator):
        return torch.randn((), generator=g, dtype=torch.float64).item()
    if isinstance(g, BitGenerator):
        return int(g.random_raw())
    if isinstance(g, random.Random):
        return g.gauss(0, 1)
    if isinstance(g, RandomState):
        return g.standard_normal()
    return int(g.integers(2**32, dtype=np.uint32))


def some(g: Any) -> tuple[Any, ...]:
    """Draw what would show something kept from a draw before, then more."""
    first = one(g)
    if isinstance(g, torch.Generator):
        return first, *torch.rand(4, generator=g).tolist()
    if isinstance(g, BitGenerator):
        return first, *g.random_raw(3).tolist()
    return first, one(g), g.random(), one(g)


def state(g: Any) -> str:
    """Return everything that a generator remembers."""
    if isinstance(g, torch.Generator):
        return str(g.get_state().tolist())
    if isinstance(g, random.Random):
        return repr(g.getstate())
    with np.printoptions(threshold=10**6):
        if isinstance(g, RandomState):
            return repr(g.get_state(legacy=False))
        return repr(g.bit_generator.state if isinstance(g, np.random.Generator) else g.state)


class Worker:
    """One worker that reads through its own copy."""

    def __init__(self, *generators: Any, places: tuple[str, ...] = (PLACE,), own: bool = False):
        self.generators = generators
        self.keyed = Keyed(list(zip(places, generators, strict=True)), own_state=own)

    def begin(self, key: int) -> Any:
        self.keyed.begin(mix64(key))
        return self.generators[0]

    def read(self, key: int) -> tuple[Any, ...]:
        return some(self.begin(key))


# ---- what is drawn for a sample ----


def test_numbers_owe_nothing_to_the_samples_before(make: Any) -> None:
    expected = {key: Worker(make(0)).read(key) for key in range(60)}
    worker = Worker(make(0))
    for key in range(60):
        assert worker.read(key) == expected[key]
        for _ in range(key % 4):  # an odd number leaves a normal number or half a word
            one(worker.generators[0])


def test_a_state_of_its_own_counts_if_asked_for(make: Any) -> None:
    def read(seed: int, place: str = PLACE) -> tuple[Any, ...]:
        return Worker(make(seed), places=(place,), own=True).read(5)

    assert read(1) == read(1)
    assert len({read(1), read(2), read(1, "dataset.other"), Worker(make(1)).read(5)}) == 4
    drawn_from = make(1)
    some(drawn_from)
    assert Worker(drawn_from, own=True).read(5) != read(1), "the state handed over counts"


FIRST = {
    "bare-MT19937": 2015779718,
    "bare-PCG64": 90054063744590220,
    "bare-PCG64DXSM": 14805491823582721312,
    "bare-Philox": 12147347662951409745,
    "bare-SFC64": 1703344319315212344,
    "Random": 1416854881,
    "torch": 1874111924,
}


@pytest.mark.parametrize("name", FIRST)
def test_the_numbers_are_equal_on_all_machines_and_in_all_versions(name: str) -> None:
    g = Worker(MAKERS[name](1)).begin(5)
    if name == "torch":
        drawn = int(torch.randint(1 << 31, (), generator=g))
    else:
        drawn = g.getrandbits(31) if name == "Random" else g.random_raw()
    assert drawn == FIRST[name]


# ---- what else refers to a generator ----


@pytest.mark.parametrize("kind", HOOKED)
@pytest.mark.parametrize("listed", ["both", "bit generator first", "the generator alone"])
def test_a_generator_and_its_bit_generator_are_one_stream(kind: Any, listed: str) -> None:
    def read(keys: list[int]) -> list[Any]:
        bits = kind(0)
        user = np.random.Generator(bits)
        pairs: list[tuple[str, Any]] = [(PLACE, user), ("dataset.bits", bits)]
        if listed == "bit generator first":
            pairs = [(PLACE, bits), ("dataset.user", user)]
        keyed = Keyed(pairs if listed != "the generator alone" else pairs[:1], own_state=False)
        for key in keys:
            keyed.begin(key)
            before = bits.state
            drawn = [user.random(), int(bits.random_raw())]
            bits.state = before  # as code does to draw the same for image and mask
            assert [user.random(), int(bits.random_raw())] == drawn
        return drawn

    alone = Worker(np.random.Generator(kind(3)))
    alone.keyed.begin(2)
    assert read([1, 2]) == read([2])
    assert read([2])[0] == alone.generators[0].random()


# ---- samples that seed ----


# ---- putting back ----


def primed(make: Callable[[int], Any]) -> Any:
    g = make(3)
    one(g)  # keeps a normal number or half a word
    return g


def test_restored_bit_for_bit(make: Any) -> None:
    g = primed(make)
    before, attributes = state(g), set(getattr(g, "__dict__", ()))
    bits = getattr(g, "_bit_generator", None)
    worker = Worker(g)
    worker.keyed.restore()
    assert state(g) == before
    worker.begin(1)
    worker.keyed.restore()
    assert state(g) == before
    drawn = []
    for key in 1, 2:
        for extra in range(2):
            drawn.append(worker.read(key))
            if extra:
                one(g)
            worker.begin(4)
            worker.keyed.restore()
            assert state(g) == before
            assert type(g) is type(make(0))
            assert getattr(g, "_bit_generator", None) is bits
            assert set(getattr(g, "__dict__", ())) == attributes
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    assert some(g) == some(primed(make))


def test_what_the_user_draws_between_two_samples_is_kept(make: Any) -> None:
    g, plain = primed(make), primed(make)
    worker = Worker(g)
    for key in range(3):
        worker.read(key)
        worker.keyed.restore()
        assert one(g) == one(plain)
