"""Hugging Face's streams: the private names of `datasets` that fastload reads, and states for one pass.

    _ex_iterable                   of a stream: the steps that read it
    BufferShuffledExamplesIterable the step of `shuffle()`. A state has no examples of its buffer, and copies that split
                                   shards cannot load it

`shuffles` looks for both. If `datasets` has others, no state is used: the samples are read again, with a warning.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from weakref import WeakSet, finalize

import numpy as np

from fastload.order.state import load_into
from fastload.safety.objects import LEAVES, own_dict, some

CHAIN = "_ex_iterable"
_SHUFFLE = "BufferShuffledExamplesIterable"
_lent = WeakSet[Any]()  # streams with a state for one pass
_kept: dict[int, tuple[Any, bytes, dict[str, Any]]] = {}
"""By the id of a dataset that keeps the state lent to it: that state, its pickle, and what the attributes were."""


def streams(source: Any) -> list[Any]:
    """Return each stream that an object is or leads to. No code of a class runs."""
    module = sys.modules.get("datasets.iterable_dataset")
    todo, seen, found = [] if module is None else [source], set[int](), []
    while todo:
        x = todo.pop()
        kind = type(x)
        if id(x) in seen or issubclass(kind, ModuleType):
            continue
        seen.add(id(x))
        held = own_dict(x)
        if issubclass(kind, module.IterableDataset):  # type: ignore[union-attr]
            found.append(x)
        parts = [*held.values()]
        if issubclass(kind, list | tuple | dict):
            parts += some(x, 1_000)  # not all of a list of names
        todo += [part for part in parts if type(part) not in LEAVES]
    return found


def shuffles(held: list[Any]) -> bool:
    """Return whether one of these streams does not resume exactly from its own state.

    If this version of `datasets` has other names, return True.
    """
    if not held:
        return False
    named = all(hasattr(stream, CHAIN) for stream in held)
    if not (named and hasattr(sys.modules["datasets.iterable_dataset"], _SHUFFLE)):
        return True
    return any(type(step).__name__ == _SHUFFLE for step in _steps(held))


def unseeded(held: list[Any]) -> bool:
    """Return whether one of these streams shuffles by a generator that got no seed: NumPy drew 128 bits for it."""
    found = [getattr(step, "generator", None) for step in _steps(held)]
    seeds: list[Any] = [x.bit_generator.seed_seq for x in found if type(x) is np.random.Generator]
    return any(type(seed.entropy) is int and seed.entropy >> 64 for seed in seeds)


def _steps(held: list[Any]) -> Iterator[Any]:
    todo = [getattr(stream, CHAIN, None) for stream in held]
    for step in todo:
        yield step
        todo += filter(None, [getattr(step, "ex_iterable", 0), *getattr(step, "ex_iterables", ())])


def lend(dataset: Any, state: Any, held: list[Any]) -> None:
    """Load a copy of `state` for one pass. A dataset that keeps it would begin each later pass with it."""
    own, former = copy.deepcopy(state), dict(own_dict(dataset))
    load_into(dataset, own, "lanes")
    _lent.update(stream for stream in held if hasattr(stream, "load_state_dict"))
    if kept := {name for name, value in own_dict(dataset).items() if value is own}:
        _kept[id(dataset)] = own, pickle.dumps(own), {name: former.get(name) for name in kept}
        finalize(dataset, _kept.pop, id(dataset), None).atexit = False


def take_back(dataset: Any, held: list[Any]) -> None:
    """Let the next pass begin at the front. A state that has changed since it was lent is the dataset's own."""
    for stream in held:
        if stream in _lent:
            _lent.discard(stream)
            stream.load_state_dict({})
    own, lent, former = _kept.pop(id(dataset), (None, b"", {}))
    if former and pickle.dumps(own) == lent:
        attributes = own_dict(dataset)
        attributes.update(
            (name, was) for name, was in former.items() if attributes.get(name) is own
        )
