"""The box of a picture to its row of the batch: antialiased resize, flip, window, into planes or interleaved colours.

Source of the arithmetic: ATen/native/cpu/UpSampleKernelAVXAntialias.h, which follows Pillow's Resample.c. Two passes,
columns first; int16 weights with as many bits as the largest weight allows; uint8 between the passes. A pass that ATen
leaves out, since it changes no size, has weights 1 and 0 here, which give the same pixels.

Flips, windows and the order of colours cost nothing in the loops: the tables of columns are made in the order of the
result, and the first pass writes planes or interleaved colours.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import numpy as np
from numba import njit

from fastload.image.kernels.draws import size_before_crop
from fastload.image.kernels.memory import (
    OPTIONS,
    PICTURE_AT,
    PLAN_AT,
    copy,
    fill,
    load_f32,
    load_f64,
    load_i64,
    load_u8,
    load_u32,
    nanoseconds,
    stack,
    store_f32,
    store_f64,
    store_i16,
    store_i32,
    store_i64,
)
from fastload.image.kernels.tables import TOO_LARGE, UNDECIDED
from fastload.image.kernels.vectors import (
    differing,
    fence,
    interleave_high,
    interleave_low,
    is_zero,
    lane_shuffle,
    load_halves,
    load_wide,
    multiply_add,
    narrow,
    splat,
    splat_at,
    store_3_longs,
    store_12_bytes,
    store_past_caches,
    store_wide,
    to_floats,
    zeros,
)

_Table = namedtuple(
    "_Table",
    [
        "before",  # pixels of the box in this direction
        "after",  # of the resized picture
        "first",  # of these, which are kept
        "kept",
        "black",  # pixels of the result before them
        "mirrored",
        "unit",  # of `begins`: bytes of a pixel, or 1
        "shares",  # weights before they are rounded; of each pixel `share_bytes`
        "share_bytes",
        "begins",  # where the pixels begin that make one of the result, int64
        "weights",  # their weights, int16, `taps` for each
        "taps",  # an even number
        "bits",  # of which the weights are fractions
    ],
)
_TABLE = _Table(*range(0, 8 * len(_Table._fields), 8))
"""Where the numbers of one pass lie, bytes."""
_TABLE_BYTES = 8 * len(_TABLE)

_Work = namedtuple(
    "_Work",
    [
        "end",  # of what is taken of the arena
        "source",  # address of the first pixel of the box
        "stride",
        "safe_rows",  # rows from the top that may be read beyond their end
        # Lines: rows of the source after the first pass, three planes each or interleaved colours.
        "lines",
        "most_lines",
        "line_bytes",
        "plane_bytes",
        "padded",  # address of two rows of the source that cannot be read beyond their end
        "padded_bytes",
        "assembled",  # address of a row of the result, if it cannot be written at once
        "pixel_bytes",  # 3: colours of a pixel lie together, 1: there are three planes
        "is_direct",  # 1: rows of the result are written at once
        # Floats; see `_find_factors`.
        "factors",  # and `_PATTERNS` bytes further on, shifts
        "is_linear",
        "past_caches",
    ],
)
_AT = _Work(*range(0, 8 * len(_Work._fields), 8))
"""Where the other numbers lie that the functions below share, bytes. All lie on the stack of `resample`."""
_COLUMNS = 8 * len(_AT)
_ROWS = _COLUMNS + _TABLE_BYTES
_WORK_BYTES = _ROWS + _TABLE_BYTES

_VECTOR = 32  # bytes
_PATTERN = 24  # the least common multiple of 3 colours and of 8 floats of a vector
_PATTERNS = 3 * 4 * _PATTERN  # bytes of one for each colour
_LEVELS = 4 * 256  # bytes of a colour's table
# A result of so many bytes leaves the second cache before anybody reads it.
_BEYOND_CACHES = 2**18
_LINES_BESIDE_TAPS = 24  # so that lines are moved seldom, and stay in the first cache


@njit(**OPTIONS)
def resample(picture: int, plan: int, arena: int, arena_bytes: int) -> int:
    """Make the row of a picture of state DONE from the box at `source`.

    Bytes between the rows of the box must be readable; nothing is read beyond the last pixel. Sets TOO_LARGE if the
    arena has too few bytes, and UNDECIDED if the result is neither in planes nor interleaved. Returns how many bytes
    are needed if they are too few, else 0.
    """
    if not _can_write(plan):
        store_i64(picture + PICTURE_AT.state, UNDECIDED)
        return 0
    began = nanoseconds()
    work = stack(_WORK_BYTES)
    needed = _lay_out(work, picture, plan, arena)
    if needed > arena_bytes:
        store_i64(picture + PICTURE_AT.state, TOO_LARGE)
        return needed
    _fill_table(work + _COLUMNS)
    _fill_table(work + _ROWS)
    if load_i64(plan + PLAN_AT.levels) != 0:
        _find_factors(work, plan)
    _make_rows(work, plan, load_i64(picture + PICTURE_AT.row))
    fence()
    spent = load_i64(picture + PICTURE_AT.transform_ns) + nanoseconds() - began
    store_i64(picture + PICTURE_AT.transform_ns, spent)
    return 0


@njit(**OPTIONS)
def _can_write(plan: int) -> bool:
    step = 3 if load_i64(plan + PLAN_AT.colour_step) == 1 else 1
    return load_i64(plan + PLAN_AT.pixel_step) == step or load_i64(plan + PLAN_AT.width) == 1


@njit(**OPTIONS)
def bytes_needed(picture: int, plan: int) -> int:
    """Return the bytes of an arena that `resample` needs."""
    work = stack(_WORK_BYTES)
    # Any address will do, since nothing is touched there.
    return _lay_out(work, picture, plan, work)


@njit(**OPTIONS)
def aligned(count: int) -> int:
    """Return `count` bytes, rounded up to a multiple of 64."""
    return (count + 63) & ~63


# ---- what lies where ----


@njit(**OPTIONS)
def _lay_out(work: int, picture: int, plan: int, arena: int) -> int:
    """Note what is known before the tables, and divide the arena without touching it; return the bytes needed."""
    store_i64(work + _AT.end, arena)
    result_height, result_width = load_i64(plan + PLAN_AT.height), load_i64(plan + PLAN_AT.width)
    rows, columns = size_before_crop(picture, plan)
    box_height = load_i64(picture + PICTURE_AT.box_height)
    box_width = load_i64(picture + PICTURE_AT.box_width)
    row_taps = _lay_out_table(work, work + _ROWS, box_height, rows, result_height)
    column_taps = _lay_out_table(work, work + _COLUMNS, box_width, columns, result_width)
    store_i64(work + _ROWS + _TABLE.unit, 1)
    store_i64(work + _COLUMNS + _TABLE.unit, 3)
    store_i64(work + _ROWS + _TABLE.mirrored, 0)
    if load_i64(picture + PICTURE_AT.flip) != 0:
        _mirror(work + _COLUMNS, result_width)
    _lay_out_source(work, picture, column_taps)
    _lay_out_lines(work, box_height, row_taps)
    _lay_out_result(work, plan)
    return load_i64(work + _AT.end) - arena


@njit(**OPTIONS)
def _take(work: int, count: int) -> int:
    """Take bytes of the arena; return their address."""
    begin = load_i64(work + _AT.end)
    store_i64(work + _AT.end, begin + aligned(count))
    return begin


@njit(**OPTIONS)
def _lay_out_table(work: int, table: int, before: int, after: int, result: int) -> int:
    """Note what of `after` pixels is kept for a result of `result`; return the most taps, rounded up to an even number.

    A window is in the middle, as torchvision's centre crop; if `result` is larger, pixels beside `after` are black.
    """
    # Without a window `result` and `after` are equal.
    first, kept, black = 0, after, (result - after) // 2
    if result <= after:
        first, kept, black = int(np.rint(float(after - result) / 2.0)), result, 0
    most = _most_taps(before, after)
    taps = (min(before, most) + 1) & ~1
    places = (kept + 3) & ~3  # columns are made 4 at a time
    store_i64(table + _TABLE.before, before)
    store_i64(table + _TABLE.after, after)
    store_i64(table + _TABLE.first, first)
    store_i64(table + _TABLE.kept, kept)
    store_i64(table + _TABLE.black, black)
    store_i64(table + _TABLE.mirrored, 0)
    store_i64(table + _TABLE.share_bytes, 8 * (most + 2))
    store_i64(table + _TABLE.shares, _take(work, 8 * (most + 2) * after))
    store_i64(table + _TABLE.begins, _take(work, 8 * places))
    store_i64(table + _TABLE.weights, _take(work, 2 * taps * places))
    return taps


@njit(**OPTIONS)
def _most_taps(before: int, after: int) -> int:
    """Return the most pixels that make one of the result, as ATen bounds it."""
    return math.ceil(max(float(before) / float(after), 1.0)) * 2 + 1


@njit(**OPTIONS)
def _mirror(table: int, result: int) -> None:
    kept, black = load_i64(table + _TABLE.kept), load_i64(table + _TABLE.black)
    store_i64(table + _TABLE.mirrored, 1)
    store_i64(table + _TABLE.black, result - black - kept)


@njit(**OPTIONS)
def _lay_out_source(work: int, picture: int, taps: int) -> None:
    stride = load_i64(picture + PICTURE_AT.stride)
    height = load_i64(picture + PICTURE_AT.box_height)
    row_bytes = 3 * load_i64(picture + PICTURE_AT.box_width)
    span = row_bytes + 3 * taps + 16  # from the begin of a row, what the first pass reads at most
    room = (height - 1) * stride + row_bytes - span
    store_i64(work + _AT.source, load_i64(picture + PICTURE_AT.source))
    store_i64(work + _AT.stride, stride)
    store_i64(work + _AT.safe_rows, 0 if room < 0 else room // stride + 1)
    store_i64(work + _AT.padded_bytes, aligned(span))
    store_i64(work + _AT.padded, _take(work, 2 * aligned(span)))


@njit(**OPTIONS)
def _lay_out_lines(work: int, height: int, taps: int) -> None:
    plane_bytes = aligned(load_i64(work + _COLUMNS + _TABLE.kept) + 4)
    most_lines = min(height + 2, 2 * taps + _LINES_BESIDE_TAPS)
    store_i64(work + _AT.most_lines, most_lines)
    store_i64(work + _AT.line_bytes, 3 * plane_bytes)
    store_i64(work + _AT.plane_bytes, plane_bytes)
    # Weights of 0 reach `taps` lines further, and vectors 32 bytes.
    store_i64(work + _AT.lines, _take(work, (most_lines + taps + 2) * 3 * plane_bytes + _VECTOR))


@njit(**OPTIONS)
def _lay_out_result(work: int, plan: int) -> None:
    height, width = load_i64(plan + PLAN_AT.height), load_i64(plan + PLAN_AT.width)
    rows = load_i64(work + _ROWS + _TABLE.kept)
    columns = load_i64(work + _COLUMNS + _TABLE.kept)
    is_direct = rows == height and columns == width and load_i64(plan + PLAN_AT.levels) == 0
    store_i64(work + _AT.pixel_bytes, 3 if load_i64(plan + PLAN_AT.colour_step) == 1 else 1)
    store_i64(work + _AT.is_direct, int(is_direct))
    store_i64(work + _AT.assembled, _take(work, 3 * width + _VECTOR))
    store_i64(work + _AT.factors, _take(work, 2 * _PATTERNS))


# ---- weights ----


@njit(**OPTIONS)
def _fill_table(table: int) -> None:
    """Fill the begins and weights of one pass, for the pixels that are kept."""
    kept, first = load_i64(table + _TABLE.kept), load_i64(table + _TABLE.first)
    mirrored, unit = load_i64(table + _TABLE.mirrored) != 0, load_i64(table + _TABLE.unit)
    shares, share_bytes = load_i64(table + _TABLE.shares), load_i64(table + _TABLE.share_bytes)
    begins, weights = load_i64(table + _TABLE.begins), load_i64(table + _TABLE.weights)
    largest, most = _find_shares(table)
    bits = 0
    while bits < 22 and int(0.5 + largest * float(1 << (bits + 1))) < 1 << 15:
        bits += 1
    taps = (most + 1) & ~1
    one = float(1 << bits)
    store_i64(table + _TABLE.taps, taps)
    store_i64(table + _TABLE.bits, bits)
    for place in range(kept):
        share = shares + share_bytes * (first + (kept - 1 - place if mirrored else place))
        store_i64(begins + 8 * place, unit * load_i64(share))
        count = load_i64(share + 8)
        weight = weights + 2 * taps * place
        for k in range(count):
            store_i16(weight + 2 * k, int(0.5 + load_f64(share + 16 + 8 * k) * one))
        for k in range(count, taps):
            store_i16(weight + 2 * k, 0)
    for place in range(kept, (kept + 3) & ~3):
        store_i64(begins + 8 * place, 0)
        fill(weights + 2 * taps * place, 0, 2 * taps)


@njit(**OPTIONS)
def _find_shares(table: int) -> tuple[float, int]:
    """Note begin, count and unrounded weights of each pixel of the result; return the largest, and the most of one.

    As ATen's `_compute_indices_min_size_weights_aa`, operation by operation.
    """
    before, after = load_i64(table + _TABLE.before), load_i64(table + _TABLE.after)
    shares, share_bytes = load_i64(table + _TABLE.shares), load_i64(table + _TABLE.share_bytes)
    size = _most_taps(before, after)
    scale = float(before) / float(after)
    support = max(scale, 1.0)
    inverse = 1.0 / scale if scale >= 1.0 else 1.0
    largest, most = 0.0, 1
    for place in range(after):
        share = shares + share_bytes * place
        centre = scale * (float(place) + 0.5)
        begin = max(int(centre - support + 0.5), 0)
        count = min(max(min(int(centre + support + 0.5), before) - begin, 0), size)
        total = 0.0
        for k in range(count):
            value = max(1.0 - abs((float(k + begin) - centre + 0.5) * inverse), 0.0)
            store_f64(share + 16 + 8 * k, value)
            total += value
        if total != 0.0:
            for k in range(count):
                value = load_f64(share + 16 + 8 * k) / total
                store_f64(share + 16 + 8 * k, value)
                largest = max(largest, value)
        store_i64(share, begin)
        store_i64(share + 8, count)
        most = max(most, count)
    return largest, most


# ---- the first pass: columns ----

# Of 16 bytes, which are 5 pixels: two pixels as pairs of int16, each pair one colour.
_pixels_0_and_1 = lane_shuffle(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1)
_pixels_2_and_3 = lane_shuffle(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1)
# Of 4 pixels with a fourth byte each: without it, and as 4 bytes of each colour.
_without_fourth = lane_shuffle(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14)
_by_colour = lane_shuffle(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14)


def _first_pass(fixed_taps: int) -> Any:
    """Make the function that makes two lines of two rows; with `fixed_taps` 0, of any number of taps."""

    @njit(**OPTIONS)
    def pixel(upper: int, lower: int, weights: int, taps: int, half: Any) -> Any:
        pixels = load_halves(upper, lower)
        total = multiply_add(half, _pixels_0_and_1(pixels), splat_at(weights))
        if taps > 2:
            total = multiply_add(total, _pixels_2_and_3(pixels), splat_at(weights + 4))
        for k in range(4, taps, 4):
            pixels = load_halves(upper + 3 * k, lower + 3 * k)
            total = multiply_add(total, _pixels_0_and_1(pixels), splat_at(weights + 2 * k))
            if k + 2 < taps:
                total = multiply_add(total, _pixels_2_and_3(pixels), splat_at(weights + 2 * k + 4))
        return total

    @njit(**OPTIONS)
    def two_lines(upper: int, lower: int, line: int, work: int) -> None:
        """Make the lines at `line` and after it of two rows of the source."""
        table = work + _COLUMNS
        begins, weights = load_i64(table + _TABLE.begins), load_i64(table + _TABLE.weights)
        bits, columns = load_i64(table + _TABLE.bits), load_i64(table + _TABLE.kept)
        taps = fixed_taps if fixed_taps > 0 else load_i64(table + _TABLE.taps)
        interleaved = load_i64(work + _AT.pixel_bytes) == 3
        plane = load_i64(work + _AT.plane_bytes)
        next_line = line + load_i64(work + _AT.line_bytes)
        half = splat(1 << (bits - 1))
        for x in range(0, columns, 4):
            place, weight = begins + 8 * x, weights + 2 * taps * x
            at = load_i64(place)
            first = pixel(upper + at, lower + at, weight, taps, half)
            at = load_i64(place + 8)
            second = pixel(upper + at, lower + at, weight + 2 * taps, taps, half)
            at = load_i64(place + 16)
            third = pixel(upper + at, lower + at, weight + 4 * taps, taps, half)
            at = load_i64(place + 24)
            fourth = pixel(upper + at, lower + at, weight + 6 * taps, taps, half)
            made = narrow(first, second, third, fourth, bits)
            if interleaved:
                store_12_bytes(_without_fourth(made), line + 3 * x, next_line + 3 * x)
            else:
                store_3_longs(_by_colour(made), line + x, next_line + x, plane)

    return two_lines


_two_lines_of_2_taps = _first_pass(2)
_two_lines_of_4_taps = _first_pass(4)
_two_lines_of_any_taps = _first_pass(0)


@njit(**OPTIONS)
def _source_row(work: int, row: int, slot: int) -> int:
    """Return an address where the row can be read beyond its end."""
    address = load_i64(work + _AT.source) + row * load_i64(work + _AT.stride)
    if row < load_i64(work + _AT.safe_rows):
        return address
    padded = load_i64(work + _AT.padded) + slot * load_i64(work + _AT.padded_bytes)
    copy(padded, address, 3 * load_i64(work + _COLUMNS + _TABLE.before))
    return padded


@njit(**OPTIONS)
def _two_lines(work: int, row: int, line: int) -> None:
    """Make the lines of a row of the source, and of the next if there is one."""
    upper = _source_row(work, row, 0)
    lower = upper
    if row + 1 < load_i64(work + _ROWS + _TABLE.before):
        lower = _source_row(work, row + 1, 1)
    taps = load_i64(work + _COLUMNS + _TABLE.taps)
    if taps == 2:
        _two_lines_of_2_taps(upper, lower, line, work)
    elif taps == 4:
        _two_lines_of_4_taps(upper, lower, line, work)
    else:
        _two_lines_of_any_taps(upper, lower, line, work)


# ---- the second pass: rows ----


def _second_pass(fixed_taps: int) -> Any:
    """Make the function that blends 32 bytes of lines; with `fixed_taps` 0, of any number of lines."""

    @njit(**OPTIONS)
    def blend(line: int, line_bytes: int, weights: int, any_taps: int, bits: int, to: int) -> None:
        taps = fixed_taps if fixed_taps > 0 else any_taps
        half, zero = splat(1 << (bits - 1)), zeros()
        first = second = third = fourth = half
        for k in range(0, taps, 2):
            even = load_wide(line + k * line_bytes)
            odd = load_wide(line + (k + 1) * line_bytes)
            pair = splat_at(weights + 2 * k)
            low, high = interleave_low(even, odd), interleave_high(even, odd)
            first = multiply_add(first, interleave_low(low, zero), pair)
            second = multiply_add(second, interleave_high(low, zero), pair)
            third = multiply_add(third, interleave_low(high, zero), pair)
            fourth = multiply_add(fourth, interleave_high(high, zero), pair)
        store_wide(narrow(first, second, third, fourth, bits), to)

    @njit(**OPTIONS)
    def blend_all(
        line: int, line_bytes: int, weights: int, taps: int, bits: int, to: int, count: int
    ) -> None:
        """Blend `count` bytes of lines, and write no byte beyond."""
        for x in range(0, count - _VECTOR + 1, _VECTOR):
            blend(line + x, line_bytes, weights, taps, bits, to + x)
        if count % _VECTOR == 0:
            return
        if count > _VECTOR:
            x = count - _VECTOR
            blend(line + x, line_bytes, weights, taps, bits, to + x)
        else:
            short = stack(32)
            blend(line, line_bytes, weights, taps, bits, short)
            copy(to, short, count)

    return blend_all


_blend_2_taps = _second_pass(2)
_blend_4_taps = _second_pass(4)
_blend_any_taps = _second_pass(0)


@njit(**OPTIONS)
def _blend(work: int, row: int, line: int, to: int, count: int) -> None:
    """Make `count` bytes of a row of the resized picture of the lines from `line` on."""
    line_bytes, bits = load_i64(work + _AT.line_bytes), load_i64(work + _ROWS + _TABLE.bits)
    taps = load_i64(work + _ROWS + _TABLE.taps)
    weights = load_i64(work + _ROWS + _TABLE.weights) + 2 * taps * row
    if taps == 2:
        _blend_2_taps(line, line_bytes, weights, taps, bits, to, count)
    elif taps == 4:
        _blend_4_taps(line, line_bytes, weights, taps, bits, to, count)
    else:
        _blend_any_taps(line, line_bytes, weights, taps, bits, to, count)


# ---- rows of the result ----


@njit(**OPTIONS)
def _make_rows(work: int, plan: int, target: int) -> None:
    """Run both passes; as many lines are kept as the next rows need."""
    row_begins, taps = load_i64(work + _ROWS + _TABLE.begins), load_i64(work + _ROWS + _TABLE.taps)
    lines, line_bytes = load_i64(work + _AT.lines), load_i64(work + _AT.line_bytes)
    most_lines, height = load_i64(work + _AT.most_lines), load_i64(work + _ROWS + _TABLE.before)
    top, kept_rows = load_i64(work + _ROWS + _TABLE.black), load_i64(work + _ROWS + _TABLE.kept)
    if load_i64(work + _AT.is_direct) == 0:
        fill(load_i64(work + _AT.assembled), 0, 3 * load_i64(plan + PLAN_AT.width))
        for row in range(top):
            _write_assembled(work, plan, target, row)
        for row in range(top + kept_rows, load_i64(plan + PLAN_AT.height)):
            _write_assembled(work, plan, target, row)
    base = done = load_i64(row_begins)  # rows of the source: of the first line, and after the last
    for row in range(kept_rows):
        begin = load_i64(row_begins + 8 * row)
        while done < min(begin + taps, height):
            if done + 2 - base > most_lines:
                copy(lines, lines + (begin - base) * line_bytes, (done - begin) * line_bytes)
                base = begin
            _two_lines(work, done, lines + (done - base) * line_bytes)
            done = min(done + 2, height)
        _make_row(work, plan, row, lines + (begin - base) * line_bytes, target)


@njit(**OPTIONS)
def _make_row(work: int, plan: int, row: int, line: int, target: int) -> None:
    """Make a row of the result of the lines from `line` on."""
    direct, pixel = load_i64(work + _AT.is_direct) != 0, load_i64(work + _AT.pixel_bytes)
    to, colour_step = load_i64(work + _AT.assembled), load_i64(plan + PLAN_AT.width)
    if direct:
        to = target + row * load_i64(plan + PLAN_AT.row_step)
        colour_step = load_i64(plan + PLAN_AT.colour_step)
    to += pixel * load_i64(work + _COLUMNS + _TABLE.black)
    count = pixel * load_i64(work + _COLUMNS + _TABLE.kept)
    for plane in range(3 // pixel):
        from_ = line + plane * load_i64(work + _AT.plane_bytes)
        _blend(work, row, from_, to + plane * colour_step, count)
    if not direct:
        _write_assembled(work, plan, target, load_i64(work + _ROWS + _TABLE.black) + row)


@njit(**OPTIONS)
def _write_assembled(work: int, plan: int, target: int, row: int) -> None:
    """Write a row of the result from the bytes that were assembled for it, as its type."""
    pixel, width = load_i64(work + _AT.pixel_bytes), load_i64(plan + PLAN_AT.width)
    size = 1 if load_i64(plan + PLAN_AT.levels) == 0 else 4
    to = target + size * row * load_i64(plan + PLAN_AT.row_step)
    step = size * load_i64(plan + PLAN_AT.colour_step)
    for plane in range(3 // pixel):
        pixels = load_i64(work + _AT.assembled) + plane * width
        _write(work, plan, pixels, pixel * width, plane, to + plane * step)


# ---- floats ----


@njit(**OPTIONS)
def _write(work: int, plan: int, pixels: int, count: int, plane: int, to: int) -> None:
    """Write bytes as the type of the result; they are a row of a plane, or of interleaved colours."""
    levels = load_i64(plan + PLAN_AT.levels)
    if levels == 0:
        copy(to, pixels, count)
    elif load_i64(work + _AT.is_linear) != 0:
        factors = load_i64(work + _AT.factors) + 4 * _PATTERN * plane
        past_caches = load_i64(work + _AT.past_caches) != 0 and to % _VECTOR == 0
        _write_linear(pixels, count, factors, past_caches, to)
    else:
        step = _LEVELS if load_i64(work + _AT.pixel_bytes) == 3 else 0
        for x in range(count):
            level = levels + _LEVELS * plane + x % 3 * step + 4 * load_u8(pixels + x)
            store_i32(to + 4 * x, load_u32(level))


@njit(**OPTIONS)
def _write_linear(pixels: int, count: int, factors: int, past_caches: bool, to: int) -> None:
    pattern = 0
    for x in range(0, count - 7, 8):
        floats = to_floats(pixels + x, factors + pattern, factors + pattern + _PATTERNS)
        if past_caches:
            store_past_caches(floats, to + 4 * x)
        else:
            store_wide(floats, to + 4 * x)
        pattern = pattern + _VECTOR if pattern < 2 * _VECTOR else 0
    rest = count % 8
    if rest > 0:
        short = stack(32)
        x = count - rest
        floats = to_floats(pixels + x, factors + pattern, factors + pattern + _PATTERNS)
        store_wide(floats, short)
        copy(to + 4 * x, short, 4 * rest)


@njit(**OPTIONS)
def _find_factors(work: int, plan: int) -> None:
    """Find a factor and a shift for each colour that give its 256 levels to the bit: arithmetic is faster than tables.

    A vector of 8 floats has its own factors. They repeat after `_PATTERN` floats, and so are written down.
    """
    levels, factors = load_i64(plan + PLAN_AT.levels), load_i64(work + _AT.factors)
    is_linear = True
    for colour in range(3):
        is_linear &= _find_factor(levels + _LEVELS * colour, factors + 4 * _PATTERN * colour)
    if load_i64(work + _AT.pixel_bytes) == 3:
        for k in range(_PATTERN):
            place = factors + 4 * k
            of_colour = place + 4 * _PATTERN * (k % 3)
            store_i32(place, load_u32(of_colour))
            store_i32(place + _PATTERNS, load_u32(of_colour + _PATTERNS))
    pixels = load_i64(plan + PLAN_AT.height) * load_i64(plan + PLAN_AT.width)
    store_i64(work + _AT.is_linear, int(is_linear))
    store_i64(work + _AT.past_caches, int(3 * 4 * pixels >= _BEYOND_CACHES))


@njit(**OPTIONS)
def _find_factor(levels: int, factors: int) -> bool:
    """Fill one colour's pattern of factors and of shifts; False if no factor gives all its levels."""
    shift = -load_f32(levels)
    guess, bytes_ = stack(4), stack(8)
    store_f32(guess, (load_f32(levels + _LEVELS - 4) + shift) / 255.0)
    nearest = load_u32(guess)
    for k in range(_PATTERN):
        store_f32(factors + _PATTERNS + 4 * k, shift)
    for candidate in range(nearest - 2, nearest + 3):
        for k in range(_PATTERN):
            store_i32(factors + 4 * k, candidate)
        different = zeros()
        for value in range(0, 256, 8):
            store_i64(bytes_, 0x0706050403020100 + value * 0x0101010101010101)
            floats = to_floats(bytes_, factors, factors + _PATTERNS)
            different = differing(different, floats, load_wide(levels + 4 * value))
        if is_zero(different):
            return True
    return False
