"""Hugging Face's streams, the private names of `datasets` that fastload reads, and states lent for one pass."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from fastload.order.state import load_into
from fastload.safety.objects import LEAVES, own_dict, some

CHAIN = "_ex_iterable"
"""The attribute of a stream with the steps that read it."""
_SHUFFLE = "BufferShuffledExamplesIterable"
"""The step of `shuffle()`. A state has no examples of its buffer, and copies that split shards cannot load it."""
_START = "_starting_state_dict"
"""The attribute with the state at which each pass of a stream begins. The stream keeps it for good."""


def streams(source: Any) -> list[dict[str, Any]]:
    """Return the attributes of each stream that an object is or leads to. No code of a class runs."""
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
            found.append(held)
        parts = [*held.values()]
        if issubclass(kind, list | tuple | dict):
            parts += some(x, 1_000)  # not all of a list of names
        todo += [part for part in parts if type(part) not in LEAVES]
    return found


def shuffles(held: list[dict[str, Any]]) -> bool:
    """Return whether one of these streams does not resume exactly from its own state.

    If this version of `datasets` has other names, return True.
    """
    named = all({CHAIN, _START} <= stream.keys() for stream in held)
    if held and not (named and hasattr(sys.modules["datasets.iterable_dataset"], _SHUFFLE)):
        return True
    return any(type(step).__name__ == _SHUFFLE for step in _steps(held))


def unseeded(held: list[dict[str, Any]]) -> bool:
    """Return whether one of these streams shuffles by a generator that got no seed: NumPy drew 128 bits for it."""
    found = [getattr(step, "generator", None) for step in _steps(held)]
    seeds: list[Any] = [x.bit_generator.seed_seq for x in found if type(x) is np.random.Generator]
    return any(type(seed.entropy) is int and seed.entropy >> 64 for seed in seeds)


def _steps(held: list[dict[str, Any]]) -> Iterator[Any]:
    todo = [stream.get(CHAIN) for stream in held]
    for step in todo:
        yield step
        todo += filter(None, [getattr(step, "ex_iterable", 0), *getattr(step, "ex_iterables", ())])


class Lent(dict[str, Any]):
    """A state that a dataset loaded for one pass, and keeps. A copy is a plain dict."""

    def __init__(self, state: dict[str, Any], was: Any) -> None:
        super().__init__(state)
        self.lent, self.former = pickle.dumps(state), was

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def lend(dataset: Any, state: Any, held: list[dict[str, Any]]) -> None:
    """Load a copy of `state` for one pass. `take_back` undoes it if the dataset or a stream keeps it."""
    own, was = copy.deepcopy(state), dict(own_dict(dataset))
    load_into(dataset, own, "lanes")
    for attributes in (own_dict(dataset), *held):
        for name, value in attributes.items():
            if type(value) is dict and (value is own or name == _START):
                attributes[name] = Lent(value, was.get(name))


def take_back(dataset: Any, held: list[dict[str, Any]]) -> None:
    """Let the next pass begin at the front. A state that has changed since it was lent is the dataset's own."""
    for attributes in (own_dict(dataset), *held):
        for name, value in attributes.items():
            if type(value) is Lent and pickle.dumps(dict(value)) == value.lent:
                attributes[name] = value.former
