"""Functions on the leaves of nested containers, such as samples and batches: tuples, lists and mappings of anything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_tensors(nested: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply `function` to every tensor in `nested`; see `map_leaves`."""
    return map_leaves(nested, lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf)


def map_leaves(nested: Any, function: Callable[[Any], Any]) -> Any:
    """Apply `function` to every leaf of `nested`, and return the result. An unchanged container is returned itself.

    Containers keep their types. A mapping that cannot be made from a dict becomes a dict.
    """
    if isinstance(nested, Tensor):  # first, as most parts of batches are leaves
        return function(nested)
    if isinstance(nested, PackedSequence):  # its batch sizes must stay on the CPU
        data, sizes, *indices = nested
        parts = [map_leaves(part, function) for part in (data, *indices)]
        return nested if parts[0] is data else PackedSequence(parts[0], sizes, *parts[1:])
    if isinstance(nested, tuple | list):
        parts = [map_leaves(part, function) for part in nested]
        if all(new is old for new, old in zip(parts, nested, strict=True)):
            return nested
        if isinstance(nested, list):
            clone = copy.copy(nested)
            clone[:] = parts
            return clone
        return type(nested)(*parts) if hasattr(nested, "_fields") else type(nested)(parts)
    if isinstance(nested, Mapping):
        values = {key: map_leaves(value, function) for key, value in nested.items()}
        if all(value is nested[key] for key, value in values.items()):
            return nested
        return _like_mapping(nested, values)
    return function(nested)


def _like_mapping(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping like `mapping`, with the same keys and these values."""
    if isinstance(mapping, MutableMapping):
        clone = copy.copy(mapping)
        clone.update(values)
        return clone
    with suppress(TypeError):
        return type(mapping)(values)  # type: ignore[call-arg]
    return values
