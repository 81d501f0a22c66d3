"""`TokenWindows`: windows of a long stream of tokens in flat binary files."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from fastload._kit.integers import as_indices, integer
from fastload.errors import SequenceError
from fastload.remote.files import announce, root_of, store_of
from fastload.rows import Run
from fastload.sequences.packed import Packed
from fastload.sequences.token_files import OpenFile, parts_of

Path = str | os.PathLike[str]
MOST_OPEN = 64  # files of a dataset


class TokenWindows(Dataset[dict[str, Tensor]]):
    """Windows of `length` tokens, and the tokens that follow them, as nanoGPT and Megatron-LM take them.

    Window `i` of a file has its tokens from `i * length` to `i * length + length`. Windows never cross files. What
    is left at the end of a file, with fewer than `length + 1` tokens, is in no window. A sample is a dict of tensors:

    - `tokens`, int64[length].
    - `targets`, int64[length]: the next token for each of them.
    - with `end`, `segments`, int32[length]: the number of the document in the window, from 1 on. A marker belongs to
      the document that it ends.
    - with `end`, `positions`, int64[length]: the place of each token in its document, from 0 at the beginning of the
      window and after each marker.

    Files are read by position with the GIL released, not mapped: a file that is cut off is an error, and no SIGBUS.
    They are opened when they are needed. The dataset can be shared between threads, pickled, copied, and used after a
    fork. Windows at URLs are read by the batch, and neighbours by one request.

    Args:
        files: a file or its URL, or several in order. Names that end in `.npy` are NumPy files of one dimension. All
            others have the bytes of the tokens, and nothing else.
        length: tokens of a window.
        dtype: the dtype of the tokens in files that are not NumPy's, such as "uint16": one for all, or a sequence with
            one for each file.
        end: the token that ends each document.

    At most 64 files are open at once.

    Attributes:
        files, length, end: the arguments; files as absolute paths or URLs.
        left_out: the number of tokens that are in no window, neither as a token nor as a target.
        set_id: hash of the files' names, sizes and dtypes, and of the arguments. A loader's state contains it.

    Raises:
        ValueError: an argument is out of range, a dtype is not of integers, or cannot hold `end`.
        OSError: a file cannot be read.
        SequenceError: a file is empty, is not of whole tokens, is not a NumPy file as its name says, or changed since
            the dataset was created.

    Examples:
        >>> from fastload.sequences import TokenWindows
        >>> np.save("tokens.npy", np.arange(100, dtype=np.uint16))
        >>> TokenWindows("tokens.npy", length=8)[1]["targets"]
        tensor([ 9, 10, 11, 12, 13, 14, 15, 16])
    """

    fastload_per_worker = ()

    def __init__(
        self,
        files: Path | Sequence[Path],
        length: int,
        *,
        dtype: Any = None,
        end: int | None = None,
    ) -> None:
        given = [files] if isinstance(files, str | os.PathLike) else [*files]
        if integer("length", length) < 1 or not given:
            raise ValueError(
                f"expected length of 1 or more and a file or several, got {length=} and {files=}"
            )
        self.length, self.end = int(length), None if end is None else integer("end", end)
        self._parts = parts_of(given, _dtypes(given, dtype))
        self._roots = {root_of(part.path) for part in self._parts if part.is_remote}
        for part in self._parts:
            limits = np.iinfo(part.dtype)
            if self.end is not None and not limits.min <= self.end <= limits.max:
                raise ValueError(
                    f"end must be a token that {part.dtype} can hold, the dtype of {part.path}, got {self.end}"
                )
        self.files = [part.path for part in self._parts]
        windows = [(part.tokens - 1) // self.length for part in self._parts]
        self._ends = [*accumulate(windows)]
        used = sum(self.length * count + 1 for count in windows if count)
        self.left_out = sum(part.tokens for part in self._parts) - used
        if not len(self):
            raise ValueError(
                f"no file has {self.length + 1} tokens, which a window of length {self.length} and its targets need"
            )
        about = [(os.path.basename(part.path), part.tokens, part.dtype.str) for part in self._parts]
        text = repr((about, self.length, self.end))
        self.set_id = blake2b(text.encode(), digest_size=8).hexdigest()
        self.close()

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        # Part `k` is at place `k % len(self._open)`. A thread that is reading holds its file.
        self._open: list[OpenFile | None] = [None] * min(MOST_OPEN, len(self._parts))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": [None] * len(self._open)}

    def __len__(self) -> int:
        return self._ends[-1]

    def __repr__(self) -> str:
        files = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        return f"TokenWindows({files}: {len(self)} windows of {self.length} tokens)"

    def locate(self, index: int) -> str:
        """Return the file of window `index`, and its first token there."""
        part, first = self._place(index)
        return f"{self._parts[part].path}, token {first}"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = operator.index(index)
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {self!r}: expected 0 to {len(self) - 1}")
        sample = self.empty_sample()
        rows = {name: leaf.numpy()[None] for name, leaf in sample.items()}
        self._fill(index, rows, 0, self._fetch([index]).get(0))
        self._mark(rows)
        return sample

    def empty_sample(self) -> dict[str, Tensor]:
        """Return an empty window; see `fastload.rows`."""
        names = ["tokens", "targets"]
        if self.end is not None:
            names += ["segments", "positions"]
        return {
            name: torch.empty(self.length, dtype=torch.int32 if name == "segments" else torch.int64)
            for name in names
        }

    def fill_rows(self, run: Run) -> Sequence[int]:
        """Write the windows of a run into the batch; see `fastload.rows`."""
        windows = as_indices(run.indices, len(self))
        if windows is None:
            return range(len(run))
        rows = {name: leaf.numpy() for name, leaf in run.rows.items()}
        missing = []
        indices = windows.tolist()
        try:
            fetched = self._fetch(indices)
        except (SequenceError, OSError):
            return range(len(run))  # read one by one, those that fail raise
        for k, index in enumerate(indices):
            try:
                self._fill(index, rows, k, fetched.get(k))
            except (SequenceError, OSError):
                missing.append(k)  # `__getitem__` raises it again, in its place
        self._mark(rows)
        return missing

    def _mark(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Write what says where documents begin, from the tokens of windows."""
        if self.end is None:
            return
        first = np.zeros((len(rows["tokens"]), self.length), np.bool_)  # of its document
        first[:, 0] = True
        np.equal(rows["tokens"][:, :-1], self.end, out=first[:, 1:])
        np.cumsum(first, axis=1, out=rows["segments"])
        places = np.arange(self.length)
        begins = np.maximum.accumulate(np.where(first, places, 0), axis=1)
        np.subtract(places, begins, out=rows["positions"])

    def _place(self, index: int) -> tuple[int, int]:
        """Return the part of a window, and its first token there."""
        part = bisect_right(self._ends, index)
        return part, (index - (self._ends[part - 1] if part else 0)) * self.length

    @property
    def will_read(self) -> Callable[[Sequence[int]], None] | None:
        """Begins to read the windows of samples that are at URLs, or None if all are in local files.

        fastload's loader calls it with the indices of the batches that its workers will read soon. An empty list
        forgets what was begun.
        """
        return self._begin if self._roots else None

    def _begin(self, indices: Sequence[int]) -> None:
        wanted = self._remote_spans(indices).values()
        announce(wanted, self._roots, ends=not len(indices), owner=id(self))

    def _remote_spans(self, indices: Sequence[int]) -> dict[int, tuple[str, int, int]]:
        """Return URL, begin and end of each window that is at a URL, by its place in `indices`."""
        places = ((k, *self._place(index)) for k, index in enumerate(indices))
        return {
            k: (part.path, *part.span(first, self.length + 1))
            for k, number, first in places
            if (part := self._parts[number]).is_remote
        }

    def _fetch(self, indices: Sequence[int]) -> dict[int, bytes]:
        """Return the bytes of windows that are at URLs, read together, by their places in `indices`."""
        if not self._roots:
            return {}
        wanted, found = self._remote_spans(indices), dict[int, bytes]()
        for root in self._roots:
            here = {k: span for k, span in wanted.items() if span[0].startswith(root)}
            found.update(zip(here, store_of(root).read_many(here.values()), strict=True))
        for number in {self._place(indices[k])[0] for k in wanted}:
            self._parts[number].check_object()
        return found

    def _fill(
        self, index: int, rows: Mapping[str, NDArray[Any]], k: int, found: bytes | bytearray | None
    ) -> None:
        """Write the tokens of a window, and those that follow them, into row `k`. `found`: its bytes, if fetched."""
        number, first = self._place(index)
        part, place = self._parts[number], number % len(self._open)
        if found is None:
            file = self._open[place]
            if file is None or file.part is not part:
                self._open[place] = file = OpenFile(part)
            found = file.read(*part.span(first, self.length + 1))
        ids = np.frombuffer(found, part.dtype)
        rows["tokens"][k], rows["targets"][k] = ids[:-1], ids[1:]


def check_rows(sources: Mapping[str, Any]) -> None:
    """Raise ValueError if packed rows or windows of two sources have other keys or shapes."""
    shapes = {
        name: {key: (*leaf.shape,) for key, leaf in source.empty_sample().items()}
        for name, source in ((name, _whole(source)) for name, source in sources.items())
        if isinstance(source, Packed | TokenWindows)
    }
    for (one, its), (other, theirs) in pairwise(shapes.items()):
        if its != theirs:
            apart = dict(its.items() - theirs.items()), dict(theirs.items() - its.items())
            raise ValueError(
                f"rows of sources {one!r} and {other!r} do not fit into one batch: {apart[0]} beside {apart[1]}. Give "
                "both the same length, max_segments and also. Packed and TokenWindows have other keys"
            )


def _whole(source: Any) -> Any:
    return _whole(source.dataset) if isinstance(source, Subset) else source


def _dtypes(files: Sequence[Path], given: Any) -> Sequence[Any]:
    """Return the dtype of each file, or None."""
    if isinstance(given, list | tuple):
        if len(given) != len(files):
            raise ValueError(f"expected {len(files)} dtypes, one for each file, got {len(given)}")
        return given
    return [given] * len(files)
