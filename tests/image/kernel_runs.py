"""Runs of the kernels on pixels in memory, and memory that ends at a page without access."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastload.image import Plan
from fastload.image.kernels import Kernels
from fastload.image.kernels.tables import IMAGE
from fastload.image.plan_tables import plan_table
from tests.image.photographs import Pixels

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
ARENA = np.empty(64 << 20, np.uint8)


class GuardedMemory:
    """Memory between two pages without access."""

    def __init__(self, most: int) -> None:
        page = mmap.PAGESIZE
        inner = -(-most // page) * page
        memory = np.frombuffer(mmap.mmap(-1, inner + 2 * page), np.uint8)
        for at in (0, page + inner):
            if _libc.mprotect(memory.ctypes.data + at, page, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._bytes = memory[page : page + inner]

    def last(self, count: int) -> Pixels:
        """Return the last `count` bytes."""
        return self._bytes[len(self._bytes) - count :]


def guarded(nbytes: int) -> Any:
    """uint8[nbytes], all 0, after which no byte can be read or written."""
    return GuardedMemory(nbytes).last(nbytes)


def guarded_copy(pixels: Pixels) -> Pixels:
    """A copy of pixels after which no byte can be read."""
    copy = guarded(pixels.size)
    copy[:] = pixels.reshape(-1)
    reshaped: Pixels = copy.reshape(pixels.shape)
    return reshaped


def image_of(pixels: Pixels, row: torch.Tensor, *, key: int = 0) -> Any:
    """A row of IMAGE for raw pixels in memory: the box is all of them until one is drawn."""
    image = np.zeros(1, IMAGE)
    image["key"], image["file"], image["checksum"] = key, -1, -1
    image["source"], image["length"] = pixels.ctypes.data, pixels.size
    image["height"], image["width"] = pixels.shape[:2]
    image["box_height"], image["box_width"] = pixels.shape[:2]
    image["stride"] = pixels.strides[0]
    image["row"] = row.data_ptr()
    return image


@dataclass
class Made:
    """What a kernel made of an image."""

    row: torch.Tensor
    image: Any
    needed: int

    @property
    def state(self) -> int:
        return int(self.image["state"])


def make(
    kernels: Kernels,
    plan: Plan,
    pixels: Pixels,
    key: int = 0,
    *,
    entry: str = "raw_run",
    row: torch.Tensor | None = None,
    arena: Any = ARENA,
    limit: int | None = None,
    **fields: int,
) -> Made:
    """Run a kernel on one image, with `fields` of IMAGE set."""
    row = empty_row(plan) if row is None else row
    image = image_of(pixels, row, key=key)
    for name, value in fields.items():
        image[name] = value
    table = plan_table(plan, row.stride(), 2 * (limit or 0))
    needed = getattr(kernels, entry)(
        image.ctypes.data, 1, table.address, arena.ctypes.data, arena.nbytes
    )
    return Made(row, image[0], needed)


def size_of(plan: Any) -> tuple[int, int]:
    size: tuple[int, int] = getattr(plan, "crop", None) or plan.size
    return size


def empty_row(plan: Plan) -> torch.Tensor:
    """Memory for a result, in the layout that the plan asks for, filled with 77."""
    height, width = size_of(plan)
    dtype = torch.uint8 if plan.mean is None else torch.float32
    if plan.channels_last:
        return torch.full((height, width, 3), 77, dtype=dtype).permute(2, 0, 1)
    return torch.full((3, height, width), 77, dtype=dtype)


def by_torch(plan: Plan, pixels: Pixels, key: int = 0) -> torch.Tensor:
    """What torch's own kernels make of pixels."""
    generator = torch.Generator().manual_seed(key)
    return plan.finished(pixels, plan.region(*pixels.shape[:2], generator))
