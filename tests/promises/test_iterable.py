"""Promises:
- An iterable dataset gives torch's batches in torch's order, for any sharding. It may be endless, empty or its own
  iterator. See also `tests/contracts/workers.py`.
- An error of an iterable dataset arrives in its place, and costs the other workers nothing.
  See also `tests/contracts/workers.py`.
- A state of an iterable dataset, taken at any step, resumes bit for bit, with a state for each worker's copy.
- A state that an iterable dataset has loaded counts for one epoch: the next one begins at the front.
- A `state_dict()` that needs arguments, as LitData's does, is not called. Such a dataset is read again, with a warning.
- Hugging Face's iterable datasets are read and resumed exactly. One with a shuffle buffer, or whose state cannot be
  loaded, is read again up to the position, with a warning.
- A stream that gives other samples as it is read again is warned of. Random numbers after a loaded state continue.
- With a seed, the loader's epoch reaches `set_epoch` of a stream.
- torch's warning of an exceeded length comes with the same batch.

Each worker thread reads a copy of its own, and no thread is left.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset

import fastload
from fastload.errors import StateError
from fastload.reading import hub_streams
from tests.contracts.workers import (
    SHARD,
    Drawing,
    IteratorRemembers,
    Remembers,
    Sharded,
    Shuffles,
    my_part,
    plain,
    through_json,
)
from tests.resuming import resumes_twice

# Torch's own loader says so of more processes than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Log(list[Any]):
    """A list that all copies of a dataset share. `list.append` is atomic."""

    fastload_per_worker = ()


def torch_loader(dataset: Any, **options: Any) -> torch.utils.data.DataLoader[Any]:
    if options.get("num_workers"):
        options["multiprocessing_context"] = "fork"
    return torch.utils.data.DataLoader(dataset, **options)


def given(loader: Any) -> list[Any]:
    return [plain(batch) for batch in loader]


# ---- errors ----


def test_an_error_keeps_type_and_traceback_and_says_which_worker() -> None:
    class Breaking(Sharded):
        def __iter__(self) -> Iterator[int]:
            for k in super().__iter__():
                if k == SHARD + 2:
                    self.break_down(k)
                yield k

        def break_down(self, k: int) -> None:
            raise LookupError(f"sample {k} is bad")

    iterator = iter(fastload.DataLoader(Breaking([4, 4]), 2, num_workers=2))
    got = [plain(next(iterator)) for _ in range(3)]
    assert got == [[0, 1], [SHARD, SHARD + 1], [2, 3]]
    with pytest.raises(LookupError, match="sample 1002 is bad") as caught:
        next(iterator)
    assert "break_down" in [entry.name for entry in caught.traceback]
    notes = " ".join(caught.value.__notes__)
    assert "worker 1" in notes
    assert "2" in notes, "its position in the worker"
    assert list(iterator) == []


# ---- random numbers ----


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_are_reproducible_and_keyed_by_epoch_and_worker(workers: int) -> None:
    def run(seed: int) -> list[list[Any]]:
        torch.rand(seed)  # the global state differs
        with fastload.DataLoader(Shuffles([6] * 3), 2, num_workers=workers, seed=seed) as loader:
            return [given(loader) for _ in range(2)]

    first, again, other = run(3), run(3), run(4)
    assert first == again
    assert first[0] != first[1]
    rows = [row for epoch in first + other for batch in epoch for row in batch]
    assert len({number for _, number in rows}) == len(rows) == 2 * 2 * 18


# ---- state ----


def logged(kind: type[Drawing], lengths: list[int]) -> Any:
    """Return a dataset whose `log` gets each value that is made."""

    class Logged(kind):  # type: ignore[misc, valid-type]
        log = Log()

        def make(self, value: int) -> torch.Tensor:
            self.log.append(value)
            return super().make(value)  # type: ignore[no-any-return]

    return Logged(lengths)


STATEFUL = [Remembers, IteratorRemembers]
LENGTHS = [5, 1, 8, 3]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", STATEFUL)
def test_with_a_state_of_its_own_nothing_is_read_again(kind: type[Drawing], workers: int) -> None:
    loader = fastload.DataLoader(kind([7, 9]), 2, num_workers=workers, seed=1)
    iterator = iter(loader)
    had = [int(value) for _ in range(4) for value in next(iterator)[:, 0]]
    state = through_json(loader.state_dict())
    loader.close()
    dataset = logged(kind, [7, 9])
    resumed = fastload.DataLoader(dataset, 2, num_workers=workers, seed=1)
    resumed.load_state_dict(state)
    rest = [int(value) for batch in resumed for value in batch[:, 0]]
    assert not set(had) & set(rest)
    assert sorted(had + rest) == [*range(7), *range(SHARD, SHARD + 9)]
    assert sorted(dataset.log) == sorted(rest)


class OtherProtocol(Shuffles):
    """Has the methods of litdata.StreamingDataset, with its arguments; those of streaming have others."""

    def state_dict(self, num_samples_yielded: int, num_workers: int, batch_size: int) -> Any:
        raise AssertionError(f"called with {num_samples_yielded}, {num_workers}, {batch_size}")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("called")


@pytest.mark.filterwarnings("ignore:fastload. .* lacks state_dict")
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str
)
def test_methods_of_another_protocol_are_not_called(options: dict[str, Any]) -> None:
    resumes_twice(lambda: fastload.DataLoader(OtherProtocol(LENGTHS), 2, seed=1, **options))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_of_another_protocol_is_read_again_with_a_warning(workers: int) -> None:
    loader = fastload.DataLoader(OtherProtocol(LENGTHS), 2, num_workers=workers, seed=1)
    next(iter(loader))
    state = through_json(loader.state_dict())
    loader.close()
    loader.load_state_dict(state)
    with pytest.warns(RuntimeWarning, match="OtherProtocol lacks state_dict.*read again"):
        list(loader)


class CountsPasses(Sharded):
    """Counts its passes, and begins each elsewhere."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        values = self.part(*my_part())
        yield from [*values[self.passes % 3 :], *values[: self.passes % 3]]


