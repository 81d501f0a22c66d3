"""`predictions`: a model answers each sample of a dataset, on any number of ranks, and its answers become a set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fastload.distributed import Rank
from fastload.store.dataset import SetDataset
from fastload.store.feature_key import hash_of, key_of
from fastload.store.model_run import Forward
from fastload.store.model_set import ModelSet, loader_options, part_ranges
from fastload.store.ranks import meet
from fastload.store.read import get

MOST_PARTS = 1024


def predictions(
    name: str | os.PathLike[str],
    *,
    dataset: Any,
    model: Any,
    inputs: Callable[[Any], Any] | None = None,
    loader: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    parts: int | None = None,
    rank: Rank | None = None,
    version: str = "",
    root: str | os.PathLike[str] | None = None,
    made: Mapping[str, Any] | None = None,
    replace: bool = False,
    progress: bool = False,
) -> SetDataset:
    """Run a model over a dataset, store its answers as a set, and open the set. All ranks of a job call this.

    Row `i` is the answer for sample `i` of the dataset. A model that returns a tensor [batch, ...] gives the column
    "y"; one that returns a dict of such tensors, a column for each key; one that returns a tuple, "y0", "y1" ... Each
    has the dtype of its tensor. If the set exists, neither the dataset nor the model runs.

    Args:
        name: name of the set, or its path. All ranks must see its folder.
        dataset: map-style.
        model: runs in eval mode, without gradients. Its modes are restored afterwards.
        inputs: takes a batch, and returns what the model gets. None: the first item of a batch that is a tuple or list,
            which is the `x` of samples `(x, y)`; any other batch as it is.
        loader: arguments of the `DataLoader` that reads the dataset. Default: batches of 64, a thread for each core
            of this rank, and `seed=0`. The order is always that of the dataset.
        device: device of the model, which is moved there and back. Batches are moved there. None: its current device.
        parts: number of parts of the set, of nearly equal size. None: one per 512 rows, and at most 1,024. A rank holds
            one part in its memory.
        rank: the rank of this process. None: the one that its launcher (torchrun, mpiexec, srun) sets, or the only one.
        version: version of the samples, for a dataset whose content cannot be detected. Change it when they change.
        root, made: see `put`.
        replace: replace predictions of this name that have another key, as soon as the new ones are complete.
        progress: show a bar, on rank 0.

    Ranks lease the missing parts one after another, so a slow rank makes fewer. Each part is made by one rank, without
    padding. Rank 0 seals the set after all ranks are done. The others wait for that, and then open it. A part does not
    depend on the number of ranks. No batch has samples of two parts, and what a sample draws depends only on its index
    in the dataset.

    A part is written as soon as it is complete. If a rank ends or fails, complete parts are kept. The next call, on any
    number of ranks, makes only the missing ones. `features` describes the key of the set. `inputs` counts too.

    Raise what `features` raises. On several ranks, raise PrepareError. It names the first rank that failed and its
    reason, and has the error as `__cause__` on that rank. Or it names the rank whose model or dataset differs from that
    of rank 0. The ranks that have not failed first make their parts. An error on all ranks is raised unchanged.
    """
    with meet(rank) as ranks:

        def plan() -> ModelSet:
            options = loader_options(loader, dataset, "predictions", ranks)
            changing = [options.get("seed"), options.get("collate_fn")]
            key = key_of(dataset, model, loader=changing, version=version)
            return ModelSet(
                kind="predictions",
                dataset=dataset,
                forward=Forward(model, partial(_split, inputs=inputs or _first), _named),
                ranges=part_ranges(len(dataset), parts, most=MOST_PARTS),
                key={**key, "inputs": hash_of(inputs, "function inputs=")},
                options=options,
            )

        place = ranks.each(plan).make(
            name, ranks, device=device, root=root, made=made, replace=replace, progress=progress
        )
        return ranks.each(lambda: get(place))


def _split(batch: Any, inputs: Callable[[Any], Any]) -> tuple[Any, None]:
    return inputs(batch), None


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) else batch


def _named(outputs: Any) -> Mapping[str, Any]:
    """Return the columns of what a model returned."""
    if isinstance(outputs, Mapping):
        return {str(name): found for name, found in outputs.items()}
    if isinstance(outputs, tuple | list):
        return {f"y{number}": found for number, found in enumerate(outputs)}
    return {"y": outputs}
