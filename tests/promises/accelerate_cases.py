"""Trainings with Accelerate, for tests that run them as one process or as two, with fastload's loaders or torch's."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader

import fastload
from fastload.order.state import known_length
from tests.promises.framework_ranks import on_ranks

Spec = dict[str, Any]


def run(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function` as one process, which is this one, or as several. Return the results of all ranks."""
    if world_size > 1:
        return on_ranks(function, *arguments, world_size=world_size)
    try:
        return [function(*arguments)]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def fresh(**options: Any) -> Any:
    """Return an Accelerator as a new program would have it. `config` are arguments of DataLoaderConfiguration."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    config = accelerate.DataLoaderConfiguration(**options.pop("config", {}))
    return accelerate.Accelerator(cpu=True, dataloader_config=config, **options)


class Rows(Dataset[Any]):
    """An index, and a number that is drawn for it."""

    fastload_per_worker = ()  # one for all workers, to be looked at

    def __init__(self, length: int, fails: tuple[int, ...] = ()) -> None:
        self.length, self.fails = length, fails
        self.read: list[int] = []
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        self.threads.add(threading.current_thread().name)
        self.read.append(index)
        if index in self.fails:
            raise OSError(f"sample {index}")
        return index, torch.rand(())


class Lists(Rows):
    """The same, for lists of indices."""

    def __getitem__(self, indices: Any) -> Any:
        return torch.tensor(indices), torch.rand(len(indices))


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            yield index, torch.rand(())


class KnownStream(Stream):
    def __len__(self) -> int:
        return self.length


class Ragged:
    """Batches of one, two and three indices, without `batch_size`."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __iter__(self) -> Iterator[list[int]]:
        begin, size = 0, 1
        while begin < self.length:
            yield list(range(begin, min(begin + size, self.length)))
            begin, size = begin + size, size % 3 + 1


def make(kind: str, spec: Spec) -> Any:
    """Return a loader of fastload ("ours") or of torch ("theirs") with the arguments of `spec`."""
    given = {"batch_size": 3, **spec}
    length = given.pop("length", 20)
    dataset = given.pop("dataset", Rows)(length)
    sampler = given.pop("order", None)
    if sampler == "weighted":
        given["sampler"] = WeightedRandomSampler([1.0 + i for i in range(length)], length)
    elif sampler == "subset":
        given["sampler"] = SubsetRandomSampler(range(0, length, 2))
    elif sampler == "ragged":
        given["batch_size"] = 1
        given["batch_sampler"] = Ragged(length)
    elif sampler == "backwards":
        given["batch_size"] = 1
        given["batch_sampler"] = BatchSampler(range(length - 1, -1, -1), 3, False)
    elif sampler == "batches":  # of a sampler whose elements are lists
        dataset = Lists(length)
        given["batch_size"] = None
        given["sampler"] = BatchSampler(range(length), 3, False)
    if kind == "theirs":
        given.pop("seed", None)
        given.pop("worker_method", None)
        return TorchLoader(dataset, **given)
    return fastload.DataLoader(dataset, **given)


