"""Promise: The kernels read raw pixels out of files as Python does, and say which read failed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload.image import Plan, RandomResizedCrop, Resize
from fastload.image.kernels import Kernels
from fastload.image.kernels.tables import DAMAGED, DONE, TOO_LARGE, UNDECIDED, UNREADABLE
from tests.image.kernel_runs import Made, by_torch, guarded, make

PIXELS = np.random.default_rng(0).integers(0, 256, (61, 47, 3), dtype=np.uint8)
BEGIN = 1_001
CRC = zlib.crc32(PIXELS.tobytes())
PLAN = Resize((32, 32))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "pixels"
    path.write_bytes(b"?" * BEGIN + PIXELS.tobytes())
    return path


@pytest.fixture
def file(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    yield file
    os.close(file)


def from_file(kernels: Kernels, file: int, plan: Plan = PLAN, **options: Any) -> Made:
    options = {"source": BEGIN, **options}
    return make(kernels, plan, PIXELS, file=file, **options)


@pytest.mark.parametrize("checksum", [-1, CRC])
def test_a_box_out_of_a_file(kernels: Kernels, file: int, checksum: int) -> None:
    plan = RandomResizedCrop(24, flip=0.5)
    for key in range(30):
        made = from_file(kernels, file, plan, key=key, checksum=checksum)
        if made.state != UNDECIDED:
            assert made.state == DONE
            assert torch.equal(made.row, by_torch(plan, PIXELS, key))
            assert made.image["read_ns"] > 0
            assert made.image["transform_ns"] > 0
            assert made.image["source"] == BEGIN
            assert made.image["checksum"] == checksum


def test_damage_is_seen_outside_of_the_box(kernels: Kernels, path: Path) -> None:
    plan = RandomResizedCrop(8, scale=(0.01, 0.01), ratio=(1.0, 1.0))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    file = os.open(path, os.O_RDONLY)
    states = {from_file(kernels, file, plan, key=key, checksum=CRC).state for key in range(20)}
    os.close(file)
    assert {DAMAGED} <= states <= {DAMAGED, UNDECIDED}


@pytest.mark.parametrize("source", [BEGIN + 1, 10**9, -1, -(2**63), 2**63 - 1])
def test_a_file_that_ends_too_soon(kernels: Kernels, file: int, source: int) -> None:
    assert from_file(kernels, file, source=source).state == UNREADABLE


def test_only_the_rows_of_the_box_are_needed(kernels: Kernels, path: Path) -> None:
    os.truncate(path, BEGIN + PIXELS.size // 2)
    plan = RandomResizedCrop(8, scale=(0.02, 0.05))
    file = os.open(path, os.O_RDONLY)
    states = []
    for key in range(60):
        made = from_file(kernels, file, plan, key=key)
        states.append(made.state)
        if made.state == DONE:
            assert torch.equal(made.row, by_torch(plan, PIXELS, key))
    os.close(file)
    assert {DONE, UNREADABLE} <= set(states) <= {DONE, UNREADABLE, UNDECIDED}


def test_what_cannot_be_read(kernels: Kernels, path: Path, tmp_path: Path) -> None:
    directory, writable = os.open(tmp_path, os.O_RDONLY), os.open(path, os.O_WRONLY)
    pipe = os.pipe()
    for file in (directory, writable, *pipe):
        assert from_file(kernels, file).state == UNREADABLE
        os.close(file)


def test_an_arena_too_small_for_the_payload(kernels: Kernels, file: int) -> None:
    for checksum in (-1, CRC):
        first = from_file(kernels, file, checksum=checksum, arena=np.empty(0, np.uint8))
        assert first.state == TOO_LARGE
        assert first.needed > PIXELS.size
        arena = guarded(first.needed)
        made = from_file(kernels, file, checksum=checksum, arena=arena)
        assert (made.state, made.needed) == (DONE, 0)
        assert torch.equal(made.row, by_torch(PLAN, PIXELS))
        less = from_file(kernels, file, checksum=checksum, arena=arena[1:])
        assert (less.state, less.needed) == (TOO_LARGE, first.needed)