class Unseeded(Sharded):
    """Has another order in each pass."""

    def __iter__(self) -> Iterator[Any]:
        values = self.part(*my_part())
        yield from np.random.default_rng().permutation(values).tolist()


class Empty(Sharded):
    """Has nothing any more."""

    def __iter__(self) -> Iterator[Any]:
        yield from ()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_that_gives_other_samples_as_it_is_read_again_is_warned_of(workers: int) -> None:
    """Rows would come twice, and others never. In its first epoch, one that counts its passes gives the same."""

    def state_in(epoch: int, kind: type[Any]) -> tuple[dict[str, Any], list[Any]]:
        loader = fastload.DataLoader(kind([12, 15]), 4, num_workers=workers, seed=1)
        for _ in range(epoch):
            list(loader)
        batches = iter(loader)
        next(batches), next(batches), next(batches)
        return through_json(loader.state_dict()), [plain(batch) for batch in batches]

    def rest(state: dict[str, Any], kind: type[Any]) -> list[Any]:
        loader = fastload.DataLoader(kind([12, 15]), 4, num_workers=workers, seed=1)
        loader.load_state_dict(state)
        return [plain(batch) for batch in loader]

    state, right = state_in(0, CountsPasses)
    assert rest(state, CountsPasses) == right
    state, _ = state_in(0, Unseeded)
    with pytest.warns(RuntimeWarning, match="Empty gave other samples"):
        assert rest(state, Empty) == []
    other = [] if workers else [CountsPasses]  # new workers have new copies in each epoch
    for epoch, kind in ((0, Unseeded), *((1, kind) for kind in (Unseeded, *other))):
        state, _ = state_in(epoch, kind)
        with pytest.warns(RuntimeWarning, match=f"{kind.__name__} gave other samples"):
            rest(state, kind)


