"""`put` of a Dask collection: each partition is written by the worker that holds it, into the root of its node.

    begin   each worker that holds a partition makes a folder ROOT/.unsealed/NAME-TOKEN, and locks it (`_Folder`)
    write   each partition becomes a part, on its worker
    seal    one worker for each root writes the index, which all roots share, and gives the set its name

A `_Folder` is the result of a task. If the put fails, or the client ends, Dask drops it, and the files go with it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import dask
import pyarrow as pa
from dask.delayed import Delayed

from fastload.datasets.manifest import Index, Shard, described, read_index, shard_name
from fastload.errors import PrepareError
from fastload.store.columns import record_batch
from fastload.store.parts import write_part
from fastload.store.root import expect_free, in_memory, locate, remove, seal, this_node


def current_client(client: Any) -> Any:
    """Return `client`, or the current one of `distributed`, or None if there is none."""
    if client is None:
        with suppress(ImportError, ValueError):
            from distributed import get_client

            return get_client()
    return client


def partitions(data: Any) -> list[Delayed]:
    """Return what computes each partition, in order. Text stays what it was: no cell is made a text of Arrow's.

    Raises TypeError for what is no frame, array or bag of Dask, nor a mapping of arrays or a list of delayed parts.
    """
    with dask.config.set({"dataframe.convert-string": False}):
        if isinstance(data, Mapping):
            columns = {str(name): _of_array(array) for name, array in data.items()}
            if len({len(blocks) for blocks in columns.values()}) > 1:
                raise ValueError("all arrays must have the same chunks in dim 0: rechunk them")
            make = dask.delayed(dict, pure=False)
            return [
                make(**dict(zip(columns, blocks, strict=True)))
                for blocks in zip(*columns.values(), strict=True)
            ]
        if isinstance(data, Delayed):
            return [data]
        if isinstance(data, list | tuple):
            return [part if isinstance(part, Delayed) else dask.delayed(part) for part in data]
        if hasattr(data, "chunks"):
            return _of_array(data)
        if hasattr(data, "expr"):
            from dask.dataframe.dask_expr._collection import new_collection

            data = new_collection(_without_conversion(data.expr))
        if not hasattr(data, "to_delayed"):
            raise TypeError(
                f"expected a frame, array or bag of Dask, or delayed parts, got {type(data)}"
            )
        return list(data.to_delayed())


def _of_array(array: Any) -> list[Delayed]:
    whole = array.rechunk(dict.fromkeys(range(1, array.ndim), -1)) if array.ndim > 1 else array
    return list(whole.to_delayed().ravel())


def _without_conversion(expr: Any) -> Any:
    """Return a frame's expression as if `dataframe.convert-string` had been off when it was built.

    With it on, a cell that is an array becomes the text that NumPy prints for it.
    """
    from dask.dataframe.dask_expr._expr import ArrowStringConversion, Expr

    if isinstance(expr, ArrowStringConversion):
        return _without_conversion(expr.frame)
    operands = []
    for name, operand in zip_longest(expr._parameters, expr.operands):
        if name == "pyarrow_strings_enabled":
            operand = False
        operands.append(_without_conversion(operand) if isinstance(operand, Expr) else operand)
    same = all(a is b for a, b in zip(operands, expr.operands, strict=True))
    return expr if same else type(expr)(*operands)


def as_part(part: Any) -> Any:
    """Return a partition as `record_batch` takes it: an array as the column "data", rows of a bag as columns."""
    if hasattr(part, "shape") and not hasattr(part, "columns") and not hasattr(part, "schema"):
        return {part.name: part} if hasattr(part, "to_frame") else {"data": part}
    if isinstance(part, Mapping) or hasattr(part, "columns"):
        return part
    rows = list(part)
    if not all(isinstance(row, Mapping) and list(row) == list(rows[0]) for row in rows):
        raise TypeError("the rows of a bag must be mappings of the same names")
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


def local_parts(data: Any) -> Iterator[Any]:
    """Yield the partitions, each computed here when it is written: there is no client."""
    for number, delayed in enumerate(partitions(data)):
        with dask.config.set({"dataframe.convert-string": False}):
            part = delayed.compute()
        with _about(number):
            yield as_part(part)


class _about:
    """Say in errors which partition it was."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Raise the same error with the partition's number."""
        if isinstance(error, TypeError | ValueError) and not isinstance(error, UnicodeError):
            raise type(error)(f"partition {self.number}: {error}") from error


# ---- on a worker ----


