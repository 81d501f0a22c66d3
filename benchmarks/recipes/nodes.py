"""torchdata.nodes with threads: the graph of its migration guide, over the same dataset as torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import RandomSampler, default_collate
from torchdata.nodes import Batcher, Loader, ParallelMapper, Prefetcher, SamplerWrapper
from torchvision.datasets import ImageFolder

from benchmarks.recipes import Batch, Task
from benchmarks.recipes._decoding import crop, decode_file


def opened(task: Task) -> Iterator[Iterable[Batch]]:
    dataset = ImageFolder(str(task.source), crop, loader=decode_file)

    def load(indices: list[int]) -> Any:
        return default_collate([dataset[index] for index in indices])

    node: Any = SamplerWrapper(RandomSampler(dataset))
    node = Batcher(node, batch_size=task.batch, drop_last=False)
    node = ParallelMapper(node, load, num_workers=task.workers, method="thread", in_order=True)
    node = Prefetcher(node, prefetch_factor=2 * task.workers)
    yield Loader(node)
