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
    """Run a model over a dataset, keep its answers as a set, and open the set. All ranks of a job call this.

    Row `i` is the answer for sample `i` of the dataset. A model that returns a tensor [batch, ...] gives the column
    "y"; one that returns a dict of such tensors, a column for each key; one that returns a tuple, "y0", "y1" ... Each
    has the dtype of its tensor. If the set is there, neither the dataset nor the model runs.

    Args:
        name: of the set, or its path. All ranks must see its folder.
        dataset: map-style.
        model: runs in eval mode, without gradients. Its modes are restored afterwards.
        inputs: takes a batch, and returns what the model gets. None: the first item of a batch that is a tuple or list,
            which is the `x` of samples `(x, y)`; any other batch as it is.
        loader: arguments of the `DataLoader` that reads the dataset. Default: batches of 64, a thread for each core
            of this rank, and `seed=0`. The order is always that of the dataset.
        device: of the model; it is moved there and back, and batches are moved there. None: where the model is.
        parts: how many parts the set has, of nearly equal size. None: one for each 512 rows, and at most 1,024. A rank
            holds one part in its memory.
        rank: which rank this process is. None: the one that its launcher (torchrun, mpiexec, srun) says, or the only
            one.
        version: names the samples of a dataset whose content cannot be found out. Change it whenever they change.
        root, made: see `put`.
        replace: predictions of this name that were made of other things are replaced once the new ones are complete.
        progress: show a bar, on rank 0.

    Ranks lease the parts that are missing, one after another, so a slow rank makes fewer. Each part is made by one
    rank, without padding. Rank 0 seals the set after all ranks are done; the others wait, and open it then. No batch
    has samples of two parts, and what a sample draws depends on its place in the dataset, so a part does not depend on
    the number of ranks.

    A part is written as soon as it is complete. If a rank ends or fails, the parts that are complete stay. The next
    call, on any number of ranks, makes only those that are missing. What the key of the set has, and what it has not,
    is written at `features`; `inputs` counts too.

    Raises what `features` raises. On several ranks: PrepareError, which names the first rank that failed and why, and
    has the error as `__cause__` there; or the rank that has another model or dataset than rank 0. The ranks that have
    not failed make their parts first. An error that all ranks meet is raised as it is.
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
