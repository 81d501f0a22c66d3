"""The folder of a set that is being prepared: parts under their fingerprints, and a note for each that is complete.

    ROOT/.unsealed/NAME/FINGERPRINT.arrow   a part; none if it has no rows
    ROOT/.unsealed/NAME/FINGERPRINT.json    its note, written after the part
    ROOT/.unsealed/NAME.lock                held by the one process that prepares NAME

Each file gets its name by a rename. Two workers that make the same part write equal files, so either may stay.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

import pyarrow as pa

from fastload._kit.disk import open_file, write_file
from fastload.datasets.manifest import Shard, described, shard_name
from fastload.store.parts import open_part, write_part
from fastload.store.room import room_for
from fastload.store.root import in_memory


@dataclass(frozen=True)
class Note:
    """The description of a part. Its `shard` has no name yet. If it has no rows, the part has no file."""

    shard: Shard
    schema: pa.Schema


@dataclass(frozen=True)
class Work:
    """The folder in which parts are written, and what `put` calls `checksums`. Workers get a copy of this."""

    folder: str
    checksums: bool | None

    def write(self, batch: pa.RecordBatch, fingerprint: str) -> None:
        """Write a part and its note. Raises StoreFullError, OSError."""
        shard = Shard("", 0, 0, None)
        if batch.num_rows:
            partial = self._name(f".{fingerprint}.{secrets.token_hex(4)}")
            shard = write_part(partial, batch, self.checksums)
            os.rename(partial, self._part(fingerprint))
        self._write_note(Note(replace(shard, name="", fingerprint=fingerprint), batch.schema))

    def take(self, path: str, shards: Iterable[Shard]) -> None:
        """Take parts over from the set at `path`."""
        for shard in shards:
            if shard.fingerprint and not os.path.exists(self._part(shard.fingerprint)):
                batch, _ = open_part(path, shard)
                _link(os.path.join(path, shard.name), self._part(shard.fingerprint))
                self._write_note(Note(replace(shard, name=""), batch.schema))

    def _write_note(self, note: Note) -> None:
        about = {**asdict(note.shard), "schema": base64.b64encode(note.schema.serialize()).decode()}
        encoded = json.dumps(about).encode()
        name = self._name(f"{note.shard.fingerprint}.json")
        with room_for(name, len(encoded)):
            write_file(name, encoded, durable=not in_memory(self.folder))

    def notes(self) -> dict[str, Note]:
        """Return the notes of existing parts, by fingerprint. Delete leftovers of writers that have ended."""
        found = {}
        for name in os.listdir(self.folder):
            if name.startswith("."):
                with suppress(FileNotFoundError):
                    os.unlink(self._name(name))
            elif name.endswith(".json"):
                note = self.note(name.removesuffix(".json"))
                if note is not None:
                    found[note.shard.fingerprint] = note
        return found

    def note(self, fingerprint: str) -> Note | None:
        """Return the note of a part, or None if the part is missing or incomplete."""
        try:
            with open_file(self._name(f"{fingerprint}.json")) as file:
                about = json.load(file)
            schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(about.pop("schema"))))
            shard = Shard.of(about)
            there = not shard.rows or os.path.getsize(self._part(fingerprint)) == shard.bytes
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
            return None
        return Note(shard, schema) if there else None

    def gather(self, shards: Iterable[Shard], folder: str) -> None:
        """Give parts their names as shards of the set that is made in `folder`."""
        for shard in shards:
            _link(self._part(shard.fingerprint), os.path.join(folder, shard.name))

    def _part(self, fingerprint: str) -> str:
        return self._name(f"{fingerprint}.arrow")

    def _name(self, name: str) -> str:
        return os.path.join(self.folder, name)


def shards_of(
    notes: Iterable[tuple[str, Note]], error: type[Exception]
) -> tuple[list[Shard], pa.Schema]:
    """Return the parts that have rows, in order and with their names as shards, and their schema.

    Args:
        notes: what errors call the origin of each part, and its note.

    Raise `error` if a part has other columns than the first, and ValueError if no part has rows.
    """
    full = [(origin, note) for origin, note in notes if note.shard.rows]
    if not full:
        raise ValueError("all parts are empty. Give data with rows")
    first, schema = full[0][0], full[0][1].schema
    for origin, note in full:
        if not note.schema.equals(schema, check_metadata=True):
            raise error(
                f"{origin} gave the columns {described(note.schema)}, but {first} gave {described(schema)}"
            )
    return [replace(note.shard, name=shard_name(k)) for k, (_, note) in enumerate(full)], schema


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, target)  # a file system without links
