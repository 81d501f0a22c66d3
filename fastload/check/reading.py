"""One reading of a dataset's samples, serially or by workers. `compare` compares the readings."""

from __future__ import annotations

import copy as copies
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from textwrap import shorten
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe

from fastload._kit.user_errors import shown
from fastload.check.equality import same
from fastload.errors import DatasetCopyError
from fastload.loader import DataLoader
from fastload.reading.rows import filler


def require_dataset(dataset: Any) -> None:
    """Raise TypeError if `dataset` is no dataset that the check can read. The message says what to give instead.

    Args:
        dataset: any object.

    Examples:
        >>> from fastload.check import require_dataset
        >>> require_dataset(dataset)
    """
    if isinstance(dataset, TorchDataLoader):
        raise TypeError(f"expected a dataset, got a {type(dataset).__name__}. Give its dataset")
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise TypeError(
            "expected a dataset, got a data pipe. torch reads data pipes in processes, never in threads"
        )
    if isinstance(dataset, type):
        raise TypeError(f"expected a dataset, got the class {dataset.__name__}. Give an instance")
    if isinstance(dataset, IterableDataset):
        return  # no reading needs its length
    is_sequence = all(hasattr(dataset, name) for name in ("__getitem__", "__len__"))
    if isinstance(dataset, str | bytes) or not is_sequence:
        raise TypeError(
            f"expected a dataset (with __getitem__ and __len__, or an IterableDataset), got {type(dataset).__name__}"
        )
    try:
        len(dataset)
    except Exception as error:  # user code
        raise TypeError(
            f"the length of {type(dataset).__name__} is unknown: len() raises {type(error).__name__}: "
            f"{shown(error, str)}. Return the number of samples, 0 or more"
        ) from error


@dataclass(frozen=True, slots=True)
class Raised:
    """An error that a sample raised. Two are equal if their types are, because a message may contain the time."""

    kind: str
    said: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.kind}: {shorten(self.said, 200)}"


def _identity(samples: Any) -> Any:
    return samples


def read(
    dataset: Any,
    indices: Iterable[int] | None,
    workers: int,
    seed: int,
    method: str,
    *,
    limit: int | None = None,
    buffers: list[int] | None = None,
) -> list[Any]:
    """Read samples one by one, each with the random stream of its index. Return each sample, or its error instead.

    Add to `buffers` the numbers of the samples that changed when the next one was read.
    """
    got: list[Any] = []
    before: Any = None
    how: dict[str, Any] = {} if indices is None else {"sampler": [*indices]}
    how |= {"num_workers": workers, "worker_method": method, "seed": seed}
    with DataLoader(dataset, batch_size=None, collate_fn=_identity, **how) as loader:
        for sample in islice(each(loader), limit):
            if buffers is not None and got and not same(before, got[-1]):
                buffers.append(len(got) - 1)
            before = sample
            got.append(_kept(sample))
    return got


def read_filled(dataset: Any, indices: Iterable[int], seed: int) -> list[Any]:
    """Let the dataset fill batches of one sample each. Return each batch, or its error instead.

    Return an empty list if the dataset does not fill rows.
    """
    with suppress(Exception):  # user code; the loader warns of it
        if filler(dataset) is None:
            return []
    with DataLoader(dataset, 1, sampler=[*indices], seed=seed) as loader:
        return [_kept(batch) for batch in each(loader)]


def each(samples: Iterable[Any]) -> Iterator[Any]:
    """Yield what `samples` gives, such as a loader, or its error instead."""
    iterator = iter(samples)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except DatasetCopyError:
            raise
        except Exception as error:
            yield Raised(type(error).__name__, shown(error, str))


def _kept(sample: Any) -> Any:
    """Return a copy that the next sample cannot change, or the sample itself if it cannot be copied."""
    try:
        return copies.deepcopy(sample)
    except Exception:  # user code, or torch's for a tensor in a graph
        return sample


@contextmanager
def switching_often() -> Iterator[None]:
    """Let threads switch every 10 us in the block, so that races show sooner. This affects the whole process."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
