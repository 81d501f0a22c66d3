"""Sets of the outputs of a model for a dataset: the common code of `features` and `predictions`."""

from __future__ import annotations

import errno
import math
import os
import secrets
import sys
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset
from tqdm import tqdm

from fastload._kit.evaluating import evaluating
from fastload._kit.fingerprint import fingerprint
from fastload.datasets.manifest import read_index
from fastload.errors import PrepareError
from fastload.store.columns import record_batch
from fastload.store.feature_key import random_transforms
from fastload.store.model_run import Forward, Run, batches_of
from fastload.store.preparation import Preparation, preparation
from fastload.store.ranks import Ranks
from fastload.store.root import locate, this_node

ROWS_OF_PART = 512
BATCH_SIZE = 64
_ORDER = "rows have the order of the dataset. Shuffle them when you read them"
_REFUSED = {
    "shuffle": _ORDER,
    "sampler": _ORDER,
    "batch_sampler": _ORDER,
    "generator": "pass seed=",
    "drop_last": "every sample gets a row",
    "in_order": _ORDER,
}


@dataclass(frozen=True, kw_only=True)
class ModelSet:
    """A set of what a model returns for each sample of a dataset.

    Attributes:
        kind: "features" or "predictions", the name of the function that makes it.
        dataset, forward: the dataset, and the model that runs over it.
        key: a hash of each thing that the set depends on, by name.
        ranges: the rows of each part.
        options: arguments of the loader.
    """

    kind: str
    dataset: Any
    forward: Forward
    key: Mapping[str, str]
    ranges: list[range]
    options: Mapping[str, Any]

    def make(
        self,
        name: str | os.PathLike[str],
        ranks: Ranks,
        *,
        device: torch.device | str | None,
        root: str | os.PathLike[str] | None,
        made: Mapping[str, Any] | None,
        replace: bool,
        progress: bool,
    ) -> str:
        """Make the set unless it exists, and return its path. All ranks call this."""
        ranks.expect_same(self.key)
        place = ranks.each(lambda: os.path.join(*locate(name, root)))
        with ExitStack() as stack:

            def opened() -> Preparation | None:
                if self._is_there(place, replace=replace):
                    return None
                prepared = preparation(
                    fingerprint(self.key),
                    self.ranges,
                    place,
                    classes=_classes(self.dataset),
                    made=self._about(made),
                    replace=replace,
                    progress=progress,
                )
                return stack.enter_context(prepared)

            if (found := ranks.first(opened)) is None:
                return place
            if ranks.rank.rank == 0 and (random := random_transforms(self.dataset)):
                warnings.warn(
                    f"fastload: {self.kind} are made once, so the random transforms {', '.join(random)} give the same "
                    "values in every epoch. Remove them from the dataset, or make several sets with different seeds, "
                    'loader={"seed": ...}',
                    stacklevel=3,
                )
            job = ranks.first(lambda: f"parts-{secrets.token_hex(8)}")
            ranks.each(lambda: self._make_share(found, ranks, job, device, progress=progress))
            ranks.first(lambda: found.seal().rows)
        return place

    def _is_there(self, place: str, *, replace: bool) -> bool:
        """Return True if the set with this key is at `place`. Raise FileExistsError if a different set is there."""
        try:
            there = read_index(place).made.get(self.kind)
        except FileNotFoundError:
            return False
        if there == self.key:
            return True
        if replace:
            return False
        reason = f"which {self.kind}() did not make"
        if isinstance(there, dict):
            differing = [part for part in self.key if there.get(part) != self.key[part]]
            reason = f"of {self.kind} made with other {' and other '.join(differing)}"
        raise FileExistsError(
            errno.EEXIST,
            f"a set of this name exists, {reason}. Choose another name, or pass replace=True to make it again",
            place,
        )

    def _about(self, made: Mapping[str, Any] | None) -> dict[str, Any]:
        return {
            **(made or {}),
            self.kind: dict(self.key),
            "model": type(self.forward.model).__qualname__,
            "dataset": _described(self.dataset),
        }

    def _make_share(
        self,
        found: Preparation,
        ranks: Ranks,
        job: str,
        device: torch.device | str | None,
        *,
        progress: bool,
    ) -> None:
        """Make the parts of this rank. `job` names the leases of all ranks."""
        work, missing = found.work, [*found.missing.items()]
        if not os.path.isdir(work.folder):
            raise PrepareError(
                f"{work.folder} does not exist on {this_node()}. Give the set a path that all nodes see, and copy it "
                "to each node with fastload stage"
            )
        left = sum(len(rows) for _, rows in missing)
        total = len(self.dataset)
        with (
            evaluating(self.forward.model, device) as on,
            tqdm(
                desc=f"{self.kind.capitalize()} {found.name}{ranks}",
                total=math.ceil(total / ranks.rank.world_size),
                initial=(total - left) // ranks.rank.world_size,
                unit="row",
                file=sys.stderr,
                disable=None if progress and ranks.rank.rank == 0 else True,
            ) as bar,
            ranks.leased(missing, job) as shares,
            closing(batches_of(self.dataset, shares, self.options)) as parts,
        ):
            run = Run(self.forward, device=on, rows=left, folder=work.folder, made=bar.update)
            for (name, rows), batches in parts:
                work.write(record_batch(run.columns(len(rows), batches)), name)
                shares.made()


def loader_options(
    given: Mapping[str, Any] | None, dataset: Any, kind: str, ranks: Ranks
) -> dict[str, Any]:
    """Return the arguments of the loader. Raise TypeError or ValueError for those that cannot be given."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{kind} need a map-style dataset, with a length and samples by index, got {type(dataset).__name__}"
        )
    given = dict(given or {})
    for name, reason in _REFUSED.items():
        if name in given:
            raise ValueError(f"loader: {name} cannot be given: {reason}")
    if given.get("on_error") == "skip":
        raise ValueError(
            'loader: on_error="skip" would leave rows out. Give a function that returns another sample'
        )
    options = {"batch_size": BATCH_SIZE, "num_workers": ranks.cores(), "seed": 0, **given}
    size = options["batch_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"loader: batch_size must be an integer of at least 1, got {size!r}")
    return options


def part_ranges(rows: int, parts: int | None, *, most: int) -> list[range]:
    """Return the rows of `parts` parts of nearly equal size. None: a part for each 512 rows, at most `most` parts."""
    if not rows:
        raise ValueError("the dataset has no samples")
    if parts is None:
        parts = min(most, math.ceil(rows / ROWS_OF_PART))
    if not 1 <= parts <= rows:
        raise ValueError(f"parts must be 1 to {rows}, the rows of the dataset, got {parts!r}")
    return [range(k * rows // parts, (k + 1) * rows // parts) for k in range(parts)]


def _described(dataset: Any) -> str:
    kind: Any = type(dataset)
    # The repr of `object` has an address, which differs between processes.
    return str(kind.__qualname__) if kind.__repr__ is object.__repr__ else repr(dataset)[:200]


def _classes(dataset: Any) -> list[str]:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return [str(name) for name in getattr(dataset, "classes", None) or ()]
