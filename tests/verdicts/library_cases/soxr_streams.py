"""Sounds that soxr resamples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import soxr
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, wave


class Sounds(Dataset[Any]):
    """Sounds at another rate."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(soxr.resample(wave(index), 8_000, 6_000)), index


class Streams(Sounds):
    """The same by one resampler, whose buffers two threads would overwrite."""

    def __init__(self) -> None:
        self.resampler = soxr.ResampleStream(8_000, 6_000, 1, dtype="float32")

    def __getitem__(self, index: int) -> Any:
        self.resampler.clear()
        return torch.from_numpy(self.resampler.resample_chunk(wave(index), last=True)), index


def resampled(folder: Path) -> Made:
    return Made(Sounds())


def held(folder: Path) -> Made:
    return Made(Streams())
