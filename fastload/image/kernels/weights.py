"""The weights of one pass, operation by operation as ATen computes them (UpSampleKernelAVXAntialias.h)."""

from __future__ import annotations

from numba import njit

from fastload.image.kernels.memory import (
    OPTIONS,
    fill,
    load_f64,
    load_i64,
    store_f64,
    store_i16,
    store_i64,
)
from fastload.image.kernels.workspace import TABLE, most_taps


@njit(**OPTIONS)
def fill_table(table: int) -> None:
    """Fill the begins and weights of one pass, for the pixels that are kept."""
    kept, first = load_i64(table + TABLE.kept), load_i64(table + TABLE.first)
    mirrored, unit = load_i64(table + TABLE.mirrored) != 0, load_i64(table + TABLE.unit)
    shares, share_bytes = load_i64(table + TABLE.shares), load_i64(table + TABLE.share_bytes)
    begins, weights = load_i64(table + TABLE.begins), load_i64(table + TABLE.weights)
    largest, most = _find_shares(table)
    bits = 0
    while bits < 22 and int(0.5 + largest * float(1 << (bits + 1))) < 1 << 15:
        bits += 1
    taps = (most + 1) & ~1
    one = float(1 << bits)
    store_i64(table + TABLE.taps, taps)
    store_i64(table + TABLE.bits, bits)
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
    """Store the begin, the count and the unrounded weights of each pixel. Return the largest weight and count.

    This is ATen's `_compute_indices_min_size_weights_aa`, operation by operation.
    """
    before, after = load_i64(table + TABLE.before), load_i64(table + TABLE.after)
    shares, share_bytes = load_i64(table + TABLE.shares), load_i64(table + TABLE.share_bytes)
    size = most_taps(before, after)
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
