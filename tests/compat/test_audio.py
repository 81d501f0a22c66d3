"""Promises:
- With soundfile and audiomentations, 8 workers read 2,048 right clips from files that are opened at the first sample,
  and give two signals one draw.
- A SoundFile that is open at `iter()` is refused, and the error names its place.

An open file has a position, and a frozen transform keeps its parameters.
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


class Blocks(Clips):
    """The same into a buffer of the dataset."""

    buffer: Any = None

    def read(self, index: int) -> Any:
        if self.buffer is None:
            self.buffer = np.empty(CLIP, np.int16)
            self.sound = library("soundfile").SoundFile(self.path)
        self.sound.seek(index * CLIP)
        return self.sound.read(out=self.buffer).copy()


@pytest.mark.parametrize("dataset", [Clips, Blocks])
def test_a_file_opened_at_the_first_sample(recording: Path, dataset: type[Clips]) -> None:
    assert wrong_pairs(dataset(recording)) == 0


def test_what_is_open_is_refused(recording: Path) -> None:
    with library("soundfile").SoundFile(recording) as sound:
        clips = Clips(recording)
        clips.transform = Holder(sound=sound)
        with refused(r"dataset\.transform\.sound"):
            wrong_pairs(clips, worker_method="thread")


class Frozen(Pairs):
    """Clean and noisy speech get one draw: the transform is frozen for the second."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        clean = (np.arange(CLIP, dtype=np.float32) + index) / 4_096
        first = self.transform(clean, sample_rate=RATE)
        self.transform.freeze_parameters()
        second = self.transform(clean, sample_rate=RATE)
        self.transform.unfreeze_parameters()
        return torch.from_numpy(first.copy()), torch.from_numpy(second.copy())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_frozen_parameters_are_the_samples_own() -> None:
    audio = library("audiomentations")
    steps = [audio.Gain(p=0.7), audio.PolarityInversion(p=0.5), audio.Shift(p=0.5)]
    assert wrong_pairs(Frozen(audio.Compose(steps))) == 0
