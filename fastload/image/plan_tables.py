"""Plans in the form that the kernels read."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from fastload.image.kernels import tables
from fastload.image.normalize import factor_and_shift
from fastload.image.plans import Plan, RandomResizedCrop, Resize, ResizeCenterCrop
from fastload.image.sizes import log_ratio


class _PlanTable:
    """A plan in the form that the kernels read, at `address`."""

    def __init__(self, plan: Plan, strides: tuple[int, ...], most_pixels: int) -> None:
        self._table = table = np.zeros((), tables.PLAN)
        self.address = table.ctypes.data
        table["colour_step"], table["row_step"], table["pixel_step"] = strides
        table["scaled"], table["most_pixels"] = bool(plan.scaled_decode), most_pixels
        if plan.mean is not None:
            factor, shift = factor_and_shift(plan.mean, plan.std)
            table["floats"], table["factors"], table["shifts"] = 1, factor.view(3), shift.view(3)
        table["height"], table["width"] = result_size(plan)
        table["kind"] = _KINDS[type(plan)]
        if isinstance(plan, RandomResizedCrop):
            self._set_crop(plan)
        elif isinstance(plan, ResizeCenterCrop):
            resize = plan.resize if isinstance(plan.resize, tuple) else (plan.resize, -1)
            table["resize_height"], table["resize_width"] = resize

    def _set_crop(self, plan: RandomResizedCrop) -> None:
        table = self._table
        table["area_base"], table["area_span"] = base_and_span(*plan.scale)
        bounds = log_ratio(plan.ratio)
        table["log_ratio_base"], table["log_ratio_span"] = base_and_span(*bounds)
        table["ratio_low"], table["ratio_high"] = plan.ratio
        table["flip"] = np.float32(plan.flip)


plan_table = lru_cache(maxsize=64)(_PlanTable)
_KINDS: dict[type[Plan], int] = {
    RandomResizedCrop: tables.RANDOM_RESIZED_CROP,
    Resize: tables.RESIZE,
    ResizeCenterCrop: tables.RESIZE_CENTER_CROP,
}


def result_size(plan: Any) -> Any:
    """Return (height, width) of a plan's results, or one number if they vary."""
    return plan.crop if type(plan) is ResizeCenterCrop else plan.size


def base_and_span(low: float, high: float) -> tuple[float, float]:
    """Return the float32 values from which torch draws: `low + unit * (high - low)`."""
    base = np.float32(low)
    return float(base), float(np.float32(high) - base)
