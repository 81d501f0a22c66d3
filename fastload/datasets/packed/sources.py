"""The inputs of packing: lists and trees of image files, Parquet files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fastload.datasets.image_files import ImageFileList, ImageFiles, ImageFolder
from fastload.errors import FileListError

_ROWS = 64  # rows of a Parquet file that are read at a time


@dataclass(frozen=True)
class Input:
    """One input: its file, or its bytes from a file with many inputs. The set stores `name` as its source."""

    name: str
    label: int
    path: str | None = None
    encoded: Any = None  # the value of a table's image column, of any type
    extras: dict[str, Any] = field(default_factory=dict)


class Files:
    """The images of a file list or of a tree with one directory per class, in a fixed order.

    `columns` are their extra columns.
    """

    def __init__(self, source: str, *, base_dir: str | None) -> None:
        if os.path.isdir(source):
            self._files: ImageFiles = ImageFolder(source)
            base = os.path.expanduser(source)
        else:
            files = ImageFileList(source, base_dir=base_dir)
            self._files, base = files, files.base_dir
        self._base = os.path.join(base, "") if base else ""
        self.classes = self._files.classes
        self.columns: dict[str, pa.DataType] = {}

    def __len__(self) -> int:
        return len(self._files)

    def inputs(self) -> Iterator[Input]:
        """Yield the inputs, in order."""
        for path, label in self._files.samples:
            yield Input(path.removeprefix(self._base), label, path=path)


class Parquet:
    """The rows of Parquet files, in the order of the files' names. It has the attributes of `Files`.

    `paths` are the files, at least one: `source`, or those in it. `named` are the columns: that of the images, that of
    the labels, and others to keep.

    The image column holds bytes, or Hugging Face's struct of `bytes` and `path`. The label column holds integers or
    names. Names become numbers in the order of the sorted names. The names of a Hugging Face class label are read from
    the schema.

    Memory: what pyarrow needs for one column chunk, and 64 rows.
    """

    def __init__(self, source: str, paths: list[str], named: Sequence[str]) -> None:
        self._paths, self._rows = paths, 0
        self._image, self._label, *columns = named
        schema = None
        for path in paths:
            try:
                found = pq.read_metadata(path)
            except UnicodeEncodeError as error:
                raise FileListError(
                    f"Arrow cannot open a Parquet file whose name is not UTF-8. Found {path!r}. Rename it or its folder"
                ) from error
            except pa.ArrowException as error:
                raise FileListError(f"{path}: this is not a Parquet file: {error}") from error
            self._rows += found.num_rows
            arrow = found.schema.to_arrow_schema()
            schema = schema or arrow
            if not arrow.equals(schema):
                raise FileListError(f"{path}: the columns differ from those of {paths[0]}")
        assert schema is not None
        if missing := [name for name in named if name not in schema.names]:
            raise FileListError(
                f"{source}: column {missing[0]!r} does not exist. The columns are {schema.names}"
            )
        self.columns = {name: schema.field(name).type for name in columns}
        self.classes = _class_names(schema, self._label)
        self._numbers = self._numbers_of_names(schema.field(self._label).type, source)

    def _numbers_of_names(self, kind: pa.DataType, source: str) -> dict[str, int] | None:
        """Return the number of each name of a class, or None if labels are numbers. Names become the classes."""
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if pa.types.is_integer(kind):
            return None
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise FileListError(
                f"{source}: column {self._label!r} has type {kind}, expected integers or names"
            )
        names: set[str] = set()
        for path in self._paths:
            found = pq.read_table(path, columns=[self._label]).column(0)
            names.update(pc.unique(found).drop_null().to_pylist())
        self.classes = sorted(names)
        return {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return self._rows

    def inputs(self) -> Iterator[Input]:
        """Yield the inputs, in order."""
        columns = list(dict.fromkeys((self._image, self._label, *self.columns)))
        for path in self._paths:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                batches = file.iter_batches(_ROWS, columns=columns)
                rows = chain.from_iterable(batch.to_pylist() for batch in batches)
                for number, row in enumerate(rows):
                    yield self._input(f"{os.path.basename(path)}:{number}", row)

    def _input(self, name: str, row: dict[str, Any]) -> Input:
        image, label = row[self._image], row[self._label]
        if isinstance(image, dict):
            name, image = image.get("path") or name, image.get("bytes")
        if self._numbers is not None:
            label = self._numbers.get(label)
        extras = {column: row[column] for column in self.columns}
        return Input(name, -1 if label is None else label, encoded=image, extras=extras)


def open_source(source: str, *, base_dir: str | None, named: Sequence[str]) -> Files | Parquet:
    """Return the inputs of a file list, a folder of images, a Parquet file, or a folder of Parquet files.

    `named` are the columns of Parquet files; see `Parquet`. Raises ValueError if there are columns to keep, but no such
    file.
    """
    if paths := _parquet_files(source):
        return Parquet(source, paths, named)
    if named[2:]:
        raise ValueError(f"columns are for Parquet files only, but {source} has none")
    return Files(source, base_dir=base_dir)


def _parquet_files(source: str) -> list[str]:
    """Return the Parquet file `source`, or those in the directory `source`, sorted. Otherwise return an empty list.

    A directory with the name of a Parquet file, as Spark writes it, is read as a directory.
    """
    if not os.path.isdir(source):
        return [source] if source.endswith(".parquet") else []
    paths = (os.path.join(source, name) for name in os.listdir(source) if name.endswith(".parquet"))
    return sorted(path for path in paths if not os.path.isdir(path))


def _class_names(schema: pa.Schema, column: str) -> list[str]:
    """Return the names that Hugging Face's `datasets` stores for a class label, or an empty list."""
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = about["info"]["features"][column]["names"]
    except (KeyError, TypeError, ValueError):
        return []
    return [str(name) for name in names] if isinstance(names, list) else []
