"""Streams of other libraries, with fastload's order and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from fastload._kit.torch_private import set_worker_info
from fastload.reading import hub_streams
from fastload.streams.chain import Stream
from fastload.streams.shards import Shards

_OPEN = ("StreamingOpen", "FileCache", "tarfile_samples", "tarfile_to_samples")
_TAR = (*_OPEN, "tar_file_expander", "group_by_keys", "check_empty")
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
        ValueError: it shuffles by a buffer.
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
    return Shards(range(dataset.num_shards), _HubShard(dataset), **options)


class _HubShard:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, index: int) -> Iterator[Any]:
        samples = iter(self.dataset.shard(self.dataset.num_shards, index))
        sample = None
        while sample is not _END:
            before = get_worker_info()
            set_worker_info(None)  # or `datasets` would divide the shard by the workers again
            try:
                if get_worker_info() is not None:
                    raise RuntimeError(
                        "a stream of from_hub is read by fastload.DataLoader, not by torch's"
                    )
                sample = next(samples, _END)
            finally:
                set_worker_info(before)
            if sample is not _END:
                yield sample


_END = object()


def from_webdataset(pipeline: Any, **options: Any) -> Stream:
    """Return a stream of a `webdataset.WebDataset` or pipeline of tar files, local or at URLs.

    Each stage that takes a sample and gives one, or none, is applied as it is: `decode`, `map`, `to_tuple`, `select`.
    The buffer of `shuffle(n)` becomes `Shuffled` of that size, and the division by nodes and workers that of `Shards`.

    Args:
        pipeline: with a list of shards first, as `WebDataset(urls)` has.
        options: `shuffle`, `seed`, `rank` and `world_size` of `Shards`.

    Raises:
        ValueError: a stage makes batches, or holds samples in another way. Leave it to the loader.

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
    stream: Stream = Shards([url.removeprefix("file:") for url in urls], "tar", **options)
    for name, stage in zip(names[opened:], stages[opened:], strict=True):
        if name in _TAR:
            continue
        if name in _HOLDS:
            raise ValueError(
                f"from_webdataset cannot take the stage {name.strip('_')!r}: it holds samples"
            )
        if name in ("_shuffle", "detshuffle"):
            stream = stream.shuffle(
                stage.args[0] if name == "_shuffle" and stage.args else stage.bufsize
            )
        else:
            stream = stream.flat_map(_One(stage))
    return stream


class _One:
    """A stage of a pipeline, for one sample."""

    def __init__(self, stage: Callable[[Iterator[Any]], Iterable[Any]]) -> None:
        self.stage = getattr(stage, "run", stage)

    def __call__(self, sample: Any) -> Iterable[Any]:
        return self.stage(iter((sample,)))
