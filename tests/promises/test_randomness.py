"""Promises:
- What a sample draws is a pure function of seed, epoch, global position and index.
- The same seed gives bit-equal batches for 0, 1, 2 and 8 workers, under random delays too. Transforms of torchvision
  v1 and v2 need no change.
- Epochs, positions, repeats of an index and ranks draw different numbers.
- A sample draws the same numbers in a world of another size, and when it is read again.
- The random states of the main thread stay as they are. A `worker_init_fn` that seeds does no harm. See also
  `tests/random/test_torch_random.py`.
- A sample that calls `torch.manual_seed`, `set_rng_state` or `fork_rng` draws what it draws without a loader, and
  leaves the loop's random numbers alone.
- `random_stream` reproduces any sample and any batch, with `collate_fn` and `__getitems__` too.
- Every operator of torch that draws on the CPU is routed to the sample's stream or listed. See also
  `tests/random/test_torch_random.py`.
- In a sample `torch.initial_seed()`, `torch.get_rng_state()` and `get_worker_info().seed` have torch's types and
  ranges.
"""

from __future__ import annotations

import copy
import errno
import functools
import inspect
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
import torch.utils.data
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    default_collate,
    get_worker_info,
)

import fastload
from fastload._kit.torch_private import overload
from fastload.random import torch_random

SEED = 7


class Draws(Dataset[Any]):
    """(index, three numbers of torch's), `length` many."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return int(index), torch.rand(3, dtype=torch.float64)


class Calls(Draws):
    """(index, what `draw` gives)."""

    def __init__(self, length: int, draw: Callable[[], Any]) -> None:
        super().__init__(length)
        self.draw = draw

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return int(index), self.draw()


def same(a: Any, b: Any) -> bool:
    """Whether two batches are equal: types, dtypes, shapes and every bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def epochs(
    dataset: Any,
    *,
    count: int = 2,
    batch_size: int | None = 4,
    seed: int | None = SEED,
    **more: Any,
) -> list[list[Any]]:
    """The batches of the first epochs of a new loader."""
    with fastload.DataLoader(dataset, batch_size, seed=seed, **more) as loader:
        return [list(loader) for _ in range(count)]


def rows(epoch: list[Any]) -> list[tuple[float, ...]]:
    """What each sample of an epoch of `Draws` drew."""
    return [tuple(row) for _, drawn in epoch for row in drawn.tolist()]


