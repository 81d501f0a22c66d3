"""Sets of the outputs of a model for a dataset: the common code of `features` and `predictions`."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset, Subset
from tqdm import tqdm

from fastload._kit.evaluating import evaluating
from fastload._kit.fingerprint import fingerprint
from fastload.datasets.manifest import INDEX
from fastload.distributed import Rank
from fastload.errors import PrepareError, UsageError
from fastload.store.columns import record_batch
from fastload.store.dataset import SetDataset
from fastload.store.model_key import key_of, name_of, random_transforms
from fastload.store.model_run import Forward, ModelRun, batches_of
from fastload.store.preparation import Preparation, preparation
from fastload.store.ranks import Ranks, meet
from fastload.store.root import index_at, locate, this_node

ROWS_OF_PART = 512
MOST_PARTS = {"features": 64, "predictions": 1024}
"""The greatest default numbers of parts."""
BATCH_SIZE = 64
_ORDER = "rows have the order of the dataset. Shuffle them when you read them"
_REFUSED = {
    **dict.fromkeys(("shuffle", "sampler", "batch_sampler", "in_order"), _ORDER),
    "generator": "pass seed=",
    "drop_last": "every sample gets a row",
}


@dataclass(frozen=True)
class ModelSet:
    """A set of what a model returns for each sample of a dataset.

    Attributes:
        kind: "features" or "predictions", the name of the function that makes it.
        forward: the model, its input and its columns.
        more: what else its key has, by name.

    The others are arguments of that function.
    """

    kind: str
    name: str | os.PathLike[str]
    dataset: Any
    forward: Forward
    more: Mapping[str, Any]
    loader: Mapping[str, Any] | None
    device: torch.device | str | None
    parts: int | None
    version: str
    root: str | os.PathLike[str] | None
    made: Mapping[str, Any] | None
    replace: bool
    progress: bool

    def opened(self, rank: Rank | None, opening: Callable[[str], SetDataset]) -> SetDataset:
        """Make the set unless it exists, and return what `opening` returns for its path. All ranks call this."""
        with meet(rank) as ranks, ExitStack() as stack:
            options, ranges, key, place = ranks.each(lambda: self._plan(ranks.cores()))
            ranks.expect_same(key)

            is_first = ranks.rank.rank == 0
            is_there = ranks.each(lambda: self._is_there(place, key, says=is_first))

            def prepared() -> Preparation | None:
                return (
                    None if is_there else stack.enter_context(self._preparation(place, ranges, key))
                )

            if (found := ranks.first(prepared)) is not None:
                if is_first:
                    self._warn_of_random_transforms()
                ranks.each(lambda: self._make_share(found, ranks, options))
                ranks.first(lambda: found.seal().rows)
            return ranks.each(lambda: opening(place))

    def _plan(self, cores: int) -> tuple[dict[str, Any], list[range], dict[str, str], str]:
        """Return the loader's arguments, the rows of each part, the key, and the path."""
        options = loader_options(self.loader, self.dataset, self.kind, cores)
        ranges = part_ranges(len(self.dataset), self.parts, most=MOST_PARTS[self.kind])
        loader = {"seed": options["seed"], "collate_fn": options.get("collate_fn") or ""}
        made = json.loads(json.dumps(self.made or {}))  # an error now, and not after the last part
        more = {**made, **self.more, **loader}
        key = key_of(self.dataset, self.forward.model, self.version, more)
        return options, ranges, key, os.path.join(*locate(self.name, self.root))

    def _is_there(self, place: str, key: dict[str, str], *, says: bool) -> bool:
        """Return True if the set with this key is at `place`. Raise FileExistsError if a different set is there.

        Args:
            says: say that the set is reused.
        """
        if (index := index_at(place)) is None:
            return False
        there, reason = index.made.get(self.kind), f"which {self.kind}() did not make"
        if isinstance(there, dict):
            differing = [part for part in key if there.get(part) != key[part]]
            if not differing:
                if says:
                    self._say_reused(
                        place, self.kind, os.stat(os.path.join(place, INDEX)).st_mtime_ns
                    )
                return True
            reason = f"of {self.kind} made with other {' and other '.join(differing)}"
            if "version" in differing:
                reason += f": it has version {there.get('version')!r}, not {self.version!r}"
        if self.replace:
            return False
        raise FileExistsError(
            errno.EEXIST,
            f"a set of this name exists, {reason}. Choose another name, or pass replace=True to make it again",
            place,
        )

    def _say_reused(self, place: str, what: str, date: int) -> None:
        version = f"version {self.version!r}"
        if not self.version:
            version = (
                "no version. Name one, and change it whenever samples, transforms or code change"
            )
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(date / 1e9))
        tqdm.write(f"{place}: reuses {what} of {when}, {version}", file=sys.stderr)

    @contextmanager
    def _preparation(
        self, place: str, ranges: list[range], key: dict[str, str]
    ) -> Iterator[Preparation]:
        names = {"model": name_of(self.forward.model), "dataset": _described(self.dataset)}
        with preparation(
            fingerprint(key),
            ranges,
            place,
            classes=_classes(self.dataset),
            made={**(self.made or {}), self.kind: key, **names},
            replace=self.replace,
            progress=self.progress,
        ) as found:
            if reused := len(ranges) - len(found.missing):
                date = os.stat(found.work.folder).st_mtime_ns
                self._say_reused(place, f"{reused} of {len(ranges)} parts", date)
            yield found

    def _warn_of_random_transforms(self) -> None:
        if random := random_transforms(self.dataset):
            warnings.warn(
                f"fastload: {self.kind} are made once, so the random transforms {', '.join(random)} give the same "
                "values in every epoch. Remove them from the dataset, or make several sets with different seeds, "
                'loader={"seed": ...}',
                stacklevel=4,
            )

    def _make_share(self, found: Preparation, ranks: Ranks, options: Mapping[str, Any]) -> None:
        """Make the parts of this rank."""
        work, missing = found.work, [*found.missing.items()]
        if not os.path.isdir(work.folder):
            raise PrepareError(
                f"{work.folder} does not exist on {this_node()}. Give the set a path that all nodes see, and copy it "
                "to each node with fastload set stage"
            )
        left = sum(len(rows) for _, rows in missing)
        total = len(self.dataset)
        with (
            evaluating(self.forward.model, self.device) as on,
            tqdm(
                desc=f"{self.kind.capitalize()} {found.name}{ranks}",
                total=math.ceil(total / ranks.rank.world_size),
                initial=(total - left) // ranks.rank.world_size,
                unit="row",
                file=sys.stderr,
                disable=None if self.progress and ranks.rank.rank == 0 else True,
            ) as bar,
            closing(batches_of(self.dataset, ranks.share(missing), options)) as parts,
        ):
            run = ModelRun(self.forward, on, left, work.folder, bar.update)
            for (name, rows), batches in parts:
                work.write(record_batch(run.columns(len(rows), batches)), name)


def loader_options(
    given: Mapping[str, Any] | None, dataset: Any, kind: str, cores: int
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
    options = {"batch_size": BATCH_SIZE, "num_workers": cores, "seed": 0, **given}
    size = options["batch_size"]
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(f"loader: batch_size must be an integer of at least 1, got {size!r}")
    return options


def part_ranges(rows: int, parts: int | None, *, most: int) -> list[range]:
    """Return the rows of `parts` parts of nearly equal size. None: a part for each 512 rows, at most `most` parts."""
    if not rows:
        raise UsageError("the dataset has no samples")
    if parts is None:
        parts = min(most, math.ceil(rows / ROWS_OF_PART))
    if not 1 <= parts <= rows:
        raise UsageError(f"parts must be 1 to {rows}, the rows of the dataset, got {parts!r}")
    return [range(k * rows // parts, (k + 1) * rows // parts) for k in range(parts)]


def _described(dataset: Any) -> str:
    kind: Any = type(dataset)
    # The repr of `object` has an address, which differs between processes.
    return str(kind.__qualname__) if kind.__repr__ is object.__repr__ else repr(dataset)[:200]


def _classes(dataset: Any) -> list[str]:
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return [str(name) for name in getattr(dataset, "classes", None) or ()]
