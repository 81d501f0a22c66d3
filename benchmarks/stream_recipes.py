"""The streams of `streams`: each library's loader, by its own recipe.

`datasets` goes into torchdata's StatefulDataLoader, as its documents say. Grain has files of lines, and interleaves
them. LitData has chunks of its own.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

import fastload
from fastload.streams import Shards
from fastload.streams.adapters import from_hub

Sample = dict[str, Any]


class Task(NamedTuple):
    """What is read, and how."""

    paths: list[str]
    workers: int = 2
    buffer: int = 0
    steps: bool = False
    """Whether samples are doubled, and those that 3 divides are kept; in batches of 16 if the library has these."""
    says_reader: bool = False
    batch: int = 8


class Stream(NamedTuple):
    """A loader with a state, and what its recipe calls before each epoch."""

    loader: Any
    set_epoch: Callable[[int], object] = lambda _: None


Recipe = Callable[[Task], Stream]


class NoSuchFeatureError(Exception):
    """Raised if a library has no such feature."""


def _doubled(sample: Sample) -> Sample:
    return {"id": 2 * sample["id"]}


def _by_three(sample: Sample) -> bool:
    return bool(sample["id"] % 3 == 0)


def _with_reader(sample: Sample) -> Sample:
    info = get_worker_info()
    return {"id": sample["id"], "process": os.getpid(), "worker": info.id if info else 0}


# ---- the recipes ----


def _stepped(stream: Any, task: Task) -> Any:
    """Return a stream of fastload or Grain with the steps of a task."""
    if task.steps:
        stream = stream.map(_doubled).filter(_by_three)
    return stream.map(_with_reader) if task.says_reader else stream


def _buffered(stream: Any, task: Task) -> Stream:
    stream = stream.shuffle(task.buffer) if task.buffer else stream
    return Stream(fastload.DataLoader(stream, batch_size=task.batch, num_workers=task.workers))


def _fastload(task: Task) -> Stream:
    return _buffered(_stepped(Shards(task.paths), task), task)


def _hub(task: Task) -> Any:
    import datasets

    datasets.disable_progress_bars()
    stream = datasets.load_dataset("json", data_files=task.paths, split="train", streaming=True)
    if task.steps:
        doubled = partial(map, lambda n: 2 * n)
        stream = stream.map(
            lambda ids: {"id": [*doubled(ids)]}, input_columns="id", batched=True, batch_size=16
        ).filter(
            lambda ids: [n % 3 == 0 for n in ids], input_columns="id", batched=True, batch_size=16
        )
    return stream.map(_with_reader) if task.says_reader else stream


def _from_hub(task: Task) -> Stream:
    return _buffered(from_hub(_hub(task)), task)


def _stateful(dataset: Any, task: Task) -> Stream:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(dataset, task.batch, num_workers=task.workers)
    return Stream(loader, dataset.set_epoch)


def _datasets(task: Task) -> Stream:
    stream = _hub(task)
    return _stateful(stream.shuffle(0, buffer_size=task.buffer) if task.buffer else stream, task)


class Lines(IterableDataset[Sample]):
    """A dataset with a state, as the documents of StatefulDataLoader ask for."""

    def __init__(self, task: Task) -> None:
        self.task, self.at = task, (0, 0, 0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun."""
        if self.at[0] != epoch:
            self.at = epoch, 0, 0

    def state_dict(self) -> Any:
        """Return the epoch, the number of the file and the byte in it."""
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        """Go on there."""
        self.at = tuple(state["at"])

    def __iter__(self) -> Iterator[Sample]:
        info, (epoch, number, byte) = get_worker_info(), self.at
        paths = random.Random(epoch).sample(self.task.paths, len(self.task.paths))
        paths = paths[info.id :: info.num_workers] if info else paths
        for k in range(number, len(paths)):
            with open(paths[k], "rb") as file:
                file.seek(byte)
                while line := file.readline():
                    self.at = epoch, k, file.tell()
                    yield json.loads(line)
            byte = 0
        self.at = epoch + 1, 0, 0


def _own_dataset(task: Task) -> Stream:
    if task.buffer or task.steps:
        raise NoSuchFeatureError
    return _stateful(Lines(task), task)


class GrainLoader:
    """Grain's batches as a loader with a state and epochs."""

    def __init__(self, task: Task) -> None:
        import grain

        self.task, self.epoch = task, 0
        self.reading = grain.ReadOptions(num_threads=0)
        self.batches: Any = None

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, unless it has begun."""
        if epoch != self.epoch:
            self.epoch, self.batches = epoch, None

    def __iter__(self) -> Any:
        if self.batches is None:
            self.batches = iter(_grain_batches(self.task, self.epoch, self.reading))
        return self.batches

    def state_dict(self) -> Any:
        """Return the epoch, and the state of Grain's iterator."""
        return self.epoch, iter(self).get_state()

    def load_state_dict(self, state: Any) -> None:
        """Go on there."""
        self.set_epoch(state[0])
        iter(self).set_state(state[1])


