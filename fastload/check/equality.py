"""Compare two samples bit for bit, whatever they consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fastload.safety.objects import attributes, slots_of


def differing(indices: Sequence[Any], one: Sequence[Any], other: Sequence[Any]) -> str:
    """Describe which samples differ. Return an empty string if none does."""
    pairs = zip(indices, one, other, strict=True)
    wrong = [index for index, a, b in pairs if not same(a, b)]
    return f"{len(wrong)} of {len(indices)} samples (index {wrong[0]!r} first)" if wrong else ""


def same(a: Any, b: Any, compared: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Return True if two samples are equal, bit for bit.

    Objects without equality are compared by their attributes, and by type if they have none. `compared` are the pairs
    that contain this one, because an object may contain itself.
    """
    if type(a) is not type(b):
        return False
    pair = id(a), id(b)
    if a is b or pair in compared:
        return True
    compared |= {pair}

    def alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
        return len(some) == len(others) and all(
            same(one, other, compared) for one, other in zip(some, others, strict=True)
        )

    if isinstance(a, torch.Tensor):
        return alike(_parts(a), _parts(b))
    if isinstance(a, np.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return (
            alike([*a.flat], [*b.flat]) if a.dtype.hasobject else bool(a.tobytes() == b.tobytes())
        )
    if isinstance(a, Mapping):
        return list(a) == list(b) and alike([*a.values()], [*b.values()])
    if isinstance(a, list | tuple):
        return alike(a, b)
    if hasattr(a, "tobytes"):  # images
        return bool(a.tobytes() == b.tobytes())
    attributes = _attributes(a)
    if getattr(type(a), "__eq__", None) is not getattr(object, "__eq__", None):
        try:
            equals = getattr(a, "equals", None)  # a table's == returns a table
            if bool(equals(b)) if equals else bool(a == b or (a != a and b != b)):
                return True
        except Exception:  # user code, or arrays inside: compare their attributes
            return alike(attributes, _attributes(b))
        return bool(attributes) and alike(attributes, _attributes(b))
    return alike(attributes, _attributes(b))


def _parts(tensor: torch.Tensor) -> list[Any]:
    """Return the parts of a tensor of any layout: plain values and dense tensors."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return [*tensor.unbind()]
    head = [tensor.layout, tensor.dtype, tuple(tensor.shape)]
    if tensor.layout is torch.sparse_coo:
        return [*head, tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [*head, tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [*head, tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.layout is not torch.strided or tensor.is_meta:
        return head
    dense = tensor.int_repr() if tensor.is_quantized else tensor
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [*head, flat.view(torch.uint8).numpy()]


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes by name, from its dictionary and its slots."""
    return sorted(dict(attributes(value, slots_of(type(value)))).items())
