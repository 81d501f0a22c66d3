"""Promise: Mixtures and packed rows are measured beside those of other libraries: rate, time to resume, padding."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, TensorDataset

import fastload
from benchmarks._measure import NotMeasuredError
from benchmarks._report import Aim, Figures, Results, Row, row
from benchmarks._run import Case

TITLE = "sequences: three sources of int64[128] in memory, by weight, batches of 32, no workers; rows of 4,096 tokens"
REPEATS = 5
PACKAGES = ("grain", "torchdata", "datasets", "mosaicml-streaming")

BATCH, ROW = 32, 4096
WEIGHTS = {"books": 0.2, "code": 0.3, "web": 0.5}
SIZES = {"books": 10_000, "code": 20_000, "web": 30_000}
PEERS = ("grain", "nodes", "datasets", "streaming")
Stateful = Any  # an iterable of batches with state_dict() and load_state_dict()


def cases(*, smoke: bool) -> list[Case]:
    scale = 100 if smoke else 1
    mixed = [Case(name, {"name": name, "scale": scale}) for name in ("fastload", *PEERS)]
    lengths = 500 if smoke else 20_000
    return mixed + [
        Case(f"{name} packs", {"name": name, "lengths": lengths}) for name in ("fastload", "grain")
    ]


def measure(*, name: str, scale: int = 1, lengths: int = 0) -> Figures:
    try:
        return _padding(name, lengths) if lengths else _mixing(name, scale)
    except ImportError as error:
        raise NotMeasuredError(str(error)) from error


def _mixing(name: str, scale: int) -> Figures:
    data = {
        source: np.tile(np.arange(size // scale)[:, None], (1, 128))
        for source, size in SIZES.items()
    }
    total = sum(map(len, data.values()))
    with tempfile.TemporaryDirectory() as folder:
        loader = _MIXED[name](data, folder)
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        count, began = max(5, int(0.9 * total / BATCH) - 5), perf_counter()
        for _ in range(count):
            batch = next(batches)
        rate = count * BATCH / (perf_counter() - began)
        if len(_tokens(batch)) != BATCH:
            raise NotMeasuredError(f"a batch has {len(_tokens(batch))} samples")
        state = loader.state_dict()
        expected = _tokens(next(batches))
        resumed = _MIXED[name](data, folder)
        began = perf_counter()
        resumed.load_state_dict(state)
        found = _tokens(next(batches := iter(resumed)))
        resume_s = perf_counter() - began
    exact = float(np.array_equal(expected, found))
    return {"rate": rate, "resume_ms": 1000 * resume_s, "exact": exact}


def _tokens(batch: Any) -> NDArray[np.int64]:
    batch = batch["tokens"] if isinstance(batch, dict) else batch
    return np.asarray(batch[0] if isinstance(batch, list | tuple) else batch)


# ---- mixtures ----


def _fastload(data: dict[str, NDArray[np.int64]], folder: str) -> Stateful:
    from fastload.sequences import Mixture

    sources: dict[str, Dataset[Any]] = {
        name: TensorDataset(torch.from_numpy(rows)) for name, rows in data.items()
    }
    mixture = Mixture(sources, weights=WEIGHTS, seed=0)
    return fastload.DataLoader(mixture.dataset, batch_size=BATCH, sampler=mixture, seed=0)


class _GrainMix:
    """Grain's mix as an iterable with a state."""

    def __init__(self, data: dict[str, NDArray[np.int64]], folder: str) -> None:
        import grain

        parts = [grain.MapDataset.source(data[name]).shuffle(seed=0).repeat() for name in WEIGHTS]
        mixed = grain.MapDataset.mix(parts, weights=[*WEIGHTS.values()])
        options = grain.ReadOptions(num_threads=0)
        self._batches = iter(mixed.batch(BATCH).to_iter_dataset(options))

    def __iter__(self) -> Iterator[Any]:
        return self._batches

    def state_dict(self) -> Any:
        return self._batches.get_state()

    def load_state_dict(self, state: Any) -> None:
        self._batches.set_state(state)


