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
from fastload.image.kernels.tables import PICTURE
from fastload.image.render import plan_table
from tests.image.photographs import Pixels

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
ARENA = np.empty(64 << 20, np.uint8)


class _Pages:
    """Memory that ends at a page without access, and begins after one."""

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        inner = -(-nbytes // page) * page
        self._memory = mmap.mmap(-1, inner + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._forbidden = [base, base + page + inner]
        self._protect(0)
        self.address = base + page + inner - nbytes

    def _protect(self, access: int) -> None:
        for address in self._forbidden:
            assert _libc.mprotect(address, mmap.PAGESIZE, access) == 0

    def __del__(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)


class _Guarded(np.ndarray):  # type: ignore[type-arg]
    pages: _Pages


def guarded(nbytes: int) -> Any:
    """uint8[nbytes], all 0, after which no byte can be read or written."""
    pages = _Pages(nbytes)
    memory = (ctypes.c_uint8 * nbytes).from_address(pages.address)
    array = np.frombuffer(memory, np.uint8).view(_Guarded)
    array.pages = pages
    return array


def guarded_copy(pixels: Pixels) -> Pixels:
    """A copy of pixels after which no byte can be read."""
    copy = guarded(pixels.size)
    copy[:] = pixels.reshape(-1)
    reshaped: Pixels = copy.reshape(pixels.shape)
    return reshaped


def picture_of(pixels: Pixels, row: torch.Tensor, *, key: int = 0) -> Any:
    """A row of PICTURE for raw pixels in memory: the box is all of them until one is drawn."""
    picture = np.zeros(1, PICTURE)
    picture["key"], picture["file"], picture["checksum"] = key, -1, -1
    picture["source"], picture["length"] = pixels.ctypes.data, pixels.size
    picture["height"], picture["width"] = pixels.shape[:2]
    picture["box_height"], picture["box_width"] = pixels.shape[:2]
    picture["stride"] = pixels.strides[0]
    picture["row"] = row.data_ptr()
    return picture


@dataclass
class Made:
    """What a kernel made of a picture."""

    row: torch.Tensor
    picture: Any
    needed: int

    @property
    def state(self) -> int:
        return int(self.picture["state"])


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
    """Run a kernel on one picture, with `fields` of PICTURE set."""
    row = empty_row(plan) if row is None else row
    picture = picture_of(pixels, row, key=key)
    for name, value in fields.items():
        picture[name] = value
    table = plan_table(plan, row.stride(), 2 * (limit or 0))
    needed = getattr(kernels, entry)(
        picture.ctypes.data, 1, table.address, arena.ctypes.data, arena.nbytes
    )
    return Made(row, picture[0], needed)


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