class _Folder:
    """The folder of one put in the root of a worker. It is locked, by all workers that have this root."""

    descriptor = -1

    def __init__(self, name: str, root: str | None, token: str, worker: int) -> None:
        self.root, self.name = locate(name, root)
        expect_free(self.root, self.name)
        self.path = os.path.join(self.root, ".unsealed", f"{self.name}-{token}")
        self.durable = not in_memory(self.root)
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        os.makedirs(self.path, exist_ok=True)
        with open(os.path.join(self.path, f".worker-{worker}"), "wb"):
            pass

    def __reduce__(self) -> Any:
        raise TypeError("the folder of a put stays on its worker")

    def close(self) -> None:
        """Delete what was not sealed, unless another worker still has it too: the last one deletes it."""
        if self.descriptor < 0:
            return
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
            os.unlink(f"{self.path}.lock")
        os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        """Close it: the client has ended. What two workers leave when they close at once, `gc` collects."""
        self.close()


@dataclass(frozen=True)
class _Written:
    shard: Shard
    schema: pa.Schema


def _workers_of(folder: _Folder) -> tuple[frozenset[str], bool]:
    """Return the workers that share this folder, and whether it is on a disk."""
    names = (name for name in os.listdir(folder.path) if name.startswith(".worker-"))
    return frozenset(names), folder.durable


def _write(folder: _Folder, part: Any, number: int, checksums: bool | None) -> _Written:
    with _about(number):
        batch = record_batch(as_part(part))
    file = os.path.join(folder.path, f"partition-{number}")
    if not batch.num_rows:
        return _Written(Shard("", 0, 0, None), batch.schema)
    checksum = folder.durable if checksums is None else checksums
    shard = write_part(file, batch, checksum=checksum, durable=folder.durable, node=this_node())
    return _Written(shard, batch.schema)


def _seal(folder: _Folder, index: Index, names: dict[str, str]) -> None:
    for entry in os.listdir(folder.path):
        path = os.path.join(folder.path, entry)
        if entry in names:
            os.rename(path, os.path.join(folder.path, names[entry]))
        else:
            os.unlink(path)
    seal(folder.path, folder.root, folder.name, index)


def _undo(folder: _Folder, index: Index) -> None:
    with suppress(FileNotFoundError):
        if read_index(os.path.join(folder.root, folder.name)).id == index.id:
            remove(folder.root, folder.name)


# ---- on the client ----


