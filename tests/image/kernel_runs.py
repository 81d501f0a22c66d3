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
from fastload.image.kernels.tables import DONE, IMAGE, UNDECIDED
from fastload.image.plan_tables import plan_table, result_size
from fastload.image.regions import Box, Region
from tests.image.photographs import Pixels

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
ARENA = np.empty(64 << 20, np.uint8)


EXTREMES = [
    (1, 1, (1, 1)),
    (1, 1, (300, 300)),
    (300, 300, (1, 1)),
    (5000, 1, (3, 3)),
    (1, 5000, (3, 3)),
    (3000, 700, (5, 7)),  # more than 1,000 taps
    (64, 64, (64, 64)),  # no pass is needed
    (64, 50, (64, 70)),  # no vertical one
    (50, 64, (70, 64)),  # no horizontal one
    (33, 65, (129, 31)),
]
"""Height and width of images, and the sizes of results."""


def noise(height: int, width: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


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


def empty_row(plan: Plan) -> torch.Tensor:
    """Memory for a result, in the layout that the plan asks for, filled with 77."""
    height, width = result_size(plan)
    dtype = torch.uint8 if plan.mean is None else torch.float32
    if plan.channels_last:
        return torch.full((height, width, 3), 77, dtype=dtype).permute(2, 0, 1)
    return torch.full((3, height, width), 77, dtype=dtype)


def by_torch(plan: Plan, pixels: Pixels, key: int = 0) -> torch.Tensor:
    """What torch's own kernels make of pixels."""
    generator = torch.Generator().manual_seed(key)
    return plan.finished(pixels, plan.region(*pixels.shape[:2], generator))


class Trial:
    """Renders single JPEGs by the kernels."""

    def __init__(self, kernels: Kernels, arena_bytes: int = 1 << 23) -> None:
        self.image = np.zeros(1, IMAGE)  # the row of the last image
        self.needed = 0
        self.scale = 1.0  # at which `expected` has decoded
        self._kernels = kernels
        self._arena = np.empty(arena_bytes, np.uint8)

    def run(self, plan: Plan, key: int, **fields: int) -> tuple[int, Pixels]:
        """Return an image's state and its result, uint8[H, W, 3]. `fields` are fields of its row in the table.

        `source` is the address of `length` bytes in memory, unless `file` is given. With `named=1` it is the address of
        a file's name.
        """
        result = np.zeros((*result_size(plan), 3), np.uint8)
        state = self.run_into(result, self._arena, plan, key, **fields)
        for _ in range(2):  # the arena may have to grow for the file, then for its pixels
            if self.needed:
                self._arena = np.empty(self.needed + 64, np.uint8)
                state = self.run_into(result, self._arena, plan, key, **fields)
        return state, result

    def run_into(
        self,
        result: Pixels,
        arena: Pixels,
        plan: Plan,
        key: int,
        *,
        named: int = 0,
        most_pixels: int = 0,
        **fields: int,
    ) -> int:
        """Return an image's state after one call. If the arena was too small, `needed` is the right size, else 0."""
        table = plan_table(plan, (1, 3 * result.shape[1], 3), most_pixels)
        self.image[:] = 0
        fields = {"key": key, "row": result.ctypes.data, "file": -1, "checksum": -1} | fields
        for name, value in fields.items():
            self.image[name] = value
        run = self._kernels.file_run if named else self._kernels.jpeg_run
        skipped = -arena.ctypes.data % 64
        room = arena.ctypes.data + skipped, max(0, arena.nbytes - skipped)
        self.needed = run(self.image.ctypes.data, 1, table.address, *room)
        return int(self.image["state"][0])

    def run_bytes(
        self, plan: Plan, key: int, encoded: bytes, most_pixels: int = 0
    ) -> tuple[int, Pixels]:
        """Call `run` for an image in memory."""
        payload = np.frombuffer(encoded, np.uint8)
        place = {"source": payload.ctypes.data, "length": len(encoded)}
        return self.run(plan, key, most_pixels=most_pixels, **place)

    def expected(self, plan: Plan, encoded: bytes) -> Pixels:
        """Return the pixels of the last box, decoded without the kernel, uint8[H, W, 3]. Raises DecodeError."""
        fields = self.image[["top", "left", "box_height", "box_width", "flip"]]
        top, left, rows, columns, flip = fields[0].item()
        region = Region(Box(top, left, rows, columns), result_size(plan), flip=bool(flip))
        whole, region = plan.decoded(encoded, lambda *_: region, name="trial")
        self.scale = rows / region.box.height
        pixels: Pixels = plan.finished(whole, region).permute(1, 2, 0).contiguous().numpy()
        return pixels

    def check(self, plan: Plan, encoded: bytes, keys: range) -> None:
        """Assert that an image's results are those of the ordinary way."""
        for key in keys:
            state, result = self.run_bytes(plan, key, encoded)
            assert state in (DONE, UNDECIDED), (state, key)
            if state == DONE:
                assert np.array_equal(result, self.expected(plan, encoded)), (key, self.image)
