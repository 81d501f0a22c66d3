"""Promises:
- A mixture gives each source its share of every global batch.
- No sample of a source comes twice before all of it came once. It then repeats, ends the epoch or drops out.
- Weights may be a schedule. Other weights hold from a state on.
- Sources can be added or removed after a state: those that stay continue, new ones begin.
- Packed rows of any sources fit into one batch by default. A mixture refuses rows that do not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset

import fastload
from fastload.errors import StateError
from fastload.sequences import Mixture, Packed, TokenWindows
from tests.fakes import Numbers

WEIGHTS = {"a": 3.0, "b": 6.0, "c": 1.0}
LENGTHS = {"a": 50, "b": 31, "c": 7}
BEGINS = {"a": 0, "b": 50, "c": 81}


class Named(Numbers):
    set_id = "another set"


def mixture(
    weights: Any = None, sources: Any = LENGTHS, size: int | None = 10, **options: Any
) -> Mixture:
    return Mixture(sources, weights=weights or WEIGHTS, seed=3, global_batch=size, **options)


def sources_of(indices: list[int]) -> str:
    return "".join("a" if index < 50 else "b" if index < 81 else "c" for index in indices)


def batches(mixed: Mixture, epoch: int = 0, size: int = 10) -> list[list[int]]:
    indices = [*mixed.ordered(epoch)]
    assert len(indices) % size == 0
    return [indices[k : k + size] for k in range(0, len(indices), size)]


def test_whole_shares_are_the_same_in_every_global_batch() -> None:
    for batch in batches(mixture(epoch_samples=500)):
        assert Counter(sources_of(batch)) == {"a": 3, "b": 6, "c": 1}


@given(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any), st.integers(1, 40))
def test_quotas_are_rounded_and_exact_in_the_long_run(weights: list[int], size: int) -> None:
    shares = np.array(weights) / sum(weights)
    mixed = mixture(dict(zip("abc", weights, strict=True)), size=size, epoch_samples=64 * size)
    ordered = batches(mixed, size=size)
    counts = np.array([[sources_of(batch).count(name) for name in "abc"] for batch in ordered])
    assert (np.abs(counts - size * shares) < 1 + 1e-9).all(), "in each global batch"
    assert (np.abs(counts.cumsum(0) - np.arange(1, 65)[:, None] * size * shares) < 4).all()


@pytest.mark.parametrize("on_exhausted", ["repeat", "stop", "drop"])
def test_no_sample_comes_twice_before_all_of_its_source_came_once(on_exhausted: Any) -> None:
    mixed, seen = mixture(on_exhausted=on_exhausted), np.zeros(88, int)
    for epoch in range(4):
        for batch in batches(mixed, epoch):
            np.add.at(seen, batch, 1)
            for name, begin in BEGINS.items():
                part = seen[begin : begin + LENGTHS[name]]
                assert part.max() - part.min() <= 1
        given_now = {name: int(seen[b : b + LENGTHS[name]].sum()) for name, b in BEGINS.items()}
        assert mixed.seen(int(seen.sum()) // 10) == given_now
    assert mixed.epochs(int(seen.sum()) // 10)["c"] == given_now["c"] / 7


def test_an_epoch_ends_as_exhausted_sources_say() -> None:
    one_ends = batches(mixture(on_exhausted="stop"))
    assert len(one_ends) == 6, "31 of b, 6 in each batch: the sixth batch exhausts it"
    whole = Counter(index for batch in batches(mixture(on_exhausted="drop")) for index in batch)
    assert whole.keys() == set(range(88)), "every sample at least once"
    assert sum(whole.values()) == 90 or sum(whole.values()) == 100
    assert len(mixture(epoch_samples=41)) == 50, "rounded up to whole global batches"


def test_orders_of_a_source_differ_from_epoch_to_epoch_and_not_with_its_neighbours() -> None:
    alone = [*mixture({"b": 1}, {"b": 31}, size=31, epoch_samples=62).ordered(0)]
    assert sorted(alone[:31]) == sorted(alone[31:]) == [*range(31)]
    assert alone[:31] != alone[31:]
    plain = [*mixture({"b": 1}, {"b": 4}, size=1, shuffle=False).ordered(0)]
    assert plain == [0, 1, 2, 3]


def test_a_schedule_is_a_function_of_the_global_step_over_all_epochs() -> None:
    only = {name: {other: float(other == name) for other in "abc"} for name in "abc"}
    steps = {0: only["a"], 3: only["b"], 12: only["c"]}

    def function(step: int) -> dict[str, float]:
        return only["a" if step < 3 else "b" if step < 12 else "c"]

    for schedule in (steps, function):
        mixed = mixture(schedule, epoch_samples=80)
        shown = [sources_of(batch)[0] for epoch in (0, 1) for batch in batches(mixed, epoch)]
        assert "".join(shown) == "aaabbbbb" + "bbbbcccc"


def state_after(count: int, mixed: Mixture, **options: Any) -> dict[str, Any]:
    loader = fastload.DataLoader(Numbers(88), batch_size=10, sampler=mixed, seed=0, **options)
    [*islice(loader, count)]
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    loader.close()
    return state


def load(state: dict[str, Any], mixed: Mixture, samples: int = 88, **options: Any) -> Any:
    options = {"batch_size": 10, "seed": 0, **options}
    loader = fastload.DataLoader(Numbers(samples), sampler=mixed, **options)
    loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("on_exhausted", ["repeat", "drop"])
def test_sources_can_be_added_and_removed_after_a_state(on_exhausted: Any) -> None:
    old = mixture(on_exhausted=on_exhausted)
    state = state_after(3, old)
    before = {index for batch in batches(old)[:3] for index in batch if index < 50}
    sources = {"a": 50, "d": 20}  # b and c are gone
    new = mixture({"a": 1, "d": 1}, sources, on_exhausted=on_exhausted)
    rest = [index for batch in load(state, new, 70) for index in batch.tolist()]
    assert not before & set(rest[:20]), (
        "a continues: what came before the state does not come again"
    )
    assert sources_of(rest[:20]).count("a") == 10
    added = [index for index in rest if index >= 50]
    assert sorted(added[:20]) == [*range(50, 70)], "d begins with its first epoch"
    assert new.seen(3) == {"a": len(before), "d": 0}


def test_other_weights_hold_from_a_state_on() -> None:
    old, new = mixture(epoch_samples=100), mixture({"a": 1, "b": 0, "c": 0}, epoch_samples=100)
    before = {index for batch in batches(old)[:4] for index in batch if index < 50}
    rest = [index for batch in load(state_after(4, old), new) for index in batch.tolist()]
    assert sources_of(rest) == "a" * 60
    left = 50 - len(before)
    assert {*rest[:left]} | before == {*range(50)}, "a continues, and then begins its next epoch"
    assert len({*rest[left:]}) == 60 - left


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"sources": {**LENGTHS, "b": 32}}, "length of 'b'"),
        ({"sources": {**LENGTHS, "b": Named(31)}}, "set_id of 'b'"),
        ({"on_exhausted": "stop"}, "on_exhausted"),
        ({"size": 20}, "global_batch"),
        ({"shuffle": False}, "shuffle"),
    ],
)
def test_a_state_of_another_mixture_is_refused(other: dict[str, Any], field: str) -> None:
    state = state_after(2, mixture())
    mixed = mixture(**other)
    with pytest.raises(StateError, match=f"^{field}: the state has"):
        load(state, mixed, mixed.samples)
    assert mixed.seen(0) == dict.fromkeys(LENGTHS, 0), "nothing was loaded"


def test_a_step_may_have_several_batches() -> None:
    whole = [batch.tolist() for batch in fastload.DataLoader(Numbers(88), 10, sampler=mixture())]
    mixed = mixture()
    loader = fastload.DataLoader(Numbers(88), batch_size=5, sampler=mixed, seed=0)
    first = [batch.tolist() for batch in islice(loader, 3)]
    assert first[0] + first[1] == whole[0]
    state = loader.state_dict()
    resumed = load(state, mixture(), batch_size=5)
    assert first[2] + next(iter(resumed)).tolist() == whole[1]
    with pytest.raises(StateError, match="ends within global step 1"):
        load(state, mixture({"a": 1, "b": 0, "c": 0}), batch_size=5)
    with pytest.raises(ValueError, match="global_batch must be a multiple of batch size x ranks"):
        fastload.DataLoader(Numbers(88), batch_size=4, sampler=mixture())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": {"a": 1, "b": 1}}, "weights must name each source once"),
        ({"weights": {**WEIGHTS, "c": -1}}, "finite, 0 or more"),
        ({"weights": {**WEIGHTS, "c": float("nan")}}, "finite, 0 or more"),
        ({"weights": dict.fromkeys("abc", 0)}, "not all 0"),
        ({"weights": {1: WEIGHTS}}, "begin with step 0"),
        ({"sources": {"a": 50, "b": 31, "c": 0}}, "samples of source 'c' must be 1 or more"),
        ({"weights": {**WEIGHTS, "b": 1e308, "c": 1e308}}, "and their sum must be finite"),
        ({"epoch_samples": 0}, "epoch_samples must be 1 or more"),
        ({"size": 0}, "global_batch must be 1 or more"),
        ({"on_exhausted": "cry"}, "on_exhausted must be"),
        ({"on_exhausted": "stop", "epoch_samples": 5}, "epoch_samples needs"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(**arguments)


ROWS: dict[str, Callable[[Any], Any]] = {
    "cu_seqlens": lambda texts: Packed(texts, 8, max_segments=7),
    "tokens": lambda texts: Packed(texts, 9, max_segments=8),
    "labels": lambda texts: Packed(
        [{"a": text, "labels": text} for text in texts], 8, key="a", also={"labels": 0}
    ),
    "targets": lambda texts: TokenWindows(texts.file, 8, dtype="uint16"),
}


class Texts(list[Any]):
    """Some texts, which are also in a file."""

    def __init__(self, lengths: Sequence[int], file: Path) -> None:
        super().__init__(np.arange(length) + 1 for length in lengths)
        self.file = file
        np.concatenate(self).astype("uint16").tofile(file)


def test_packed_rows_fit_into_one_batch_whatever_the_texts(tmp_path: Path) -> None:
    many, long = Texts([1] * 40, tmp_path / "many"), Texts([7, 8] * 20, tmp_path / "long")
    sources = {"many": Packed(many, 8), "long": Packed(long, 8)}
    mixed = Mixture(sources, weights=dict.fromkeys(sources, 1), seed=1)
    for batch in fastload.DataLoader(mixed.dataset, 6, sampler=mixed, num_workers=2):
        assert {key: (*leaf.shape,) for key, leaf in batch.items()} == {
            **dict.fromkeys(("tokens", "segments", "positions"), (6, 8)),
            "cu_seqlens": (6, 10),
        }


@pytest.mark.parametrize("key", ROWS)
def test_rows_that_do_not_fit_into_one_batch_are_refused(key: str, tmp_path: Path) -> None:
    texts = Texts([3, 4] * 20, tmp_path / "texts")
    part = Subset(ROWS[key](texts), range(2))
    sources = {"a": Packed(texts, 8), "b": Numbers(3), "c": part}
    match = f"rows of sources 'a' and 'c' do not fit into one batch: .*'{key}': .*same length, max_segments"
    with pytest.raises(ValueError, match=match):
        Mixture(sources, weights=dict.fromkeys(sources, 1))


def test_another_global_batch_is_used_before_the_first_step_and_refused_after_it() -> None:
    def loader(mixed: Mixture, size: int) -> Any:
        return fastload.DataLoader(Numbers(88), batch_size=size, sampler=mixed)

    mixed = mixture(size=None)
    assert len(loader(mixed, 32)) == 3
    again = loader(mixed, 8)
    assert len(again) == 11
    expected = [batch.tolist() for batch in loader(mixture(size=None), 8)]
    assert [batch.tolist() for batch in again] == expected
    with pytest.raises(ValueError, match="read with a global batch of 8, and it would be 32"):
        loader(mixed, 32)
    assert mixed.global_batch == 8, "the first loader can still be used"
