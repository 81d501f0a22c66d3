"""`features` and `predictions`: a model runs over a dataset once, and what it returns becomes a set."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastload.distributed import Rank
from fastload.store.dataset import SetDataset
from fastload.store.model_run import Forward, shown
from fastload.store.model_set import ModelSet
from fastload.store.read import get


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
        version: your name for the samples, their transforms and the model's code. Change it when one of them changes.
        root: see `put`.
        made: how the set was made, as JSON values. They count in the key.
        replace: replace predictions of this name that have another key, as soon as the new ones are complete.
        progress: show a bar, on rank 0.

    The key of a set has a hash of the weights and buffers, `version`, `made`, and the number of samples. It also has
    the names of the model, of the dataset and of `inputs`, the seed, the indices of a `Subset`, and the id of a set
    that the dataset reads. Code and files are not looked at: if they change, change `version`. Each reuse prints the
    set's version and its date on standard error.

    The ranks divide the missing parts. Each part is made by one rank, without padding. Rank 0 seals the set after all
    ranks are done. The others wait for that, and then open it. A part does not depend on the number of ranks. No batch
    has samples of two parts, and what a sample draws depends only on its index in the dataset. Random transforms are
    drawn once, so every epoch reads the same values. A warning names those whose name shows that they are random.

    A part is written as soon as it is complete. If a rank ends or fails, complete parts are kept. The next call, on any
    number of ranks, makes only the missing ones.

    Returns:
        The set, opened.

    Raises:
        FileExistsError: another set has this name. The message names the differing parts of the key.
        StoreFullError: the rows will not fit. It comes after the first batch.
        TypeError: the model does not return tensors with one row per sample.
        PrepareError: on several ranks: names the first rank that failed and its reason, which is `__cause__` there. Or
            it names the rank whose model or dataset differs. The others first make their parts. An error on all ranks
            is raised unchanged, as what dataset and model raise.

    Examples:
        >>> answers = fastload.store.predictions("answers", dataset=dataset, model=torch.nn.Flatten())
        >>> answers[0]["y"].shape
        torch.Size([48])
    """
    forward = Forward(model, partial(_unlabelled, inputs=inputs or _first), _named)
    more = {"inputs": inputs or ""}
    how = (loader, device, parts, version, root, made, replace, progress)
    return ModelSet("predictions", name, dataset, forward, more, *how).opened(rank, get)


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
    """Run a model over a dataset once, store what it returns with the labels as a set, and open the set.

    Features are `predictions` with labels, in one dtype: see there for all else. The column "x" has what the model
    returns for each sample, and "y" its label, int64 if it is a whole number. There is no "y" if samples are single
    tensors.

    Args:
        name, loader, device, rank, version, root, made, replace, progress: see `predictions`.
        dataset: map-style, of samples `(x, y)`, of single tensors `x`, or of dicts.
        model: gets batches of `x` and returns a tensor [batch, ...], which is stored as it is; see `backbone`.
        data, label: the keys of `x` and `y`, if samples are dicts.
        dtype: dtype of the column "x".
        parts: number of parts of the set, of nearly equal size. None: one per 512 rows, and at most 64.

    Returns:
        The set, opened.

    Raises:
        FileExistsError: another set has this name. The message names the differing parts of the key.
        StoreFullError: the rows will not fit. It comes after the first batch.
        TypeError: the model does not return a tensor with one row per sample.

    Examples:
        >>> features = fastload.store.features("codes", dataset=dataset, model=torch.nn.Flatten())
        >>> features[0][0].shape
        torch.Size([48])
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype of torch, got {dtype!r}")
    forward = Forward(model, partial(_labelled, data=data, label=label), _x, dtype)
    more = {"data": data, "label": label, "dtype": str(dtype).removeprefix("torch.")}
    how = (loader, device, parts, version, root, made, replace, progress)
    return ModelSet("features", name, dataset, forward, more, *how).opened(rank, _labelled_set)


def _labelled_set(path: str) -> SetDataset:
    columns = [column for column, _ in get(path).schema]
    return get(path, data="x", label="y" if "y" in columns else None)


def _unlabelled(batch: Any, inputs: Callable[[Any], Any]) -> tuple[Any, None]:
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


def _x(outputs: Any) -> dict[str, Any]:
    return {"x": outputs}


def _labelled(batch: Any, data: str | None, label: str | None) -> tuple[Any, Any]:
    """Return the model's input from a batch, and the batch's labels or None."""
    if isinstance(batch, Mapping):
        if data not in batch or (label is not None and label not in batch):
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
