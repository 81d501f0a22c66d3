"""Sizes and addresses in the arena that the passes of a resize share. Nothing here writes to the arena."""

from __future__ import annotations

import math
from collections import namedtuple

import numpy as np
from numba import njit

from fastload.image.kernels.draws import size_before_crop
from fastload.image.kernels.memory import IMAGE_AT, OPTIONS, PLAN_AT, load_i64, stack, store_i64

_Table = namedtuple(
    "_Table",
    [
        "before",  # pixels of the box in this direction
        "after",  # pixels of the resized image
        "first",  # the first of these that is kept
        "kept",  # their number
        "black",  # black pixels of the result before them
        "mirrored",
        "unit",  # of `begins`: bytes of a pixel, or 1
        "shares",  # unrounded weights, `share_bytes` for each pixel
        "share_bytes",
        "begins",  # the first source pixel of each pixel of the result, int64
        "weights",  # int16, `taps` for each pixel of the result
        "taps",  # an even number
        "bits",  # weights are multiples of 2**-bits
    ],
)
TABLE = _Table(*range(0, 8 * len(_Table._fields), 8))
"""Offsets of the numbers of one pass, in bytes."""
TABLE_BYTES = 8 * len(TABLE)

_Work = namedtuple(
    "_Work",
    [
        "end",  # of the part of the arena that is taken
        "source",  # address of the first pixel of the box
        "stride",
        "safe_rows",  # rows from the top that may be read beyond their end
        # Lines: rows of the source after the first pass, three planes each or interleaved colours.
        "lines",
        "most_lines",
        "line_bytes",
        "plane_bytes",
        "padded",  # address of copies of two rows of the source that cannot be read beyond their end
        "padded_bytes",
        "assembled",  # address of a row of the result, if it cannot be written directly
        "pixel_bytes",  # 3: interleaved colours, 1: three planes
        "is_direct",  # 1: rows of the result are written directly
        # For floats. See `find_factors`.
        "factors",  # shifts follow `PATTERNS` bytes later
        "is_linear",
        "past_caches",
    ],
)
AT = _Work(*range(0, 8 * len(_Work._fields), 8))
"""Offsets of the other numbers that the passes share, in bytes. All are on the stack of `resample`."""
COLUMNS = 8 * len(AT)
ROWS = COLUMNS + TABLE_BYTES
WORK_BYTES = ROWS + TABLE_BYTES

VECTOR = 32  # bytes
PATTERN = 24  # the least common multiple of 3 colours and 8 floats of a vector
PATTERNS = 3 * 4 * PATTERN  # bytes of one for each colour
_LINES_BESIDE_TAPS = 24  # so that lines are rarely moved, and stay in the first-level cache


@njit(**OPTIONS)
def bytes_needed(image: int, plan: int) -> int:
    """Return the bytes of an arena that `resample` needs."""
    work = stack(WORK_BYTES)
    # Any address works, because nothing is read or written there.
    return lay_out(work, image, plan, work)


@njit(**OPTIONS)
def aligned(count: int) -> int:
    """Return `count` bytes, rounded up to a multiple of 64."""
    return (count + 63) & ~63


@njit(**OPTIONS)
def lay_out(work: int, image: int, plan: int, arena: int) -> int:
    """Store the numbers that are known before the tables, and divide the arena. Return the bytes that are needed."""
    store_i64(work + AT.end, arena)
    result_height, result_width = load_i64(plan + PLAN_AT.height), load_i64(plan + PLAN_AT.width)
    rows, columns = size_before_crop(image, plan)
    box_height = load_i64(image + IMAGE_AT.box_height)
    box_width = load_i64(image + IMAGE_AT.box_width)
    row_taps = _lay_out_table(work, work + ROWS, box_height, rows, result_height)
    column_taps = _lay_out_table(work, work + COLUMNS, box_width, columns, result_width)
    store_i64(work + ROWS + TABLE.unit, 1)
    store_i64(work + COLUMNS + TABLE.unit, 3)
    store_i64(work + ROWS + TABLE.mirrored, 0)
    if load_i64(image + IMAGE_AT.flip) != 0:
        _mirror(work + COLUMNS, result_width)
    _lay_out_source(work, image, column_taps)
    _lay_out_lines(work, box_height, row_taps)
    _lay_out_result(work, plan)
    return load_i64(work + AT.end) - arena


