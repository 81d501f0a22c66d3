"""Boxes of the three plans, from a sample's key: torch's generator and torchvision's draws, to the bit.

Sources of the formulas: ATen/core/MT19937RNGEngine.h and TransformationHelper.h. `fastload.image.plans` and
`fastload.image.drawing` compute the same in Python.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fastload.image.kernels.memory import (
    IMAGE_AT,
    OPTIONS,
    PLAN_AT,
    load_f64,
    load_i64,
    stack,
    store_i64,
)
from fastload.image.kernels.tables import (
    DAMAGED,
    DONE,
    RANDOM_RESIZED_CROP,
    RESIZE_CENTER_CROP,
    TOO_LARGE,
    UNDECIDED,
)

_LONGEST_SIDE = 2**28 - 1  # torch draws otherwise above; no product of two sides overflows


# ---- words of the generator, 32 bits each ----

# A stream of words is on the stack: the number of words drawn, and three words of the generator's first state. That
# state has 624 words, each computed from the one before. Word k needs words k, k + 1 and k + 397. So the first 200 or
# so need no second state, and no array.
_DRAWN, _HERE, _NEXT, _AHEAD = 0, 8, 16, 24
_DISTANCE = 397


@njit(**OPTIONS)
def _state_word(before: int, place: int) -> int:
    return (1812433253 * (before ^ (before >> 30)) + place) & 0xFFFFFFFF


@njit(**OPTIONS)
def begin_words(stream: int, key: int) -> None:
    """Seed the stream at an address (32 bytes) as `torch.Generator().manual_seed(key)`."""
    here = key & 0xFFFFFFFF
    ahead = here
    for place in range(1, _DISTANCE + 1):
        ahead = _state_word(ahead, place)
    store_i64(stream + _DRAWN, 0)
    store_i64(stream + _HERE, here)
    store_i64(stream + _NEXT, _state_word(here, 1))
    store_i64(stream + _AHEAD, ahead)


@njit(**OPTIONS)
def next_word(stream: int) -> int:
    """Return the next word of a stream. Call this at most 200 times for a stream."""
    drawn = load_i64(stream + _DRAWN) + 1
    here, following = load_i64(stream + _HERE), load_i64(stream + _NEXT)
    ahead = load_i64(stream + _AHEAD)
    mixed = (here & 0x80000000) | (following & 0x7FFFFFFF)
    word = ahead ^ (mixed >> 1) ^ (0x9908B0DF & -(mixed & 1))
    store_i64(stream + _DRAWN, drawn)
    store_i64(stream + _HERE, following)
    store_i64(stream + _NEXT, _state_word(following, drawn + 1))
    store_i64(stream + _AHEAD, _state_word(ahead, drawn + _DISTANCE))
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ (word >> 18)


@njit(**OPTIONS)
def _uniform(stream: int, base: float, span: float, fused: int) -> float:
    unit = float(next_word(stream) & 0xFFFFFF) * 2.0**-24
    if fused != 0:
        return np.float64(np.float32(unit * span + base))
    return np.float64(np.float32(np.float64(np.float32(unit * span)) + base))


# ---- boxes ----


@njit(**OPTIONS)
def draw(image: int, plan: int) -> int:
    """Draw the box and the flip of an image, store them and the state in its row of IMAGE, and return the state."""
    state = _check(image, plan)
    if state == DONE:
        if load_i64(plan + PLAN_AT.kind) == RANDOM_RESIZED_CROP:
            state = _draw_crop(image, plan)
        else:
            _whole(image)
    store_i64(image + IMAGE_AT.state, state)
    return state


@njit(**OPTIONS)
def _check(image: int, plan: int) -> int:
    height, width = load_i64(image + IMAGE_AT.height), load_i64(image + IMAGE_AT.width)
    if height < 1 or width < 1:
        return DAMAGED
    most = load_i64(plan + PLAN_AT.most_pixels)
    if max(height, width) > _LONGEST_SIDE or 0 < most < height * width:
        return TOO_LARGE
    rows, columns = size_before_crop(image, plan)
    if max(rows, columns) > _LONGEST_SIDE or 0 < most < rows * columns:
        return TOO_LARGE
    return DONE


@njit(**OPTIONS)
def size_before_crop(image: int, plan: int) -> tuple[int, int]:
    """Return the size (height, width) to which the box is resized, before a center crop."""
    if load_i64(plan + PLAN_AT.kind) != RESIZE_CENTER_CROP:
        return load_i64(plan + PLAN_AT.height), load_i64(plan + PLAN_AT.width)
    rows = load_i64(plan + PLAN_AT.resize_height)
    columns = load_i64(plan + PLAN_AT.resize_width)
    if columns >= 0:
        return rows, columns
    height, width = load_i64(image + IMAGE_AT.height), load_i64(image + IMAGE_AT.width)
    longer = int(float(rows * max(height, width)) / float(min(height, width)))
    if width <= height:
        return longer, rows
    return rows, longer


@njit(**OPTIONS)
def _whole(image: int) -> None:
    _set_box(image, 0, 0, load_i64(image + IMAGE_AT.height), load_i64(image + IMAGE_AT.width))
    store_i64(image + IMAGE_AT.flip, 0)


@njit(**OPTIONS)
def _set_box(image: int, top: int, left: int, height: int, width: int) -> None:
    store_i64(image + IMAGE_AT.top, top)
    store_i64(image + IMAGE_AT.left, left)
    store_i64(image + IMAGE_AT.box_height, height)
    store_i64(image + IMAGE_AT.box_width, width)


@njit(**OPTIONS)
def _draw_crop(image: int, plan: int) -> int:
    """Draw as torchvision's `RandomResizedCrop.get_params` does, then RandomHorizontalFlip. Return the state."""
    height, width = load_i64(image + IMAGE_AT.height), load_i64(image + IMAGE_AT.width)
    area_base, area_span = (
        load_f64(plan + PLAN_AT.area_base),
        load_f64(plan + PLAN_AT.area_span),
    )
    ratio_base = load_f64(plan + PLAN_AT.log_ratio_base)
    ratio_span = load_f64(plan + PLAN_AT.log_ratio_span)
    fused = load_i64(plan + PLAN_AT.fused)
    stream = stack(32)
    begin_words(stream, load_i64(image + IMAGE_AT.key))
    found = False
    for _ in range(10):
        area = float(height * width) * _uniform(stream, area_base, area_span, fused)
        ratio = math.exp(_uniform(stream, ratio_base, ratio_span, fused))
        exact_width, exact_height = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if not (_is_decided(exact_width) and _is_decided(exact_height)):
            return UNDECIDED
        # As floats, because a side may be larger than any int64.
        box_width, box_height = np.rint(exact_width), np.rint(exact_height)
        if 0 < box_width <= width and 0 < box_height <= height:
            h, w = int(box_height), int(box_width)
            top = next_word(stream) % (height - h + 1)
            _set_box(image, top, next_word(stream) % (width - w + 1), h, w)
            found = True
            break
    if not found:
        _fall_back(image, plan)
    flip = load_f64(plan + PLAN_AT.flip)
    flipped = flip > 0 and _uniform(stream, 0.0, 1.0, fused) < flip
    store_i64(image + IMAGE_AT.flip, int(flipped))
    return DONE


@njit(**OPTIONS)
def _is_decided(side: float) -> bool:
    """Return whether `side` rounds to the same number with any exp within 2 ulp of torch's. See `sizes.sides`."""
    return abs(side - np.rint(side)) < 0.5 - 1e-6 * side


@njit(**OPTIONS)
def _fall_back(image: int, plan: int) -> None:
    """Take the largest box in the middle with an allowed ratio, as torchvision does after ten draws that do not fit."""
    height, width = load_i64(image + IMAGE_AT.height), load_i64(image + IMAGE_AT.width)
    low, high = load_f64(plan + PLAN_AT.ratio_low), load_f64(plan + PLAN_AT.ratio_high)
    h, w = height, width
    ratio = float(width) / float(height)
    if ratio < low:
        h = max(1, int(np.rint(float(width) / low)))
    elif ratio > high:
        w = max(1, int(np.rint(float(height) * high)))
    _set_box(image, (height - h) // 2, (width - w) // 2, h, w)
