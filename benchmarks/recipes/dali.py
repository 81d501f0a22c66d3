"""DALI on the CPU: its file reader, the decoder that decodes only the crop, resize, flip, and its iterator for torch.

Its shuffle is a buffer of 1,024 images, its default: not a global one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIClassificationIterator

from benchmarks.recipes import SIZE, Batch, Task, files


@pipeline_def
def _pipeline(images: list[str]) -> Any:
    encoded, numbers = fn.readers.file(
        files=images, labels=list(range(len(images))), random_shuffle=True, name="images"
    )
    pixels = fn.decoders.image_random_crop(
        encoded,
        device="cpu",
        output_type=types.RGB,
        random_aspect_ratio=[3 / 4, 4 / 3],
        random_area=[0.08, 1.0],
        num_attempts=10,
    )
    pixels = fn.resize(pixels, size=[SIZE, SIZE], interp_type=types.INTERP_TRIANGULAR)
    pixels = fn.crop_mirror_normalize(
        pixels, dtype=types.UINT8, output_layout="CHW", mirror=fn.random.coin_flip(probability=0.5)
    )
    return pixels, numbers


class _Passes:
    def __init__(self, batches: Any) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        for (batch,) in self._batches:
            yield batch["data"], batch["label"].squeeze(1)


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    pipeline = _pipeline(
        files(task.source), batch_size=task.batch, num_threads=task.workers, device_id=None, seed=0
    )
    yield _Passes(
        DALIClassificationIterator(
            pipeline,
            reader_name="images",
            last_batch_policy=LastBatchPolicy.PARTIAL,
            auto_reset=True,
        )
    )
