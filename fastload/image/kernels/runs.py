"""The entry points for pixels: a run of images in one call, each with its own state in its row of IMAGE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from fastload.image.kernels.checksum import crc32
from fastload.image.kernels.draws import draw
from fastload.image.kernels.memory import (
    IMAGE_AT,
    IMAGE_BYTES,
    OPTIONS,
    load_i64,
    store_i64,
)
from fastload.image.kernels.payload import read_payload
from fastload.image.kernels.resample import resample
from fastload.image.kernels.tables import DAMAGED, DONE, TOO_LARGE
from fastload.image.kernels.workspace import aligned, bytes_needed


def draw_run(images: int, count: int, plan: int) -> int:
    """Draw the boxes and flips of the images that are DONE. Return how many are DONE after that."""
    done = 0
    for place in range(count):
        image = images + IMAGE_BYTES * place
        if load_i64(image + IMAGE_AT.state) == DONE and draw(image, plan) == DONE:
            done += 1
    return done


def _run_of(make: Any, docstring: str) -> Callable[..., int]:
    """Return an entry point that calls `make` for each image that is DONE."""

    def run(images: int, count: int, plan: int, arena: int, arena_bytes: int) -> int:
        needed = 0
        for place in range(count):
            image = images + IMAGE_BYTES * place
            if load_i64(image + IMAGE_AT.state) == DONE:
                needed = max(needed, make(image, plan, arena, arena_bytes))
        return needed

    run.__doc__ = docstring
    return run


@njit(**OPTIONS)
def _raw(image: int, plan: int, arena: int, arena_bytes: int) -> int:
    """Draw the box, read its rows, write the row of the result. Return the bytes that are needed, or 0 if they fit."""
    state = draw(image, plan)
    if state != DONE:
        return 0
    height, width = load_i64(image + IMAGE_AT.height), load_i64(image + IMAGE_AT.width)
    stride = 3 * width
    if load_i64(image + IMAGE_AT.length) != height * stride:
        store_i64(image + IMAGE_AT.state, DAMAGED)
        return 0
    # The bytes of the payload that the box needs. A checksum needs all.
    begin = load_i64(image + IMAGE_AT.top) * stride + 3 * load_i64(image + IMAGE_AT.left)
    rows = load_i64(image + IMAGE_AT.box_height)
    first, length = begin, (rows - 1) * stride + 3 * load_i64(image + IMAGE_AT.box_width)
    if load_i64(image + IMAGE_AT.checksum) >= 0:
        first, length = 0, height * stride
    in_file = load_i64(image + IMAGE_AT.file) >= 0
    taken = aligned(length) if in_file else 0
    if taken > arena_bytes:
        store_i64(image + IMAGE_AT.state, TOO_LARGE)
        return taken + bytes_needed(image, plan)
    source = load_i64(image + IMAGE_AT.source)
    pixels = read_payload(image, source + first, length, arena)
    if pixels == 0:
        return 0
    store_i64(image + IMAGE_AT.source, pixels + begin - first)
    store_i64(image + IMAGE_AT.stride, stride)
    needed = resample(image, plan, arena + taken, arena_bytes - taken)
    store_i64(image + IMAGE_AT.source, source)
    return needed + taken if needed > 0 else 0


resample_run = _run_of(
    resample,
    """Write the rows of the images that are DONE from their boxes at `source`.

    Return the bytes of the arena that the largest image would have needed, or 0 if all fitted.
    """,
)
raw_run = _run_of(
    _raw,
    """Write the rows of the images that are DONE, from raw pixels in a file or in memory. Return as `resample_run`.""",
)

ENTRY_POINTS: dict[str, tuple[Callable[..., int], int]] = {
    "draw_run": (draw_run, 3),
    "resample_run": (resample_run, 5),
    "raw_run": (raw_run, 5),
    "crc32": (crc32, 3),
}
"""The functions that the training process and its tests call, with the number of arguments. All are int64."""
