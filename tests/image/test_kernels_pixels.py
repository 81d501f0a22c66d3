"""Promises:
- The compiled kernels give torch's pixels to the bit: three plans, planes and channels-last, floats, flips, windows,
  sizes from 1 x 1.
- The kernels read and write nothing beyond their memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastload.image import Plan, RandomResizedCrop, Resize, ResizeCenterCrop
from fastload.image.kernels import Kernels
from fastload.image.kernels.tables import DAMAGED, DONE, IMAGE, TOO_LARGE, UNDECIDED
from fastload.image.kernels_check import agrees_with_torch
from fastload.image.plan_tables import plan_table
from tests.image.kernel_runs import (
    ARENA,
    EXTREMES,
    by_torch,
    empty_row,
    guarded,
    guarded_copy,
    image_of,
    make,
    noise,
)

FLOATS = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SIDES = st.one_of(st.integers(1, 12), st.integers(1, 80), st.integers(1, 600))
RESULTS = st.one_of(st.integers(1, 12), st.integers(1, 80), st.integers(200, 260))
SHARES = st.floats(0.01, 1.5).map(lambda share: float(np.float32(share)))
COMMON = st.fixed_dictionaries({"channels_last": st.booleans()}).flatmap(
    lambda common: st.sampled_from([common, common | FLOATS])
)


@st.composite
def plans(draw: Any) -> Plan:
    common, size = draw(COMMON), (draw(RESULTS), draw(RESULTS))
    kind = draw(st.sampled_from([RandomResizedCrop, Resize, ResizeCenterCrop]))
    if kind is Resize:
        return Resize(size, **common)
    if kind is ResizeCenterCrop:
        resize = draw(st.one_of(st.integers(1, 80), st.tuples(RESULTS, RESULTS)))
        return ResizeCenterCrop(resize, size, **common)
    scale = sorted([draw(SHARES), draw(SHARES)])
    ratio = sorted([draw(SHARES), 2 * draw(SHARES)])
    return RandomResizedCrop(
        size, tuple(scale), tuple(ratio), draw(st.sampled_from([0.0, 0.5, 1.0])), **common
    )


@given(plan=plans(), height=SIDES, width=SIDES, key=st.integers(0, 2**63 - 1))
def test_any_plan_gives_what_torch_gives(
    kernels: Kernels, plan: Plan, height: int, width: int, key: int
) -> None:
    pixels = guarded_copy(noise(height, width, key))
    made = make(kernels, plan, pixels, key)
    if made.state == UNDECIDED:
        return  # how rare that is: test_kernels_draws.py
    assert made.state == DONE
    assert made.needed == 0
    torch.testing.assert_close(made.row, by_torch(plan, pixels, key), rtol=0, atol=0)


@pytest.mark.parametrize(("height", "width", "size"), EXTREMES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_extreme_sizes(
    kernels: Kernels, height: int, width: int, size: tuple[int, int], channels_last: bool
) -> None:
    plan = Resize(size, channels_last=channels_last)
    pixels = guarded_copy(noise(height, width))
    assert torch.equal(make(kernels, plan, pixels).row, by_torch(plan, pixels))
    # Of extremes the sums are the largest.
    pixels[:] = 255
    assert torch.equal(make(kernels, plan, pixels).row, by_torch(plan, pixels))


@pytest.mark.parametrize(
    ("resize", "crop"),
    [
        (32, 224),  # black all around
        ((40, 300), (64, 64)),  # black above and below
        ((300, 41), (64, 64)),  # black beside, an odd pixel
        ((65, 64), (64, 65)),
        (1, (7, 2)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"channels_last": True}, FLOATS], ids=str)
def test_a_window_beyond_the_image_is_black(
    kernels: Kernels, resize: Any, crop: Any, options: Any
) -> None:
    plan, pixels = ResizeCenterCrop(resize, crop, **options), guarded_copy(noise(50, 70))
    assert torch.equal(make(kernels, plan, pixels).row, by_torch(plan, pixels))


@given(plan=plans(), height=SIDES, width=SIDES, key=st.integers(0, 2**63 - 1))
def test_nothing_beyond_the_arena_and_the_row_is_touched(
    kernels: Kernels, plan: Plan, height: int, width: int, key: int
) -> None:
    pixels = guarded_copy(noise(height, width, key))
    like = empty_row(plan)
    target = guarded(like.nbytes)
    row = torch.frombuffer(target, dtype=like.dtype).as_strided(like.shape, like.stride())
    nothing = np.empty(0, np.uint8)
    asked = make(kernels, plan, pixels, key, row=row, arena=nothing)
    if asked.state == UNDECIDED:
        return
    assert asked.state == TOO_LARGE
    assert not target.any()
    arena = guarded(asked.needed)
    made = make(kernels, plan, pixels, key, row=row, arena=arena)
    assert (made.state, made.needed) == (DONE, 0)
    assert torch.equal(row, by_torch(plan, pixels, key))
    less = make(kernels, plan, pixels, key, arena=arena[1:])
    assert (less.state, less.needed) == (TOO_LARGE, asked.needed)
    assert torch.equal(less.row, empty_row(plan))


def test_a_run_does_what_it_can(kernels: Kernels) -> None:
    plan = Resize((16, 16))
    many = [noise(20 + k, 30, k) for k in range(4)]
    rows = torch.full((4, 3, 16, 16), 77, dtype=torch.uint8)
    table = plan_table(plan, rows.stride()[1:], 0)
    images = np.concatenate([image_of(p, row) for p, row in zip(many, rows, strict=True)])
    images["state"][0] = UNDECIDED
    images["length"][2] += 1
    arena = ARENA.ctypes.data, ARENA.nbytes
    assert kernels.raw_run(images.ctypes.data, 4, table.address, *arena) == 0
    assert images["state"].tolist() == [UNDECIDED, DONE, DAMAGED, DONE]
    for k, row in enumerate(rows):
        expected = by_torch(plan, many[k]) if k in (1, 3) else torch.full_like(row, 77)
        assert torch.equal(row, expected)
    assert kernels.raw_run(images.ctypes.data, 0, table.address, *arena) == 0


def test_kernels_that_differ_from_torch_are_not_used(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert IMAGE.fields is not None
    row_at = IMAGE.fields["row"][1]
    genuine = kernels.raw_run

    def wrong(images: int, *others: int) -> int:
        needed = genuine(images, *others)
        row = ctypes.c_int64.from_address(images + row_at).value
        ctypes.c_uint8.from_address(row).value ^= 1
        return needed

    assert agrees_with_torch.__wrapped__(kernels)
    monkeypatch.setattr(kernels, "raw_run", wrong)
    assert not agrees_with_torch.__wrapped__(kernels)
