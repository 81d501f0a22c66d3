"""Promises:
- Row `i` of predictions is the model's answer for sample `i`, once, in the same bytes on any number of ranks. Ranks
  are threads here.
- A restart of predictions on any number of ranks makes only the missing parts.
- All ranks of predictions end with an error that names the rank and the reason, or the rank with other weights.

Here ranks are threads, and `Together` stands for their process group. `test_predictions_on_ranks.py` has real ones.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.utils.data import Dataset, TensorDataset

from fastload import store
from fastload.distributed import Rank
from fastload.errors import PrepareError, RankError
from fastload.store.model_run import batches_of
from fastload.store.ranks import Ranks
from tests.contracts.sets import WrittenSet
from tests.files import arrow_files

LOADER = {"batch_size": 3, "num_workers": 2}


class Numbers(Dataset[Any]):
    """Sample `i` is (float32[2] of i, i % 5)."""

    fastload_per_worker = ()

    def __init__(self, rows: int = 40) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return torch.full((2,), float(index)), index % 5


class Net(nn.Module):
    """float32[B, 2] -> float32[B, 3], and notes which samples it has got."""

    def __init__(self, fails_at: float = -1, error: type[BaseException] = LookupError) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        nn.init.constant_(self.linear.weight, 0.5)
        nn.init.constant_(self.linear.bias, 1)
        self._seen: list[int] = []
        self._fails_at, self._error = fails_at, error

    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        if self._fails_at in x[:, 0].tolist():
            raise self._error(f"no answer for {self._fails_at:g}")
        self._seen += [int(value) for value in x[:, 0]]
        answer: Tensor = self.linear(x)
        return answer


def expected(rows: int = 40) -> Tensor:
    return torch.arange(rows)[:, None].expand(rows, 3) + 1.0


def values(found: store.SetDataset, column: str = "y") -> Tensor:
    return torch.cat(found.column(column))


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return [*chain.from_iterable(lists)]


# ---- ranks as threads ----


class Together:
    """The collective calls of ranks that are threads. A rank that ends breaks the calls of the others."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.calls: dict[int, dict[int, Any]] = defaultdict(dict)
        self.store = HashStore()

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
            yield Ranks(together.control(rank), together.store)
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
        patch.setattr(sys.modules["fastload.store.prediction_sets"], "meet", meet)
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
    return results, [net._seen for net in nets]


# ---- what is kept ----


@pytest.mark.parametrize(("parts", "workers"), [(1, 2), (7, 0), (None, 0), (40, 2)])
def test_row_i_is_the_answer_for_sample_i(parts: int | None, workers: int, tmp_path: Path) -> None:
    net = Net()
    found = store.predictions(
        tmp_path / "set",
        dataset=Numbers(),
        model=net,
        parts=parts,
        loader={"batch_size": 3, "num_workers": workers},
        made={"by": "a test"},
    )
    assert torch.equal(values(found), expected())
    assert net._seen == list(range(40))
    assert len(found.column("y")) == (parts or 1)
    assert found.schema == (("y", found.schema[0][1]),), "labels are not kept"
    assert found.made["by"] == "a test"
    assert net.training


def test_a_dict_a_tuple_and_a_tensor_become_columns(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(10.0)[:, None])

    def one(x: Tensor) -> Tensor:
        return (x[:, 0] * 2).long()

    def several(x: Tensor) -> dict[str, Tensor]:
        return {"logits": x.half(), "best": x[:, 0] > 3}

    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        return x, -x[:, 0].double()

    found = store.predictions(tmp_path / "one", dataset=data, model=one)
    assert values(found).tolist() == list(range(0, 20, 2))
    assert values(found).dtype == torch.int64
    found = store.predictions(tmp_path / "several", dataset=data, model=several, parts=3)
    assert values(found, "logits").dtype == torch.float16
    assert values(found, "logits").shape == (10, 1)
    assert values(found, "best").dtype == torch.bool
    assert values(found, "best").tolist() == [i > 3 for i in range(10)]
    found = store.predictions(tmp_path / "pair", dataset=data, model=pair)
    assert [name for name, _ in found.schema] == ["y0", "y1"]
    assert values(found, "y1").tolist() == [-i for i in range(10)]


