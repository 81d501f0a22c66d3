"""Frames of a film, read by PyAV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from torch.utils.data import Dataset

from tests.verdicts.library_cases import Made
from tests.verdicts.library_cases.files import COUNT, pixels


class Clips(Dataset[Any]):
    """Two frames of each film, from a random one on."""

    def __init__(self, paths: list[str], length: int = 2) -> None:
        self.paths, self.length = paths, length

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        with av.open(self.paths[index]) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        first = np.random.randint(0, len(frames) - self.length + 1)
        clip = np.stack(frames[first : first + self.length])
        return torch.from_numpy(clip).permute(3, 0, 1, 2), index


def clips(folder: Path) -> Made:
    path = folder / "film.avi"
    with av.open(str(path), "w") as film:
        stream = film.add_stream("mjpeg", rate=25)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuvj420p"
        for index in range(COUNT):
            film.mux(stream.encode(av.VideoFrame.from_ndarray(pixels(index), format="rgb24")))
        film.mux(stream.encode())
    return Made(Clips([str(path)] * COUNT))
