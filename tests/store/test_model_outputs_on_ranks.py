"""Promises of `store.features` and `store.predictions` on several ranks:
- The set has the same bytes on any number of ranks, and a restart on any number of ranks makes only missing parts.
- All ranks end with an error that names the rank and the reason, or the rank with other weights.

Here ranks are threads, and `Together` stands for their process group. `test_predictions_on_ranks.py` has real ones.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastload import store
from fastload.distributed import Rank
from fastload.errors import PrepareError, RankError, UsageError
from fastload.store.ranks import Ranks
from tests.files import arrow_files
from tests.store.test_model_outputs import LOADER, Net, Numbers, expected, values


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [*chain.from_iterable(lists)]


# ---- ranks as threads ----


class Together:
    """The collective calls of ranks that are threads. A rank that ends breaks the calls of the others."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.calls: dict[int, dict[int, Any]] = defaultdict(dict)

    def control(self, rank: Rank) -> Any:
        return _Control(self, rank)


class _Control:
    def __init__(self, together: Together, rank: Rank) -> None:
        self.rank, self._together, self._number = rank, together, count()

    def gather(self, value: Any) -> list[Any]:
        given = self._together.calls[next(self._number)]
        given[self.rank.rank] = value
        self._together.barrier.wait(60)
        return [given[rank] for rank in range(self.rank.world_size)]

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


