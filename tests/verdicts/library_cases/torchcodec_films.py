"""Frames of films, read by torchcodec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchcodec.decoders import VideoDecoder

from tests.verdicts.library_cases import Made, films


class Frames(Dataset[Any]):
    """Two frames of each film, by a decoder of the sample's own."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        decoder = VideoDecoder(self.paths[index])
        return decoder.get_frames_at([index, 0]).data.to(torch.float32), index


def frames(folder: Path) -> Made:
    return Made(Frames(films.clips(folder).dataset.paths))
