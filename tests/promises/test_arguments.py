"""Promises:
- The constructor has torch's signature, defaults, attributes, errors and warnings. Torch's warning about more
  workers than cores comes for processes only.
- Every bad argument of fastload's own is refused with its name.
- `repr(loader)` shows dataset and length, batch size, workers and seed in one line, and never raises.

Every bad argument is given to both constructors, and both must say the same. The warning about more workers than
cores does not come for threads, because those that wait need no core.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data import DataLoader as TorchLoader

import fastload
from fastload import DataLoader, RankSampler
from fastload.random.streams import chosen_modules
from fastload.settings import METHODS

OURS = {
    "seed": None,
    "on_error": "raise",
    "max_errors": None,
    "copy_dataset": "state",
    "random_modules": None,
    "prefetch_batches": None,
    "prefetch_bytes": None,
    "retries": 0,
    "begin_early": True,
    "memory_format": torch.contiguous_format,
    "on_stats": None,
    "snapshot_every_n_steps": 1,
    "worker_method": None,
    "worker_processes": None,
}


class Tens(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))

    def __repr__(self) -> str:
        return "Stream()"


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __repr__(self) -> str:
        return "NoLength()"


DATA = Tens()
ORDER = SequentialSampler(DATA)
BATCHES = BatchSampler(ORDER, 3, False)


def collate(samples: list[int]) -> list[int]:
    return samples


def init(worker: int) -> None:
    pass


def said(act: Callable[[], object]) -> tuple[list[tuple[type, str]], object]:
    """The warnings of `act`, and the type and text of its error, or None."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error: object = None
        try:
            act()
        except Exception as raised:
            error = (type(raised), str(raised))
    return [(warning.category, str(warning.message)) for warning in caught], error


# ---- torch's errors and warnings ----

BAD: dict[str, dict[str, Any]] = {
    "negative workers": {"num_workers": -1},
    "workers not a number": {"num_workers": "2"},
    "negative timeout": {"timeout": -1},
    "prefetch without workers": {"prefetch_factor": 2},
    "negative prefetch": {"prefetch_factor": -1, "num_workers": 1},
    "persistent without workers": {"persistent_workers": True},
    "sampler and shuffle": {"sampler": ORDER, "shuffle": True},
    "batch sampler and batch size": {"batch_sampler": BATCHES, "batch_size": 2},
    "batch sampler and shuffle": {"batch_sampler": BATCHES, "shuffle": True},
    "batch sampler and sampler": {"batch_sampler": BATCHES, "sampler": ORDER},
    "batch sampler and drop_last": {"batch_sampler": BATCHES, "drop_last": True},
    "no batches and drop_last": {"batch_size": None, "drop_last": True},
    "batch size 0": {"batch_size": 0},
    "batch size a float": {"batch_size": 2.5},
    "drop_last not a bool": {"drop_last": 1},
    "context without workers": {"multiprocessing_context": "fork"},
    "context unknown": {"multiprocessing_context": "teleport", "num_workers": 1},
    "context of another type": {"multiprocessing_context": 3, "num_workers": 1},
    "generator of another type": {"generator": 3, "shuffle": True},
    "empty dataset, shuffled": {"dataset": [], "shuffle": True},
    "no length": {"dataset": NoLength()},
    "no length, shuffled": {"dataset": NoLength(), "shuffle": True},
    "stream shuffled": {"dataset": Stream(), "shuffle": True},
    "stream with sampler": {"dataset": Stream(), "sampler": [1]},
    "stream with batch sampler": {"dataset": Stream(), "batch_sampler": [[1]]},
    "unknown argument": {"workers": 2},
    "too many positional": {},
    "pin memory device": {"pin_memory_device": "cuda", "num_workers": 1},
    "fine": {"batch_size": 3, "num_workers": 2, "shuffle": True, "timeout": 1.5},
    "empty dataset": {"dataset": []},
}


@pytest.mark.parametrize("case", BAD)
def test_errors_and_warnings_of_the_constructor_are_torchs(case: str) -> None:
    arguments = {"dataset": DATA, **BAD[case]}
    positional = [1] * 20 if case == "too many positional" else []

    def build(loader: Any) -> Any:
        return said(lambda: loader(*positional, **({} if positional else arguments)))

    theirs, ours = build(TorchLoader), build(DataLoader)
    if theirs[1] is not None and theirs[1][0] is TypeError and "__init__()" in theirs[1][1]:
        # Python's own words hold the name of the class's method and its number of arguments.
        assert ours[1] is not None
        assert ours[1][0] is TypeError
        assert ours[1][1].startswith("DataLoader.__init__() ")
        return
    assert ours == theirs


NOT_EARLY: dict[str, dict[str, Any]] = {
    "order without length": {"sampler": iter(range(10))},
    "sampler not iterable": {"sampler": 5},
    "batch sampler not iterable": {"batch_sampler": 5},
    "batches not lists": {"batch_sampler": [1, 2]},
    "collate not callable": {"collate_fn": 5},
    "index out of range": {"dataset": [1, 2], "sampler": [0, 7]},
}