class DrawsByAll(Remembers):
    """Its samples have numbers from Python, NumPy and torch."""

    def make(self, value: int) -> Any:
        drawn = random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()
        return torch.tensor([value, *drawn, torch.rand(()).item()])


@pytest.mark.parametrize("workers", [0, 2])
def test_the_random_numbers_of_a_stream_that_loads_its_state_continue(workers: int) -> None:
    """Whatever they are drawn with: Python's and NumPy's are one stream for the whole pass."""

    def make() -> fastload.DataLoader[Any]:
        return fastload.DataLoader(DrawsByAll([5, 8]), 2, num_workers=workers, seed=1)

    resumes_twice(make)


class KeepsAList(IterableDataset[int]):
    """Gives its state by reference, changes it as it goes on, and writes into the one it is given."""

    def __init__(self) -> None:
        self.had: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for k in range(len(self.had), 12):
            self.had.append(k)
            yield k

    def state_dict(self) -> dict[str, Any]:
        return {"had": self.had}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.had = state["had"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_is_no_part_of_the_dataset_that_gave_it(workers: int) -> None:
    loader = fastload.DataLoader(KeepsAList(), 2, num_workers=workers, seed=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert state["lanes"][0]["state"] == {"had": [0, 1]}, "and not what is read ahead"
    kept = through_json(state)
    list(iterator)
    assert state == kept
    for _ in range(2):
        resumed = fastload.DataLoader(KeepsAList(), 2, num_workers=workers, seed=1)
        resumed.load_state_dict(changed := copy.deepcopy(state))
        changed["lanes"][0]["state"]["had"].clear()
        iterator = iter(resumed)
        assert next(iterator).tolist() == [2, 3]
        assert resumed.state_dict(ahead=1) == state == kept
        assert given(iterator) == [[4, 5], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.parametrize("bad", [3, [], {"of": "another"}], ids=str)
def test_a_state_of_a_dataset_that_it_does_not_take_is_named(
    bad: Any, kind: type[Drawing], workers: int
) -> None:
    loader = fastload.DataLoader(kind([5]), 2, num_workers=workers, seed=1)
    next(iter(loader))
    state = through_json(loader.state_dict())
    loader.close()
    state["lanes"][0]["state"] = bad
    resumed = fastload.DataLoader(kind([5]), 2, num_workers=workers, seed=1)
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match="lanes: _?Remember.*cannot load its saved state"):
        list(resumed)
    resumed.close()


def test_a_state_for_a_dataset_that_has_none_is_named() -> None:
    loader = fastload.DataLoader(Drawing([5]), 2, seed=1)
    next(iter(loader))
    state = through_json(loader.state_dict())
    state["lanes"][0]["state"] = {"at": 2}
    resumed = fastload.DataLoader(Drawing([5]), 2, seed=1)
    resumed.load_state_dict(state)
    with pytest.raises(StateError, match="lanes.*load_state_dict"):
        list(resumed)


# ---- Hugging Face ----


def rows(batch: Any) -> Any:
    return {key: plain(value) for key, value in batch.items()}


@pytest.fixture
def hugging_face(monkeypatch: pytest.MonkeyPatch) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("datasets")
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True, raising=False)
    return module


@pytest.fixture
def shards(hugging_face: Any) -> Callable[[], Any]:
    def make() -> Any:
        columns = {"x": [*range(50)], "name": [f"row {k}" for k in range(50)]}
        return hugging_face.Dataset.from_dict(columns).to_iterable_dataset(num_shards=5)

    return make


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 3])
def test_hugging_face_s_iterable_dataset_as_in_torch(
    shards: Callable[[], Any], workers: int
) -> None:
    for batch_size in (4, None):
        options = {"batch_size": batch_size, "num_workers": workers}
        expected = [rows(batch) for batch in torch_loader(shards(), **options)]
        assert [rows(batch) for batch in fastload.DataLoader(shards(), **options)] == expected


