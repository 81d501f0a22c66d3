"""`put`: make a set from data."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import pyarrow as pa
from tqdm import tqdm

from fastload.datasets.manifest import Index, Shard, described, shard_name
from fastload.store.columns import record_batch
from fastload.store.files import parts_of_files
from fastload.store.parts import write_part
from fastload.store.root import in_memory, locate, owner, seal, this_node, unsealed


def put(
    data: Any,
    name: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    checksums: bool | None = None,
    classes: Iterable[str] = (),
    made: Mapping[str, Any] | None = None,
    temporary: bool = False,
    progress: bool = False,
    client: Any = None,
    placement: Literal["spread"] | None = None,
) -> str:
    """Make a set of `data` under `name`, whole or not at all. Return its id.

    Args:
        data: one of these, see below: columns, an iterable of columns, a path or a list of paths, or a Dask collection.
        name: 1 to 128 letters, digits and `_.+=-`, or a path whose last part is such a name.
        root: the folder of the sets, if `name` is not a path. None: $FASTLOAD_STORE, or a folder in shared memory.
        checksums: store a CRC-32 of each part, for `fastload set verify` and copying. None: if `root` is on a disk.
        classes: class names in the order of their numbers.
        made: how the set was made, as JSON values.
        temporary: `fastload set gc` removes the set after this process has ended.
        progress: show a bar on standard error, if that is a terminal. Not for Dask, which has its own.
        client: client of Dask. Each partition is written by the worker that holds it, into the root of the worker's own
            node ($FASTLOAD_STORE there). None: the current client. Without one, the partitions are computed here.
        placement: placement of Dask's partitions. None: on the workers that hold them, or that Dask chooses. "spread":
            evenly, with the first ones on the first worker by name.

    Forms of `data`:

    - One part: a mapping of names to tensors, arrays or lists of the same length; an Arrow record batch or table; or a
      frame of pandas.
    - An iterable of these: one part each.
    - The path of a file, or a list of paths: one part per row group of Parquet, per record batch of Arrow, or per
      `.npz`, with its arrays as the columns. All `.npy` files of the list are one part, with one column each.
    - Dask: a frame, an array, a bag, a mapping of names to arrays with the same chunks, or a list of delayed parts. It
      has one part per partition. An array alone is the column "data", and the rows of a bag are mappings.

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
    made = {**(made or {}), **({"owner": owner()} if temporary else {})}
    if is_dask(data):
        from fastload.store.dask import current_client, local_parts

        if client := current_client(client):
            from fastload.store.dask_put import DaskPut

            with DaskPut(client, name, root, placement, checksums) as workers:
                index = index_of(*workers.write(data), classes=classes, made=made)
                workers.seal(index)
            return index.id
        data = local_parts(data)
    path, name = locate(name, root)
    durable = not in_memory(path)
    checksums = durable if checksums is None else checksums
    node = "" if durable else this_node()
    shards: list[Shard] = []
    schema: pa.Schema | None = None
    with unsealed(path, name) as folder, ExitStack() as stack:
        parts = parts_of(data)
        bar = stack.enter_context(
            tqdm(parts, desc=f"Writing {name}", unit="part", disable=None if progress else True)
        )
        for part in bar:
            batch = _checked(part, schema, number=len(shards))
            schema = batch.schema
            file = os.path.join(folder, shard_name(len(shards)))
            if batch.num_rows:
                shards.append(
                    write_part(file, batch, checksum=checksums, durable=durable, node=node)
                )
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
    if isinstance(data, str | os.PathLike):
        data = [data]
    if isinstance(data, list | tuple) and all(isinstance(one, str | os.PathLike) for one in data):
        yield from parts_of_files(data)
        return
    if isinstance(data, Mapping | pa.Table | pa.RecordBatch) or hasattr(data, "to_dict"):
        yield data
        return
    for part in data:
        if isinstance(part, str | os.PathLike):
            yield from parts_of_files([part])
        else:
            yield part


def _checked(part: Any, schema: pa.Schema | None, *, number: int) -> pa.RecordBatch:
    """Return a part as a record batch of the schema that the first one has."""
    try:
        batch = record_batch(part)
    except (TypeError, ValueError) as error:
        raise type(error)(f"part {number}: {error}") from error
    if schema is not None and not batch.schema.equals(schema, check_metadata=True):
        raise ValueError(
            f"part {number} has the columns {described(batch.schema)}, but part 0 has {described(schema)}"
        )
    return batch
