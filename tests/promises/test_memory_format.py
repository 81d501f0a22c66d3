"""Promises:
- With `memory_format=torch.channels_last` a batch has the values, types and shapes of default_collate, and its
  4-dimensional tensors lie in channels-last memory.
- Without `memory_format` the batches are contiguous for any samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from fastload import SKIP, DataLoader

LARGE, SMALL = (3, 120, 100), (3, 5, 7)  # a row of a slot; one that torch stacks


@functools.cache
def sample_image(index: int, shape: tuple[int, ...] = LARGE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(index)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


def interleaved(index: int) -> torch.Tensor:
    """As a PIL image gives it: [3, H, W] in the memory of [H, W, 3]."""
    return sample_image(index).permute(1, 2, 0).contiguous().permute(2, 0, 1)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "planes": lambda i: (sample_image(i), i),
    "interleaved": lambda i: (interleaved(i), i),
    "small": lambda i: (sample_image(i, SMALL), i),
    "float": lambda i: sample_image(i).float(),
    "array": lambda i: sample_image(i).numpy(),
    "mapping": lambda i: {
        "image": interleaved(i),
        "mask": [sample_image(i, (1, 200, 200)), str(i)],
    },
    "alternating": lambda i: sample_image(i) if i % 2 else interleaved(i),
    "volume": lambda i: sample_image(i, (2, 3, 80, 80)),
    "flat": lambda i: sample_image(i, (300, 200)),
}


class Samples(Dataset[Any]):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(interleaved, range(7))


def leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict):
        data = list(data.values())
    if isinstance(data, list | tuple):
        for part in data:
            yield from leaves(part)
    else:
        yield data


def same(ours: Any, theirs: Any) -> None:
    """Equal in type, values and shapes; the memory is another question."""
    assert type(ours) is type(theirs)
    for one, other in zip(leaves(ours), leaves(theirs), strict=True):
        if isinstance(other, torch.Tensor):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", SAMPLES)
def test_values_are_torchs_and_the_memory_is_as_asked(name: str, workers: int) -> None:
    dataset = Samples(SAMPLES[name])
    plain = DataLoader(dataset, 3, num_workers=workers)
    asked = DataLoader(dataset, 3, num_workers=workers, memory_format=torch.channels_last)
    for number, (ours, contiguous) in enumerate(zip(asked, plain, strict=True)):
        theirs = default_collate([dataset[i] for i in range(7)][number * 3 : number * 3 + 3])
        same(ours, theirs)
        same(contiguous, theirs)
        for one, other in zip(leaves(contiguous), leaves(theirs), strict=True):
            assert not isinstance(other, torch.Tensor) or one.stride() == other.stride()
        for leaf in leaves(ours):
            if isinstance(leaf, torch.Tensor):
                four = leaf.dim() == 4
                assert (
                    leaf.is_contiguous(memory_format=torch.channels_last)
                    if four
                    else leaf.is_contiguous()
                )


def test_skipped_and_odd_samples_gathered_tensors_and_streams() -> None:
    options: dict[str, Any] = {"memory_format": torch.channels_last, "num_workers": 2}

    def some(index: int) -> torch.Tensor:
        if index == 1:
            raise ValueError("bad")
        return interleaved(index)

    table = torch.rand(7, 3, 4, 5)
    loaders = [
        DataLoader(Samples(some), 7, on_error="skip", **options),
        DataLoader(Samples(some), 7, on_error=lambda index, _: SKIP, **options),
        DataLoader(TensorDataset(table), 7, **options),
        DataLoader(Stream(), 7, **options),
    ]
    for loader, size in zip(loaders, (6, 6, 7, 7), strict=True):
        for batch in loader:
            for leaf in leaves(batch):
                assert len(leaf) in {size, 7}
                assert leaf.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(next(iter(loaders[2]))[0], table)


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(ValueError, match=r"memory_format must be .*preserve_format"):
        DataLoader([1], memory_format=torch.preserve_format)
    with pytest.raises(ValueError, match=r"memory_format is for torch's default collate"):
        DataLoader([1], collate_fn=list, memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"^memory_format: .*worker_method"):
        DataLoader([1], worker_method="torch", memory_format=torch.channels_last)
    DataLoader([1], collate_fn=default_collate, memory_format=torch.channels_last)