class Holder(IterableDataset[Any]):
    """Passes on a dataset of Hugging Face's, its state too, as training frameworks do."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Any]:
        yield from self.held

    def state_dict(self) -> dict[str, Any]:
        return {"of": [self.held.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held.load_state_dict(state["of"][0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        (lambda dataset: dataset, {}),
        (Holder, {"num_workers": 2}),
        (lambda dataset: dataset, {"num_workers": 2, "persistent_workers": True}),
    ],
    ids=["alone", "held, workers", "alone, persistent workers"],
)
def test_hugging_face_s_iterable_dataset_resumes_twice(
    shards: Callable[[], Any], wrap: Callable[[Any], Any], options: dict[str, Any]
) -> None:
    """It keeps a loaded state for good, and began each later epoch with it."""
    resumes_twice(lambda: fastload.DataLoader(wrap(shards()), 4, seed=1, **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 1])
def test_hugging_face_s_epoch_must_be_that_of_the_state(
    shards: Callable[[], Any], workers: int
) -> None:
    """With another one it began at the front, in silence. The loader sets it, if the state knows it."""

    def make(dataset: Any) -> fastload.DataLoader[Any]:
        return fastload.DataLoader(dataset, 4, seed=1, num_workers=workers)

    def epoch(loader: fastload.DataLoader[Any], dataset: Any, number: int) -> list[Any]:
        dataset.set_epoch(number)
        return [rows(batch) for batch in loader]

    dataset = shards().shuffle(seed=3, buffer_size=1)
    loader = make(dataset)
    whole = [epoch(loader, dataset, number) for number in range(4)]
    assert whole[0] != whole[1]
    dataset.set_epoch(1)
    iterator = iter(loader)
    had = [rows(next(iterator)) for _ in range(3)]
    state = through_json(loader.state_dict())
    loader.close()
    dataset = shards().shuffle(seed=3, buffer_size=1)
    loader = make(dataset)
    loader.load_state_dict(state)
    assert had + [rows(batch) for batch in loader] == whole[1]
    assert [epoch(loader, dataset, number) for number in (2, 3)] == whole[2:]


@pytest.mark.filterwarnings("ignore")
def test_an_epoch_that_the_state_of_a_stream_is_not_of_is_refused(shards: Any) -> None:
    loader = fastload.DataLoader(dataset := shards(), 4)
    list(loader)
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    dataset.set_epoch(1)  # the loader's epoch. The stream was at its epoch 0
    with pytest.raises(StateError, match=r"lanes: .* of epoch 0 .* at epoch 1.*set_epoch\(0\)"):
        list(loader)


class KeepsItsOrder(IterableDataset[int]):
    """Draws an order once, and counts its epochs in a dict. Both are in its state, and belong to all later epochs."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.epochs = {"begun": 0}
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        if not self.order:
            self.order = torch.randperm(8).tolist()
        if self.at == 0:
            self.epochs["begun"] += 1
        while self.at < 8:
            self.at += 1
            yield self.order[self.at - 1] + 10 * self.epochs["begun"]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "epochs": self.epochs, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.epochs, self.at = state["order"], state["epochs"], state["at"]


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_parts_of_a_state_that_belong_to_all_epochs_stay(options: dict[str, Any]) -> None:
    """They were taken back after the resumed epoch: the next one had another order."""
    resumes_twice(lambda: fastload.DataLoader(KeepsItsOrder(), 2, seed=1, **options))


WITHOUT_A_STATE: dict[str, Callable[[Any], Any]] = {
    "has a shuffle buffer": lambda stream: stream.shuffle(seed=3, buffer_size=7),
    "has a shuffle buffer, held": lambda stream: Holder(stream.shuffle(seed=3, buffer_size=7)),
    "has a shuffle buffer, below": lambda stream: stream.shuffle(seed=3, buffer_size=7).take(44),
    "cannot load its saved state": lambda stream: concatenated(stream),
}


