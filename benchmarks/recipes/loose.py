"""Files through torchvision's ImageFolder, by torch's DataLoader or fastload's: a user's unmodified dataset.

Variants: LOADER-DECODER, the loader "torch" or "thread" (of fastload), the decoder "pillow" (with transforms v1) or
"torchvision" (with v2, on uint8 tensors).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torchvision import transforms
from torchvision.datasets import ImageFolder

from benchmarks._measure import open_readers
from benchmarks.recipes import SIZE, Batch, Task
from benchmarks.recipes._decoding import crop, decode_file


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    kind, decoder = task.variant.split("-")
    dataset: Any
    if decoder == "pillow":
        steps = [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.PILToTensor(),
        ]
        dataset = ImageFolder(str(task.source), transforms.Compose(steps))
    else:
        dataset = ImageFolder(str(task.source), crop, loader=decode_file)
    with open_readers(kind, dataset, task.workers, batch_size=task.batch, shuffle=True) as loader:
        yield loader