def test_the_model_gets_x_or_the_batch_or_what_inputs_returns(tmp_path: Path) -> None:
    class Dicts(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"a": index, "b": 10 * index}

    class Alone(Numbers):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(index)

    def both(batch: Any) -> Tensor:
        return batch["a"] + batch["b"]

    def same(batch: Any) -> Tensor:
        return batch

    def scaled(batch: Any) -> Tensor:
        x, y = batch
        return x[:, 0] * 100 + y

    found = store.predictions(tmp_path / "dicts", dataset=Dicts(6), model=both)
    assert values(found).tolist() == [0, 11, 22, 33, 44, 55]
    found = store.predictions(tmp_path / "alone", dataset=Alone(6), model=same)
    assert values(found).tolist() == list(range(6))
    found = store.predictions(tmp_path / "x", dataset=Numbers(7), model=same)
    assert torch.equal(values(found), torch.stack([Numbers()[i][0] for i in range(7)]))
    found = store.predictions(tmp_path / "in", dataset=Numbers(7), model=same, inputs=scaled)
    assert values(found).tolist() == [0, 101, 202, 303, 404, 500, 601]
    with pytest.raises(FileExistsError, match=r"of predictions made with other inputs\. Choose"):
        store.predictions(tmp_path / "in", dataset=Numbers(7), model=same)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda x: {"a": x, "b": x[:2]},
            r"returned dict, with float32\[2, 2\] for a batch of 3 samples",
        ),
        (
            lambda x: (x, "text"),
            r"a tuple of 2, with str for a batch of 3 samples, float32\[3, 2\]",
        ),
        (lambda x: x.tolist(), r"a list of 3, with a list of 2 for a batch of 3"),
        (
            lambda x: x.double() if x[0, 0] > 4 else x,
            r"float64\[2\], but float32\[2\] for an earlier batch",
        ),
        (
            lambda x: {"a": x, "b": x.flatten()[: len(x)] if x[0, 0] < 4 else x},
            r"float32\[2\] as 'b', but float32\[\] for an earlier batch\. All rows must have the same shape and dtype",
        ),
        (
            lambda x: {"a" if x[0, 0] < 4 else "b": x},
            r"the columns \['b'\], but \['a'\] for an earlier batch",
        ),
        (lambda x: x + 0j, r"column 'y'"),
    ],
    ids=["few", "text", "list", "dtype", "shape", "columns", "complex"],
)
def test_what_are_no_rows_is_named(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message):
        store.predictions(tmp_path / "set", dataset=Numbers(), model=model, loader=LOADER)
    assert not (tmp_path / "set").exists()


def test_a_set_that_is_there_is_opened_and_another_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "set"
    first = store.predictions(path, dataset=Numbers(), model=Net())
    net = Net()
    again = store.predictions(path, dataset=Numbers(), model=net, parts=5, loader={"batch_size": 9})
    assert again.set_id == first.set_id
    assert not net._seen
    with pytest.raises(FileExistsError, match=r"of predictions made with other source\. Choose"):
        store.predictions(path, dataset=Numbers(41), model=Net())
    with pytest.raises(FileExistsError, match=r"which features\(\) did not make"):
        store.features(path, dataset=Numbers(), model=Net())
    found = store.predictions(path, dataset=Numbers(41), model=Net(), replace=True)
    assert torch.equal(values(found), expected(41))


def test_a_rank_that_no_launcher_has_started_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.split("_")[0] in ("PMI", "PMIX", "OMPI", "PALS", "SLURM", "RANK", "WORLD", "LOCAL"):
            monkeypatch.delenv(name)
    given: dict[str, Any] = {"dataset": Numbers(), "model": Net()}
    with pytest.raises(RankError, match="rank= is rank 1 of 2, but this process was started as"):
        store.predictions(tmp_path / "set", rank=Rank(1, 2, 1, 2, "environment"), **given)