def states() -> tuple[Any, Any, Any]:
    """The three global random states, comparable."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, keys.tolist(), *rest), torch.get_rng_state().tolist()


# Unmodified transforms.


def image_dataset(kind: str) -> Dataset[Any]:
    """Samples through torchvision's transforms of either generation; skips without torchvision."""
    pytest.importorskip("torchvision")
    if kind == "v1":
        from torchvision import transforms as T

        to_float = [T.ConvertImageDtype(torch.float32)]
    else:
        from torchvision.transforms import v2 as T

        to_float = [T.ToDtype(torch.float32, scale=True)]
    transform = T.Compose(
        [
            T.RandomResizedCrop(16, antialias=True),
            T.RandomHorizontalFlip(),
            T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            T.RandomAffine(20, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=5),
            T.GaussianBlur(3, sigma=(0.1, 2.0)),
            *to_float,
            T.RandomErasing(p=0.5),
        ]
    )
    source = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (20, 3, 24, 24), dtype=torch.uint8, generator=source)

    class Images(Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return transform(images[index]), index

    return Images()


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_torchvisions_transforms_give_the_same_for_any_number_of_workers(kind: str) -> None:
    """Without a seed, torch's decides."""
    dataset = image_dataset(kind)
    for seed in (SEED, None):

        def drawn(torchs: int, workers: int, seed: int | None = seed) -> list[list[Any]]:
            torch.manual_seed(torchs)
            return epochs(dataset, seed=seed, shuffle=True, num_workers=workers)

        serial = drawn(5, 0)
        assert not same(serial[0], serial[1])
        assert same(drawn(5, 2), serial)
        assert same(drawn(6, 2), serial) == (seed is not None)


class Late(Draws):
    """Draws before and after a delay that is another in each run."""

    def __init__(self, length: int, run: int) -> None:
        super().__init__(length)
        delays = random.Random(run)
        self.delays_s = [delays.choice([0.0, 0.0, 0.0005, 0.003]) for _ in range(length)]

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        first = torch.rand(2)
        time.sleep(self.delays_s[index])
        return index, torch.cat([first, torch.empty(1).uniform_(2, 3)])


def test_runs_under_injected_delays_are_bit_equal() -> None:
    """The delays are what is tested: they only vary the timing, nothing waits for them."""

    def collate(samples: list[Any]) -> Any:
        indices, drawn = default_collate(samples)
        time.sleep(0.001 * float(torch.rand(())))
        return indices, drawn, torch.randperm(len(indices)), torch.rand(1)

    options: dict[str, Any] = {"batch_size": 3, "shuffle": True, "collate_fn": collate}
    expected = epochs(Late(12, 0), **options)
    for run in range(1, 17):
        got = epochs(Late(12, run), num_workers=1 + run % 8, **options)
        assert same(got, expected), f"run {run}"


# What the streams depend on.


def test_epochs_positions_and_repeats_draw_differently() -> None:
    got = epochs(Draws(4), count=3, sampler=[0, 0, 1, 0, 1, 2], batch_size=2, num_workers=2)
    drawn = [row for epoch in got for row in rows(epoch)]
    assert len(set(drawn)) == 18
    assert len({number for row in drawn for number in row}) == 54


def test_numpy_and_torch_indices_draw_as_integers_do() -> None:
    plain = epochs(Draws(6), sampler=[3, 1, 5], batch_size=2)
    assert same(epochs(Draws(6), sampler=np.array([3, 1, 5]), batch_size=2), plain)
    assert same(epochs(Draws(6), sampler=[torch.tensor(k) for k in (3, 1, 5)], batch_size=2), plain)


def ranked(world: int, rank: int, length: int, batch: int, **more: Any) -> list[list[Any]]:
    sampler = fastload.RankSampler(length, rank=rank, world_size=world, seed=3)
    return epochs(Draws(length), batch_size=batch // world, sampler=sampler, **more)


def test_ranks_draw_differently_for_the_same_sample_at_the_same_step() -> None:
    """Padding repeats sample 0 on every rank."""
    drawn = [rows(ranked(4, rank, 1, 4)[0])[0] for rank in range(4)]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("world", [2, 4])
def test_a_sample_draws_the_same_in_another_world(world: int) -> None:
    alone = ranked(1, 0, 24, 8)
    ranks = [ranked(world, rank, 24, 8, num_workers=rank) for rank in range(world)]
    for epoch in range(2):
        parts = [rows(ranks[rank][epoch]) for rank in range(world)]
        assert [row for step in zip(*parts, strict=True) for row in step] == rows(alone[epoch])


def test_ranks_of_torchs_sampler_draw_differently() -> None:
    drawn = []
    for rank in range(2):
        sampler = DistributedSampler(range(24), num_replicas=2, rank=rank)
        drawn.append(set(rows(epochs(Draws(24), sampler=sampler)[0])))
    assert not drawn[0] & drawn[1]


ANY_INDEX = """
import fastload, torch
said = []
for index in (3, -1, 2**70, "a name", ("a", 1), b"raw", 2.5):
    with fastload.random_stream(seed=7, epoch=1, position=5, index=index):
        said.append(f"{torch.rand(2).tolist()} {fastload.sample_rng().random()}")
"""


@pytest.mark.slow  # another Python imports torch
def test_other_processes_draw_the_same() -> None:
    """Whatever the index is: Python's hash of a string is another in each process."""
    here: dict[str, Any] = {}
    exec(ANY_INDEX, here)
    assert len(set(here["said"])) == 7
    other_hashes = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    path = os.pathsep.join(filter(None, sys.path))
    there = subprocess.run(
        [sys.executable, "-c", f"{ANY_INDEX}\nprint(*said, sep='\\n')"],
        env={**os.environ, "PYTHONHASHSEED": other_hashes, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.splitlines() == here["said"]


# What the streams leave alone.


@pytest.mark.parametrize("workers", [0, 2])
def test_without_a_seed_torchs_state_moves_as_torchs_loader_moves_it(workers: int) -> None:
    """Two draws an epoch, in the loop's thread, whatever the samples draw."""

    def after(kind: Any, dataset: Any) -> list[tuple[Any, Any, Any]]:
        torch.manual_seed(11)
        seen = []
        loader = kind(dataset, batch_size=4, shuffle=True, num_workers=workers)
        for _ in range(2):
            list(loader)
            seen.append(states())
        return seen

    ours = after(fastload.DataLoader, Draws(24))
    assert ours == after(
        lambda *a, **k: torch.utils.data.DataLoader(*a, **{**k, "num_workers": 0}), range(24)
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_init_fn_that_seeds_changes_nothing(workers: int) -> None:
    def seed_everything(worker: int) -> None:
        random.seed(worker)
        np.random.seed(worker)
        torch.manual_seed(worker)

    expected = epochs(Draws(24), shuffle=True)
    before = states()
    got = epochs(Draws(24), shuffle=True, num_workers=workers, worker_init_fn=seed_everything)
    assert states() == before
    assert same(got, expected)


# What a user calls.


def test_outside_the_generator_is_torchs_own() -> None:
    assert fastload.sample_generator() is torch.default_generator
    torch.manual_seed(4)
    one = fastload.sample_rng().random()
    torch.manual_seed(4)
    assert fastload.sample_rng().random() == one
    assert fastload.sample_rng().random() != one


def test_torchs_functions_and_the_generator_draw_out_of_one_stream() -> None:
    with fastload.random_stream(seed=1, epoch=0, position=0, index=0):
        mixed = [torch.rand(1), torch.rand(1, generator=fastload.sample_generator()), torch.rand(1)]
    with fastload.random_stream(seed=1, epoch=0, position=0, index=0):
        plain = [torch.rand(1), torch.rand(1), torch.rand(1)]
    assert same(mixed, plain)


def test_each_part_of_a_streams_name_matters() -> None:
    base: dict[str, Any] = {"seed": 1, "epoch": 2, "position": 3, "index": 4, "batch": False}
    others = [{"seed": 9}, {"epoch": 9}, {"position": 9}, {"index": 9}, {"batch": True}]
    drawn = set()
    for change in [{}, *others, {"seed": 2, "epoch": 1}, {"position": 4, "index": 3}]:
        with fastload.random_stream(**{**base, **change}):
            drawn.add((*torch.rand(2).tolist(), fastload.sample_rng().random()))
    assert len(drawn) == 8
    assert len({numbers[2] for numbers in drawn}) == 8


def test_a_stream_inside_a_stream_leaves_the_outer_one_where_it_was() -> None:
    outer: dict[str, Any] = {"seed": 1, "epoch": 0, "position": 0, "index": 0}
    with fastload.random_stream(**outer):
        expected = torch.rand(4)
    with fastload.random_stream(**outer):
        first = torch.rand(2)
        with pytest.raises(KeyError), fastload.random_stream(**{**outer, "index": 1}):
            torch.rand(5)
            raise KeyError
        second = torch.rand(2)
    assert torch.equal(torch.cat([first, second]), expected)
    assert fastload.sample_generator() is torch.default_generator


def test_a_stream_is_its_threads_own() -> None:
    found: list[Any] = []
    with fastload.random_stream(seed=1, epoch=0, position=0, index=0):
        thread = threading.Thread(target=lambda: found.append(fastload.sample_generator()))
        thread.start()
        thread.join()
    assert found == [torch.default_generator]


def mixup(samples: list[Any]) -> Any:
    images, labels = default_collate(samples)
    share = torch.distributions.Beta(0.4, 0.4).sample()
    order = torch.randperm(len(images))
    return images.lerp(images[order], share), labels, order, fastload.sample_rng().random()


@pytest.mark.parametrize(("world", "rank", "workers"), [(1, 0, 3), (2, 1, 0), (4, 2, 3)])
def test_a_serial_loop_reproduces_any_batch(world: int, rank: int, workers: int) -> None:
    dataset = image_dataset("v2")
    sampler = fastload.RankSampler(20, rank=rank, world_size=world, seed=3)
    options: dict[str, Any] = {"sampler": sampler, "batch_size": 4, "collate_fn": mixup}
    got = epochs(dataset, num_workers=workers, **options)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        indices = list(sampler)
        for number, batch in enumerate(got[epoch]):
            first = 4 * number
            samples = []
            for k, index in enumerate(indices[first : first + 4], first):
                at = k * world + rank
                with fastload.random_stream(seed=SEED, epoch=epoch, position=at, index=index):
                    samples.append(dataset[index])
            with fastload.random_stream(
                seed=SEED,
                epoch=epoch,
                position=first * world + rank,
                index=indices[first],
                batch=True,
            ):
                assert same(batch, mixup(samples)), (epoch, number)


class Whole(Draws):
    """Reads a batch in one call, and draws for it."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        shift = torch.rand(3)
        return [(index, torch.rand(3) + shift) for index in indices]


def noisy(samples: list[Any]) -> Any:
    return default_collate(samples), torch.rand(3)


@pytest.mark.parametrize("collate", [None, noisy], ids=["default", "own"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_serial_loop_reproduces_batches_read_in_one_call(workers: int, collate: Any) -> None:
    """Reading and collating draw one after the other out of the batch's stream."""
    dataset = Whole(20)
    indices = list(range(19, -1, -1))
    got = epochs(dataset, sampler=indices, collate_fn=collate, num_workers=workers)
    for epoch in range(2):
        for number, batch in enumerate(got[epoch]):
            part = indices[4 * number : 4 * number + 4]
            with fastload.random_stream(
                seed=SEED, epoch=epoch, position=4 * number, index=part[0], batch=True
            ):
                expected = (collate or default_collate)(dataset.__getitems__(part))
            assert same(batch, expected), (epoch, number)


# Errors and other orders.


class Flaky(Draws):
    """Draws, and then fails the first time for the samples in `failing`."""

    def __init__(self, length: int, failing: set[int], error: BaseException) -> None:
        super().__init__(length)
        self.failing = set(failing)
        self.error = error
        self.held = np.random.default_rng(1), random.Random(1), torch.Generator().manual_seed(1)

    def others(self) -> float:
        """Return a draw from the modules and from the generators that the dataset holds."""
        new, python, torchs = self.held
        drawn = new.normal() + python.gauss(0, 1) + torch.rand((), generator=torchs).item()
        return float(drawn + random.gauss(0, 1) + np.random.randn())

    def __getitem__(self, index: int) -> Any:
        drawn = super().__getitem__(index), fastload.sample_rng().random() + self.others()
        if index in self.failing:
            self.failing.discard(index)
            random.seed(9)
            np.random.seed(9)
            raise copy.copy(self.error)
        return *drawn[0], torch.rand(2), drawn[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_is_read_again_draws_the_same(workers: int) -> None:
    error = OSError(errno.EIO, "simulated")
    options: dict[str, Any] = {"copy_dataset": "state"}  # if shared, held generators are not keyed
    expected = epochs(Flaky(12, set(), error), count=1, **options)
    options |= {"retries": 2, "num_workers": workers}
    got = epochs(Flaky(12, {0, 6, 11}, error), count=1, **options)
    assert same(got, expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_is_skipped_changes_no_other(workers: int) -> None:
    whole = dict(zip(range(12), rows(epochs(Draws(12), count=1)[0]), strict=True))
    failing = Flaky(12, {1, 6}, ValueError("simulated"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that samples are skipped is told in a warning
        got = epochs(failing, count=1, on_error="skip", num_workers=workers)[0]
    kept = {
        int(i): tuple(row)
        for batch in got
        for i, row in zip(batch[0], batch[1].tolist(), strict=True)
    }
    assert kept == {index: row for index, row in whole.items() if index not in (1, 6)}


class Uneven(Draws):
    """Samples that draw by `random`: nothing, once, twice with a part of another thread's, much, or fail after that."""

    def __getitem__(self, index: int) -> Any:
        kind = index % 5
        drawn = [] if kind == 0 else [random.random()]
        if kind == 2:
            other = threading.Thread(target=lambda: [random.random(), random.shuffle([1, 2, 3])])
            other.start()
            other.join()
            drawn.append(random.randint(0, 10**9))
        elif kind > 2:
            drawn += [*random.sample(range(1_000), 300), random.gauss(0, 1)]
            random.setstate(random.getstate())
            drawn += [random.gauss(0, 1), random.choices(range(9), k=400)]
        if index == 14:
            raise ValueError("simulated")
        return index, drawn


def drawing_list(samples: list[Any]) -> Any:
    return samples, random.random() if samples[0][0] % 2 else None


@pytest.mark.filterwarnings("ignore:.*on_error")
@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 2, "worker_method": "thread"},
        {"num_workers": 2, "worker_method": "process"},
        {"num_workers": 2, "worker_method": "process", "worker_processes": 1},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_python_s_draws_are_those_of_the_sample_s_own_stream(workers: dict[str, Any]) -> None:
    """Whatever the thread drew before, in samples, in `collate_fn` or before an error."""
    dataset = Uneven(20)
    got = epochs(dataset, count=1, collate_fn=drawing_list, on_error="skip", **workers)[0]
    for number, batch in enumerate(got):
        samples, first = [], 4 * number
        for index in {*range(first, first + 4)} - {14}:
            with fastload.random_stream(seed=SEED, epoch=0, position=index, index=index):
                samples.append(dataset[index])
        with fastload.random_stream(seed=SEED, epoch=0, position=first, index=first, batch=True):
            assert batch == drawing_list(samples)


# Torch's random functions.


def half() -> torch.Tensor:
    return torch.full((64,), 0.5)


def square() -> torch.Tensor:
    return torch.zeros(16, 16)


FIRST_ARGUMENTS: dict[Any, Callable[[], tuple[Any, ...]]] = {
    torch.bernoulli: lambda: (half(),),
    torch.binomial: lambda: (torch.full((64,), 40.0), half()),
    torch.multinomial: lambda: (torch.ones(64), 32),
    torch.normal: lambda: (half(), 1.0),
    torch.poisson: lambda: (torch.full((64,), 50.0),),
    torch.rand: lambda: (64,),
    torch.randint: lambda: (1000, (64,)),
    torch.randn: lambda: (64,),
    torch.randperm: lambda: (64,),
    torch.rrelu: lambda: (-half(), 0.1, 0.3, True),
    torch.rrelu_: lambda: (-half(), 0.1, 0.3, True),
    torch._sample_dirichlet: lambda: (torch.ones(8, 4),),
    torch._standard_gamma: lambda: (half(),),
    torch.Tensor.bernoulli: lambda: (half(),),
    torch.Tensor.bernoulli_: lambda: (half(), 0.5),
    torch.Tensor.cauchy_: lambda: (half(),),
    torch.Tensor.exponential_: lambda: (half(),),
    torch.Tensor.geometric_: lambda: (half(), 0.1),
    torch.Tensor.log_normal_: lambda: (half(),),
    torch.Tensor.multinomial: lambda: (torch.ones(64), 32),
    torch.Tensor.normal_: lambda: (half(),),
    torch.Tensor.random_: lambda: (half(),),
    torch.Tensor.uniform_: lambda: (half(),),
    nn.init.normal_: lambda: (square(),),
    nn.init.sparse_: lambda: (square(), 0.5),
    nn.init.uniform_: lambda: (square(),),
    torch.rand_like: lambda: (half(),),
    torch.randn_like: lambda: (half(),),
    torch.randint_like: lambda: (half(), 1000),
}

FORMS: dict[str, Callable[[], Any]] = {
    "rand, out": lambda: torch.rand(64, out=torch.empty(64)),
    "randint, low and high": lambda: torch.randint(5, 1000, (64,)),
    "normal, mean and std tensors": lambda: torch.normal(half(), half()),
    "normal, size": lambda: torch.normal(0.0, 1.0, (64,)),
    "bernoulli_, tensor": lambda: torch.empty(64).bernoulli_(half()),
    "random_, to": lambda: half().random_(1000),
    "rand_like, dtype": lambda: torch.rand_like(
        torch.zeros(64, dtype=torch.int32), dtype=torch.float64
    ),
    "rand_like, channels last": lambda: torch.rand_like(
        torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    ),
    "subclass": lambda: torch.rand_like(nn.Parameter(half())),
    # Without an argument for a generator.
    "dropout": lambda: functional.dropout(square()[0] + 1),
    "native_dropout": lambda: torch.native_dropout(torch.ones(64), 0.5, True)[0],
    "attention": lambda: functional.scaled_dot_product_attention(
        *[torch.linspace(0, 1, 64).view(1, 8, 8)] * 3, dropout_p=0.5
    ),
    # Not by a function of the module `torch`.
    "torch.ops, functional": lambda: torch.ops.aten.uniform(half()),
    "held": functools.partial(torch.randn, 64),
    "inference mode": torch.inference_mode()(lambda: torch.rand(64).clone()),
}


def name_of(func: Any) -> str:
    owner = getattr(func, "__objclass__", None) or inspect.getmodule(func)
    return f"{getattr(owner, '__name__', 'torch')}.{func.__name__}"


FUNCTIONS: dict[str, Callable[[], Any]] = {
    **{
        name_of(func): lambda func=func, arguments=arguments: func(*arguments())
        for func, arguments in FIRST_ARGUMENTS.items()
    },
    **FORMS,
}


def test_a_random_function_draws_from_the_stream(subtests: pytest.Subtests) -> None:
    def drawn(function: Callable[[], Any], index: int) -> torch.Tensor:
        with fastload.random_stream(seed=1, epoch=0, position=0, index=index):
            return function()  # type: ignore[no-any-return]

    for name, function in FUNCTIONS.items():
        with subtests.test(name):
            torch.manual_seed(0)
            before = states()
            one = drawn(function, 0)
            torch.manual_seed(99)
            assert same(drawn(function, 0), one)
            assert not torch.equal(drawn(function, 1), one)
            torch.manual_seed(0)
            assert states() == before


def test_a_random_function_draws_what_torch_draws_of_that_generator(
    subtests: pytest.Subtests,
) -> None:
    """Value for value, with torch's dtype and layout: a stream changes only where numbers come from."""
    for name, function in FUNCTIONS.items():
        with subtests.test(name):
            with fastload.random_stream(seed=1, epoch=0, position=0, index=0):
                state = fastload.sample_generator().get_state()
                got = function()
                ended = fastload.sample_generator().get_state()
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(state)
                expected = function()
                assert torch.equal(torch.get_rng_state(), ended)
            assert same(got, expected)
            assert got.stride() == expected.stride()
            assert (got.requires_grad, type(got)) == (expected.requires_grad, type(expected))


BY_POSITION = [torch.binomial, torch.poisson, torch.rrelu, torch.rrelu_]
BY_POSITION += [torch._sample_dirichlet, torch._standard_gamma]


def test_a_generator_that_is_given_is_respected(subtests: pytest.Subtests) -> None:
    def drawn(func: Any, by_position: bool) -> torch.Tensor:
        given, arguments = torch.Generator().manual_seed(3), FIRST_ARGUMENTS[func]()
        if by_position:
            return func(*arguments, given)  # type: ignore[no-any-return]
        return func(*arguments, generator=given)  # type: ignore[no-any-return]

    # Torch hands on that of `sparse_` for the values only, and picks the rows from the global state.
    by_name = [(func, False) for func in FIRST_ARGUMENTS if func is not nn.init.sparse_]
    for func, by_position in (*by_name, *((func, True) for func in BY_POSITION)):
        with subtests.test(name_of(func), by_position=by_position):
            try:
                expected = drawn(func, by_position)
            except TypeError:
                assert "_like" in func.__name__, "in torch versions where these take none"
                continue
            with fastload.random_stream(seed=1, epoch=0, position=0, index=0):
                state = fastload.sample_generator().get_state()
                assert torch.equal(drawn(func, by_position), expected)
                assert torch.equal(fastload.sample_generator().get_state(), state)


def test_other_devices_are_left_alone() -> None:
    meta = torch.empty(3, device="meta")
    with fastload.random_stream(seed=1, epoch=0, position=0, index=0):
        state = fastload.sample_generator().get_state()
        made = [torch.rand(3, device="meta"), meta.uniform_(), torch.rand_like(meta)]
        made += [functional.dropout(meta), torch.rand_like(half(), device="meta")]
        assert {tensor.device.type for tensor in made} == {"meta"}
        assert torch.equal(fastload.sample_generator().get_state(), state)


def operators() -> list[Any]:
    """Every operator of torch's that draws, or that has an argument for a generator."""
    found = []
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        operator = overload(name) if namespace == "aten" else None
        if operator is not None and (
            torch.Tag.nondeterministic_seeded in operator.tags
            or any(argument.name == "generator" for argument in operator._schema.arguments)
        ):
            found.append(operator)
    return found


WITH_REASON = {
    "aten::_fused_sdp_choice": "it draws nothing",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "it refuses to drop anything",
}


def test_every_operator_of_torch_that_draws_on_the_cpu_is_routed_or_has_a_reason() -> None:
    found = [o for o in operators() if o.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)]
    assert len(found) > 25, "torch no longer says which operators draw"
    routed = [overload(name) for name in torch_random.kernels()]
    assert {o.name() for o in found if o not in routed} <= set(WITH_REASON)


def test_what_is_routed_draws() -> None:
    every = operators()
    assert len(torch_random.kernels()) > 50
    assert [name for name in torch_random.kernels() if overload(name) not in every] == []


# ---- samples that seed ----


class Seeding(Dataset[Any]):
    """Crops an image and its mask alike, in the three ways that people do it."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        torch.manual_seed(index)
        image = torch.rand(2)
        torch.manual_seed(index)
        mask = torch.rand(2)
        state = torch.get_rng_state()
        second = torch.rand(2)
        torch.set_rng_state(state)
        with torch.random.fork_rng(devices=[]):
            torch.random.manual_seed(3)
            forked = torch.rand(1, generator=torch.default_generator)
        return image, mask, second, torch.rand(2), forked, torch.initial_seed()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_seeds_draws_what_it_draws_without_a_loader(workers: int) -> None:
    expected = list(DataLoader(Seeding(), None))
    before = torch.get_rng_state()
    with fastload.DataLoader(Seeding(), None, num_workers=workers, seed=1) as loader:
        got = list(loader)
    assert torch.equal(torch.get_rng_state(), before), "the loop was seeded"
    for theirs, ours in zip(expected, got, strict=True):
        assert torch.equal(ours[0], ours[1])
        assert torch.equal(ours[2], ours[3])
        assert ours[5] == theirs[5]
        assert all(torch.equal(a, b) for a, b in zip(theirs[:5], ours[:5], strict=True))


def test_a_sample_that_seeds_at_random_is_another_each_time_and_seeds_nobody_else() -> None:
    before = torch.get_rng_state()
    seeds = set()
    for _ in range(2):
        with fastload.random_stream(seed=1, epoch=0, position=0, index=0):
            seeds.add(torch.seed())
    assert len(seeds) == 2
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.seed() == torch.initial_seed() == torch.default_generator.initial_seed()
    assert not torch.equal(torch.get_rng_state(), before)


# What a worker of torch answers.


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("workers", "seed"), [(2, None), (0, 0), (2, 2**64 - 1)])
def test_what_torch_says_of_seeds_in_a_sample_has_torchs_types_and_ranges(
    workers: int, seed: int | None
) -> None:
    def answers() -> tuple[Any, ...]:
        info = get_worker_info()
        return torch.initial_seed(), torch.get_rng_state(), info and info.seed

    def check(found: tuple[Any, ...], has_info: bool) -> None:
        initial, state, of_worker = found
        assert type(initial) is int
        assert int(torch.tensor(initial)) == initial >= 0
        assert (state.dtype, state.shape) == (torch.uint8, torch.Size([5056]))
        torch.set_rng_state(state)
        if has_info:
            assert type(of_worker) is int
            assert int(torch.tensor(of_worker)) == of_worker >= 0

    options = {"batch_size": None, "collate_fn": lambda sample: sample}
    loader = fastload.DataLoader(Calls(64, answers), num_workers=workers, seed=seed, **options)
    samples = [found for _, found in loader]
    for found in samples:
        check(found, bool(workers))
    if workers or seed is not None:
        assert len({initial for initial, _, _ in samples}) == 64
    (theirs,) = DataLoader(Calls(1, answers), num_workers=1, **options)
    check(theirs[1], True)
