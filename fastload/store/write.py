"""`put`: make a set from data."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from fastload.datasets.manifest import Index, Shard, described, shard_name
from fastload.store.columns import naming, record_batch
from fastload.store.parts import write_part
from fastload.store.root import locate, seal, unsealed


def put(
    data: Any,
    name: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    checksums: bool | None = None,
    classes: Iterable[str] = (),
    made: Mapping[str, Any] | None = None,
    client: Any = None,
) -> str:
    """Make a set of `data` under `name`, whole or not at all. Return its id.

    Args:
        data: one of these, see below: columns, an iterable of columns, or a Dask collection.
        name: 1 to 128 letters, digits and `_.+=-`, or a path whose last part is such a name.
        root: the folder of the sets, if `name` is not a path. None: $FASTLOAD_STORE, or a folder in shared memory.
        checksums: store a CRC-32 of each part, for `fastload set verify` and copying. None: if `root` is on a disk.
        classes: class names in the order of their numbers.
        made: how the set was made, as JSON values.
        client: client of Dask. Its workers write equal numbers of partitions, the first worker by name the first ones,
            into the root of their own node ($FASTLOAD_STORE there). None: the current client. Without one, the
            partitions are computed here.

    Forms of `data`:

    - One part: a mapping of names to tensors, arrays or lists of the same length; an Arrow record batch or table; or a
      frame of pandas.
    - An iterable of these: one part each.
    - Dask: a frame, an array, a bag, a mapping of names to arrays with the same chunks, or a list of delayed parts. It
      has one part per partition. An array alone is the column "data", and the rows of a bag are mappings.
    - A file, as its own library reads it: `pyarrow.parquet.ParquetFile(path).iter_batches()` is an iterable of batches,
      and `numpy.load("a.npz")` a mapping.

    A column has one row per sample. All rows have the same shape and dtype, and no row is missing. Memory: one part.

    After an error, no files are left.

    Returns:
        The id of the set.

    Raises:
        FileExistsError: the name is taken.
        StoreFullError: there is no room.
        TypeError, ValueError: columns cannot be stored. The message has the part, the column and the row.

    Examples:
        >>> id = fastload.store.put({"x": torch.zeros(10, 3), "y": torch.arange(10)}, "numbers")
        >>> len(fastload.store.get("numbers"))
        10
    """
    if is_dask(data):
        from fastload.store.dask import current_client, local_parts

        if client := current_client(client):
            from fastload.store.dask_put import DaskPut

            with DaskPut(client, name, root, checksums) as workers:
                index = index_of(*workers.write(data), classes=classes, made=made)
                workers.seal(index)
            return index.id
        data = local_parts(data)
    path, name = locate(name, root)
    shards: list[Shard] = []
    schema: pa.Schema | None = None
    with unsealed(path, name) as folder:
        for part in parts_of(data):
            batch = _checked(part, schema, number=len(shards))
            schema = batch.schema
            file = os.path.join(folder, shard_name(len(shards)))
            if batch.num_rows:
                shards.append(write_part(file, batch, checksums))
        if schema is None or not shards:
            raise ValueError(f"{name}: all parts are empty. Give data with rows")
        index = index_of(shards, schema, classes=classes, made=made)
        seal(folder, path, name, index)
    return index.id


def index_of(
    shards: Iterable[Shard],
    schema: pa.Schema,
    *,
    classes: Iterable[str] = (),
    made: Mapping[str, Any] | None = None,
) -> Index:
    """Return the index of parts. Its id is a function of the parts' bytes if they have checksums, random if not."""
    shards = tuple(shards)
    content = [(shard.rows, shard.bytes, shard.checksum) for shard in shards]
    if all(shard.checksum is not None for shard in shards):
        text = repr((described(schema), content)).encode()
        name = f"{zlib.crc32(text):08x}{zlib.adler32(text):08x}"
    else:
        name = secrets.token_hex(8)
    rows, classes = sum(shard.rows for shard in shards), tuple(classes)
    if others := [name for name in classes if not isinstance(name, str)]:
        raise TypeError(f"classes must be names, got {others[0]!r}")
    return Index("columns", rows, classes, described(schema), dict(made or {}), shards, name)


def is_dask(data: Any) -> bool:
    """Return True if `data` is a Dask collection, or contains some. Imports nothing."""
    if isinstance(data, Mapping):
        data = list(data.values())
    some = data if isinstance(data, list | tuple) else [data]
    return any(hasattr(type(one), "__dask_graph__") for one in some)


def parts_of(data: Any) -> Iterator[Any]:
    """Yield the parts of the data that `put` is given."""
    # A path is no part either, and the error says so.
    whole = Mapping | pa.Table | pa.RecordBatch | str | os.PathLike
    if isinstance(data, whole) or hasattr(data, "to_dict"):
        yield data
    else:
        yield from data


def _checked(part: Any, schema: pa.Schema | None, *, number: int) -> pa.RecordBatch:
    """Return a part as a record batch of the schema that the first one has."""
    with naming(f"part {number}"):
        batch = record_batch(part)
    if schema is not None and not batch.schema.equals(schema, check_metadata=True):
        raise ValueError(
            f"part {number} has the columns {described(batch.schema)}, but part 0 has {described(schema)}"
        )
    return batch
