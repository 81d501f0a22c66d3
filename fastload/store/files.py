"""Files whose rows can be put into a set: Parquet, Arrow and NumPy. Their first bytes show their kind."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from fastload.datasets.manifest import described
from fastload.store.columns import record_batch

_NPY = b"\x93NUM"


def parts_of_files(
    paths: Iterable[str | os.PathLike[str]], columns: Sequence[str] = ()
) -> Iterator[pa.RecordBatch]:
    """Yield the parts of files, with only `columns` if any are named.

    A Parquet file has one part per row group, and an Arrow file one per record batch. An `.npz` file is one part, with
    its arrays as the columns. All `.npy` files together are one part, with one column per file, named after the file.

    Raise ValueError, which names the file, if it is of another kind, damaged, or lacks a column. Raise it also if the
    file has a column that a set cannot store, or other columns than the files before it.
    """
    schema, first = None, ""
    for path, part in _parts([os.fspath(path) for path in paths], columns):
        with _naming(path):
            batch = record_batch(_chosen(part, columns))
            if schema is None:
                schema, first = batch.schema, path
            if not batch.schema.equals(schema, check_metadata=True):
                raise ValueError(
                    f"the columns are {described(batch.schema)}, but those of {first} are {described(schema)}"
                )
        yield batch


def _parts(paths: Iterable[str], columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each part with the path of its file."""
    arrays: dict[str, Any] = {}
    last = ""
    for path in paths:
        with open(path, "rb") as file:
            begin = file.read(4)
        with _naming(path):
            if begin != _NPY:
                if begin not in _READERS:
                    raise ValueError(
                        f"is not a Parquet, Arrow, .npy or .npz file: it begins with {begin!r}"
                    )
                for part in _READERS[begin](path, columns):
                    yield path, part
                continue
            name = os.path.basename(path).removesuffix(".npy")
            if name in arrays:
                raise ValueError(
                    f"another file has the column {name!r} already. Rename one of them"
                )
            # Private, not read-only, because torch warns about read-only memory.
            arrays[name], last = np.load(path, mmap_mode="c"), path
    if arrays:
        yield last, arrays


@contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the name of the file to errors of the block."""
    try:
        yield
    except Exception as error:
        # The readers of damaged files raise errors of many kinds, Arrow an OSError without a number.
        if not isinstance(error, OSError) or error.errno is None:
            raise ValueError(f"{path}: {error}") from error
        error.filename = error.filename or path
        raise


def _row_groups(path: str, columns: Sequence[str]) -> Iterator[pa.Table]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        _expect(columns, file.schema_arrow.names)
        for number in range(file.num_row_groups):
            yield file.read_row_group(number, columns=list(columns) or None)


def _batches(path: str, _: Sequence[str]) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(_mapped(path))
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


def _batches_of_stream(path: str, _: Sequence[str]) -> Iterator[pa.RecordBatch]:
    yield from pa.ipc.open_stream(_mapped(path))


def _mapped(path: str) -> pa.Buffer:
    with open(path, "rb") as file:
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _arrays(path: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    # Opened here, because NumPy does not close a file that is not an archive.
    with open(path, "rb") as opened, np.load(opened) as file:
        _expect(columns, file.files)
        arrays = {name: file[name] for name in columns or file.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ValueError(f"is not an .npz file: {name} in it is not an array")
    yield arrays


def _chosen(part: Any, columns: Sequence[str]) -> Any:
    """Return a part with only `columns`, in their order; all if none are named."""
    if not columns:
        return part
    names = list(part) if isinstance(part, Mapping) else part.schema.names
    _expect(columns, names)
    if isinstance(part, Mapping):
        return {name: part[name] for name in columns}
    return part.select(list(columns))


def _expect(columns: Sequence[str], names: Sequence[str]) -> None:
    for name in columns:
        if name not in names:
            raise ValueError(f"has no column {name!r}. The columns are {', '.join(names)}")


_READERS: dict[bytes, Any] = {
    b"PAR1": _row_groups,
    b"ARRO": _batches,
    b"\xff\xff\xff\xff": _batches_of_stream,
    b"PK\x03\x04": _arrays,
}
"""Readers by the first bytes of their files."""
