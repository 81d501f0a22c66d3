"""`ParquetDataset`: the rows of Parquet files, by position. Needs the extra `arrow`.

`row_groups` reads and caches row groups. `arrow_columns` converts their columns to tensors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from glob import glob
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from fastload.errors import FastloadError, ParquetError, needs

try:
    import pyarrow as pa
except ModuleNotFoundError as error:
    raise needs("ParquetDataset", "pyarrow", "arrow", error) from error

from fastload._kit.integers import as_indices
from fastload.datasets.arrow_columns import Column, decoded
from fastload.datasets.row_groups import ParquetPart, RowGroup, RowGroupCache
from fastload.datasets.sample_columns import SampleColumns
from fastload.reading.rows import Gatherer
from fastload.rows import Run


class ParquetDataset(Dataset[Any]):
    """The rows of Parquet files as a map-style dataset. Row `i` is always the same row, in the order of the files.

    Args:
        path: a file; a folder, whose `*.parquet` files are read in the order of their names; or a list of files. All
            must have the same columns, of the same types.
        columns: the column, or columns, of a sample. One name: a sample is its value. Several: a tuple of values.
            None: a dict of all columns but that of `label`. Other columns are not read.
        label: the column that follows them: a sample is `(data, label)`.
        cache_bytes: bytes of decoded row groups to cache (default 256 MiB). The newest one always stays.

    A number or bool becomes a tensor of the column's dtype, without dimensions. Fixed-shape tensors and lists of fixed
    size become tensors of their shape, and other lists of numbers become tensors of one dimension. Strings and bytes
    are Python values. Other types, such as timestamps and decimals, raise TypeError. If the lists of a column vary in
    length, torch's collate raises its own error: pass a `collate_fn`.

    A sample that is null, or has a null in it, raises `ParquetError` when it is read. To leave rows out, take a
    `torch.utils.data.Subset` of the others.

    Cost: the constructor reads all footers. Reading one row decodes its row group, in 8 workers at most 8 at once, and
    caches it. Threads share the cache; processes do not. So read in order, or with row groups small enough for
    `cache_bytes`. A full shuffle of a set larger than `cache_bytes` decodes a row group for nearly every row. Shuffle
    by windows instead, with `RankSampler(window=, run=)` and a `run` of about a row group, or put the rows into mapped
    memory once, with `fastload.store.put(pyarrow.parquet.ParquetFile(path).iter_batches(), name)`.

    The dataset can be pickled, copied and used after a fork: no file stays open. Flipped bits are certain to be found
    only if the file has page checksums (`write_page_checksum=True`).

    Attributes:
        files: the files, in order.
        schema: names and types of all columns, a `pyarrow.Schema`.
        columns, label: the arguments.
        set_id: hash of the files' names, sizes and footers. A loader's state contains it.

    Raises:
        FileNotFoundError: `path` has no such file.
        ParquetError: a file cannot be read, has other columns or is replaced later.
        KeyError: a column is unknown.
        TypeError: a column has an unsupported type.

    Examples:
        >>> import pyarrow, pyarrow.parquet
        >>> table = pyarrow.table({"x": [0.5, 1.5], "y": [0, 1]})
        >>> pyarrow.parquet.write_table(table, "table.parquet")
        >>> fastload.datasets.ParquetDataset("table.parquet", columns="x", label="y")[1]
        (tensor(1.5000, dtype=torch.float64), tensor(1))
    """

    fastload_per_worker = ()

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        columns: str | Sequence[str] | None = None,
        label: str | None = None,
        cache_bytes: int = 256 << 20,
    ) -> None:
        if cache_bytes < 0:
            raise ValueError(f"cache_bytes must be 0 or more, got {cache_bytes}")
        self.files = _files_of(path)
        # The bar appears after 5 s, so a few files show none.
        footers = tqdm(self.files, unit="footer", delay=5, leave=False, disable=None)
        parts = [ParquetPart(file) for file in footers]
        self.schema = _common_schema(parts)
        where = self.files[0] if len(self.files) == 1 else os.path.dirname(self.files[0])
        self._sample = SampleColumns(columns, label, known=self.schema.names, where=where)
        self.columns, self.label = self._sample.data, label
        self._fields = [self.schema.field(name) for name in self._sample.names]
        self._without_rows()  # a type that cannot be read is an error here
        # For each row group of all files: its file, and its number in that file.
        self._groups = [(part, k) for part in parts for k in range(len(part.groups))]
        sizes = [size for part in parts for size in part.groups]
        self._begins = np.cumsum([0, *sizes])  # of each row group, among all rows
        self.set_id = _hash(parts)
        self._cache = RowGroupCache(cache_bytes)
        self._gatherer = Gatherer()

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __repr__(self) -> str:
        files = self.files[0] if len(self.files) == 1 else f"{len(self.files)} files"
        label = "" if self.label is None else f", label {self.label}"
        return f"ParquetDataset({files}: {len(self)} rows, columns {', '.join(self._sample.data_names)}{label})"

    def locate(self, index: int) -> str:
        """Return the file of sample `index`, and its row in the file."""
        row = self._checked([index])[0]
        number = int(np.searchsorted(self._begins, row, side="right")) - 1
        part, group = self._groups[number]
        return f"{part.path}, row {row - self._begins[number] + sum(part.groups[:group])}"

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of `indices`. Each row group is looked up once."""
        samples: list[Any] = [None] * len(indices)
        for number, group, places, local in self._pieces(self._checked(indices)):
            self._refuse_nulls(number, group, local)
            rows = local.tolist()
            columns = {name: column.rows(rows) for name, column in group.items()}
            for k, place in enumerate(places.tolist()):
                samples[place] = self._sample.sample(
                    {name: values[k] for name, values in columns.items()}
                )
        return samples

    def empty_sample(self) -> Any:
        """Return an empty sample, or None if samples cannot be filled in runs; see `fastload.rows`.

        A list without a fixed length is assumed to be as long as the first row's. Samples with others are read singly.
        """
        columns = self._without_rows()
        values = {name: column.values for name, column in columns.items()}
        if not len(self) or not all(isinstance(each, Tensor) for each in values.values()):
            return None
        if all(column.offsets is None for column in columns.values()):
            empty = {name: each.new_empty(each.shape[1:]) for name, each in values.items()}
            return self._sample.sample(empty)
        try:
            return self[0]
        except (FastloadError, OSError):
            return None  # the error is raised when the first sample is read

    def _without_rows(self) -> RowGroup:
        """Return the columns without rows. Not kept: torch cannot pickle tensors of some dtypes, such as uint16."""
        return {f.name: decoded(f, pa.chunked_array([pa.nulls(0, f.type)])) for f in self._fields}

    def fill_rows(self, run: Run) -> Sequence[int]:
        """Copy the rows of a run into the batch; see `fastload.rows`."""
        found = as_indices(run.indices, len(self))
        if found is None:
            return range(len(run))
        leaves = self._sample.leaves(run.rows)
        done = np.zeros(len(run), bool)
        try:
            for _, group, places, local in self._pieces(found):
                done[places] = True
                for name, out in leaves:
                    done[places] &= self._fill(group[name], out, places, local)
        except (FastloadError, OSError):
            pass  # reading the missing samples raises it again
        missing: list[int] = np.flatnonzero(~done).tolist()
        return missing

    def _fill(
        self, column: Column, out: Tensor, places: NDArray[np.int64], local: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Copy the rows `local` of a row group to `out[places]`. Return a mask of those that could be copied."""
        there = np.ones(len(local), bool) if column.valid is None else column.valid[local]
        if column.offsets is not None:
            begins, ends = column.offsets[local], column.offsets[local + 1]
            there &= ends - begins == out.shape[1]
            for place, begin, end in zip(places[there], begins[there], ends[there], strict=True):
                out[place] = column.values[begin:end]
        elif len(places) == len(out):
            self._gatherer.gather(column.values, local, out)
        else:
            # In NumPy: each small torch call would release the GIL, and workers would mostly wait for it.
            out.numpy()[places] = column.values.numpy()[local]
        return there

    def _checked(self, indices: Sequence[int]) -> NDArray[np.int64]:
        found = as_indices(indices, len(self))
        if found is None:
            raise IndexError(
                f"{indices!r:.100} of {self!r}: expected indices from 0 to {len(self) - 1}"
            )
        return found

    def _pieces(
        self, indices: NDArray[np.int64]
    ) -> Iterator[tuple[int, RowGroup, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield for each row group of `indices`: its number, the group, positions in `indices`, rows in the group."""
        numbers = np.searchsorted(self._begins, indices, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        for places in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            if len(places):
                number = int(numbers[places[0]])
                yield number, self._group(number), places, indices[places] - self._begins[number]

    def _group(self, number: int) -> RowGroup:
        def read() -> RowGroup:
            part, group = self._groups[number]
            return part.read(group, self._sample.names)

        return self._cache.get(number, read)

    def _refuse_nulls(self, number: int, group: RowGroup, local: NDArray[np.int64]) -> None:
        for name, column in group.items():
            if column.valid is not None and not column.valid[local].all():
                index = int(self._begins[number] + local[~column.valid[local]][0])
                raise ParquetError(
                    f"{self.locate(index)}, column {name!r}: expected a value, found null. Replace it in the file, or "
                    "leave such rows out with a torch.utils.data.Subset"
                )


def _files_of(path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return the absolute paths of the files: the working directory may change before they are opened."""
    if not isinstance(path, str | os.PathLike):
        files = [os.path.abspath(file) for file in path]
    elif os.path.isdir(path := os.path.abspath(path)):
        files = [os.path.join(path, name) for name in sorted(glob("*.parquet", root_dir=path))]
        if not files:
            raise FileNotFoundError(f"{path}: the folder has no *.parquet files")
    else:
        files = [path]
    if not files:
        raise ValueError("path: expected a file, a folder or a list of files, got an empty list")
    return files


def _common_schema(parts: Sequence[ParquetPart]) -> pa.Schema:
    """Return the columns that all files have. Raises ParquetError, which names the file and column that differ."""
    first = parts[0]
    if twice := [name for name in first.schema.names if first.schema.names.count(name) > 1]:
        raise ParquetError(f"{first.path}: two columns have the name {twice[0]!r}. Rename one")
    expected = {field.name: field.type for field in first.schema}
    for part in parts[1:]:
        found = {field.name: field.type for field in part.schema}
        for name in [*expected, *found]:
            if expected.get(name) != found.get(name) or len(found) < len(part.schema.names):
                raise ParquetError(
                    f"{part.path}: column {name!r} {_typed(found.get(name))}, but {_typed(expected.get(name))} in "
                    f"{first.path}. Give all files the same columns, with the same types"
                )
    return first.schema


def _typed(kind: pa.DataType | None) -> str:
    return "is missing" if kind is None else f"has type {kind}"


def _hash(parts: Sequence[ParquetPart]) -> str:
    shapes = [(os.path.basename(part.path), part.identity[2], part.footer) for part in parts]
    # None: the dataset had filters once, and the states of that time are to be loaded.
    text = repr((shapes, [(field.name, str(field.type)) for field in parts[0].schema], None))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
