"""From the box of an image to its row of the batch: antialiased resize, flip, crop, to planes or interleaved colours.

Source of the arithmetic: ATen/native/cpu/UpSampleKernelAVXAntialias.h, which follows Pillow's Resample.c. There are two
passes, columns first. Weights are int16, with as many bits as the largest one allows. Pixels between the passes are
uint8. ATen leaves out a pass that changes no size. Here it has weights 1 and 0, which give the same pixels.

Flips, crops and the order of colours cost nothing in the loops. The tables of columns have the order of the result, and
the first pass writes planes or interleaved colours.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from fastload.image.kernels.floats import find_factors, write
from fastload.image.kernels.memory import (
    IMAGE_AT,
    OPTIONS,
    PLAN_AT,
    add_time,
    copy,
    fill,
    load_i64,
    nanoseconds,
    stack,
    store_i64,
)
from fastload.image.kernels.tables import TOO_LARGE, UNDECIDED
from fastload.image.kernels.vectors import (
    fence,
    interleave_high,
    interleave_low,
    lane_shuffle,
    load_halves,
    load_wide,
    multiply_add,
    narrow,
    splat,
    splat_at,
    store_3_longs,
    store_12_bytes,
    store_wide,
    zeros,
)
from fastload.image.kernels.weights import fill_table
from fastload.image.kernels.workspace import AT, COLUMNS, ROWS, TABLE, VECTOR, WORK_BYTES, lay_out


@njit(**OPTIONS)
def resample(image: int, plan: int, arena: int, arena_bytes: int) -> int:
    """Write the row of an image of state DONE from the box at `source`.

    Bytes between the rows of the box must be readable. Nothing after the last pixel is read. Set TOO_LARGE if the
    arena has too few bytes, and UNDECIDED if the result is neither in planes nor interleaved. Return the bytes that
    are needed if the arena has too few, else 0.
    """
    if not _can_write(plan):
        store_i64(image + IMAGE_AT.state, UNDECIDED)
        return 0
    began = nanoseconds()
    work = stack(WORK_BYTES)
    needed = lay_out(work, image, plan, arena)
    if needed > arena_bytes:
        store_i64(image + IMAGE_AT.state, TOO_LARGE)
        return needed
    fill_table(work + COLUMNS)
    fill_table(work + ROWS)
    if load_i64(plan + PLAN_AT.levels) != 0:
        find_factors(work, plan)
    _make_rows(work, plan, load_i64(image + IMAGE_AT.row))
    fence()
    add_time(image + IMAGE_AT.transform_ns, began)
    return 0


@njit(**OPTIONS)
def _can_write(plan: int) -> bool:
    step = 3 if load_i64(plan + PLAN_AT.colour_step) == 1 else 1
    return load_i64(plan + PLAN_AT.pixel_step) == step or load_i64(plan + PLAN_AT.width) == 1


# ---- the first pass: columns ----

# From 16 bytes, which are 5 pixels: two pixels as pairs of int16, a pair for each colour.
_pixels_0_and_1 = lane_shuffle(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1)
_pixels_2_and_3 = lane_shuffle(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1)
# From 4 pixels of 4 bytes each: without the fourth byte, and as 4 bytes of each colour.
_without_fourth = lane_shuffle(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14)
_by_colour = lane_shuffle(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14)


def _first_pass(fixed_taps: int) -> Any:
    """Return a function that computes two lines from two rows. `fixed_taps` 0: with any number of taps."""

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
        """Compute the line at `line` and the next one from two rows of the source."""
        table = work + COLUMNS
        begins, weights = load_i64(table + TABLE.begins), load_i64(table + TABLE.weights)
        bits, columns = load_i64(table + TABLE.bits), load_i64(table + TABLE.kept)
        taps = fixed_taps if fixed_taps > 0 else load_i64(table + TABLE.taps)
        interleaved = load_i64(work + AT.pixel_bytes) == 3
        plane = load_i64(work + AT.plane_bytes)
        next_line = line + load_i64(work + AT.line_bytes)
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
    """Return an address at which the row can be read beyond its end."""
    address = load_i64(work + AT.source) + row * load_i64(work + AT.stride)
    if row < load_i64(work + AT.safe_rows):
        return address
    padded = load_i64(work + AT.padded) + slot * load_i64(work + AT.padded_bytes)
    copy(padded, address, 3 * load_i64(work + COLUMNS + TABLE.before))
    return padded


@njit(**OPTIONS)
def _two_lines(work: int, row: int, line: int) -> None:
    """Compute the lines of a row of the source, and of the next one if it exists."""
    upper = _source_row(work, row, 0)
    lower = upper
    if row + 1 < load_i64(work + ROWS + TABLE.before):
        lower = _source_row(work, row + 1, 1)
    taps = load_i64(work + COLUMNS + TABLE.taps)
    if taps == 2:
        _two_lines_of_2_taps(upper, lower, line, work)
    elif taps == 4:
        _two_lines_of_4_taps(upper, lower, line, work)
    else:
        _two_lines_of_any_taps(upper, lower, line, work)


# ---- the second pass: rows ----


def _second_pass(fixed_taps: int) -> Any:
    """Return a function that blends bytes of lines. `fixed_taps` 0: of any number of lines."""

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
        """Blend `count` bytes. Never write past them."""
        for x in range(0, count - VECTOR + 1, VECTOR):
            blend(line + x, line_bytes, weights, taps, bits, to + x)
        if count % VECTOR == 0:
            return
        if count > VECTOR:
            x = count - VECTOR
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
    """Compute `count` bytes of a row of the resized image from the lines at `line` and after it."""
    line_bytes, bits = load_i64(work + AT.line_bytes), load_i64(work + ROWS + TABLE.bits)
    taps = load_i64(work + ROWS + TABLE.taps)
    weights = load_i64(work + ROWS + TABLE.weights) + 2 * taps * row
    if taps == 2:
        _blend_2_taps(line, line_bytes, weights, taps, bits, to, count)
    elif taps == 4:
        _blend_4_taps(line, line_bytes, weights, taps, bits, to, count)
    else:
        _blend_any_taps(line, line_bytes, weights, taps, bits, to, count)


# ---- rows of the result ----


@njit(**OPTIONS)
def _make_rows(work: int, plan: int, target: int) -> None:
    """Run both passes. Keep only the lines that the next rows need."""
    row_begins, taps = load_i64(work + ROWS + TABLE.begins), load_i64(work + ROWS + TABLE.taps)
    lines, line_bytes = load_i64(work + AT.lines), load_i64(work + AT.line_bytes)
    most_lines, height = load_i64(work + AT.most_lines), load_i64(work + ROWS + TABLE.before)
    top, kept_rows = load_i64(work + ROWS + TABLE.black), load_i64(work + ROWS + TABLE.kept)
    if load_i64(work + AT.is_direct) == 0:
        fill(load_i64(work + AT.assembled), 0, 3 * load_i64(plan + PLAN_AT.width))
        for row in range(top):
            _write_assembled(work, plan, target, row)
        for row in range(top + kept_rows, load_i64(plan + PLAN_AT.height)):
            _write_assembled(work, plan, target, row)
    base = done = load_i64(row_begins)  # rows of the source: of the first line, after the last line
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
    """Compute a row of the result from the lines at `line` and after it."""
    direct, pixel = load_i64(work + AT.is_direct) != 0, load_i64(work + AT.pixel_bytes)
    to, colour_step = load_i64(work + AT.assembled), load_i64(plan + PLAN_AT.width)
    if direct:
        to = target + row * load_i64(plan + PLAN_AT.row_step)
        colour_step = load_i64(plan + PLAN_AT.colour_step)
    to += pixel * load_i64(work + COLUMNS + TABLE.black)
    count = pixel * load_i64(work + COLUMNS + TABLE.kept)
    for plane in range(3 // pixel):
        from_ = line + plane * load_i64(work + AT.plane_bytes)
        _blend(work, row, from_, to + plane * colour_step, count)
    if not direct:
        _write_assembled(work, plan, target, load_i64(work + ROWS + TABLE.black) + row)


@njit(**OPTIONS)
def _write_assembled(work: int, plan: int, target: int, row: int) -> None:
    """Write a row of the result as its type, from the bytes that were assembled for it."""
    pixel, width = load_i64(work + AT.pixel_bytes), load_i64(plan + PLAN_AT.width)
    size = 1 if load_i64(plan + PLAN_AT.levels) == 0 else 4
    to = target + size * row * load_i64(plan + PLAN_AT.row_step)
    step = size * load_i64(plan + PLAN_AT.colour_step)
    for plane in range(3 // pixel):
        pixels = load_i64(work + AT.assembled) + plane * width
        write(work, plan, pixels, pixel * width, plane, to + plane * step)