@pytest.mark.parametrize("case", NOT_EARLY)
def test_errors_of_the_first_epoch_have_torchs_type_and_text(case: str) -> None:
    arguments: dict[str, Any] = {"dataset": DATA, **NOT_EARLY[case]}

    def twice(loader: Any) -> list[Any]:
        built = loader(**arguments)
        return [said(lambda: list(built))[1], said(lambda: len(built))[1]]

    assert twice(DataLoader) == twice(TorchLoader)


def test_no_warning_about_more_workers_than_cores() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(DATA, num_workers=500)
        assert len(list(DataLoader(DATA, num_workers=64))) == 10
    assert loader.num_workers == 500
    with pytest.warns(UserWarning, match="worker processes in total"):
        DataLoader(DATA, num_workers=500, worker_method="process")


# ---- the signature, the attributes ----


def test_the_signature_is_torchs_and_ours_by_keyword() -> None:
    theirs = inspect.signature(TorchLoader.__init__).parameters
    ours = inspect.signature(DataLoader.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    beyond = {name: p for name, p in ours.items() if name not in theirs}
    assert {name: p.default for name, p in beyond.items()} == OURS
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in beyond.values())


VALUES: dict[str, Any] = {
    "dataset": DATA,
    "batch_size": 3,
    "sampler": ORDER,
    "num_workers": 2,
    "collate_fn": collate,
    "pin_memory": False,
    "drop_last": True,
    "timeout": 7.5,
    "worker_init_fn": init,
    "multiprocessing_context": None,
    "generator": torch.Generator(),
    "prefetch_factor": 5,
    "persistent_workers": True,
    "pin_memory_device": "",
    "in_order": False,
    "on_error": "skip",
    "max_errors": 4,
    "copy_dataset": False,
    "random_modules": ("numpy",),
    "prefetch_batches": 9,
    "prefetch_bytes": 10**9,
    "retries": 2,
    "memory_format": torch.contiguous_format,
    "on_stats": print,
    "snapshot_every_n_steps": 100,
    "worker_method": "thread",
}


def test_every_argument_is_an_attribute_of_its_name() -> None:
    loader = DataLoader(**VALUES)
    for name, value in VALUES.items():
        assert getattr(loader, name) is value, name
    assert DataLoader(DATA, seed=12).seed == 12
    assert DataLoader(DATA, batch_sampler=BATCHES).batch_sampler is BATCHES
    assert DataLoader(DATA, worker_method="process").worker_method == "process"
    handler = lambda index, error: fastload.SKIP  # noqa: E731
    assert DataLoader(DATA, on_error=handler).on_error is handler


def test_the_attributes_of_ours_are_public_and_in_vars() -> None:
    """That is where frameworks look for the arguments of a loader that they build again."""
    loader = DataLoader(DATA, copy_dataset="state", worker_method="auto")  # tests have others
    assert {**OURS, "worker_method": "auto"}.items() <= vars(loader).items()


@pytest.mark.parametrize("workers", [0, 2])
def test_attributes_that_torch_fills_in_are_torchs(workers: int) -> None:
    theirs, ours = (kind(DATA, 4, num_workers=workers) for kind in (TorchLoader, DataLoader))
    # But for this one, which stays as it was given: a loader built again from it keeps its depth.
    assert ours.prefetch_factor is None
    names = {name for name in vars(theirs) if not name.startswith("_")} - {"prefetch_factor"}
    assert "collate_fn" in names
    for name in names:
        one, other = getattr(ours, name), getattr(theirs, name)
        assert one == other or type(one) is type(other), name
    assert ours.collate_fn is default_collate
    assert isinstance(DataLoader(DATA, shuffle=True).sampler, RandomSampler)
    assert type(ours.batch_sampler) is BatchSampler


# ---- ours ----

OURS_BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "seed with generator": ({"seed": 1, "generator": torch.Generator()}, ValueError, "generator"),
    "seed not a number": ({"seed": "x"}, (TypeError, ValueError), "seed"),  # type: ignore[dict-item]
    "on_error unknown": ({"on_error": "ignore"}, ValueError, "on_error.*'ignore'"),
    "on_error None": ({"on_error": None}, (TypeError, ValueError), "on_error"),  # type: ignore[dict-item]
    "max_errors negative": ({"max_errors": -1, "on_error": "skip"}, ValueError, "max_errors"),
    "prefetch_batches": ({"prefetch_batches": 0, "num_workers": 1}, ValueError, "prefetch_batches"),
    "copy_dataset unknown": ({"copy_dataset": "deep"}, ValueError, "copy_dataset.*state.*'deep'"),
    "random_modules unknown": (
        {"random_modules": ("torch",)},
        ValueError,
        "random_modules.*'torch'",
    ),
    "random_modules no collection": ({"random_modules": 3}, ValueError, "random_modules"),
    "random_modules a text": ({"random_modules": "numpy"}, ValueError, "random_modules.*'numpy'"),
    "on_stats no callable": ({"on_stats": "log"}, ValueError, "on_stats.*callable.*'log'"),
    "retries of a stream": ({"dataset": Stream(), "retries": 1}, ValueError, "retries.*map-style"),
    "worker_method unknown": ({"worker_method": "fiber"}, ValueError, "worker_method.*'fiber'"),
}


