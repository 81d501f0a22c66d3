"""`TokenWindows`: windows of a long stream of tokens in flat binary files."""

from __future__ import annotations

import operator
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, pairwise
from tokenize import TokenError
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from fastload._kit.disk import Descriptor, identity, open_file, preadv
from fastload._kit.integers import as_indices, integer
from fastload.errors import SequenceError
from fastload.rows import Run
from fastload.sequences.packed import Packed

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
    fork.

    Args:
        files: a file, or several in order. Names that end in `.npy` are NumPy files of one dimension. All others have
            the bytes of the tokens, and nothing else.
        length: tokens of a window.
        dtype: the dtype of the tokens in files that are not NumPy's, such as "uint16": one for all, or a sequence with
            one for each file.
        end: the token that ends each document.

    At most 64 files are open at once.

    Attributes:
        files, length, end: the arguments; files as absolute paths.
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
        kinds = zip(map(os.path.abspath, given), _dtypes(given, dtype), strict=True)
        self._parts = [_part(path, kind) for path, kind in kinds]
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
        self._open: list[_OpenFile | None] = [None] * min(MOST_OPEN, len(self._parts))

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
        self._fill(index, rows, 0)
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
        for k, index in enumerate(windows.tolist()):
            try:
                self._fill(index, rows, k)
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

    def _fill(self, index: int, rows: Mapping[str, NDArray[Any]], k: int) -> None:
        """Write the tokens of a window, and those that follow them, into row `k`."""
        number, first = self._place(index)
        part, place = self._parts[number], number % len(self._open)
        file = self._open[place]
        if file is None or file.part is not part:
            self._open[place] = file = _OpenFile(part)
        size = part.dtype.itemsize
        found = file.read((self.length + 1) * size, part.offset + first * size)
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


class _Part(NamedTuple):
    """A file of tokens. `identity` tells if it is replaced, and `offset` is the byte of its first token."""

    path: str
    identity: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    tokens: int


class _OpenFile(Descriptor):
    """An open file of tokens."""

    def __init__(self, part: _Part) -> None:
        self.part = part
        super().__init__(os.open(part.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        if identity(self.fd) != part.identity:
            raise self._changed()

    def read(self, size: int, begin: int) -> bytearray:
        """Return the bytes of the file from `begin` on."""
        found = bytearray(size)
        try:
            if preadv(self.fd, memoryview(found), begin) < size:
                raise self._changed()
        except OSError as error:
            error.filename = self.part.path  # unlike open(), a read does not name it
            raise
        return found

    def _changed(self) -> SequenceError:
        now = os.fstat(self.fd).st_size
        return SequenceError(
            f"{self.part.path}: the file was cut off, replaced or changed since the dataset was created. The file has "
            f"{now:,} bytes now, and had {self.part.identity[2]:,} then. Create the dataset again"
        )


def _part(path: str, dtype: Any) -> _Part:
    """Return a file of tokens, which must be of whole tokens."""
    offset, kind, count = 0, None if dtype is None else _integers(path, dtype), 0
    with open_file(path) as file:
        found = identity(file.fileno())
        if path.endswith(".npy"):
            try:
                old = npy.read_magic(file) == (1, 0)
                header = npy.read_array_header_1_0 if old else npy.read_array_header_2_0
                (count,), _, stored = header(file)
            except (ValueError, SyntaxError, TokenError) as error:
                raise SequenceError(
                    f"{path}: expected a NumPy file of one dimension: {error}"
                ) from error
            if kind not in (None, stored):
                raise ValueError(f"{path}: dtype is {kind}, but the file has {stored}")
            offset, kind = file.tell(), _integers(path, stored)
    if kind is None:
        raise ValueError(f'{path}: expected the dtype of its tokens: pass dtype, such as "uint16"')
    size = found[2] - offset
    if not size or size % kind.itemsize or (count or size // kind.itemsize) * kind.itemsize != size:
        expected = f"{count:,} tokens" if count else "tokens"
        raise SequenceError(
            f"{path}: expected {expected} of {kind.itemsize} bytes each ({kind}), found {size:,} bytes"
        )
    return _Part(path, found, kind, offset, size // kind.itemsize)


def _integers(path: str, dtype: Any) -> np.dtype[Any]:
    """Return a dtype. Raises ValueError unless it is one of integers."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"{path}: dtype {dtype!r} is unknown: {error}") from error
    if found.kind not in "iu":
        raise ValueError(f"{path}: expected a dtype of integers, found {found}")
    return found


def _dtypes(files: Sequence[Path], given: Any) -> Sequence[Any]:
    """Return the dtype of each file, or None."""
    if isinstance(given, list | tuple):
        if len(given) != len(files):
            raise ValueError(f"expected {len(files)} dtypes, one for each file, got {len(given)}")
        return given
    return [given] * len(files)
