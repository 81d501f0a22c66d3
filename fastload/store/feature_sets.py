"""`features`: a model runs over a dataset once, and what it returns becomes a set."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastload.datasets.manifest import read_index
from fastload.distributed import Rank
from fastload.store.dataset import SetDataset
from fastload.store.feature_key import key_of
from fastload.store.model_run import Forward, shown
from fastload.store.model_set import ModelSet, loader_options, part_ranges
from fastload.store.ranks import meet
from fastload.store.read import get

MOST_PARTS = 64


def features(
    name: str | os.PathLike[str],
    *,
    dataset: Any,
    model: Any,
    loader: Mapping[str, Any] | None = None,
    data: str | None = None,
    label: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    parts: int | None = None,
    rank: Rank | None = None,
    version: str = "",
    root: str | os.PathLike[str] | None = None,
    made: Mapping[str, Any] | None = None,
    replace: bool = False,
    progress: bool = False,
) -> SetDataset:
    """Run a model over a dataset once, store what it returns as a set, and open the set. All ranks of a job call this.

    Row `i` is the sample `i` of the dataset. The column "x" has what the model returns for it, and "y" its label, int64
    if it is a whole number. There is no "y" if samples are single tensors. If the set exists, neither the dataset nor
    the model runs.

    Args:
        name: name of the set, or its path. All ranks must see its folder.
        dataset: map-style, of samples `(x, y)`, of single tensors `x`, or of dicts.
        model: gets batches of `x` and returns a tensor [batch, ...], which is stored as it is; see `backbone`. It runs
            in eval mode, without gradients. Its modes are restored afterwards.
        loader: arguments of the `DataLoader` that reads the dataset. Default: batches of 64, a thread for each core
            of this rank, and `seed=0`. The order is always that of the dataset.
        data, label: the keys of `x` and `y`, if samples are dicts.
        dtype: dtype of the column "x".
        device: device of the model, which is moved there and back. None: its current device.
        parts: number of parts of the set, of nearly equal size. None: one per 512 rows, and at most 64. A rank holds
            one part in its memory.
        rank: the rank of this process. None: the one that its launcher (torchrun, mpiexec, srun) sets, or the only one.
        version: version of the samples, for a dataset whose content cannot be detected. Change it when they change.
        root, made: see `put`.
        replace: replace features of this name that have another key, as soon as the new ones are complete.
        progress: show a bar.

    The key of a set of features has the content of the weights, the structure and code of the model, the samples and
    the transforms. It also has the loader's `seed` and `collate_fn`, and the dtype. For image files, their paths, sizes
    and modification times count, so no image is opened. A dataset's own file counts if an attribute names it. Installed
    code, and anything that a dataset reaches through a module, count by name. If the dataset reads something else, pass
    `version`, and change it when that changes. Device, batch size and number of threads do not count, although they can
    change the last bits of a float.

    A part is written as soon as it is complete. If the process is killed, the next call makes only the missing parts.
    Random transforms are drawn once, so every epoch reads the same values. This warns if the name of a transform shows
    that it is random. Ranks lease the missing parts one after another, so a slow rank makes fewer. What a sample draws
    does not depend on the rank that makes it.

    Raise FileExistsError, which names the differing parts of the key, if another set has this name. Raise
    StoreFullError after the first batch if the rows will not fit. Raise TypeError if the dataset has no fingerprint, or
    if the model does not return a tensor with one row per sample. Raise what dataset and model raise.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype of torch, got {dtype!r}")
    with meet(rank) as ranks:

        def plan() -> ModelSet:
            options = loader_options(loader, dataset, "features", ranks)
            changing = [options.get("seed"), options.get("collate_fn"), data, label]
            return ModelSet(
                kind="features",
                dataset=dataset,
                forward=Forward(model, partial(_split, data=data, label=label), _x, dtype),
                ranges=part_ranges(len(dataset), parts, most=MOST_PARTS),
                key=key_of(dataset, model, dtype=dtype, loader=changing, version=version),
                options=options,
            )

        place = ranks.each(plan).make(
            name, ranks, device=device, root=root, made=made, replace=replace, progress=progress
        )
        return ranks.each(lambda: _opened(place))


def _opened(place: str) -> SetDataset:
    columns = [column for column, _ in read_index(place).schema]
    return get(place, data="x", label="y" if "y" in columns else None)


def _x(outputs: Any) -> dict[str, Any]:
    return {"x": outputs}


def _split(batch: Any, data: str | None, label: str | None) -> tuple[Any, Any]:
    """Return the model's input from a batch, and the batch's labels or None."""
    if isinstance(batch, Mapping):
        missing = [name for name in (data, label) if name is not None and name not in batch]
        if data is None or missing:
            raise TypeError(
                f"the samples are dicts with the keys {list(batch)}. Name the model's input and the label with data= "
                "and label="
            )
        return batch[data], None if label is None else batch[label]
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise TypeError(
        f"expected samples (x, y), single tensors or dicts, got {shown(batch)} as a batch"
    )
