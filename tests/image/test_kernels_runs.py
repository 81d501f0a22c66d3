"""Promises:
- A thread's scratch memory lives as long as the run that uses it. If it cannot grow, the run's rows are valid nevertheless.
- What fills rows takes the same arguments of a plan as what reads samples one by one.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from fastload.image import Plan, RandomResizedCrop, Resize, render
from fastload.image.kernels import Kernels
from tests.image.kernel_runs import by_torch
from tests.image.photographs import Pixels

PIXELS = np.random.default_rng(0).integers(0, 256, (61, 47, 3), dtype=np.uint8)


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scratch memory of its own for a test."""
    made = render._Scratch()
    monkeypatch.setattr(render, "_scratch", made)
    return made


def render_of(kernels: Kernels, plan: Plan, rows: torch.Tensor) -> render.Render:
    made = render.make_render(plan, rows, np.zeros(len(rows), np.uint64))
    assert made is not None
    made._kernels = kernels
    return made


def test_the_scratch_memory_of_a_run_stays_until_its_end(kernels: Kernels, scratch: Any) -> None:
    """At exit, the interpreter takes down the module, while a daemon thread may be in a run."""
    kept = []

    def entry(*_: int) -> int:
        before = weakref.ref(scratch.arena)
        scratch.arena = np.empty(0, np.uint8)
        kept.append(before() is not None)
        return 0

    render_of(kernels, Resize((8, 8)), torch.empty(1, 3, 8, 8, dtype=torch.uint8))._call(entry, 0, 0)
    assert kept == [True]


def test_memory_that_cannot_grow_costs_no_run(
    kernels: Kernels, scratch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "_MOST_ARENA", 2**62)
    before = scratch.arena
    scratch.grow(2**60)
    assert scratch.arena is before


@pytest.mark.parametrize("name", ["scaled_decode", "upright"])
@pytest.mark.parametrize("value", [None, "yes", 2])
def test_a_plan_takes_whatever_is_true_or_false(kernels: Kernels, name: str, value: Any) -> None:
    plan = RandomResizedCrop((16, 16), **{name: value})
    rows = torch.empty(1, 3, 16, 16, dtype=torch.uint8)
    run = render_of(kernels, plan, rows)

    def read(k: int, first: int, stop: int) -> Pixels:
        raise AssertionError("the kernels read by themselves")

    address = np.array([PIXELS.ctypes.data])
    nothing = np.array([-1])
    assert run.raw(nothing, address, np.array([PIXELS.shape[:2]], np.int32), nothing, read) == []
    assert torch.equal(rows[0], by_torch(plan, PIXELS))
