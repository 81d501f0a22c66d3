"""What users write, for mypy and pyright: nothing runs it. Both must find each line that says that it is wrong."""

from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fastload
import fastload.distributed
import fastload.image
import fastload.store
import fastload.stream
from fastload import DataLoader, RankSampler, Stats, prefetch_to
from fastload.datasets import ImageFolder, PackedDataset
from fastload.elastic import Leases, LeaseSampler
from fastload.image import RandomResizedCrop, normalize_on
from fastload.sequences import Mixture, Packed, TokenBatchSampler, TokenWindows, lengths_of


class Pairs(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3), index


class Lines(IterableDataset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])


def stacked(samples: list[tuple[Tensor, int]]) -> Tensor:
    return torch.stack([image for image, _ in samples])


def joined(samples: list[str]) -> str:
    return " ".join(samples)


def replaced(index: object, error: Exception) -> tuple[Tensor, int]:
    return torch.zeros(3), -1


# The loader knows its samples. What a batch is depends on `collate_fn`, as with torch's loader.
loader = DataLoader(Pairs(), batch_size=2, shuffle=True, num_workers=2, seed=0)
assert_type(loader, DataLoader[tuple[Tensor, int]])
assert_type(loader.dataset, Dataset[tuple[Tensor, int]])
assert_type(len(loader), int)
for batch in loader:
    assert_type(batch, Any)
images: Tensor = next(iter(loader))[0]
for images, _ in loader:
    assert_type(images, Tensor)
with DataLoader(Pairs(), collate_fn=stacked, on_error=replaced, worker_method="thread") as entered:
    assert_type(entered, DataLoader[tuple[Tensor, int]])
assert_type(DataLoader(Lines(), collate_fn=joined), DataLoader[str])
assert_type(DataLoader([1, 2, 3], collate_fn=sum), DataLoader[int])
assert_type(DataLoader(TensorDataset(images)), DataLoader[tuple[Tensor, ...]])

DataLoader(Pairs(), seed="0")  # wrong
DataLoader(Pairs(), worker_method="threads")  # wrong
DataLoader(Pairs(), on_error="leap")  # wrong
DataLoader(Pairs(), collate_fn=joined)  # wrong
DataLoader(Pairs(), num_wokers=2)  # wrong
DataLoader(8)  # wrong

# What it says, and its state
stats = loader.stats()
assert_type(stats, Stats)
assert_type(stats.consumer_wait_s, float)
assert_type(stats.stages["read"].seconds, float)
assert_type(stats.useful_share, float | None)
assert_type(loader.chosen().kind, str)
assert_type(loader.state_dict(), dict[str, Any])
loader.load_state_dict(loader.state_dict(ahead=1))
loader.load_state_dict("state.json")  # wrong
stats.consumer_wait_s = 0.0  # wrong


def log(seen: Stats) -> None: ...


DataLoader(Pairs(), on_stats=log)

# Samplers
sampler = RankSampler(Pairs(), rank=0, world_size=2, ends="uneven")
assert_type(list(sampler), list[int])
assert_type(sampler.indices(0, 2), NDArray[np.int64])
DataLoader(Pairs(), sampler=sampler)
DataLoader(Pairs(), sampler=range(8))
RankSampler(Pairs(), 0, 2)  # wrong
RankSampler(Pairs(), ends="even")  # wrong

lengths = lengths_of([1, 2, 3])
batches = TokenBatchSampler(lengths, budget=8)
assert_type(list(batches), list[list[int]])
DataLoader(Pairs(), batch_sampler=batches)
DataLoader(Pairs(), batch_sampler=sampler)  # wrong
with Leases(8) as leases:
    DataLoader(Pairs(), batch_sampler=LeaseSampler(leases, batch_size=4))

mixture = Mixture({"a": Pairs(), "b": [1, 2]}, weights={"a": 1, "b": 2.5})
assert_type(list(mixture), list[int])
assert_type(mixture.epochs(100), dict[str, float])
DataLoader(mixture.dataset, sampler=mixture)
Mixture({"a": Pairs()}, weights={0: {"a": 1}, 1000: {"a": 2}})
Mixture({"a": Pairs()}, weights=lambda step: {"a": step / 100})
Mixture({"a": Pairs()})  # wrong
Mixture([Pairs()], weights={"a": 1})  # wrong

# Datasets and plans
assert_type(DataLoader(Packed([[1, 2]], length=8)), DataLoader[dict[str, Tensor]])
assert_type(TokenWindows("train.bin", 8)[0], dict[str, Tensor])
assert_type(DataLoader(ImageFolder("train")), DataLoader[tuple[Any, Any]])
PackedDataset("packed", transform=RandomResizedCrop(224, flip=0.5))
RandomResizedCrop("224")  # wrong
assert_type(normalize_on("cpu")(images), Tensor)
for images, _ in prefetch_to(loader, "cpu"):
    assert_type(images, Tensor)

# In a sample
with fastload.stage("read"), fastload.random_stream(seed=0, epoch=0, position=0, index=0):
    assert_type(fastload.sample_rng(), np.random.Generator)
    assert_type(fastload.sample_generator(), torch.Generator)
fastload.stage(1)  # wrong

# Names that there are not
print(
    fastload.DataLodaer,  # wrong
    fastload.sequences.Mixtures,  # wrong
    fastload.datasets.ImageFolders,  # wrong
    fastload.image.Resizes,  # wrong
    fastload.distributed.initialise,  # wrong
    fastload.store.puts,  # wrong
    fastload.stream.Folders,  # wrong
)
