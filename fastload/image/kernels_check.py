"""A check that the compiled kernels give torch's results to the bit. Another build of torch may round otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from fastload.image.kernels import Kernels
from fastload.image.kernels.tables import DONE, IMAGE, UNDECIDED
from fastload.image.plan_tables import base_and_span, plan_table
from fastload.image.plans import Plan, RandomResizedCrop, Resize, ResizeCenterCrop

# Height and width of the images.
_SIDES = ((1, 1), (1, 90), (77, 1), (40, 64), (131, 97), (64, 300))
_ARENA_BYTES = 4 << 20


@lru_cache(maxsize=2)
def agrees_with_torch(kernels: Kernels) -> bool:
    """Return whether the kernels render small images as the plans do by torch, with the same random draws."""
    if not _rounds_once():
        return False
    random = np.random.default_rng(13)
    arena = np.empty(_ARENA_BYTES, np.uint8)
    for height, width in _SIDES:
        pixels = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        for plan in _plans():
            key = int(random.integers(2**63))
            region = plan.region(height, width, torch.Generator().manual_seed(key))
            expected = plan.finished(pixels, region)
            row = torch.full_like(expected, 77)
            state = _render(kernels, plan, pixels, key, row, arena)
            if state != UNDECIDED and not (state == DONE and torch.equal(row, expected)):
                return False
    return True


def _rounds_once() -> bool:
    """Return whether torch draws `unit * span + base`, rounded once, as the kernels do. It may be compiled otherwise."""
    units = np.random.RandomState(0).randint(2**32, size=256, dtype=np.uint32) % 2**24 * 2.0**-24
    drawn, generator = torch.empty(256, dtype=torch.float32, device="cpu"), torch.Generator()
    for bounds in ((0.08, 1.0), (-0.2876820862293243, 0.2876820862293243), (0.3, 0.9)):
        base, span = base_and_span(*bounds)
        drawn.uniform_(*bounds, generator=generator.manual_seed(0))
        if not np.array_equal(drawn.numpy(), (units * span + base).astype(np.float32)):
            return False
    return True


def _plans() -> Iterator[Plan]:
    yield RandomResizedCrop((48, 56), flip=0.5)
    yield RandomResizedCrop(33, scale=(0.5, 1.0), ratio=(0.5, 2.0), flip=0.3, channels_last=True)
    yield RandomResizedCrop(32, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    yield Resize((40, 64), channels_last=True)
    yield ResizeCenterCrop((50, 70), (64, 47), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def _render(
    kernels: Kernels,
    plan: Plan,
    pixels: NDArray[np.uint8],
    key: int,
    row: torch.Tensor,
    arena: NDArray[np.uint8],
) -> int:
    """Render `pixels`, uint8[H, W, 3], into `row`, with the random stream of `key`. Return the image's state."""
    image = np.zeros(1, IMAGE)
    image["key"], image["file"], image["checksum"] = key, -1, -1
    image["source"], image["length"] = pixels.ctypes.data, pixels.size
    image["height"], image["width"] = pixels.shape[:2]
    image["row"] = row.data_ptr()
    table = plan_table(plan, row.stride(), 0)
    kernels.raw_run(image.ctypes.data, 1, table.address, arena.ctypes.data, arena.nbytes)
    return int(image["state"][0])
