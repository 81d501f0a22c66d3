"""Hugging Face's streams: the private names of `datasets` that fastload reads. All of them are in this file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from fastload.isolation.attributes import SCALARS
from fastload.isolation.rules import own_dict, some

CHAIN = "_ex_iterable"
"""The attribute of a stream with the steps that read it."""
_SHUFFLE = "BufferShuffledExamplesIterable"
"""The step of `shuffle()`. A state has no examples of its buffer, and copies that split shards cannot load it."""
_START = "_starting_state_dict"
"""The attribute with the state at which each pass of a stream begins. The stream keeps it for good."""
_LENT = "lent by fastload"  # a key that marks such a state: it is for one pass


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
        todo += [part for part in parts if type(part) not in SCALARS]
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


def lend(held: list[dict[str, Any]]) -> None:
    """Mark the states that streams have loaded: each is for one pass."""
    for stream in held:
        if stream.get(_START):
            stream[_START] = {**stream[_START], _LENT: True}


def take_back(held: list[dict[str, Any]]) -> None:
    """Let streams begin their next pass at the front, not at a state that was lent."""
    for stream in held:
        if _LENT in (stream.get(_START) or ()):
            stream[_START] = None
