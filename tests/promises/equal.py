"""What it means that a batch equals another: type, dtype, shape, strides, nesting and every bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def check_same(got: Any, expected: Any, where: str = "batch") -> None:
    """Raise AssertionError where `got` is not what `expected` is, part by part."""
    assert type(got) is type(expected), where
    if isinstance(expected, torch.Tensor):
        check_same_tensor(got, expected, where)
    elif isinstance(expected, Mapping):
        assert list(got) == list(expected), where
        for key in expected:
            check_same(got[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, Sequence | deque) and not isinstance(expected, str | bytes | range):
        assert len(got) == len(expected), where
        for place, (one, other) in enumerate(zip(got, expected, strict=True)):
            check_same(one, other, f"{where}[{place}]")
    elif isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype, where
        np.testing.assert_array_equal(got, expected, where)
    elif isinstance(expected, torch.Generator):
        check_same_tensor(got.get_state(), expected.get_state(), where)
    elif isinstance(expected, torch.UntypedStorage):
        assert bytes(got) == bytes(expected), where
    else:
        both_nan = got != got and expected != expected
        assert got is expected or got == expected or both_nan, where
    for name in ("label", "default_factory", "maxlen"):
        assert getattr(got, name, None) == getattr(expected, name, None), f"{where}.{name}"


def check_same_tensor(got: torch.Tensor, expected: torch.Tensor, where: str) -> None:
    if expected.is_nested:  # it has no shape
        check_same(got.unbind(), expected.unbind(), where)
        return
    for fact in ("dtype", "shape", "layout", "device", "requires_grad", "is_leaf", "is_quantized"):
        assert getattr(got, fact) == getattr(expected, fact), f"{where}.{fact}"
    assert (got.grad_fn is None) == (expected.grad_fn is None), f"{where}.grad_fn"
    if expected.layout is torch.strided:
        assert got.stride() == expected.stride(), f"{where}.stride()"
    assert got.is_inference() == expected.is_inference(), f"{where}.is_inference()"
    if got.layout is torch.strided:
        assert not got.is_shared(), f"{where} is in shared memory"
    if got.device.type != "meta":
        assert raw(got) == raw(expected), where


def raw(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor's values, which tell NaN from NaN and -0.0 from 0.0."""
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    plain = tensor.detach().as_subclass(torch.Tensor)
    plain = plain.int_repr() if plain.is_quantized else plain
    plain = plain.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""
