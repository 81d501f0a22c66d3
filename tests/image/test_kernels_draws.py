"""Promise: The compiled kernels draw torchvision's boxes from a sample's key, or leave the draw to torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.image import Plan, RandomResizedCrop, Resize, ResizeCenterCrop
from fastload.image.kernels import Kernels
from fastload.image.kernels.tables import DAMAGED, DONE, IMAGE, TOO_LARGE, UNDECIDED
from fastload.image.plan_tables import plan_table

SIDES = st.one_of(st.integers(1, 64), st.integers(1, 4000))
BOUNDS = st.lists(st.floats(0.05, 4.0), min_size=2, max_size=2).map(lambda two: tuple(sorted(two)))
BOX = ["top", "left", "box_height", "box_width", "flip"]


def draw(
    kernels: Kernels, plan: Plan, keys: Any, heights: Any, widths: Any, limit: int | None = None
) -> Any:
    """The rows of IMAGE after a run without scratch memory, with state DONE if a box was drawn."""
    images = np.zeros(len(keys), IMAGE)
    images["key"], images["height"], images["width"] = keys, heights, widths
    images["length"] = 3 * images["height"] * images["width"]
    images["file"] = images["checksum"] = -1
    table = plan_table(plan, (1, 1, 1), 2 * (limit or 0))
    kernels.raw_run(images.ctypes.data, len(images), table.address, 0, 0)
    images["state"][(images["state"] == TOO_LARGE) & (images["box_height"] > 0)] = DONE
    return images


@given(
    scale=BOUNDS,
    ratio=BOUNDS,
    flip=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    height=SIDES,
    width=SIDES,
    key=st.integers(0, 2**63 - 30),
)
def test_boxes_and_flips_are_those_of_the_plan(
    kernels: Kernels, scale: Any, ratio: Any, flip: float, height: int, width: int, key: int
) -> None:
    plan = RandomResizedCrop(8, scale, ratio, flip)
    images = draw(kernels, plan, range(key, key + 20), height, width)
    for image in images[images["state"] == DONE]:
        generator = torch.Generator().manual_seed(int(image["key"]))
        region = plan.region(height, width, generator)
        assert image[BOX].item() == (*region.box, region.flip)


def test_a_tie_that_the_last_bit_of_exp_decides_is_left_to_torch(kernels: Kernels) -> None:
    # Of all boxes the area is 9, the ratio 1 / 1.44: width 2.5, height 3.6.
    plan = RandomResizedCrop(8, (9 / 100, 9 / 100), (2.5**2 / 9, 2.5**2 / 9))
    assert draw(kernels, plan, range(20), 10, 10)["state"].tolist() == [UNDECIDED] * 20


@pytest.mark.parametrize("plan", [Resize((5, 6)), ResizeCenterCrop(7, 5)])
def test_the_other_plans_take_all_and_draw_nothing(kernels: Kernels, plan: Plan) -> None:
    images = draw(kernels, plan, [1, 2], [30, 40], [50, 20])
    assert images[BOX].tolist() == [(0, 0, 30, 50, 0), (0, 0, 40, 20, 0)]


@pytest.mark.parametrize("plan", [RandomResizedCrop(8), Resize((8, 8)), ResizeCenterCrop(8, 8)])
@pytest.mark.parametrize(
    ("height", "width", "state"),
    [
        (0, 5, DAMAGED),
        (5, 0, DAMAGED),
        (-3, -4, DAMAGED),
        (-(2**63), 1, DAMAGED),
        (100, 200, DONE),
        (100, 201, TOO_LARGE),
        (2**28, 1, TOO_LARGE),
        (2**62, 2**62, TOO_LARGE),
        (2**63 - 1, 2, TOO_LARGE),
    ],
)
def test_forged_sizes(kernels: Kernels, plan: Plan, height: int, width: int, state: int) -> None:
    assert draw(kernels, plan, [3], height, width, limit=10_000)["state"] == state
