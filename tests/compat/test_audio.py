"""Promises:
- With soundfile, 8 workers read 2,048 right clips from files that are opened at the first sample.
- A SoundFile that is open at `iter()` is refused, and the error names its place.

An open file has a position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.eight_workers import PAIRS, Holder, Pairs, library, refused, wrong_pairs

RATE = 8_000
CLIP = 256


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording of `PAIRS` clips, each of which says its index in every sample."""
    path: Path = tmp_path_factory.mktemp("audio") / "recording.wav"
    library("soundfile").write(path, np.arange(PAIRS, dtype=np.int16).repeat(CLIP), RATE)
    return path


class Clips(Pairs):
    """Clips of a recording that is opened at the first one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sound: Any = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.read(index)), torch.full((CLIP,), index, dtype=torch.int16)

    def read(self, index: int) -> Any:
        if self.sound is None:
            self.sound = library("soundfile").SoundFile(self.path)
        self.sound.seek(index * CLIP)
        return self.sound.read(CLIP, dtype="int16")


def test_a_file_opened_at_the_first_sample(recording: Path) -> None:
    assert wrong_pairs(Clips(recording)) == 0


def test_what_is_open_is_refused(recording: Path) -> None:
    with library("soundfile").SoundFile(recording) as sound:
        clips = Clips(recording)
        clips.transform = Holder(sound=sound)
        with refused(r"dataset\.transform\.sound"):
            wrong_pairs(clips, worker_method="thread")
