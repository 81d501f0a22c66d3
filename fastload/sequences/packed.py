"""`Packed`: samples of tokens, packed into rows of equal length."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fastload._kit.integers import as_indices, integer
from fastload._kit.will_read import WillRead, will_read_of
from fastload.errors import SequenceError
from fastload.order.batches import set_id_of
from fastload.rows import Run
from fastload.sequences.lengths import lengths_of
from fastload.sequences.packing import MOST_ITEMS, best_fit

_NAMES = ("tokens", "segments", "positions", "cu_seqlens")


class Packed(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens, into which the samples of a dataset are packed: best-fit decreasing.

    A sample is an integer array, tensor or list of one dimension, or a dict with one at `key`. Samples without tokens
    are in no row. A row is a dict of tensors:

    - `tokens`, int64[length]: the samples one after another, then `pad`.
    - `segments`, int32[length]: 1 for the tokens of the row's first sample, 2 for the second, ..., 0 for padding.
    - `positions`, int64[length]: the place of each token in its sample, from 0 on. 0 for padding.
    - `cu_seqlens`, int32[max_segments + 2]: 0, then the end of each sample, then `length` to the end. So FlashAttention
      sees the padding as one more sequence, followed by empty ones. All rows have the same shapes.
    - each key of `also`, int64[length]: its values, in the places of the tokens they belong to, then its padding.

    The rows are a pure function of the lengths and the arguments: the same in all epochs, on all ranks and machines. A
    sampler shuffles the rows. `dataset` is read for each row, by `__getitems__` if it has that.

    Args:
        dataset: a map-style dataset.
        length: tokens of a row.
        lengths: the number of tokens of each sample, as `lengths_of` takes them. None: the constructor reads every
            sample once.
        key: the key of the tokens, if a sample is a dict.
        also: other keys whose values are packed beside the tokens, an integer for each of them, and their padding:
            `{"labels": -100}`. Keys that are not named are left out.
        long: what to do with samples longer than `length`. "split" makes pieces of `length` tokens, and of the rest,
            each of which is a segment of its own. Each piece reads the whole sample. "truncate" leaves out what is
            beyond `length`. "error" raises ValueError.
        pad: the token of the padding.
        seed: decides which samples of equal length share a row, and the numbers of the rows.
        max_segments: entries of `cu_seqlens`, less 2. By default `length`, which fits any samples: 4 more bytes for
            each token of a row. Give the sources of a `Mixture` the same number.

    Memory: 8 bytes for each sample and for each row, and 8 more for each sample if one is split or has no tokens. While
    the constructor plans, at most 20 more for each sample and 48 for each row. Threads share the plan, and have copies
    of `dataset` as the loader makes them. Each process has a plan of its own.

    Attributes:
        dataset, length, key, also, pad: the arguments.
        max_segments: segments for which `cu_seqlens` has room.
        useful_share: the share of tokens that are no padding, 0 to 1.
        set_id: hash of the lengths, the arguments and the `set_id` of `dataset`. A loader's state contains it.

    An error of `dataset` has a note that names the row.

    Raises:
        ValueError: an argument is out of range, or no sample has tokens.
        SequenceError: a sample that is read, or one of its values of `also`, has another length than planned.
        TypeError: the values of a sample that is read are not integers in one dimension.
        KeyError: a sample that is read lacks a key.

    Examples:
        >>> from fastload.sequences import Packed
        >>> rows = Packed(texts, length=256, lengths=[len(text) for text in texts])
        >>> rows[0]["tokens"].shape
        torch.Size([256])
    """

    fastload_per_worker = ("dataset",)

    def __init__(
        self,
        dataset: Any,
        length: int = 4096,
        *,
        lengths: Any = None,
        key: Any = None,
        also: Mapping[str, int] | None = None,
        long: Literal["split", "truncate", "error"] = "split",
        pad: int = 0,
        seed: int = 0,
        max_segments: int | None = None,
    ) -> None:
        if not 1 <= integer("length", length) < 1 << 31:
            raise ValueError(f"length must be from 1 to 2**31 - 1, got {length}")
        if long not in ("split", "truncate", "error"):
            raise ValueError(f'long must be "split", "truncate" or "error", got {long!r}')
        self.dataset, self.length, self.key = dataset, int(length), key
        self.pad = integer("pad", pad)
        self.also = {name: integer(f"also[{name!r}]", fill) for name, fill in (also or {}).items()}
        if self.also and (key is None or not self.also.keys().isdisjoint((key, *_NAMES))):
            raise ValueError(
                f"also names keys beside key, and none of {_NAMES}, got {also!r} and {key=}"
            )
        planned = lengths_of(self._length if lengths is None else lengths, dataset, least=0)
        small = planned.max(initial=0) < 1 << 31
        self._planned: NDArray[Any] = planned.astype(np.int32 if small else np.int64)
        sizes = self._planned
        # The number of each sample's first piece, int64[samples + 1], if not every sample is one piece.
        self._firsts: NDArray[np.int64] | None = None
        if not len(sizes) or sizes.min() < 1 or sizes.max() > self.length:
            sizes = self._cut(long)
        if not 0 < len(sizes) <= MOST_ITEMS:
            raise ValueError(
                f"expected 1 to {MOST_ITEMS:,} samples or pieces with tokens, found {len(sizes):,}"
            )
        self._pieces, self._begins = best_fit(sizes, self.length, integer("seed", seed))
        needed = int(np.diff(self._begins).max())
        self.max_segments = (
            self.length if max_segments is None else integer("max_segments", max_segments)
        )
        if self.max_segments < needed:
            raise ValueError(
                f"max_segments must be {needed} or more, for the fullest row, got {max_segments}"
            )
        self.useful_share = int(sizes.sum(dtype=np.int64)) / (len(self) * self.length)
        hashed = blake2b(self._planned.data, digest_size=8)
        inner = set_id_of(dataset)
        hashed.update(repr((inner, self.length, key, self.also, long, pad, int(seed))).encode())
        self.set_id = hashed.hexdigest()

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __repr__(self) -> str:
        return f"Packed({len(self)} rows of {self.length} tokens, {self.useful_share:.1%} of them useful)"

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        row = operator.index(row)
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {self!r}: expected 0 to {len(self) - 1}")
        sample = self.empty_sample()
        try:
            self._fill(row, {name: leaf.numpy() for name, leaf in sample.items()})
        except Exception as error:
            error.add_note(f"in row {row} of {self!r}")
            raise
        return sample

    def empty_sample(self) -> dict[str, Tensor]:
        """Return an empty row; see `fastload.rows`."""
        row = {name: torch.empty(self.length, dtype=torch.int64) for name in ("tokens", *self.also)}
        return row | {
            "segments": torch.empty(self.length, dtype=torch.int32),
            "positions": torch.empty(self.length, dtype=torch.int64),
            "cu_seqlens": torch.empty(self.max_segments + 2, dtype=torch.int32),
        }

    def fill_rows(self, run: Run) -> Sequence[int]:
        """Write the rows of a run into the batch; see `fastload.rows`."""
        rows = as_indices(run.indices, len(self))
        if rows is None:
            return range(len(run))
        leaves = {name: leaf.numpy() for name, leaf in run.rows.items()}
        missing = []
        for k, row in enumerate(rows.tolist()):
            try:
                self._fill(row, {name: leaf[k] for name, leaf in leaves.items()})
            except Exception:  # `__getitem__` raises it again, in its place
                missing.append(k)
        return missing

    @property
    def will_read(self) -> WillRead | None:
        """What tells `dataset` which samples are read soon, or None if it does not listen."""
        inner = will_read_of(self.dataset)
        if inner is None:
            return None
        there = range(len(self))
        return lambda rows: inner(
            [k for row in rows if row in there for k in self._row(row)[1].tolist()]
        )

    def _row(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the pieces of a row, and the sample of each."""
        pieces = self._pieces[self._begins[row] : self._begins[row + 1]].astype(np.int64)
        if self._firsts is None:
            return pieces, pieces
        return pieces, np.searchsorted(self._firsts, pieces, side="right") - 1

    def _fill(self, row: int, into: Mapping[str, NDArray[Any]]) -> None:
        """Write a row."""
        pieces, samples = self._row(row)
        starts = np.zeros_like(pieces)
        if self._firsts is not None:
            starts = (pieces - self._firsts[samples]) * self.length
        planned = self._planned[samples]
        sizes = np.minimum(planned - starts, self.length)
        ends = np.cumsum(sizes)
        used, count = int(ends[-1]), len(pieces)
        into["segments"][:used] = np.repeat(np.arange(1, count + 1), sizes)
        into["positions"][:used] = np.arange(used) - np.repeat(ends - sizes, sizes)
        cu_seqlens = into["cu_seqlens"]
        cu_seqlens[0], cu_seqlens[1 : count + 1], cu_seqlens[count + 1 :] = 0, ends, self.length
        for name, fill in {"tokens": self.pad, "segments": 0, "positions": 0, **self.also}.items():
            into[name][used:] = fill
        read = zip(samples.tolist(), self._read(samples.tolist()), planned.tolist(), strict=True)
        places = zip(starts.tolist(), ends.tolist(), sizes.tolist(), strict=True)
        for (index, sample, expected), (start, end, size) in zip(read, places, strict=True):
            for name, key in (("tokens", self.key), *zip(self.also, self.also, strict=True)):
                ids = self._ids(index, sample, key)
                if len(ids) != expected:
                    raise SequenceError(
                        f"sample {index}{_at(key)}: planned were {expected} tokens, found {len(ids)}. Give the lengths "
                        "that the samples have now, or find out why they change"
                    )
                into[name][end - size : end] = ids[start : start + size]

    def _read(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]

    def _ids(self, index: int, sample: Any, key: Any) -> NDArray[Any]:
        """Return the tokens of a sample, or other values beside them."""
        if isinstance(sample, Mapping) and key not in sample:
            raise KeyError(f"sample {index}: expected key to be one of {[*sample]}, got {key!r}")
        ids = np.asarray(sample if key is None else sample[key])
        if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
            raise TypeError(
                f"sample {index}{_at(key)}: expected integers in one dimension, found {ids.dtype}{[*ids.shape]}"
            )
        return ids

    def _length(self, index: int) -> int:
        """Return the number of tokens of a sample, which it reads."""
        return len(self._ids(index, self._read([index])[0], self.key))

    def _cut(self, long: str) -> NDArray[Any]:
        """Cut the samples into pieces. Return the length of each piece."""
        planned, length = self._planned, self.length
        if long == "error" and len(planned) and planned.max() > length:
            index = int(np.argmax(planned > length))
            raise ValueError(
                f'sample {index} has {planned[index]} tokens, but rows have {length}. Pass long="split" or "truncate"'
            )
        counts = -(-planned // length) if long == "split" else np.minimum(planned, 1)
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        there = counts > 0
        sizes = np.full(int(self._firsts[-1]), length, np.int32)
        rest = planned[there] - (counts[there] - 1) * length  # of the last piece
        sizes[self._firsts[1:][there] - 1] = np.minimum(rest, length)
        return sizes


def _at(key: Any) -> str:
    return "" if key is None else f", key {key!r}"