def concatenated(stream: Any) -> Any:
    from datasets import concatenate_datasets

    return concatenate_datasets([stream, stream.map(lambda row: row)])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, options) for kind in WITHOUT_A_STATE for options in ({}, {"num_workers": 2})),
        ("cannot load its saved state", {"num_workers": 2, "worker_method": "process"}),
    ],
    ids=str,
)
def test_a_stream_whose_state_is_not_enough_is_read_again(
    shards: Callable[[], Any], kind: str, options: dict[str, Any]
) -> None:
    """The examples in a shuffle buffer were lost, and several workers cannot load the state of some streams."""

    def make() -> fastload.DataLoader[Any]:
        return fastload.DataLoader(WITHOUT_A_STATE[kind](shards()), 4, seed=1, **options)

    with make() as loader:
        epochs = [[rows(batch) for batch in loader] for _ in range(2)]
    loader = make()
    assert [rows(batch) for batch in loader] == epochs[0]
    batches = iter(loader)
    had = [rows(next(batches)) for _ in range(3)]
    state = through_json(loader.state_dict())
    loader.close()
    with make() as resumed, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        resumed.load_state_dict(state)
        assert had + [rows(batch) for batch in resumed] == epochs[1]
    said = [str(one.message) for one in warned if "are read again" in str(one.message)]
    if kind.startswith("has") or options:
        assert len(said) == 1
        assert kind.partition(",")[0] in said[0]


@pytest.mark.parametrize("wrap", [lambda stream: stream, Holder], ids=["alone", "held"])
@pytest.mark.parametrize("name", ["CHAIN", "_SHUFFLE"])
def test_a_stream_is_read_again_if_a_version_of_datasets_has_other_names(
    shards: Callable[[], Any], name: str, wrap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = wrap(shards())
    assert not hub_streams.shuffles(hub_streams.streams(dataset))
    monkeypatch.setattr(hub_streams, name, "renamed")
    assert hub_streams.shuffles(hub_streams.streams(dataset))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str
)
def test_with_a_seed_the_epoch_reaches_a_stream(
    shards: Callable[[], Any], options: dict[str, Any]
) -> None:
    """Each epoch has another order. `set_epoch` of the loader or of the stream chooses it."""
    stream = shards().shuffle(seed=3, buffer_size=7)
    with fastload.DataLoader(stream, 4, seed=1, **options) as loader:
        orders = [[rows(batch) for batch in loader] for _ in range(3)]
        assert orders[0] != orders[1] != orders[2]
        for chooses in (loader, stream):
            chooses.set_epoch(1)
            assert [[rows(batch) for batch in loader] for _ in range(2)] == orders[1:]
    stream = shards().shuffle(seed=3, buffer_size=7)
    stream.set_epoch(2)
    with fastload.DataLoader(stream, 4, seed=1, **options) as loader:
        assert [rows(batch) for batch in loader] == orders[2]


class _Uneven(IterableDataset[int]):
    """The first worker has one sample, each other one four."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        yield from range(10 * info.id, 10 * info.id + (4 if info.id else 1))


@pytest.mark.parametrize("received", range(6))
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_state_that_leaves_batches_out_does_not_count_the_end_of_a_worker(
    received: int, ahead: int
) -> None:
    def loader() -> fastload.DataLoader[int]:
        return fastload.DataLoader(_Uneven(), batch_size=1, num_workers=2, seed=1)

    whole = [batch.tolist() for batch in loader()]
    batches = iter(first := loader())
    for _ in range(received):
        next(batches, None)
    state = first.state_dict(ahead=ahead)
    (second := loader()).load_state_dict(state)
    assert [batch.tolist() for batch in second] == whole[max(0, min(received, 5) - ahead) :]


def test_a_stream_that_shuffles_without_a_seed_has_no_state_to_resume_from() -> None:
    stream = pytest.importorskip("datasets").IterableDataset.from_generator(
        lambda: iter([{"x": 1}] * 9)
    )
    loader = fastload.DataLoader(stream.shuffle(buffer_size=4), 2, seed=7)
    with closing(iter(loader)) as batches:
        next(batches)
        state = loader.state_dict()
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="shuffle"):
        next(iter(loader))