def _nodes(data: dict[str, NDArray[np.int64]], folder: str) -> Stateful:
    import torchdata.nodes as nodes
    from torch.utils.data import RandomSampler, default_collate

    def source(rows: NDArray[np.int64]) -> Any:
        generator = torch.Generator().manual_seed(0)
        return nodes.MapStyleWrapper(rows, RandomSampler(rows, generator=generator))  # type: ignore[arg-type]

    mixed = nodes.MultiNodeWeightedSampler(
        {name: source(data[name]) for name in WEIGHTS}, WEIGHTS, stop_criteria="CYCLE_FOREVER"
    )
    batches = nodes.Mapper(nodes.Batcher(mixed, BATCH), default_collate)
    return nodes.Loader(batches)


class _Interleaved:
    """Hugging Face's interleaved datasets as an iterable with a state."""

    def __init__(self, data: dict[str, NDArray[np.int64]], folder: str) -> None:
        import datasets

        parts = [
            datasets.Dataset.from_dict({"tokens": data[name]})
            .to_iterable_dataset()
            .shuffle(seed=0, buffer_size=1000)
            for name in WEIGHTS
        ]
        mixed = datasets.interleave_datasets(
            parts, [*WEIGHTS.values()], seed=0, stopping_strategy="all_exhausted"
        )
        self._mixed = mixed.with_format("torch").batch(BATCH)
        self.state_dict, self.load_state_dict = self._mixed.state_dict, self._mixed.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mixed)


def _streaming(data: dict[str, NDArray[np.int64]], folder: str) -> Stateful:
    import os

    from streaming import MDSWriter, Stream, StreamingDataLoader, StreamingDataset

    streams = []
    for name, rows in data.items():
        path = os.path.join(folder, name)
        if not os.path.exists(path):
            with MDSWriter(out=path, columns={"tokens": "ndarray:int64:128"}) as writer:
                for tokens in rows:
                    writer.write({"tokens": tokens})
        streams.append(Stream(local=path, proportion=WEIGHTS[name]))
    dataset = StreamingDataset(
        streams=streams, shuffle=True, batch_size=BATCH, epoch_size=sum(map(len, data.values()))
    )
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=0)


_MIXED: dict[str, Callable[..., Stateful]] = {
    "fastload": _fastload,
    "grain": _GrainMix,
    "nodes": _nodes,
    "datasets": _Interleaved,
    "streaming": _streaming,
}


# ---- packing ----


def _padding(name: str, count: int) -> Figures:
    lengths = np.random.default_rng(0).lognormal(6, 1, count).astype(np.int64).clip(1, ROW)
    samples = [np.ones(length, np.int64) for length in lengths]
    if name == "fastload":
        from fastload.sequences import Packed

        rows = len(Packed(samples, ROW, lengths=lengths))  # type: ignore[arg-type]
    else:
        import grain

        source = grain.MapDataset.source(samples).map(lambda tokens: {"tokens": tokens})
        packed = grain.experimental.BestFitPackIterDataset(
            source.to_iter_dataset(), length_struct={"tokens": ROW}, num_packing_bins=64
        )
        rows = sum(1 for _ in packed)
    return {"padding": 100 * (1 - lengths.sum() / (rows * ROW))}


def rows(results: Results) -> list[Row]:
    found = []
    for key, unit, aim in (("rate", "samples/s", ">="), ("resume_ms", "ms", "<=")):
        for name in PEERS:
            found.append(row(results, name, key, name=f"{key}: {name}", unit=unit))
            ours, against = f"{key}: fastload beside {name}", (name, key)
            of = partial(row, results, "fastload", key, name=ours, unit=unit)
            found.append(of(against=against, aim=Aim(aim, 1)))
    for name in ("fastload", *PEERS):
        said = f"resumes exactly (1) or not (0): {name}"
        found.append(row(results, name, "exact", name=said, unit=""))
    for name in ("fastload", "grain"):
        found.append(row(results, f"{name} packs", "padding", name=f"padding: {name}", unit="%"))
    return found