class TestPredictions(WrittenSet):
    rows = 24

    def write(self, path: Path, *, other: bool = False) -> None:
        loader = {"batch_size": 3, "num_workers": 0}
        inputs = doubled if other else None
        given: dict[str, Any] = {"dataset": Numbers(self.rows), "inputs": inputs}
        store.predictions(path, model=nn.Identity(), parts=4, loader=loader, **given)

    def opened(self, path: Path) -> store.SetDataset:
        return store.get(path, data="y")

    def sample(self, row: int) -> Any:
        return torch.full((2,), float(row))


def doubled(batch: Any) -> Tensor:
    x, _ = batch
    doubles: Tensor = 2 * x
    return doubles


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
            assert torch.equal(values(found), expected(rows))
        assert sorted(joined(seen)) == list(range(rows)), "each sample once"
        assert arrow_files(path) == arrow_files(tmp_path / "alone")
        assert not (tmp_path / ".unsealed" / str(size)).exists()


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("parts", [0, 1, 7])
def test_each_part_is_given_to_one_rank_and_a_slow_rank_gets_fewer(size: int, parts: int) -> None:
    shares: list[list[int]] = [[] for _ in range(size)]
    with ExitStack() as stack:
        together = Together(size)
        given = [
            stack.enter_context(
                Ranks(together.control(Rank(k, size, k, size, "none")), together.store).leased(
                    range(parts), "a name"
                )
            )
            for k in range(size)
        ]
        iterators = [iter(one) for one in given]
        for rank in [*range(1, size), 0] * parts:  # rank 0 asks last, and only once
            if not (rank == 0 < size - 1 and shares[0]):
                for part in islice(iterators[rank], 1):
                    shares[rank].append(part)
                    given[rank].made()
    assert sorted(joined(shares)) == list(range(parts))
    assert size == 1 or len(shares[0]) <= 1


def test_a_rank_that_comes_when_all_parts_are_made_has_none_and_warns_of_nothing() -> None:
    together = Together(2)
    first, late = (
        Ranks(together.control(Rank(k, 2, k, 2, "none")), together.store) for k in range(2)
    )
    with first.leased(range(3), "a name") as shares:
        for _ in shares:
            shares.made()
    with late.leased(range(3), "a name") as shares:
        assert list(shares) == []


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
        assert torch.equal(values(found), expected())
    store.predictions(tmp_path / "alone", dataset=Numbers(), model=Net(), parts=8, loader=LOADER)
    assert arrow_files(path) == arrow_files(tmp_path / "alone")


def test_an_error_of_all_ranks_is_raised_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, _ = predict_on(2, tmp_path / "set", monkeypatch, parts=99)
    assert [type(error) for error in results] == [ValueError, ValueError]
    results, _ = predict_on(2, tmp_path / "no name!", monkeypatch)
    assert [type(error) for error in results] == [ValueError, ValueError]
    store.put({"x": torch.zeros(3)}, tmp_path / "taken")
    results, _ = predict_on(2, tmp_path / "taken", monkeypatch)
    assert [type(error) for error in results] == [FileExistsError, FileExistsError]


def test_a_rank_with_other_weights_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_on_two(rank: int) -> Net:
        net = Net()
        nn.init.constant_(net.linear.bias, float(rank == 2))
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
    assert torch.equal(values(results[0]), expected())
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


# ---- parts that are given out one by one ----


def test_the_loader_takes_a_part_when_it_begins_to_read_it() -> None:
    """So parts can be leased: the parts here have no end."""
    taken: list[int] = []

    def leased() -> Iterator[tuple[str, range]]:
        for number in count():
            taken.append(number)
            yield f"part {number}", range(number % 4 * 10, number % 4 * 10 + 10)

    parts = batches_of(Numbers(), leased(), {"batch_size": 4, "num_workers": 2, "seed": 0})
    for number in range(10):
        (name, rows), batches = next(parts)
        found = [(size, x[:, 0].tolist()) for size, (x, _) in batches]
        assert name == f"part {number}"
        assert [size for size, _ in found] == [4, 4, 2]
        assert joined(x for _, x in found) == list(rows)
        assert taken[-1] <= number + 2, (
            "batches in flight are at most three, so parts ahead are two"
        )
    parts.close()
    with suppress(StopIteration):
        next(parts)