def plain(value: Any) -> Any:
    """Return tensors as lists."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def close(loader: Any) -> None:
    """End the workers of a loader of ours."""
    if isinstance(loader, fastload.DataLoader):
        loader.close()


def walk(
    kind: str, specs: list[Spec], options: dict[str, Any], *, gather: bool = True
) -> list[Any]:
    """Return what two epochs of each loader give: indices, is it the last, how many are new; and what is gathered."""
    found = []
    for spec in specs:
        accelerator = fresh(**options)
        torch.manual_seed(5)
        loader = accelerator.prepare(make(kind, spec))
        epochs: Any = []
        for _ in range(2):
            batches, gathered = [], []
            for indices, _ in loader:
                state = accelerator.gradient_state
                batches.append((indices.tolist(), state.end_of_dataloader, state.remainder))
                if gather:
                    gathered += accelerator.gather_for_metrics(indices).tolist()
            assert not accelerator.gradient_state.in_dataloader
            epochs.append((batches, gathered))
        found.append((known_length(loader), epochs))
        close(loader)
    return found


def kept(specs: list[Spec]) -> list[Any]:
    """Return what is the same of each loader after `prepare`, and which threads read."""
    found = []
    for spec in specs:
        accelerator = fresh()
        loader = make("ours", spec)
        prepared = accelerator.prepare(loader)
        assert prepared is loader
        assert accelerator.prepare(loader) is loader
        torch_thinks = isinstance(loader, TorchLoader), isinstance(loader, fastload.DataLoader)
        list(loader)
        threads = {name.rpartition("-")[0] for name in loader.dataset.threads}
        position = loader.state_dict()
        found.append((torch_thinks, loader.num_workers, threads, position["seed"], repr(loader)))
        json.dumps(position)
        close(loader)
    return found


def resumed(spec: Spec, options: dict[str, Any], folder: str, stops: list[tuple[int, int]]) -> Any:
    """Train three epochs, and save at each of `stops`: epoch and batch. Return the batches after each, as trained on

    without a break, and as after a load by a new program. Each new program goes on from the one before it, and
    saves the next.
    """
    accelerator, loader = _begin(spec, options)
    whole: dict[tuple[int, int], Any] = {}
    for epoch in range(3):
        for step, batch in enumerate(loader):
            whole[epoch, step] = plain(batch)
            if (epoch, step + 1) == stops[0]:
                accelerator.save_state(f"{folder}/0")
    close(loader)
    answers = []
    for number, stop in enumerate(stops):
        following = stops[number + 1] if number + 1 < len(stops) else None
        torch.manual_seed(99)
        accelerator, loader = _begin(spec, options, seed=99)
        accelerator.load_state(f"{folder}/{number}")
        rest: dict[tuple[int, int], Any] = {}
        epoch, step = stop
        while epoch < 3:
            for batch in loader:
                rest[epoch, step] = plain(batch)
                step += 1
                if (epoch, step) == following:
                    accelerator.save_state(f"{folder}/{number + 1}")
            epoch, step = epoch + 1, 0
        close(loader)
        answers.append(([(key, whole[key]) for key in whole if key >= stop], list(rest.items())))
    return answers


def _begin(spec: Spec, options: dict[str, Any], seed: int = 5) -> tuple[Any, Any]:
    accelerator = fresh(**options)
    torch.manual_seed(seed + accelerator.process_index)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = accelerator.prepare(model, optimizer, make("ours", spec))
    return accelerator, loader


def skipped(kind: str, spec: Spec, way: str, folder: str) -> Any:
    """Return epoch 1 as it is without a break, and after its first two batches were skipped, with epoch 2."""
    options = {"config": {"use_seedable_sampler": True}}

    def begin() -> tuple[Any, Any]:
        accelerator = fresh(**options)
        torch.manual_seed(5)
        return accelerator, accelerator.prepare(make(kind, spec))

    accelerator, loader = begin()
    whole = []
    for _ in range(3):
        whole.append(plain(list(loader)))
    close(loader)
    accelerator, loader = begin()
    if way == "set_epoch before":
        loader.set_epoch(1)
        rest = accelerator.skip_first_batches(loader, 2)
    elif way == "set_epoch after":
        rest = accelerator.skip_first_batches(loader, 2)
        rest.set_epoch(1)
    elif way == "after load_state":
        list(loader)
        with contextlib.closing(iter(loader)) if kind == "x" else contextlib.nullcontext():
            batches = iter(loader)
            next(batches), next(batches)
            accelerator.save_state(folder)
        close(loader)
        accelerator, loader = begin()
        accelerator.load_state(folder)
        rest = accelerator.skip_first_batches(loader, 2)
    elif way == "after load_state of another epoch":
        batches = iter(loader)
        next(batches)
        accelerator.save_state(folder)
        close(loader)
        accelerator, loader = begin()
        accelerator.load_state(folder)
        loader.set_epoch(1)
        rest = accelerator.skip_first_batches(loader, 2)
    else:
        list(loader)
        rest = accelerator.skip_first_batches(loader, 2)
    loader.dataset.read = []
    after = plain(list(rest))
    read = len(loader.dataset.read)
    following = plain(list(loader))
    close(loader)
    return whole, after, following, read, Path(folder).exists()


def walk_nogather(kind: str, specs: list[Spec], options: dict[str, Any]) -> list[Any]:
    return walk(kind, specs, options, gather=False)
