"""Hugging Face's streams: the private names of `datasets` that fastload reads. All of them are in this file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from fastload.isolation.rules import own_dict

CHAIN = "_ex_iterable"
"""The attribute of a stream with the steps that read it."""
_SHUFFLE = "BufferShuffledExamplesIterable"
"""The step of `shuffle()`. A state has no examples of its buffer, and copies that split shards cannot load it."""


def shuffles(dataset: Any) -> bool:
    """Return whether a Hugging Face stream, or one that `dataset` holds, does not resume exactly from its own state.

    If this version of `datasets` has other names, return True for all streams.
    """
    module = sys.modules.get("datasets.iterable_dataset")
    if module is None:
        return False
    todo = [held[CHAIN] for held in attributes(dataset) if CHAIN in held]
    if not todo:
        return isinstance(dataset, module.IterableDataset)
    if not hasattr(module, _SHUFFLE):
        return True
    for step in todo:
        if type(step).__name__ == _SHUFFLE:
            return True
        if step is not None:
            todo += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())]
    return False


def attributes(source: Any) -> Iterator[dict[str, Any]]:
    """Yield the attributes of an object, and of all objects that attributes lead to. No code of a class runs."""
    todo, seen = [source], set[int]()
    while todo:
        x = todo.pop()
        held = {} if issubclass(type(x), ModuleType) else own_dict(x)
        if held and id(held) not in seen:
            seen.add(id(held))
            todo += held.values()
            yield held
