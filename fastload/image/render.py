"""Runs of images, rendered into the rows of a batch: by the kernels if this machine has them, else by torch.

Both give the same pixels, to the bit. The loader reads images that neither can render one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fastload._kit.torch_private import no_torch_function
from fastload.image import kernels
from fastload.image.decode import Encoded, Pixels
from fastload.image.kernels import tables
from fastload.image.kernels_check import agrees_with_torch
from fastload.image.plan_tables import plan_table, result_size
from fastload.image.plans import Plan, is_known_plan
from fastload.image.regions import Box, Region
from fastload.telemetry import add_to_stage

T = TypeVar("T")

_MOST_ARENA = 256 * 1024 * 1024
"""The most bytes of scratch memory that a thread keeps. An image that needs more is read alone."""


def empty_result(transform: Any) -> torch.Tensor | None:
    """Return an empty result of `transform`, or None if it is not one of our plans, or if its output size varies."""
    form = _form(transform) if is_known_plan(transform) else None
    return None if form is None else torch.empty(form[0], dtype=form[1], device="cpu")


@lru_cache(maxsize=64)
def _form(plan: Plan) -> tuple[tuple[int, ...], torch.dtype] | None:
    size = result_size(plan)
    if not isinstance(size, tuple):
        return None
    return (3, *size), torch.uint8 if plan.mean is None else torch.float32


def make_render(transform: Any, rows: torch.Tensor, keys: NDArray[np.uint64]) -> Render | None:
    """Return a `Render` for the images of a run, or None if the results of `transform` do not fit into `rows`.

    The kernels write into `rows` without checks, so nothing else may create a `Render`.
    """
    form = _form(transform) if is_known_plan(transform) else None
    if form is None or not rows.is_cpu:
        return None
    fits = rows.dtype is form[1] and rows.shape == (len(keys), *form[0])
    return Render(transform, rows, keys) if fits else None


def _most_pixels() -> int:
    """Return the limit of pixels for the kernels: 0 for no limit."""
    limit = Image.MAX_IMAGE_PIXELS
    return 0 if limit is None else min(max(1, int(2 * limit)), 2**62)


class Render:
    """Renders the images of one run by `plan` into `rows`, uint8[n, 3, H, W] (or float32), of any strides.

    `keys`, uint64[n], are the keys of the samples' random streams. Each method returns the positions that it could not
    render.
    """

    def __init__(self, plan: Plan, rows: torch.Tensor, keys: NDArray[np.uint64]) -> None:
        self._plan = plan
        self._rows = rows
        self._keys = keys
        ready = kernels.kernels()
        self._kernels = ready if ready is not None and agrees_with_torch(ready) else None
        self._read_s = 0.0  # for the images that torch renders
        # A reference: the kernels read it by its address.
        self._table = plan_table(plan, rows.stride()[1:], _most_pixels())

    def raw(
        self,
        files: NDArray[np.int64],
        begins: NDArray[np.int64],
        sides: NDArray[np.int32],
        checksums: NDArray[np.int64],
        read: Callable[[int, int, int], Pixels],
    ) -> list[int]:
        """Render images from raw pixels.

        Args:
            files: the descriptor of each image's open file, int64[n].
            begins: the offset in its file at which each image's pixels, uint8[height, width, 3], begin, int64[n].
            sides: height and width, int32[n, 2].
            checksums: the CRC-32 that the pixels must have, int64[n]; -1 for no check.
            read: returns rows `first` to `stop` of image k, checked, as uint8[stop - first, width, 3].
        """
        if self._kernels is None:
            every = range(len(self._keys))
            return self._by_torch(every, lambda k, choose: self._raw_region(k, sides, choose, read))
        images = self._images()
        images["file"], images["source"] = files, begins
        images["height"], images["width"] = sides.T
        images["length"] = 3 * sides[:, 0].astype(np.int64) * sides[:, 1]
        images["checksum"] = checksums
        self._call(self._kernels.raw_run, images.ctypes.data, len(images))
        return self._missing(images)

    def encoded(
        self, read: Callable[[int], Encoded], place: Callable[[NDArray[Any]], None]
    ) -> list[int]:
        """Render images from encoded files.

        Args:
            read: returns the bytes of image k, checked. They are valid until the next call.
            place: writes into the kernels' table where the bytes are: `file`, `source`, `length` and `checksum`.
        """
        return self._encoded("jpeg_run", read, place)

    def files(self, paths: Sequence[bytes], read: Callable[[int], Encoded]) -> list[int]:
        """Render images from the files at `paths`. `read` is as in `encoded`."""
        names = np.frombuffer(b"\0".join(paths) + b"\0", np.uint8)
        ends = np.cumsum([len(path) + 1 for path in paths])

        def place(images: NDArray[Any]) -> None:
            images["file"], images["checksum"] = -1, -1
            images["source"] = names.ctypes.data + np.array([0, *ends[:-1]])

        return self._encoded("file_run", read, place)

    def _encoded(
        self, entry: str, read: Callable[[int], Encoded], place: Callable[[NDArray[Any]], None]
    ) -> list[int]:
        plan = self._plan
        missing: list[int] = []
        rest: Sequence[int] = range(len(self._keys))
        if self._kernels and self._kernels.libjpeg and plan.region_decode and not plan.upright:
            images = self._images()
            place(images)
            self._call(getattr(self._kernels, entry), images.ctypes.data, len(images))
            left = self._missing(images)
            # Other formats, unusual JPEGs and damage.
            rest = [k for k in left if images["state"][k] == tables.DAMAGED]
            missing = [k for k in left if k not in rest]
        return missing + self._by_torch(
            rest, lambda k, choose: plan.decoded(self._timed(read, k), choose, name="")
        )

    # ---- tables ----

    def _call(self, entry: Callable[..., int], images: int, count: int) -> None:
        """Call a kernel for `count` images of a table. It releases the GIL."""
        # A reference: at the interpreter's exit, `_scratch` goes while daemon threads run on.
        arena = _scratch.arena
        _scratch.grow(entry(images, count, self._table.address, _scratch.address, arena.nbytes))

    def _images(self) -> NDArray[Any]:
        """Return a table of the run's images, with their keys and rows."""
        n = len(self._keys)
        images = np.zeros(n, tables.IMAGE)
        images["key"] = self._keys
        step = self._rows.stride(0) * self._rows.element_size()
        images["row"] = self._rows.data_ptr() + step * np.arange(n)
        return images

    def _missing(self, images: NDArray[Any]) -> list[int]:
        """Count the stages of the run, and return the positions of images that are not done."""
        done = images["state"] == tables.DONE
        count = int(np.count_nonzero(done))
        for stage in ("read", "decode", "transform"):
            spent = int(images[f"{stage}_ns"].sum())
            if spent and count:
                add_to_stage(stage, spent * 1e-9, count, computed=stage != "read")
        return [] if count == len(images) else np.flatnonzero(~done).tolist()

    # ---- by torch ----

    def _by_torch(
        self,
        images: Sequence[int],
        decoded: Callable[[int, Callable[[int, int], Region]], tuple[Pixels, Region]],
    ) -> list[int]:
        """Render some images by torch's kernel. `decoded(k, choose)` returns pixels and the region in them."""
        missing = []
        plan, out, generator = self._plan, self._rows.numpy(), torch.Generator()
        decode_s = transform_s = 0.0
        with no_torch_function():
            for k in images:
                key = int(self._keys[k])
                choose = partial(plan.region, generator=generator.manual_seed(key))
                began = perf_counter()
                try:
                    pixels, region = decoded(k, choose)
                    was_decoded = perf_counter()
                    plan.finish(pixels, region, out[k])
                except Exception:
                    missing.append(k)  # reading this image alone raises it again
                    continue
                decode_s += was_decoded - began
                transform_s += perf_counter() - was_decoded
        count = len(images) - len(missing)
        stages = {"read": self._read_s, "decode": decode_s - self._read_s, "transform": transform_s}
        for stage, seconds in stages.items() if count else ():
            add_to_stage(stage, seconds, count, computed=stage != "read")
        return missing

    def _timed(self, read: Callable[..., T], *place: int) -> T:
        """Call `read` for an image, return its result, and count its time."""
        began = perf_counter()
        try:
            return read(*place)
        finally:
            self._read_s += perf_counter() - began

    def _raw_region(
        self,
        k: int,
        sides: NDArray[np.int32],
        choose: Callable[[int, int], Region],
        read: Callable[[int, int, int], Pixels],
    ) -> tuple[Pixels, Region]:
        height, width = sides[k].tolist()
        region = choose(height, width)
        top, left, h, w = region.box
        return self._timed(read, k, top, top + h), region._replace(box=Box(0, left, h, w))


class _Scratch(threading.local):
    """A thread's own memory."""

    def __init__(self) -> None:
        self.arena = np.empty(0, np.uint8)
        self.address = 0
        self.grow(4 * 1024 * 1024)

    def grow(self, nbytes: int) -> None:
        """Allocate room for an image that needs `nbytes`, if that is not too much. The rows of its run are valid."""
        if self.arena.nbytes < nbytes <= _MOST_ARENA:
            with suppress(MemoryError):
                whole = np.empty(nbytes * 5 // 4 + 64, np.uint8)
                self.arena = whole[-whole.ctypes.data % 64 :]
                self.address = self.arena.ctypes.data


_scratch = _Scratch()