@njit(**OPTIONS)
def _take(work: int, count: int) -> int:
    """Take bytes of the arena, and return their address."""
    begin = load_i64(work + AT.end)
    store_i64(work + AT.end, begin + aligned(count))
    return begin


@njit(**OPTIONS)
def _lay_out_table(work: int, table: int, before: int, after: int, result: int) -> int:
    """Store which of `after` pixels are kept for `result` pixels. Return the most taps, rounded up to an even number.

    A crop is in the middle, as torchvision's center crop. If `result` is larger, the pixels around `after` are black.
    """
    # Without a crop `result` and `after` are equal.
    first, kept, black = 0, after, (result - after) // 2
    if result <= after:
        first, kept, black = int(np.rint(float(after - result) / 2.0)), result, 0
    most = most_taps(before, after)
    taps = (min(before, most) + 1) & ~1
    places = (kept + 3) & ~3  # columns are computed 4 at a time
    store_i64(table + TABLE.before, before)
    store_i64(table + TABLE.after, after)
    store_i64(table + TABLE.first, first)
    store_i64(table + TABLE.kept, kept)
    store_i64(table + TABLE.black, black)
    store_i64(table + TABLE.mirrored, 0)
    store_i64(table + TABLE.share_bytes, 8 * (most + 2))
    store_i64(table + TABLE.shares, _take(work, 8 * (most + 2) * after))
    store_i64(table + TABLE.begins, _take(work, 8 * places))
    store_i64(table + TABLE.weights, _take(work, 2 * taps * places))
    return taps


@njit(**OPTIONS)
def most_taps(before: int, after: int) -> int:
    """Return ATen's bound of the number of source pixels for a pixel of the result."""
    return math.ceil(max(float(before) / float(after), 1.0)) * 2 + 1


@njit(**OPTIONS)
def _mirror(table: int, result: int) -> None:
    kept, black = load_i64(table + TABLE.kept), load_i64(table + TABLE.black)
    store_i64(table + TABLE.mirrored, 1)
    store_i64(table + TABLE.black, result - black - kept)


@njit(**OPTIONS)
def _lay_out_source(work: int, image: int, taps: int) -> None:
    stride = load_i64(image + IMAGE_AT.stride)
    height = load_i64(image + IMAGE_AT.box_height)
    row_bytes = 3 * load_i64(image + IMAGE_AT.box_width)
    span = row_bytes + 3 * taps + 16  # bytes that the first pass reads of a row
    room = (height - 1) * stride + row_bytes - span
    store_i64(work + AT.source, load_i64(image + IMAGE_AT.source))
    store_i64(work + AT.stride, stride)
    store_i64(work + AT.safe_rows, 0 if room < 0 else room // stride + 1)
    store_i64(work + AT.padded_bytes, aligned(span))
    store_i64(work + AT.padded, _take(work, 2 * aligned(span)))


@njit(**OPTIONS)
def _lay_out_lines(work: int, height: int, taps: int) -> None:
    plane_bytes = aligned(load_i64(work + COLUMNS + TABLE.kept) + 4)
    most_lines = min(height + 2, 2 * taps + _LINES_BESIDE_TAPS)
    store_i64(work + AT.most_lines, most_lines)
    store_i64(work + AT.line_bytes, 3 * plane_bytes)
    store_i64(work + AT.plane_bytes, plane_bytes)
    # Taps of weight 0 read up to `taps` lines further, and vectors 32 bytes.
    store_i64(work + AT.lines, _take(work, (most_lines + taps + 2) * 3 * plane_bytes + VECTOR))


@njit(**OPTIONS)
def _lay_out_result(work: int, plan: int) -> None:
    height, width = load_i64(plan + PLAN_AT.height), load_i64(plan + PLAN_AT.width)
    rows = load_i64(work + ROWS + TABLE.kept)
    columns = load_i64(work + COLUMNS + TABLE.kept)
    is_direct = rows == height and columns == width and load_i64(plan + PLAN_AT.levels) == 0
    store_i64(work + AT.pixel_bytes, 3 if load_i64(plan + PLAN_AT.colour_step) == 1 else 1)
    store_i64(work + AT.is_direct, int(is_direct))
    store_i64(work + AT.assembled, _take(work, 3 * width + VECTOR))
    store_i64(work + AT.factors, _take(work, 2 * PATTERNS))
