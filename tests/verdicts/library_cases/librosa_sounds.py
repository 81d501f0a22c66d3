"""Mel spectrograms by librosa."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import librosa
import numpy as np
import soundfile
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, wave


class Spectrograms(Dataset[Any]):
    """Sounds from files, resampled and turned into decibels."""

    def __init__(self, paths: list[Path], rate: int = 4_000) -> None:
        self.paths, self.rate = paths, rate

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        y, sr = librosa.load(self.paths[index], sr=self.rate)
        mel = librosa.feature.melspectrogram(y=y, sr=sr, n_fft=128, hop_length=64, n_mels=16)
        return torch.from_numpy(librosa.power_to_db(mel, ref=np.max)), index % 2


def mel_spectrograms(folder: Path) -> Made:
    paths = [folder / f"{index}.wav" for index in range(COUNT)]
    for index, path in enumerate(paths):
        soundfile.write(path, wave(index), 8_000)
    return Made(Spectrograms(paths))
