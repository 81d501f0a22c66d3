"""The form of messages and checkpoints: plain values with tensors in them, as JSON and one array of bytes.

Nothing is pickled. A tensor of any dtype is stored as its bytes, with the name of its dtype.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastload.distributed.arrow_memory import batch_of, bytes_of

CHUNK = 2**26
"""Bytes in a message: gRPC's limit is 2 GiB."""
ALIGNMENT = 64
_LARGE = 2**18  # bytes of a tensor that is sent on its own
_NOTHING = np.empty(0, np.uint8)
_TENSOR = "tensor: dtype, shape, first byte"
_MARK = _TENSOR.encode()
_DTYPE = re.compile(r"(bfloat|float|complex|u?int)\d+\w*|bool")
_MOST_DIMENSIONS = 64  # more than torch's functions take


class Encoded:
    """A value as JSON, in `text`, and its tensors as `size` bytes. Each tensor begins at a multiple of 64."""

    def __init__(self, value: Any) -> None:
        self._arrays: list[NDArray[np.uint8]] = []
        self.size = 0
        self.text = json.dumps(value, default=self._take).encode()

    def _take(self, tensor: Any) -> dict[str, Any]:
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            kind = getattr(tensor, "layout", type(tensor).__name__)
            raise TypeError(f"a server takes dense tensors and plain values, but got {kind}")
        content = tensor.detach().cpu().contiguous()
        array = content.reshape(-1).view(torch.uint8).numpy()
        if padding := -self.size % ALIGNMENT:
            self._arrays.append(np.zeros(padding, np.uint8))
        first = self.size + padding
        self._arrays.append(array)
        self.size = first + len(array)
        return {_TENSOR: [str(content.dtype).removeprefix("torch."), list(content.shape), first]}

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the bytes as record batches of at most `CHUNK`, at least one. Large tensors are not copied."""
        small: list[NDArray[np.uint8]] = []
        for array in self._arrays:
            if len(array) < _LARGE:
                small.append(array)
                continue
            if small:
                yield batch_of(np.concatenate(small))
                small = []
            for first in range(0, len(array), CHUNK):
                yield batch_of(array[first : first + CHUNK])
        if small or not self._arrays:
            yield batch_of(small[0] if len(small) == 1 else np.concatenate([_NOTHING, *small]))


def decode(text: bytes, content: Tensor) -> Any:
    """Return the value. Its tensors are views of `content`, which is uint8 and aligned.

    Raises ValueError, TypeError or RecursionError if `text` is not that of a value whose tensors lie in `content`.
    """

    def hook(found: dict[str, Any]) -> Any:
        if _TENSOR not in found:
            return found
        name, shape, first = found[_TENSOR]
        dtype = getattr(torch, name, None) if _DTYPE.fullmatch(name) else None
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"torch has no dtype {name!r}")
        numbers = (*shape, first)
        if len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("a tensor has a wrong shape or place")
        end = first + math.prod(shape) * dtype.itemsize
        if end > len(content) or first % ALIGNMENT:
            raise ValueError(f"a tensor lies at {first} to {end} of {len(content)} bytes")
        found_bytes = content[first:end]
        if dtype is torch.bool and (found_bytes > 1).any():
            raise ValueError("a tensor of bool has bytes other than 0 and 1")
        return found_bytes.view(dtype).view(shape)

    return json.loads(text, object_hook=hook if _MARK in text else None)


def gathered(size: int, batches: Iterable[pa.RecordBatch]) -> Tensor:
    """Return `size` bytes, aligned, out of the first batches that hold them. Raise ValueError if they do not fit."""
    # From the pool of Arrow: fresh pages for each message would cost a tenth of the time.
    content = torch.frombuffer(pa.allocate_buffer(max(size, 1)), dtype=torch.uint8)[:size]
    left = content.numpy()
    for batch in batches:
        came = bytes_of(batch)
        if len(came) > len(left):
            raise ValueError("more bytes came than were announced")
        left[: len(came)] = came
        left = left[len(came) :]
        if not len(left):
            return content
    raise ValueError("fewer bytes came than were announced")
