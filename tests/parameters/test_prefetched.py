"""Promises:
- No prefetched row lacks a push that has returned, in any interleaving of pulls, pushes and forward passes.
- The number of prefetched rows that are kept is bounded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastload.errors import ParametersError
from fastload.parameters.prefetched import Prefetched
from tests.fakes import Sequencer

IDS = st.lists(st.integers(0, 5), max_size=4)


class Servers:
    """Counts by id the pushes that named it. A row is its count."""

    def __init__(self) -> None:
        self.rows = torch.zeros(6, 1)
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []

    def pull(self, ids: Tensor) -> Tensor:
        """Read rows, with what others do before the servers read them, and before the answer arrives."""
        before, self.before, after, self.after = self.before, [], self.after, []
        for each in before:
            each()
        rows = self.rows[ids]
        for each in after:
            each()
        return rows

    def push(
        self, ids: Sequence[int], meanwhile: Sequence[Callable[[], object]] = ()
    ) -> tuple[Tensor, Tensor]:
        """Change rows, and return the fresh ones, after what others do before the answer arrives."""
        named = torch.tensor(ids, dtype=torch.int64).unique()
        self.rows[named] += 1
        fresh = self.rows[named]
        for each in meanwhile:
            each()
        return named, fresh


class Model:
    """Pulls, pushes and forward passes of one worker: threads of the loader pull, one thread does all else."""

    def __init__(self, kept: int) -> None:
        self.servers = Servers()
        self.prefetched = Prefetched(self.servers.pull, kept=kept)
        self.ahead: list[list[int]] = []

    def pull(
        self, ids: list[int], before: list[Callable[[], object]], after: list[Callable[[], object]]
    ) -> None:
        self.servers.before, self.servers.after = before, after
        self.prefetched.pull_ahead(torch.tensor(ids, dtype=torch.int64))
        self.ahead.append(ids)

    def push(self, ids: list[int], meanwhile: Sequence[Callable[[], object]] = ()) -> None:
        self.prefetched.push(partial(self.servers.push, ids, meanwhile))

    def forward(self) -> None:
        """Deliver the oldest batch."""
        if self.ahead:
            ids = torch.tensor(self.ahead.pop(0), dtype=torch.int64)
            pull = self.prefetched.take(ids)
            assert pull.rows is not None
            assert torch.equal(pull.rows[pull.places], self.servers.rows[ids])


@given(st.data(), st.integers(1, 4))
def test_whatever_happens_in_a_pull_and_in_a_push_a_delivered_row_has_all_pushes(
    data: st.DataObject, kept: int
) -> None:
    model = Model(kept)

    def steps(depth: int, kinds: str) -> list[Callable[[], object]]:
        found = []
        for kind in data.draw(st.lists(st.sampled_from(kinds), max_size=3)):
            if kind == "forward":
                found.append(model.forward)
            elif kind == "push":
                pulls = steps(depth - 1, ["pull"]) if depth else []
                found.append(partial(model.push, data.draw(IDS), pulls))
            else:
                within = ["push", "forward", "pull"] if "push" in kinds else ["pull"]
                before = steps(depth - 1, within) if depth else []
                after = steps(depth - 1, within) if depth else []
                found.append(partial(model.pull, data.draw(IDS), before, after))
        return found

    for step in steps(2, ["push", "forward", "pull"]):
        step()
    while model.ahead:
        model.forward()


def test_a_pull_that_was_read_before_a_push_and_arrives_after_it_is_patched() -> None:
    """The order of threads: the pull is sent, the push is sent, applied and noted, the pull is noted, and taken."""
    turn, rows = Sequencer(), torch.zeros(4, 1)

    def pull(ids: Tensor) -> Tensor:
        with turn(0):
            read = rows[ids]
        with turn(2):
            return read

    prefetched = Prefetched(pull, kept=4)
    thread = threading.Thread(target=prefetched.pull_ahead, args=(torch.tensor([3, 1, 3]),))
    thread.start()

    def push() -> tuple[Tensor, Tensor]:
        with turn(1):
            rows[1] = 7
            return torch.tensor([0, 1]), rows[:2].clone()

    prefetched.push(push)
    thread.join()
    found = prefetched.take(torch.tensor([3, 1, 3]))
    assert found.rows is not None
    assert found.rows[found.places].tolist() == [[0], [7], [0]]
    assert prefetched.counts == {"prefetched": 1, "pulled": 0, "patched": 1}


def test_what_is_kept_is_bounded() -> None:
    model = Model(kept=2)
    for ids in ([0], [1], [2]):
        model.pull(ids, [], [])
    assert [pull.ids.tolist() for pull in model.prefetched._pulls] == [[1], [2]]
    for _ in range(3):
        model.push([1])
        assert not any(pull.fresh for pull in model.prefetched._pulls)
    for _ in range(3):
        model.forward()
    assert model.prefetched.counts == {"prefetched": 2, "pulled": 1, "patched": 3}


def test_a_push_that_raises_drops_what_was_pulled_before_it_ends() -> None:
    model = Model(kept=4)
    model.pull([0], [], [])

    def push() -> tuple[Tensor, Tensor]:
        model.servers.push([0, 1])
        raise ParametersError("gone")

    def failing() -> None:
        with pytest.raises(ParametersError, match="gone"):
            model.prefetched.push(push)

    model.pull([1], [], [failing])
    model.forward()
    model.forward()
    assert model.prefetched.counts["prefetched"] == 0
