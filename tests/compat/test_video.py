"""Promises:
- With PyAV and OpenCV, 8 workers read 2,048 right frames by decoders that are opened at the first sample.
- A video decoder that is open at `iter()` is refused, and the error names its place. Worker processes refuse decord's.

A decoder has a position, and two threads in it end the interpreter.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.compat.eight_workers import Holder, Pairs, library, refused, wrong_pairs

FRAMES = 48
SIDE = 32


def frame(index: int) -> np.ndarray[Any, Any]:
    """Return a frame whose left half says `index` and whose right half says the same, inverted."""
    level = index * 5
    return np.repeat([level, 255 - level], SIDE // 2)[None, :, None].repeat(SIDE, 0).repeat(3, 2)


def index_of(pixels: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return what a decoded frame's two halves say: twice its index, if it is one frame."""
    levels = pixels[..., 0].reshape(SIDE, 2, SIDE // 2).astype(float).mean((0, 2))
    return torch.tensor([round(levels[0] / 5), round((255 - levels[1]) / 5)])


class Frames(Pairs):
    """Frames of a video that is opened at the first sample, in any order."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.video: Any = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        wanted = index * 7 % FRAMES
        return index_of(self.read(wanted)), torch.tensor([wanted, wanted])

    @abstractmethod
    def read(self, wanted: int) -> Any:
        """Return the pixels of the frame `wanted`."""


class AvFrames(Frames):
    """Frames by PyAV: seek to a key frame, decode up to the one that is wanted."""

    def read(self, wanted: int) -> Any:
        if self.video is None:
            self.video = library("av").open(self.path)
            self.video.streams.video[0].thread_type = "NONE"
        stream = self.video.streams.video[0]
        self.video.seek(int(wanted / stream.average_rate / stream.time_base), stream=stream)
        for found in self.video.decode(stream):
            if round(found.time * stream.average_rate) >= wanted:
                return found.to_ndarray(format="rgb24")
        raise AssertionError(f"no frame {wanted}")


class CvFrames(Frames):
    """Frames by OpenCV: set the position, read."""

    def read(self, wanted: int) -> Any:
        cv2 = library("cv2")
        if self.video is None:
            self.video = cv2.VideoCapture(self.path)
        self.video.set(cv2.CAP_PROP_POS_FRAMES, wanted)
        found, pixels = self.video.read()
        assert found
        return pixels


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a film in which each frame is an image of its own."""
    av = library("av")
    path: Path = tmp_path_factory.mktemp("video") / "film.avi"
    with av.open(str(path), "w") as film:
        stream = film.add_stream("mjpeg", rate=25)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuvj420p"
        for i in range(FRAMES):
            pixels = np.ascontiguousarray(frame(i).astype(np.uint8))
            film.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        film.mux(stream.encode())
    return path


@pytest.mark.parametrize("dataset", [AvFrames, CvFrames])
def test_a_video_opened_at_the_first_sample(video: Path, dataset: type[Frames]) -> None:
    library("av" if dataset is AvFrames else "cv2")
    assert wrong_pairs(dataset(video)) == 0


@pytest.mark.parametrize("kind", ["container", "capture"])
def test_what_is_open_is_refused(video: Path, kind: str) -> None:
    if kind == "capture":
        opened = library("cv2").VideoCapture(str(video))
        close = opened.release
    else:
        opened = library("av").open(str(video))
        close = opened.close
    read = Frames(video)
    read.transform = Holder(**{kind: opened})
    try:
        with refused(rf"dataset\.transform\.{kind}"):
            wrong_pairs(read, worker_method="thread")
    finally:
        close()


class DecordFrames(Frames):
    """Frames by decord."""

    def read(self, wanted: int) -> Any:
        if self.video is None:
            self.video = library("decord").VideoReader(self.path, num_threads=1)
        return self.video[wanted].asnumpy()


def test_a_decord_reader_that_is_open_is_refused_by_processes(video: Path) -> None:
    """Its threads are not in a fork, so no sample ends there."""
    decord = library("decord")
    dataset = DecordFrames(video)
    assert wrong_pairs(dataset, worker_method="process", num_workers=2) == 0
    loader = decord.VideoLoader([dataset.path], [decord.cpu(0)], (1, SIDE, SIDE, 3), 1, 1, 0)
    dataset.transform = Holder(reader=decord.VideoReader(dataset.path), loader=loader)
    with refused(r"dataset\.transform\.reader.* dataset\.transform\.loader"):
        wrong_pairs(dataset, worker_method="process", num_workers=2)