def on_ranks(size: int, call: Callable[[Rank], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Call a function on each rank, in threads. Return what each returned, or the error that it raised."""
    together = Together(size)
    results: list[Any] = [None] * size

    @contextmanager
    def meet(rank: Rank) -> Iterator[Ranks]:
        try:
            yield Ranks(together.control(rank))
        except Exception:
            raise  # all ranks know of it
        except BaseException:
            together.barrier.abort()
            raise

    def run(number: int) -> None:
        try:
            results[number] = call(Rank(number, size, number, size, "environment"))
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=[number]) for number in range(size)]
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["fastload.store.model_set"], "meet", meet)
        patch.setattr(Ranks, "cores", lambda _: 1)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def predict_on(
    size: int,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[int], Net] = lambda _: Net(),
    **given: Any,
) -> tuple[list[Any], list[list[int]]]:
    """Return what each rank returned or raised, and the samples that its model has got."""
    nets = [make(number) for number in range(size)]
    given = {"dataset": Numbers(), "parts": 8, "loader": LOADER, **given}

    def call(rank: Rank) -> store.SetDataset:
        return store.predictions(path, model=nets[rank.rank], rank=rank, **given)

    results = on_ranks(size, call, monkeypatch)
    return results, [net.seen for net in nets]


# ---- several ranks ----


@pytest.mark.parametrize(("rows", "parts"), [(40, 7), (3, 2), (1, None)])
def test_the_bytes_are_the_same_on_any_number_of_ranks(
    rows: int, parts: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a dataset that has fewer samples, or parts, than there are ranks."""
    given: dict[str, Any] = {"dataset": Numbers(rows), "parts": parts}
    store.predictions(tmp_path / "alone", model=Net(), loader=LOADER, **given)
    for size in (2, 3, 5):
        path = tmp_path / str(size)
        results, seen = predict_on(size, path, monkeypatch, **given)
        for found in results:
            assert torch.equal(values(found, "y"), expected(rows))
        assert sorted(joined(seen)) == list(range(rows)), "each sample once"
        assert arrow_files(path) == arrow_files(tmp_path / "alone")
        assert not (tmp_path / ".unsealed" / str(size)).exists()


@pytest.mark.parametrize("again_on", [1, 4])
def test_a_restart_on_any_number_of_ranks_makes_only_what_is_missing(
    again_on: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that has sample 17, in the fourth of eight parts of five, fails."""
    path = tmp_path / "set"
    results, seen = predict_on(3, path, monkeypatch, lambda _: Net(fails_at=17))
    [failed] = [rank for rank, error in enumerate(results) if error.__cause__ is not None]
    for error in results:
        assert isinstance(error, PrepareError)
        reason = f"rank {failed} of 3 failed (LookupError: no answer for 17). Complete"
        assert str(error).startswith(reason)
    assert isinstance(results[failed].__cause__, LookupError)
    assert not path.exists()
    notes = list((tmp_path / ".unsealed" / "set").glob("*.json"))
    made = sorted({index // 5 for index in joined(seen)} - {3, 17 // 5})
    assert len(notes) == len(made)

    results, again = predict_on(again_on, path, monkeypatch)
    kept = [index for index in range(40) if index // 5 in made]
    assert sorted(joined(again)) == sorted(set(range(40)) - set(kept))
    for found in results:
        assert torch.equal(values(found, "y"), expected())
    store.predictions(tmp_path / "alone", dataset=Numbers(), model=Net(), parts=8, loader=LOADER)
    assert arrow_files(path) == arrow_files(tmp_path / "alone")


def test_an_error_of_all_ranks_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, _ = predict_on(2, tmp_path / "set", monkeypatch, parts=99)
    assert [type(error) for error in results] == [UsageError, UsageError]
    results, _ = predict_on(2, tmp_path / "no name!", monkeypatch)
    assert [type(error) for error in results] == [UsageError, UsageError]
    store.put({"x": torch.zeros(3)}, tmp_path / "taken")
    results, _ = predict_on(2, tmp_path / "taken", monkeypatch)
    assert [type(error) for error in results] == [FileExistsError, FileExistsError]


def test_a_rank_with_other_weights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_on_two(rank: int) -> Net:
        net = Net()
        nn.init.constant_(net.body[1].bias, float(rank == 2))
        return net

    results, seen = predict_on(3, tmp_path / "set", monkeypatch, other_on_two)
    for error in results:
        assert isinstance(error, PrepareError)
        assert str(error).startswith("rank 2 of 3 differs from rank 0 in weights. Give all ranks")
    assert not any(seen)


def test_a_rank_that_ends_without_a_word_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is killed, whose connections break: here by an exception that nothing catches."""
    path = tmp_path / "set"
    results, _ = predict_on(2, path, monkeypatch, lambda _: Net(fails_at=39, error=SystemExit))
    [ended] = [rank for rank, error in enumerate(results) if isinstance(error, SystemExit)]
    assert isinstance(results[1 - ended], PrepareError)
    assert "another rank has ended, or was killed" in str(results[1 - ended])
    results, again = predict_on(2, path, monkeypatch)
    assert torch.equal(values(results[0], "y"), expected())
    assert sorted(joined(again)) == list(range(35, 40))


def test_a_folder_that_a_rank_does_not_see_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 gets the path of a folder that it does not have, as on a node without the shared disk."""
    first = Ranks.first

    def elsewhere(self: Ranks, function: Callable[[], Any]) -> Any:
        found = first(self, function)
        if self.rank.rank == 1 and hasattr(found, "work"):
            object.__setattr__(found.work, "folder", str(tmp_path / "not here"))
        return found

    class Copying(_Control):
        def broadcast(self, value: Any) -> Any:
            return pickle.loads(self.gather(pickle.dumps(value))[0])

    def call(rank: Rank) -> Any:
        return store.predictions(
            tmp_path / "set", dataset=Numbers(), model=Net(), rank=rank, parts=8, loader=LOADER
        )

    monkeypatch.setattr(Together, "control", lambda self, rank: Copying(self, rank))
    monkeypatch.setattr(Ranks, "first", elsewhere)
    results = on_ranks(2, call, monkeypatch)
    for error in results:
        assert isinstance(error, PrepareError)
        assert str(error).startswith("rank 1 of 2 failed (PrepareError: ")
        assert "not here does not exist on " in str(error)


def test_a_rank_that_no_launcher_has_started_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.split("_")[0] in ("PMI", "PMIX", "OMPI", "PALS", "SLURM", "RANK", "WORLD", "LOCAL"):
            monkeypatch.delenv(name)
    given: dict[str, Any] = {"dataset": Numbers(), "model": Net()}
    with pytest.raises(RankError, match="rank= is rank 1 of 2, but this process was started as"):
        store.predictions(tmp_path / "set", rank=Rank(1, 2, 1, 2, "environment"), **given)
