"""`put` of a Dask collection: its partitions are divided evenly, and each is written into the root of its worker.

    begin   each worker makes a folder ROOT/.unsealed/NAME-TOKEN, and locks it (`_Folder`)
    write   each partition becomes a part, on its worker
    seal    one worker for each root writes the index, which all roots share, and gives the set its name

A `_Folder` is the result of a task. If the put fails, or the client ends, Dask drops it, and it deletes its files.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import dask
import distributed
import pyarrow as pa
from dask.delayed import Delayed

from fastload.datasets.manifest import Index, Shard, read_index
from fastload.datasets.packed.unfinished import expect_free, lock_path
from fastload.errors import PrepareError
from fastload.store.columns import naming, record_batch
from fastload.store.dask import as_part, partitions
from fastload.store.parts import write_part
from fastload.store.root import in_memory, locate, remove, seal, this_node, unsealed_path
from fastload.store.work import Note, shards_of

LOOK_S = 0.5
"""Seconds between two looks for workers that have ended."""

# ---- on a worker ----


class _Folder:
    """The folder of one put in the root of a worker. All workers with this root hold a shared lock on it."""

    descriptor = -1

    def __init__(self, name: str, root: str | None, token: str, worker: int) -> None:
        self.root, self.name = locate(name, root)
        expect_free(os.path.join(self.root, self.name))
        self.path = unsealed_path(self.root, self.name, token)
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.descriptor = os.open(
            lock_path(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        os.makedirs(self.path, exist_ok=True)
        with open(os.path.join(self.path, f".worker-{worker}"), "wb"):
            pass

    def __reduce__(self) -> Any:
        raise TypeError("the folder of a put stays on its worker")

    def close(self) -> None:
        """Delete the folder if it was not sealed. If several workers share it, the last one to close deletes it."""
        if self.descriptor < 0:
            return
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
            os.unlink(lock_path(self.path))
        os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        """Close the folder after the client has ended. If two workers close it at once, `gc` deletes the leftovers."""
        self.close()


def _workers_of(folder: _Folder) -> tuple[frozenset[str], bool]:
    """Return the workers that share this folder, and whether it is on a disk."""
    names = (name for name in os.listdir(folder.path) if name.startswith(".worker-"))
    return frozenset(names), not in_memory(folder.path)


def _write(folder: _Folder, part: Any, number: int, checksums: bool | None) -> Note:
    with naming(f"partition {number}"):
        batch = record_batch(as_part(part))
    file = os.path.join(folder.path, f"partition-{number}")
    if not batch.num_rows:
        return Note(Shard("", 0, 0, None), batch.schema)
    shard = write_part(file, batch, checksums)
    return Note(replace(shard, node=this_node()), batch.schema)


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

    def __init__(self, client: Any, name: Any, root: Any, checksums: bool | None) -> None:
        name = os.fspath(name)
        self.name = os.path.abspath(name) if os.sep in name else name
        self.root = None if root is None else os.path.abspath(root)
        self.client, self.checksums = client, checksums
        self.folders: dict[str, Any] = {}
        self.tasks: list[Any] = []
        self.sealers: list[str] = []  # a worker for each root
        self.names: dict[str, str] = {}  # of shards, by the names of partitions' files

    def __enter__(self) -> DaskPut:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the folders one after another, so that the last worker of a root sees that it is the last."""
        for task in self.tasks:
            task.release()  # so that tasks that have not begun never begin
        for worker, folder in self.folders.items():
            if folder.status in ("finished", "pending"):
                with suppress(Exception):
                    self._results({worker: self._submit(worker, _Folder.close, folder)})

    def write(self, data: Any) -> tuple[list[Shard], pa.Schema]:
        """Write the partitions. Return the parts with rows, in order, and the schema. The set is not visible yet."""
        delayed = partitions(data)
        if not delayed:
            raise ValueError(f"{self.name}: the data has no partitions. Give data with rows")
        holders = self._spread(len(delayed))
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
        self.sealers = list({group: worker for worker, (group, _) in shared.items()}.values())
        parts = self._computed(delayed, holders)
        written = [
            self._submit(worker, _write, self.folders[worker], part, number, self.checksums)
            for number, (worker, part) in enumerate(zip(holders, parts, strict=True))
        ]
        self.tasks = [*parts, *written]
        found = self._results(dict(enumerate(written)), holders)
        everywhere = len(self.sealers) == 1 and all(durable for _, durable in shared.values())
        return self._named(list(found.values()), everywhere=everywhere)

    def _named(self, found: list[Note], *, everywhere: bool) -> tuple[list[Shard], pa.Schema]:
        origins = [f"partition {number}" for number in range(len(found))]
        shards, schema = shards_of(zip(origins, found, strict=True), ValueError)
        files = [one.shard.name for one in found if one.shard.rows]
        self.names = dict(zip(files, (shard.name for shard in shards), strict=True))
        if everywhere:
            shards = [replace(shard, node="") for shard in shards]
        return shards, schema

    def seal(self, index: Index) -> None:
        """Give the set its name in every root, or in none."""
        sealed = {
            worker: self._submit(worker, _seal, self.folders[worker], index, self.names)
            for worker in self.sealers
        }
        try:
            self._results(sealed)
        except BaseException:
            for worker, future in sealed.items():
                with suppress(Exception):
                    self._results({worker: future})
                    self._results(
                        {worker: self._submit(worker, _undo, self.folders[worker], index)}
                    )
            raise

    def _spread(self, count: int) -> list[str]:
        """Return the worker of each of `count` partitions: the first worker by name gets the first ones."""
        known = self.client.scheduler_info(n_workers=-1)["workers"]
        addresses = sorted(known, key=lambda address: (str(known[address]["name"]), address))
        if not addresses:
            raise PrepareError("Dask has no worker yet. Call client.wait_for_workers() first")
        return [addresses[number * len(addresses) // count] for number in range(count)]

    def _computed(self, delayed: list[Delayed], holders: list[str]) -> list[Any]:
        """Begin to compute each partition on its worker. Return their futures."""
        parts: list[Any] = []
        with dask.config.set({"dataframe.convert-string": False}):
            for worker, own in groupby(zip(holders, delayed, strict=True), lambda pair: pair[0]):
                some = [part for _, part in own]
                parts += self.client.compute(some, workers=[worker], allow_other_workers=False)
        return parts

    def _submit(self, worker: str, function: Any, *args: Any) -> Any:
        return self.client.submit(
            function, *args, workers=[worker], allow_other_workers=False, pure=False
        )

    def _results(self, futures: Mapping[Any, Any], workers: Any = None, fetch: bool = True) -> Any:
        """Wait for tasks of `workers`, and return their results. None: the keys of `futures`.

        Raise what the tasks raise, and PrepareError if a worker has ended, because its tasks would wait forever.
        """
        tasks, needed = list(futures.values()), set(futures if workers is None else workers)
        pending = True
        while pending:
            # Before the wait: a worker that holds all results may end after it, and then `gather` raises.
            if ended := needed - set(self.client.nthreads()):
                self.client.cancel(tasks)
                raise PrepareError(f"worker {min(ended)} ended during the put. Call put again")
            with suppress(TimeoutError):
                pending = bool(distributed.wait(tasks, LOOK_S).not_done)
            for task in tasks:
                if task.status in ("error", "cancelled"):
                    task.result()
        return self.client.gather(dict(futures)) if fetch else None
