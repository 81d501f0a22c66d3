"""Compressed arrays, each with a decompressor of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard as zstd
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, wave


class Blocks(Dataset[Any]):
    """Arrays that are decompressed when they are read."""

    def __init__(self, blocks: list[bytes]) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> Any:
        data = zstd.ZstdDecompressor().decompress(self.blocks[index])
        return torch.from_numpy(np.frombuffer(data, np.float32).copy()), index


def decompressed(folder: Path) -> Made:
    compressor = zstd.ZstdCompressor(level=3)
    return Made(Blocks([compressor.compress(wave(index).tobytes()) for index in range(COUNT)]))
