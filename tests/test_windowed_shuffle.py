"""Promises:
- A shuffle by windows is a permutation, a function of `(seed, epoch, position)`, and the same in all later versions.
- A shuffle by windows is sliced, shared among ranks and resumed. A state of another window is refused.
- A rank among thousands is not slowed down by the number of windows.
"""

from __future__ import annotations

import zlib
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastload
from fastload._kit.hashing import mix64
from fastload.errors import StateError
from fastload.order.sampler import RankSampler, permuted, permuted_by_window

SIZES = st.tuples(st.integers(1, 600), st.integers(1, 80), st.integers(1, 700)).map(
    lambda s: (s[0], min(s[1], s[2]), max(s[1], s[2]))
)  # length, run, window


@given(sizes=SIZES, key=st.integers(0, 2**64 - 1))
def test_every_key_gives_a_permutation_of_whole_runs_save_at_the_ends_of_windows(
    sizes: tuple[int, int, int], key: int
) -> None:
    """The bound that makes it worth its name: of the runs in a window all but three are whole.

    Cut are the one before, the one behind, and the last of the dataset is short.
    """
    n, run, window = sizes
    images = permuted_by_window(np.arange(n), n, key, window=window, run=run)
    assert sorted(images.tolist()) == list(range(n))
    for start in range(0, n, window):
        runs, counts = np.unique(images[start : start + window] // run, return_counts=True)
        assert (counts < run).sum() <= 3
        assert len(runs) <= window // run + 3


@given(
    sizes=SIZES,
    world=st.integers(1, 5),
    ends=st.sampled_from(["pad", "drop", "uneven"]),
    epoch=st.integers(0, 3),
)
def test_ranks_stride_through_one_order_and_resume_by_slicing(
    sizes: tuple[int, int, int], world: int, ends: Any, epoch: int
) -> None:
    n, run, window = sizes
    alone = RankSampler(n, rank=0, world_size=1, window=window, run=run, seed=5)
    alone.set_epoch(epoch)
    whole = list(alone)
    assert sorted(whole) == list(range(n))
    for rank in range(world):
        part = RankSampler(
            n, rank=rank, world_size=world, window=window, run=run, seed=5, ends=ends
        )
        part.set_epoch(epoch)
        expected = (whole * (world + 1))[rank : len(part) * world : world]
        assert list(part) == expected
        middle = len(part) // 2
        assert list(part.ordered(epoch, middle)) == expected[middle:]


@pytest.mark.parametrize(
    ("length", "world", "window", "run", "pinned"),
    [
        (50, 2, 1, 1, [2150992121, 2999706288]),
        (50, 2, 80, 3, [1705083328, 342949841]),
        (1000, 1, 64, 8, [939986888]),
        (1000, 7, 64, 10, [2043634219, 2586051415]),
        (9001, 4, 2, 1, [4117029206, 2017824192]),
        (100_003, 3, 5000, 7, [3000997362, 959613508]),
        (100_003, 1024, 1024, 16, [830082477, 1826027300]),
    ],
)
def test_the_orders_of_first_and_last_rank_are_the_same_for_ever(
    length: int, world: int, window: int, run: int, pinned: list[int]
) -> None:
    """As CRC-32: windows of both numbers of rounds, of one sample, longer than the dataset, many and few at a time.

    A change of these numbers changes every run that was started with a seed, and needs a new major version.
    """
    found = []
    for rank in sorted({0, world - 1}):
        sampler = RankSampler(length, rank=rank, world_size=world, seed=11, window=window, run=run)
        sampler.set_epoch(3)
        found.append(zlib.crc32(np.array(list(sampler), "<i8").tobytes()))
    assert found == pinned
    sampler = RankSampler(10**9, rank=3, world_size=8, seed=7, window=16384, run=256)
    sampler.set_epoch(2)
    assert sampler.indices(1000, 1004).tolist() == [364255426, 214406314, 2680678, 761506711]


def test_every_sample_is_equally_often_at_each_place() -> None:
    """Exactly so only where windows cut no run: there, chi-square of place by sample, over seeds."""
    n, keys = 18, 400
    counts = np.zeros((n, n))
    for s in range(keys):
        images = permuted_by_window(np.arange(n), n, mix64(s), window=9, run=3)
        counts[np.arange(n), images] += 1
    chi_square = float((((counts - keys / n) ** 2) / (keys / n)).sum())
    freedom = (n - 1) ** 2
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
    n, keys = 22, 300  # runs of 10, 10 and 2: the short one begins in window 0, 1 or 2
    slots = np.zeros(3)
    for s in range(keys):
        images = permuted_by_window(np.arange(n), n, mix64(s), window=10, run=10)
        slots[images.tolist().index(20) // 10] += 1
    assert np.abs(slots - keys / 3).max() < 5 * (keys * 2 / 9) ** 0.5


def loader(workers: int, world: int = 1, **sizes: Any) -> fastload.DataLoader[int]:
    sampler = RankSampler(100, rank=0, world_size=world, seed=3, **sizes)
    return fastload.DataLoader(
        range(100),  # type: ignore[arg-type]
        8 // world,
        sampler=sampler,
        num_workers=workers,
        collate_fn=list,
    )


def test_a_loader_resumes_in_the_middle_of_a_window_and_in_no_other() -> None:
    sizes = {"window": 30, "run": 5}
    with loader(2, **sizes) as first, loader(0, **sizes) as second:
        running = iter(first)
        taken = list(islice(running, 5))
        state = first.state_dict()
        second.load_state_dict(state)
        rest = list(second)
        assert rest == list(running)
        assert sorted(chain.from_iterable(taken + rest)) == list(range(100))
    with loader(0, 2, **sizes) as half:  # rank 0 of two, at the same global batch
        half.load_state_dict(state)
        assert list(half) == [batch[::2] for batch in rest]
    for other in ({}, {"window": 30, "run": 6}, {"window": 40, "run": 5}):
        with (
            loader(0, **other) as loaded,
            pytest.raises(StateError, match=r"(window|run): .*window and run"),
        ):
            loaded.load_state_dict(state)


def test_a_rank_among_many_goes_through_the_network_once_for_all_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has one position in each window: by one call for each, a sample takes a hundred times as long."""
    calls = []

    def counted(*arguments: Any) -> Any:
        calls.append(len(arguments[0]))
        return permuted(*arguments)

    monkeypatch.setattr("fastload.order.sampler.permuted", counted)
    sampler = RankSampler(10**9, rank=3, world_size=1024, window=1024, run=64)
    assert len(set(sampler.indices(0, 8192).tolist())) == 8192
    assert sorted(calls) == [0, 8192, 8192]  # the last window's, those of the others, that of runs