@pytest.mark.parametrize("case", OURS_BAD)
def test_bad_arguments_of_ours_are_refused_by_name(case: str) -> None:
    arguments, kind, text = OURS_BAD[case]
    with pytest.raises(kind, match=text):
        DataLoader(**{"dataset": DATA, **arguments})


@pytest.mark.parametrize(
    ("name", "value"),
    {
        "on_error": "skip",
        "max_errors": 3,
        "retries": 1,
        "on_stats": print,
        "prefetch_batches": 2,
        "prefetch_bytes": 1000,
        "random_modules": ("numpy",),
    }.items(),
)
def test_an_argument_that_torchs_iterator_has_no_place_for_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: .*worker_method"):
        DataLoader(DATA, worker_method="torch", **{name: value})


@pytest.mark.parametrize("told", ["loader", "sampler"])
def test_a_negative_epoch_is_refused(told: str) -> None:
    sampler = RankSampler(10, rank=0, world_size=1)
    loader = DataLoader(DATA, sampler=sampler)
    with pytest.raises(ValueError, match="epoch.*-1"):
        (loader if told == "loader" else sampler).set_epoch(-1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"dataset": range(7)}, "DataLoader(range[7], batch_size=1, num_workers=0, seed=None)"),
        (
            {"dataset": range(7), "batch_size": 4, "num_workers": 2, "seed": 3, "shuffle": True},
            "DataLoader(range[7], batch_size=4, num_workers=2, seed=3)",
        ),
        (
            {"dataset": range(7), "batch_sampler": [[0], [1]], "worker_method": "process"},
            'DataLoader(range[7], batch_sampler=list, worker_method="process", num_workers=0, seed=None)',
        ),
        ({"dataset": Stream()}, "DataLoader(Stream, batch_size=1, num_workers=0, seed=None)"),
    ],
    ids=["plain", "seeded", "process", "iterable"],
)
def test_a_loader_shows_itself_in_a_line(arguments: dict[str, Any], text: str) -> None:
    assert repr(DataLoader(**{"worker_method": "auto", **arguments})) == text


# ---- the ways through torch's own iterator ----


def test_every_method_gives_the_same_batches() -> None:
    arguments: dict[str, Any] = {"batch_size": 3, "shuffle": True, "num_workers": 1}
    for seed in (None, 5):
        epochs = []
        for method in METHODS:
            torch.manual_seed(3)
            loader: Any = DataLoader(DATA, **arguments, seed=seed, worker_method=method)  # type: ignore[arg-type]
            epochs.append([[batch.tolist() for batch in loader] for _ in range(2)])
            loader.close()
        assert epochs[0] == epochs[1] == epochs[2] == epochs[3]
        assert epochs[0][0] != epochs[0][1]


@pytest.mark.usefixtures("forks")
def test_all_methods_but_threads_use_processes() -> None:
    class Pids(Tens):
        def __getitem__(self, index: int) -> int:
            return os.getpid()

    for method in METHODS:
        loader: Any = DataLoader(Pids(), 5, num_workers=1, worker_method=method)  # type: ignore[arg-type]
        found = {pid == os.getpid() for batch in loader for pid in batch.tolist()}
        assert found == {method == "thread"}, method
        loader.close()


def test_the_environment_says_which_kind_of_workers_is_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FASTLOAD_WORKER_METHOD", "process")
    assert DataLoader(DATA).worker_method == "process"
    assert DataLoader(DATA, worker_method="thread").worker_method == "thread"
    monkeypatch.setenv("FASTLOAD_WORKER_METHOD", "fiber")
    with pytest.raises(ValueError, match="worker_method.*'fiber'"):
        DataLoader(DATA)


def test_the_environment_says_which_modules_are_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, wanted in (
        ("numpy", {"numpy"}),
        ("none", set()),
        ("python,numpy", {"python", "numpy"}),
    ):
        monkeypatch.setenv("FASTLOAD_RANDOM_MODULES", text)
        assert chosen_modules(None) == wanted
        assert chosen_modules(("python",)) == {"python"}
    monkeypatch.setenv("FASTLOAD_RANDOM_MODULES", "torch")
    with pytest.raises(ValueError, match=r"FASTLOAD_RANDOM_MODULES.*torch"):
        DataLoader(DATA)
    DataLoader(DATA, random_modules=())