def _grain_batches(task: Task, epoch: int, reading: Any) -> Any:
    import grain

    def opened(path: str) -> Any:
        lines = grain.MapDataset.source(Path(path).read_bytes().splitlines())
        return lines.map(json.loads).to_iter_dataset(reading)

    files = grain.MapDataset.source(task.paths).shuffle(seed=epoch).map(opened)
    stream = _stepped(grain.experimental.InterleaveIterDataset(files, cycle_length=1), task)
    if task.buffer:
        stream = grain.experimental.WindowShuffleIterDataset(
            stream, window_size=task.buffer, seed=epoch
        )
    stream = stream.batch(task.batch)
    if not task.workers:
        return stream
    return stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=task.workers))


def _grain(task: Task) -> Stream:
    loader = GrainLoader(task)
    return Stream(loader, loader.set_epoch)


def _litdata(task: Task) -> Stream:
    import litdata

    if task.steps:
        raise NoSuchFeatureError
    folder = Path(task.paths[0]).with_name("litdata")
    if not folder.exists():
        count = len(Path(task.paths[0]).read_bytes().splitlines())
        litdata.optimize(
            lines_of, task.paths, str(folder), chunk_size=count, num_workers=1, verbose=False
        )
    how: Any = {"transform": _with_reader} if task.says_reader else {}
    dataset = litdata.StreamingDataset(str(folder), shuffle=True, **how)
    how = {"batch_size": task.batch, "num_workers": task.workers}
    return Stream(litdata.StreamingDataLoader(dataset, **how))


def written(folder: str, shards: int, per_shard: int, rest: Sample) -> list[str]:
    """Write samples that have an id and `rest`, and return the paths of their files."""
    paths = [f"{folder}/{k}.jsonl" for k in range(shards)]
    for k, path in enumerate(paths):
        ids = range(per_shard * k, per_shard * (k + 1))
        Path(path).write_text("".join(json.dumps({"id": n, **rest}) + "\n" for n in ids))
    return paths


def lines_of(path: str) -> Iterator[Sample]:
    """Yield the samples of a file."""
    with open(path, "rb") as file:
        yield from map(json.loads, file)


RECIPES: dict[str, Recipe] = {
    "fastload": _fastload,
    "fastload from_hub": _from_hub,
    "datasets": _datasets,
    "StatefulDataLoader": _own_dataset,
    "grain": _grain,
    "litdata": _litdata,
}


# ---- the trainers ----


def numbers(loader: Any, count: int | None = None) -> list[int]:
    """Return the numbers of the samples of `count` batches."""
    return [number for batch in islice(loader, count) for number in batch["id"].tolist()]


def in_accelerate(recipe: Recipe, task: Task) -> tuple[list[int], list[int]]:
    """Return two epochs, after a stop and a resume in the first, and those of an undisturbed run."""
    if recipe in (RECIPES["grain"], RECIPES["litdata"]):
        raise NoSuchFeatureError
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    from fastload.integrations.accelerate import Accelerator as OurAccelerator

    def begun() -> tuple[Any, Any]:
        AcceleratorState._reset_state(True)
        loader = recipe(task).loader
        how = DataLoaderConfiguration(use_stateful_dataloader=True)
        if isinstance(loader, fastload.DataLoader):
            return (ours := OurAccelerator(cpu=True)), ours.prepare(loader)
        return (theirs := Accelerator(cpu=True, dataloader_config=how)), theirs.prepare(loader)

    whole = [numbers(loader := begun()[1]), numbers(loader), numbers(loader)]
    accelerator, loader = begun()
    numbers(loader)
    found = numbers(loader, 5)
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_state(folder)
        accelerator, loader = begun()
        accelerator.load_state(folder)
    return found + numbers(loader) + numbers(loader), whole[1] + whole[2]


def in_lightning(recipe: Recipe, task: Task, stop: int) -> tuple[list[int], list[int]]:
    """Return three epochs with a stop and a resume after `stop` batches, and those of an undisturbed run."""
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def __init__(self, stream: Stream, path: str = "") -> None:
            super().__init__()
            self.stream, self.path = stream, path
            self.seen: list[int] = []

        def on_train_epoch_start(self) -> None:
            self.stream.set_epoch(self.current_epoch)

        def training_step(self, batch: Any, _: int) -> Any:
            self.seen += batch["id"].tolist()
            return self.layer.weight.sum()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.path and self.global_step == self.trainer.max_steps:
                self.trainer.save_checkpoint(self.path)

    def fit(steps: int = -1, save: str = "", load: str | None = None) -> list[int]:
        model = Model(recipe(task), save)
        trainer = lightning.Trainer(
            accelerator="cpu", barebones=True, max_epochs=3, max_steps=steps
        )
        trainer.fit(model, model.stream.loader, ckpt_path=load, weights_only=False)
        return model.seen

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/checkpoint"
        return fit(stop, save=path) + fit(load=path), fit()
