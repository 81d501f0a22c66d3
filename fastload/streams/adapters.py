"""Streams of other libraries, with fastload's order and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from fastload._kit.torch_private import set_worker_info
from fastload.reading import hub_streams
from fastload.streams.chain import Stream
from fastload.streams.passes import END
from fastload.streams.shards import Shards

_OPEN = ("StreamingOpen", "FileCache", "tarfile_samples", "tarfile_to_samples")
_TAR = (*_OPEN, "tar_file_expander", "group_by_keys", "check_empty")
_ONE = (
    *("_map", "_map_dict", "_map_tuple", "_decode", "_xdecode", "_select", "_rsample", "_to_tuple"),
    *("_rename", "_rename_keys", "_extract_keys", "_log_keys", "_info"),
)
_HOLDS = ("_batched", "_listed", "_unbatched", "_unlisted", "islice", "_associate", "Cached")


def from_hub(dataset: Any, **options: Any) -> Shards:
    """Return a stream of a Hugging Face `IterableDataset`, with what its `map`, `filter` and the like make of it.

    To resume, it reads the present shard again from its beginning. Shuffle the stream, not the dataset: no state holds
    the buffer of `datasets`. Its functions see no worker.

    Args:
        dataset: the dataset. Each of its `num_shards` is a shard.
        options: `shuffle`, `seed`, `rank` and `world_size` of `Shards`.

    Raises:
        TypeError: the dataset is no stream.
        ValueError: it shuffles by a buffer, or has a step that must see all its shards: `take`, `skip`, `repeat`,
            `interleave_datasets`, `with_indices`, `split_dataset_by_node`.
    """
    if not hasattr(dataset, "num_shards"):
        raise TypeError(
            f"from_hub takes an IterableDataset, got a {type(dataset).__name__}. Of a Dataset, "
            "`to_iterable_dataset(num_shards=64)` makes one"
        )
    if hub_streams.shuffles(hub_streams.streams(dataset)):
        raise ValueError(
            "from_hub takes a dataset without .shuffle(). Shuffle the stream: from_hub(dataset).shuffle(10_000)"
        )
    if getattr(dataset, "_distributed", None):
        raise ValueError(
            "from_hub takes a dataset without split_dataset_by_node: the stream divides the shards by rank and worker"
        )
    for step in _steps(getattr(dataset, hub_streams.CHAIN)):
        name = type(step).__name__
        if any(part in name for part in _NEEDS_ALL) or getattr(step, "with_indices", False):
            raise ValueError(
                f"from_hub cannot take the step {name}{' with_indices' * hasattr(step, 'with_indices')}: it reads each "
                "shard by itself. Let the stream do it, such as Mixed for interleave_datasets"
            )
    return Shards(range(dataset.num_shards), _HubShard(dataset), **options)


_NEEDS_ALL = "Take", "Skip", "Step", "Repeat", "Cycling", "Interleaved", "Horizontally"


def _steps(step: Any) -> Iterator[Any]:
    """Yield the steps of a chain of `datasets`."""
    yield step
    for up in (getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())):
        if up is not None:
            yield from _steps(up)


class _HubShard:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, index: int) -> Iterator[Any]:
        samples = iter(self.dataset.shard(self.dataset.num_shards, index))
        while True:
            before = get_worker_info()
            set_worker_info(None)  # or `datasets` would divide the shard by the workers again
            try:
                if get_worker_info() is not None:
                    raise RuntimeError(
                        "a stream of from_hub is read by fastload.DataLoader, not by torch's"
                    )
                sample = next(samples, END)
            finally:
                set_worker_info(before)
            if sample is END:
                return
            yield sample


def from_webdataset(pipeline: Any, **options: Any) -> Stream:
    """Return a stream of a `webdataset.WebDataset` or pipeline of tar files, local or at URLs.

    Each stage of WebDataset that takes a sample and gives one, or none, is applied as it is: `decode`, `map`, `select`.
    A stage of your own goes through `Stream.apply`, which resumes exactly only if it keeps a state. The buffer of
    `shuffle(n)` becomes `Shuffled` of that size, and the division by nodes and workers that of `Shards`.

    Args:
        pipeline: with a list of shards first, as `WebDataset(urls)` has.
        options: `shuffle`, `seed`, `rank` and `world_size` of `Shards`.

    Raises:
        ValueError: a stage makes batches, which the loader does, or holds samples in another way. Or the pipeline
            repeats, draws or cuts its shards, or selects files of them.

    """
    stages = list(pipeline.pipeline)
    names = [
        getattr(getattr(stage, "f", stage), "__name__", type(stage).__name__) for stage in stages
    ]
    urls = [u["url"] if isinstance(u, dict) else u for u in getattr(stages[0], "urls", ())]
    opened = next((k for k, name in enumerate(names) if name in _OPEN), 0)
    if not urls or not opened:
        raise ValueError(
            f"from_webdataset expects a list of shards and then tar files, got the stages {names}"
        )
    _refuse(pipeline, stages)
    stream: Stream = Shards([url.removeprefix("file:") for url in urls], "tar", **options)
    for name, stage in zip(names[opened:], stages[opened:], strict=True):
        if name in _TAR:
            continue
        if name in _HOLDS:
            raise ValueError(
                f"from_webdataset cannot take the stage {name.strip('_')!r}: it holds samples. Leave batches to the "
                "loader, and choose samples by .filter()"
            )
        if name in ("_shuffle", "detshuffle"):
            stream = stream.shuffle(
                stage.args[0] if name == "_shuffle" and stage.args else stage.bufsize
            )
        elif name in _ONE:
            stream = stream.flat_map(_One(stage))
        else:
            stream = stream.apply(getattr(stage, "run", stage))
    return stream


def _refuse(pipeline: Any, stages: list[Any]) -> None:
    """Raise if a pipeline chooses among its samples in a way that a stream does not."""
    options = [getattr(stage, "kw", {}) for stage in stages]
    found = {
        "resampled=True": any(type(stage).__name__ == "ResampledShards" for stage in stages),
        "repeat": getattr(pipeline, "repetitions", 1) != 1,
        "with_epoch": getattr(pipeline, "nsamples", -1) > 0,
        "select_files": any(kw.get("select_files") for kw in options),
        "rename_files": any(kw.get("rename_files") for kw in options),
    }
    if any(found.values()):
        named = ", ".join(name for name, is_there in found.items() if is_there)
        raise ValueError(
            f"from_webdataset cannot take {named}: a stream gives each sample of its shards once an epoch. Leave it out"
        )


class _One:
    """A stage of a pipeline, for one sample."""

    def __init__(self, stage: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        self.stage = getattr(stage, "run", stage)

    def __call__(self, sample: Any) -> Iterable[Any]:
        return self.stage(iter((sample,)))
