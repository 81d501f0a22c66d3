"""Sound files read by soundfile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import soundfile as sf
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, wave


class Recordings(Dataset[Any]):
    """A random second of each file."""

    def __init__(self, files: list[Path], frames: int) -> None:
        self.files, self.frames = files, frames

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        info = sf.info(str(self.files[index]))
        start = np.random.randint(0, info.frames - self.frames + 1)
        sound, rate = sf.read(
            str(self.files[index]), start=start, frames=self.frames, dtype="float32"
        )
        sound = sound - sound.mean()
        sound /= np.abs(sound).max() + 1e-6
        return torch.from_numpy(sound), rate


def wav_files(folder: Path) -> Made:
    for index in range(COUNT):
        sf.write(str(folder / f"{index}.wav"), wave(index), 8_000)
    return Made(Recordings(sorted(folder.glob("*.wav")), frames=500))
