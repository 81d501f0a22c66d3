"""From bytes of a resized image to the type of the result: floats by a factor and a shift, or by a table."""

from __future__ import annotations

from numba import njit

from fastload.image.kernels.memory import (
    OPTIONS,
    PLAN_AT,
    copy,
    load_f32,
    load_i64,
    load_u8,
    load_u32,
    stack,
    store_f32,
    store_i32,
    store_i64,
)
from fastload.image.kernels.vectors import (
    differing,
    is_zero,
    load_wide,
    store_past_caches,
    store_wide,
    to_floats,
    zeros,
)
from fastload.image.kernels.workspace import AT, PATTERN, PATTERNS, VECTOR

_LEVELS = 4 * 256  # bytes of a colour's table
_BEYOND_CACHES = 2**18
"""Bytes from which on a result evicts itself from the second-level cache before the loop reads it."""


@njit(**OPTIONS)
def write(work: int, plan: int, pixels: int, count: int, plane: int, to: int) -> None:
    """Write bytes as the type of the result. They are a row of a plane, or of interleaved colours."""
    levels = load_i64(plan + PLAN_AT.levels)
    if levels == 0:
        copy(to, pixels, count)
    elif load_i64(work + AT.is_linear) != 0:
        factors = load_i64(work + AT.factors) + 4 * PATTERN * plane
        past_caches = load_i64(work + AT.past_caches) != 0 and to % VECTOR == 0
        _write_linear(pixels, count, factors, past_caches, to)
    else:
        step = _LEVELS if load_i64(work + AT.pixel_bytes) == 3 else 0
        for x in range(count):
            level = levels + _LEVELS * plane + x % 3 * step + 4 * load_u8(pixels + x)
            store_i32(to + 4 * x, load_u32(level))


@njit(**OPTIONS)
def _write_linear(pixels: int, count: int, factors: int, past_caches: bool, to: int) -> None:
    pattern = 0
    for x in range(0, count - 7, 8):
        floats = to_floats(pixels + x, factors + pattern, factors + pattern + PATTERNS)
        if past_caches:
            store_past_caches(floats, to + 4 * x)
        else:
            store_wide(floats, to + 4 * x)
        pattern = pattern + VECTOR if pattern < 2 * VECTOR else 0
    rest = count % 8
    if rest > 0:
        short = stack(32)
        x = count - rest
        floats = to_floats(pixels + x, factors + pattern, factors + pattern + PATTERNS)
        store_wide(floats, short)
        copy(to + 4 * x, short, 4 * rest)


@njit(**OPTIONS)
def find_factors(work: int, plan: int) -> None:
    """Find a factor and a shift for each colour that give its 256 levels to the bit. They are faster than tables.

    Each of the 8 floats of a vector has its factor. The factors repeat after `PATTERN` floats, so that many are stored.
    """
    levels, factors = load_i64(plan + PLAN_AT.levels), load_i64(work + AT.factors)
    is_linear = True
    for colour in range(3):
        is_linear &= _find_factor(levels + _LEVELS * colour, factors + 4 * PATTERN * colour)
    if load_i64(work + AT.pixel_bytes) == 3:
        for k in range(PATTERN):
            place = factors + 4 * k
            of_colour = place + 4 * PATTERN * (k % 3)
            store_i32(place, load_u32(of_colour))
            store_i32(place + PATTERNS, load_u32(of_colour + PATTERNS))
    pixels = load_i64(plan + PLAN_AT.height) * load_i64(plan + PLAN_AT.width)
    store_i64(work + AT.is_linear, int(is_linear))
    store_i64(work + AT.past_caches, int(3 * 4 * pixels >= _BEYOND_CACHES))


@njit(**OPTIONS)
def _find_factor(levels: int, factors: int) -> bool:
    """Fill one colour's pattern of factors and of shifts. Return False if no factor gives all its levels."""
    shift = -load_f32(levels)
    guess, bytes_ = stack(4), stack(8)
    store_f32(guess, (load_f32(levels + _LEVELS - 4) + shift) / 255.0)
    nearest = load_u32(guess)
    for k in range(PATTERN):
        store_f32(factors + PATTERNS + 4 * k, shift)
    for candidate in range(nearest - 2, nearest + 3):
        for k in range(PATTERN):
            store_i32(factors + 4 * k, candidate)
        different = zeros()
        for value in range(0, 256, 8):
            store_i64(bytes_, 0x0706050403020100 + value * 0x0101010101010101)
            floats = to_floats(bytes_, factors, factors + PATTERNS)
            different = differing(different, floats, load_wide(levels + 4 * value))
        if is_zero(different):
            return True
    return False
