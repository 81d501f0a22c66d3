"""`features`: a model runs over a dataset once, and what it returns becomes a set."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset
from tqdm import tqdm

from fastload.cores import usable_cores
from fastload.datasets.manifest import read_index
from fastload.errors import PrepareError
from fastload.evaluating import evaluating
from fastload.fingerprint import fingerprint
from fastload.store.dataset import SetDataset
from fastload.store.feature_key import key_of, random_transforms
from fastload.store.feature_run import Ahead, Run
from fastload.store.prepare import prepare
from fastload.store.read import get
from fastload.store.root import locate

ROWS_OF_PART, MOST_PARTS = 512, 64
BATCH_SIZE = 64
_ORDER = "features lie in the order of the dataset: shuffle them when you read them"
_REFUSED = {
    "shuffle": _ORDER,
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "generator": "pass seed=",
    "drop_last": "every sample gets its row",
    "in_order": _ORDER,
}


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
    version: str = "",
    root: str | os.PathLike[str] | None = None,
    made: Mapping[str, Any] | None = None,
    replace: bool = False,
    progress: bool = False,
) -> SetDataset:
    """Run a model over a dataset once, keep what it returns as a set, and open the set.

    Row `i` is the sample `i` of the dataset. The column "x" has what the model returns for it, and "y" its label, int64
    if it is a whole number. There is no "y" if samples are single tensors. If the set is there, neither the dataset nor
    the model runs.

    Args:
        name: of the set, or its path.
        dataset: map-style, of samples `(x, y)`, of single tensors `x`, or of dicts.
        model: gets batches of `x` and returns a tensor [batch, ...], which is stored as it is; see `backbone`. It runs
            in eval mode, without gradients. Its modes are restored afterwards.
        loader: arguments of the `DataLoader` that reads the dataset. Default: batches of 64, a thread for each core,
            and `seed=0`. The order is always that of the dataset.
        data, label: of samples that are dicts, the keys of `x` and `y`.
        dtype: of the column "x".
        device: of the model; it is moved there and back. None: where the model is.
        parts: how many parts the set has, of nearly equal size. None: one for each 512 rows, and at most 64. This
            process holds one part in its memory.
        version: names the samples of a dataset whose content cannot be found out. Change it whenever they change.
        root, made: see `put`.
        replace: features of this name that were made of other things are replaced once the new ones are complete.
        progress: show a bar.

    The key of a set of features has the content of the weights, the structure and code of the model, the samples, the
    transforms, the loader's `seed` and `collate_fn`, and the dtype. Of image files their paths, sizes and times of
    change count, so no image is opened; a dataset's own file counts if an attribute names it. Installed code counts by
    its name, and so does what a dataset reaches through a module. Pass `version`, and change it, if the dataset reads
    something that this cannot see. Device, batch size and number of threads do not count, although they can change the
    last bits of a float.

    A part is written as soon as it is complete. If the process is killed, the next call goes on with the parts that
    are missing. Random transforms are drawn once, so every epoch reads the same values; this warns of them if their
    names say that they are random.

    Raises FileExistsError, which names the parts of the key that differ, if there is another set of this name;
    StoreFullError after the first batch, if all rows will not fit; TypeError if the dataset has no fingerprint, or the
    model does not return a tensor of a row for each sample; and what dataset and model raise.
    """
    options = _options(loader, dataset)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating dtype of torch, got {dtype!r}")
    ranges = _ranges(len(dataset), parts)
    changing = [options.get("seed"), options.get("collate_fn"), data, label]
    key = key_of(dataset, model, dtype=dtype, loader=changing, version=version)
    place = os.path.join(*locate(name, root))
    if not _is_there(place, key, replace=replace):
        if found := random_transforms(dataset):
            warnings.warn(
                f"fastload: features keep what random transforms drew once, here {', '.join(found)}: every epoch reads "
                "the same values. Give the dataset a transform that draws nothing, or make several sets with other "
                'seeds, loader={"seed": ...}',
                stacklevel=2,
            )
        about = {
            **(made or {}),
            "features": key,
            "model": type(model).__qualname__,
            "dataset": _described(dataset),
        }
        with (
            evaluating(model, device) as on,
            _bar(place, len(dataset), progress) as bar,
            Ahead(dataset, ranges, options) as batches,
        ):
            run = Run(
                batches=batches,
                model=model,
                device=on,
                dtype=dtype,
                data=data,
                label=label,
                rows=len(dataset),
                folder=os.path.dirname(place),
                bar=bar,
                fastload_fingerprint=fingerprint(key),
            )
            try:
                prepare(
                    run,
                    ranges,
                    place,
                    workers=0,
                    classes=_classes(dataset),
                    made=about,
                    replace=replace,
                )
            except PrepareError:
                if run.error is None:
                    raise
                raise run.error from None
    columns = [column for column, _ in read_index(place).schema]
    return get(place, data="x", label="y" if "y" in columns else None)


def _options(given: Mapping[str, Any] | None, dataset: Any) -> dict[str, Any]:
    """Return the arguments of the loader. Raises TypeError and ValueError for those that features cannot have."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"features need a dataset with a length and samples by index, got {type(dataset).__name__}"
        )
    given = dict(given or {})
    for name, reason in _REFUSED.items():
        if name in given:
            raise ValueError(f"loader: {name} cannot be given: {reason}")
    if given.get("on_error") == "skip":
        raise ValueError(
            'loader: on_error="skip" would leave rows out: give a function that returns another sample'
        )
    options = {"batch_size": BATCH_SIZE, "num_workers": usable_cores(), "seed": 0, **given}
    size = options["batch_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"loader: batch_size must be an integer of at least 1, got {size!r}")
    return options


def _ranges(rows: int, parts: int | None) -> list[range]:
    """Return the rows of each part."""
    if not rows:
        raise ValueError("the dataset has no samples")
    if parts is None:
        parts = min(MOST_PARTS, math.ceil(rows / ROWS_OF_PART))
    if not 1 <= parts <= rows:
        raise ValueError(f"parts must be 1 to {rows}, the rows of the dataset, got {parts!r}")
    return [range(k * rows // parts, (k + 1) * rows // parts) for k in range(parts)]


def _is_there(place: str, key: Mapping[str, str], *, replace: bool) -> bool:
    """Return whether the features of this key are at `place`. Raises FileExistsError if another set is."""
    try:
        there = read_index(place).made.get("features")
    except FileNotFoundError:
        return False
    if there == key or replace:
        return bool(there == key)
    reason = "which features() did not make"
    if isinstance(there, dict):
        differing = [part for part in key if there.get(part) != key[part]]
        reason = f"of features of another {' and another '.join(differing)}"
    raise FileExistsError(
        17,
        f"there is a set of this name, {reason}: choose another name, or pass replace=True to make it again",
        place,
    )


def _described(dataset: Any) -> str:
    kind: Any = type(dataset)
    # That of `object` has an address, which is another one in each process.
    return str(kind.__qualname__) if kind.__repr__ is object.__repr__ else repr(dataset)[:200]


def _classes(dataset: Any) -> list[str]:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return [str(name) for name in getattr(dataset, "classes", None) or ()]


def _bar(place: str, rows: int, progress: bool) -> Any:
    return tqdm(
        desc=f"Features {os.path.basename(place)}",
        total=rows,
        unit="row",
        file=sys.stderr,
        disable=None if progress else True,
    )
