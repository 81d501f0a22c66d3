"""Promises:
- A thread's scratch memory lives as long as the run that uses it. If it cannot grow, the run's rows are valid.
- Time that the kernels spend on images that they leave to Python is counted, and each sample once.
- Whether the kernels decode a JPEG or Pillow does, the pixels are the same.
- What fills rows takes the same arguments of a plan as what reads samples one by one.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fastload.image import Plan, RandomResizedCrop, Resize, render
from fastload.image import kernels as package
from fastload.image.kernels import Kernels
from fastload.image.kernels.tables import IMAGE
from tests.image.kernel_runs import by_torch
from tests.image.photographs import Pixels, encoded, photographs

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

    render_of(kernels, Resize((8, 8)), torch.empty(1, 3, 8, 8, dtype=torch.uint8))._call(
        entry, 0, 0
    )
    assert kept == [True]


def test_memory_that_cannot_grow_costs_no_run(
    kernels: Kernels, scratch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError

    before = scratch.arena
    monkeypatch.setattr(np, "empty", refuse)
    scratch.grow(render._MOST_ARENA)
    assert scratch.arena is before


def test_the_time_of_images_left_to_python_is_counted(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kernels.libjpeg is None:
        pytest.skip(package.decoder_state())
    second = 10**9
    stages: dict[str, tuple[float, int]] = {}

    def slow(images: int, count: int, *others: int) -> int:
        needed = kernels.file_run(images, count, *others)
        table = (ctypes.c_uint8 * (count * IMAGE.itemsize)).from_address(images)
        np.frombuffer(table, IMAGE)["read_ns"] += second
        return needed

    def add(name: str, seconds: float, count: int, *, computed: bool) -> None:
        before, others = stages.get(name, (0.0, 0))
        stages[name] = before + seconds, others + count

    monkeypatch.setattr(render, "add_to_stage", add)
    paths = [tmp_path / "1.jpg", tmp_path / "2.jpg", tmp_path / "3.png", tmp_path / "none.jpg"]
    for path in paths[:3]:
        Image.fromarray(PIXELS).save(path, progressive="2" in path.name)
    rows = torch.empty(4, 3, 8, 8, dtype=torch.uint8)
    run = render_of(kernels, Resize((8, 8)), rows)
    by = SimpleNamespace(libjpeg=kernels.libjpeg, file_run=slow)
    monkeypatch.setattr(run, "_kernels", by)
    assert run.files([bytes(path) for path in paths], lambda k: paths[k].read_bytes()) == [3]
    assert {name: count for name, (_, count) in stages.items()} == dict.fromkeys(
        ("read", "decode", "transform"), 3
    )
    assert 4 <= stages["read"][0] < 5


@pytest.mark.parametrize("scaled", [True, False])
def test_runs_have_the_pixels_of_images_alone(kernels: Kernels, scaled: bool) -> None:
    plan = Resize((75, 75), scaled_decode=scaled)  # of 200 pixels, libjpeg could decode 3/8 too
    photograph = next(iter(photographs().values()))[:200, :200]
    jpeg = encoded(np.ascontiguousarray(photograph), quality=90)
    rows = torch.empty(2, 1, 3, 75, 75, dtype=torch.uint8)
    for row, by in zip(rows, (kernels, None), strict=True):
        run = render_of(kernels, plan, row)
        run._kernels = by

        def place(images: Any) -> None:
            images["file"], images["checksum"] = -1, -1
            images["source"] = np.frombuffer(jpeg, np.uint8).ctypes.data
            images["length"] = len(jpeg)

        assert run.encoded(lambda k: jpeg, place) == []
    assert torch.equal(*rows)


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
