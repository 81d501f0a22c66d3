"""Trainings with Accelerate, for tests that run them as one process or as two, with fastload's loaders or torch's."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader

import fastload
from fastload.integrations.accelerate import Accelerator
from fastload.order.state import known_length
from tests.promises.framework_ranks import on_ranks

Spec = dict[str, Any]


def run(
    world_size: int, function: Callable[..., Any], *arguments: Any, modules: str = "accelerate"
) -> list[Any]:
    """Call `function` as one process, which is this one, or as several. Return the results of all ranks."""
    if world_size > 1:
        return on_ranks(function, *arguments, world_size=world_size, modules=modules)
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
    return Accelerator(cpu=True, dataloader_config=config, **options)


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


class Stream(IterableDataset[Any]):
    """The same, one after the other."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            yield index, torch.rand(())


class EpochStream(Stream):
    """Has another order for each epoch passed to `set_epoch`."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for index, number in super().__iter__():
            yield (index + self.epoch) % self.length, number


class FailingStream(Stream):
    """Raises once, at the fifth sample, and goes on."""

    def __iter__(self) -> Iterator[Any]:
        return _Failing(self.length)


class _Failing(Iterator[Any]):
    def __init__(self, length: int) -> None:
        self.indices = iter(range(length))

    def __next__(self) -> Any:
        index = next(self.indices)
        if index == 4:
            raise OSError("sample 4")
        return index, torch.rand(())


def failing_rows(length: int) -> Rows:
    return Rows(length, fails=(4,))


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


ORDERS = {
    "subset": lambda n: {"sampler": SubsetRandomSampler(range(0, n, 2))},
    "ragged": lambda n: {"batch_size": 1, "batch_sampler": Ragged(n)},
    "backwards": lambda n: {
        "batch_size": 1,
        "batch_sampler": BatchSampler(range(n - 1, -1, -1), 3, False),
    },
}
"""Makes a sampler of the kinds that users write, from the number of samples."""


def make(kind: str, spec: Spec) -> Any:
    """Return a loader of fastload ("ours") or of torch ("theirs") with the arguments of `spec`."""
    given = {"batch_size": 3, **spec}
    length = given.pop("length", 20)
    order = given.pop("order", None)
    dataset = given.pop("dataset", Rows)(length)
    if order is not None:
        given |= ORDERS[order](length)
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
            for batch in loader:
                if batch is None:  # an empty loader of Accelerate's, before 1.11
                    accelerator.gradient_state._remove_dataloader(loader)
                    break
                indices = batch[0]
                state = accelerator.gradient_state
                batches.append((indices.tolist(), state.end_of_dataloader, state.remainder))
                if gather:
                    gathered += accelerator.gather_for_metrics(indices).tolist()
            assert not accelerator.gradient_state.in_dataloader
            epochs.append((batches, gathered))
        found.append((known_length(loader), epochs))
        close(loader)
    return found


def walk_both(cases: list[tuple[list[Spec], dict[str, Any], bool]]) -> Any:
    """Return for each case what our loaders give, and what torch's give."""
    return [
        [walk(kind, specs, options, gather=gather) for kind in ("ours", "theirs")]
        for specs, options, gather in cases
    ]


def walk_ours(cases: list[tuple[list[Spec], dict[str, Any]]]) -> Any:
    return [walk("ours", specs, options) for specs, options in cases]


def kept(specs: list[Spec]) -> list[Any]:
    """Return what is the same of each loader after `prepare`, and which threads of this process read."""
    found = []
    for spec in specs:
        accelerator = fresh()
        loader = accelerator.prepare(make("ours", spec))
        same = accelerator.prepare(loader) is loader
        kinds = isinstance(loader, TorchLoader), isinstance(loader, fastload.DataLoader)
        count = sum(len(indices) for indices, _ in loader)
        threads = {name.rstrip("-0123456789") for name in loader.dataset.threads}
        position = json.loads(json.dumps(loader.state_dict()))
        found.append((same, kinds, count, threads, position["seed"], loader.stats().samples))
        close(loader)
    return found


def begin(kind: str, spec: Spec, options: dict[str, Any], seed: int = 5) -> tuple[Any, Any]:
    """Begin a training as a new program does."""
    accelerator = fresh(**options)
    torch.manual_seed(seed + accelerator.process_index)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = accelerator.prepare(model, optimizer, make(kind, spec))
    return accelerator, loader


def accumulated(specs: list[Spec]) -> list[Any]:
    """Return what `accumulated_by` returns for our loaders, and for torch's."""
    return [[accumulated_by(kind, spec) for kind in ("ours", "theirs")] for spec in specs]


def accumulated_by(kind: str, spec: Spec) -> Any:
    """Return of two epochs, at which batches the gradients are synchronized, and the model at the end."""
    accelerator = fresh(gradient_accumulation_steps=3, config={"dispatch_batches": False})
    torch.manual_seed(5)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make(kind, spec))
    synchronized = []
    for _ in range(2):
        for indices, _ in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(indices[:, None].float() / 10).mean())
                synchronized.append(accelerator.sync_gradients)
                optimizer.step()
                optimizer.zero_grad()
    close(loader)
    return synchronized, [p.tolist() for p in model.parameters()]


def joined_both() -> list[Any]:
    return [joined(kind) for kind in ("ours", "theirs")]


@contextlib.contextmanager
def as_if_on_gpus() -> Iterator[None]:
    """Let an Accelerator join ranks, which it does on GPUs only."""
    kind = mock.patch.object(accelerate.Accelerator, "distributed_type", "MULTI_GPU")
    with kind, mock.patch.object(accelerate.Accelerator, "multi_device", True, create=True):
        yield


def joined(kind: str) -> Any:
    """Train on 13 samples by threes, with and without filling up. Return the batches of both, and of a last epoch."""
    accelerator = fresh()
    model = torch.nn.Linear(1, 1)
    model, loader = accelerator.prepare(model, make(kind, {"length": 13, "num_workers": 1}))
    found = []
    for even in (False, True):
        with as_if_on_gpus(), accelerator.join_uneven_inputs([model], even_batches=even):
            for indices, _ in loader:
                accelerator.backward(model(indices[:, None].float()).mean())
                found.append(indices.tolist())
    found += [indices.tolist() for indices, _ in loader]
    close(loader)
    return found


def failing(spec: Spec) -> list[Any]:
    """Return the batches of an epoch with a sample that raises, and the errors in their places."""
    accelerator = fresh()
    loader = accelerator.prepare(make("ours", spec))
    batches, found = iter(loader), []
    while True:
        try:
            found.append((next(batches)[0].tolist(), accelerator.gradient_state.end_of_dataloader))
        except StopIteration:
            break
        except OSError as error:
            found.append((str(error).split(";")[0], loader.state_dict().get("batches")))
    close(loader)
    return found


def refused(options: dict[str, Any], spec: Spec) -> str:
    """Return the reason for which a loader cannot be prepared."""
    accelerator = fresh(**options)
    try:
        accelerator.prepare(make("ours", spec))
    except ValueError as error:
        return str(error)
    return ""


def ranks_of_their_own(world_size: int) -> str:
    """Return why a loader with a RankSampler of several ranks cannot be prepared, and what it then is."""
    accelerator = fresh()
    dataset = Rows(20)
    sampler = fastload.RankSampler(
        dataset, rank=accelerator.process_index % 2, world_size=world_size
    )
    loader = fastload.DataLoader(dataset, batch_size=3, sampler=sampler)
    try:
        accelerator.prepare(loader)
    except ValueError as error:
        assert type(loader) is fastload.DataLoader
        return str(error)
    return ""