class DaskPut:
    """One put of a Dask collection on the workers of a client."""

    def __init__(
        self, client: Any, name: Any, root: Any, placement: Any, checksums: bool | None
    ) -> None:
        name = os.fspath(name)
        self.name = os.path.abspath(name) if os.sep in name else name
        self.root = None if root is None else os.path.abspath(root)
        self.client, self.placement, self.checksums = client, placement, checksums
        self.folders: dict[str, Any] = {}
        self.tasks: list[Any] = []

    def __enter__(self) -> DaskPut:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folders one after another, so that the last worker of a root sees that it is the last."""
        for task in self.tasks:
            task.release()  # those that have not begun never will
        for worker, folder in self.folders.items():
            if folder.status == "finished":
                with suppress(Exception):
                    self._results({worker: self._submit(worker, _Folder.close, folder)})

    def write(self, data: Any) -> tuple[list[Shard], pa.Schema]:
        """Write the partitions; return the parts with rows, in order, and the schema. Nothing is visible yet."""
        with dask.config.set({"dataframe.convert-string": False}):
            holders, parts = self._held(partitions(data))
        workers = sorted(set(holders))
        token = secrets.token_hex(4)
        self.folders = {
            worker: self._submit(worker, _Folder, self.name, self.root, token, number)
            for number, worker in enumerate(workers)
        }
        self._results(self.folders, fetch=False)
        seen = {
            worker: self._submit(worker, _workers_of, self.folders[worker]) for worker in workers
        }
        shared = self._results(seen)
        self.sealers = {group: worker for worker, (group, _) in shared.items()}
        written = [
            self._submit(worker, _write, self.folders[worker], part, number, self.checksums)
            for number, (worker, part) in enumerate(zip(holders, parts, strict=True))
        ]
        self.tasks = written
        found = self._results(dict(enumerate(written)), holders)
        self.roots = {number: shared[worker][0] for number, worker in enumerate(holders)}
        everywhere = len(self.sealers) == 1 and all(durable for _, durable in shared.values())
        return self._named(list(found.values()), everywhere=everywhere)

    def _named(self, found: list[_Written], *, everywhere: bool) -> tuple[list[Shard], pa.Schema]:
        shards: list[Shard] = []
        self.names: dict[Any, dict[str, str]] = {group: {} for group in self.sealers}
        full = [number for number, one in enumerate(found) if one.shard.rows]
        if not full:
            raise ValueError(f"{self.name}: there is nothing to put: no partition has a row")
        schema = found[full[0]].schema
        for number in full:
            one = found[number]
            if not one.schema.equals(schema, check_metadata=True):
                raise ValueError(
                    f"partition {number}: the columns are {described(one.schema)}, "
                    f"those of partition {full[0]} {described(schema)}"
                )
            name = shard_name(len(shards))
            self.names[self.roots[number]][one.shard.name] = name
            node = "" if everywhere else one.shard.node
            shards.append(replace(one.shard, name=name, node=node))
        return shards, schema

    def seal(self, index: Index) -> None:
        """Give the set its name in every root, or in none."""
        sealed = {
            group: self._submit(worker, _seal, self.folders[worker], index, self.names[group])
            for group, worker in self.sealers.items()
        }
        try:
            self._results(sealed, list(self.sealers.values()))
        except BaseException:
            for worker, future in zip(self.sealers.values(), sealed.values(), strict=True):
                with suppress(Exception):
                    self._results({worker: future})
                    self._results(
                        {worker: self._submit(worker, _undo, self.folders[worker], index)}
                    )
            raise

    def _held(self, delayed: list[Delayed]) -> tuple[list[str], list[Any]]:
        """Compute the partitions; return the worker that holds each, and its future."""
        if not delayed:
            raise ValueError(f"{self.name}: there is nothing to put: no partition")
        pinned = self._pinned(len(delayed))
        futures: dict[int, Any] = {}
        for target in {None, *pinned.values()}:
            numbers = [n for n in range(len(delayed)) if pinned.get(n) == target]
            where = {} if target is None else {"workers": [target], "allow_other_workers": False}
            made = self.client.compute([delayed[n] for n in numbers], **where)
            futures.update(zip(numbers, made, strict=True))
        parts = [futures[number] for number in range(len(delayed))]
        self._results(dict(enumerate(parts)), list(pinned.values()), fetch=False)
        who = self.client.who_has(parts)
        if missing := [n for n, part in enumerate(parts) if not who.get(part.key)]:
            raise PrepareError(f"partition {missing[0]} was lost with its worker: put it again")
        holders = [pinned.get(n) or sorted(who[part.key])[0] for n, part in enumerate(parts)]
        return holders, parts

    def _pinned(self, count: int) -> dict[int, str]:
        known = self.client.scheduler_info(n_workers=-1)["workers"]
        addresses = sorted(known, key=lambda address: (str(known[address]["name"]), address))
        if self.placement is None:
            return {}
        if self.placement == "spread":
            return {n: addresses[n * len(addresses) // count] for n in range(count)}
        if not isinstance(self.placement, Mapping):
            raise ValueError(
                f'placement must be "spread", a mapping or None, got {self.placement!r}'
            )
        names = {known[address]["name"]: address for address in addresses}
        pinned = {number: str(names.get(w, w)) for number, w in self.placement.items()}
        if unknown := set(pinned.values()) - set(addresses):
            raise ValueError(f"placement: no such worker: {unknown}; there are {sorted(names)}")
        if outside := [number for number in pinned if number not in range(count)]:
            raise ValueError(f"placement: no such partition: {outside}; there are {count}")
        return pinned

    def _submit(self, worker: str, function: Any, *args: Any) -> Any:
        return self.client.submit(
            function, *args, workers=[worker], allow_other_workers=False, pure=False
        )

    def _results(self, futures: Mapping[Any, Any], workers: Any = None, fetch: bool = True) -> Any:
        """Wait for tasks of `workers`, the keys of `futures` if None; return their results.

        Raises what they raise, and PrepareError if a worker is gone: its tasks would wait for it for ever.
        """
        needed = set(futures if workers is None else workers)
        looked = 0.0
        while not all(future.done() for future in futures.values()):
            if any(future.status == "error" for future in futures.values()):
                break
            if time.monotonic() - looked > 1:
                looked = time.monotonic()
                if gone := needed - set(self.client.nthreads()):
                    raise PrepareError(f"worker {min(gone)} ended during the put: put it again")
            time.sleep(0.01)
        for future in futures.values():
            if future.status == "error":
                future.result()
        return self.client.gather(dict(futures)) if fetch else None
