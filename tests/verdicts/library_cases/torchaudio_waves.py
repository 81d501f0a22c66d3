"""Spectrograms of torchaudio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torchaudio.transforms as T
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, wave


class Spectrograms(Dataset[Any]):
    """Mel spectrograms, masked at random places."""

    def __init__(self, waves: list[torch.Tensor]) -> None:
        self.waves = waves
        self.transform = torch.nn.Sequential(
            T.MelSpectrogram(sample_rate=8_000, n_fft=128, n_mels=16),
            T.AmplitudeToDB(),
            T.FrequencyMasking(freq_mask_param=4),
        )

    def __len__(self) -> int:
        return len(self.waves)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.waves[index]), index % 2


def spectrograms(folder: Path) -> Made:
    return Made(Spectrograms([torch.from_numpy(wave(index)) for index in range(COUNT)]))
