"""Sets of a root over Arrow Flight, read only: server of `fastload set serve`, and client of `get(source=...)`.

A set is a flight, and its descriptor is the path [NAME]. Each of its endpoints is a part on this node, with the ticket
columns/NAME/PART. A ticket gives the columns of the part to any client of Flight. Clients should read with
`IpcReadOptions(ensure_alignment=Alignment.At64Byte)`, or values have unaligned addresses. The ticket file/NAME/PART
gives the bytes of the file instead, so that a copy can be mapped, and has the same checksum. The action "set 2"
with a name gives the bytes of its index, then the names of the parts on this node, and nothing for an unknown set.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from fastload.datasets.manifest import Index, Shard, dump_index, parse_index, read_index
from fastload.distributed.arrow_memory import SCHEMA, batch_of, bytes_of
from fastload.distributed.flight import FlightCaller, GuardedServer, without_traceback
from fastload.errors import PackedDataError
from fastload.store.parts import is_here, open_part
from fastload.store.root import check_name, no_set, sets
from fastload.store.shard_bytes import PIECE_BYTES

_ACTION = "set 2"  # with the version of its results and of tickets
_ANSWER_S = 30.0
"""Seconds in which a server must answer."""
_SLOWEST = 1e6
"""Bytes per second. A slower server counts as hung."""


class StoreServer(GuardedServer):
    """Serves the sets of `root`.

    Args:
        guards: those of `GuardedServer`.

    Memory: a few pieces of 4 MiB per call.
    """

    def __init__(self, root: str, host: str = "127.0.0.1", port: int = 0, **guards: Any) -> None:
        self._root = root
        super().__init__(host, port, **guards)

    def list_flights(self, context: Any, criteria: bytes) -> list[flight.FlightInfo]:
        """Return the sealed sets."""
        found = (each for each in sets(self._root) if each.index.mode == "columns")
        return [self._info(each.name, each.index) for each in found]

    def get_flight_info(
        self, context: Any, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        """Return the description of a set, and the tickets of its parts."""
        name = b"/".join(descriptor.path or ()).decode(errors="replace")
        return self._info(name, self._index(name))

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        """Return the columns of a part, or the bytes of its file."""
        kind, _, place = ticket.ticket.decode(errors="replace").partition("/")
        name, _, part = place.partition("/")
        shards = {shard.name: shard for shard in self._index(name).shards}
        if part not in shards or not is_here(self._path(name), shards[part]):
            raise flight.FlightServerError(f"the set {name!r} has no part {part!r} on this node")
        if kind == "file":
            return flight.GeneratorStream(SCHEMA, _pieces(self._path(name, part)))
        batch, _ = open_part(self._path(name), shards[part])
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(batch.schema, [batch]))

    def do_action(self, context: Any, action: flight.Action) -> list[flight.Result]:
        """Return the results of `_ACTION`."""
        self.expect_version(action.type, _ACTION)
        name = action.body.to_pybytes().decode(errors="replace")
        if name not in {found.name for found in sets(self._root)}:
            return []
        index = self._index(name)
        here = (s.name.encode() for s in index.shards if is_here(self._path(name), s))
        return [flight.Result(content) for content in (dump_index(index), *here)]

    def _index(self, name: str) -> Index:
        """Return the index of a set. A name that would lead out of the root is an error."""
        try:
            return read_index(self._path(check_name(name)))
        except (OSError, ValueError) as error:
            raise flight.FlightServerError(no_set(self._root, name)) from error

    def _path(self, *names: str) -> str:
        return os.path.join(self._root, *names)

    def _info(self, name: str, index: Index) -> flight.FlightInfo:
        here = [shard for shard in index.shards if is_here(self._path(name), shard)]
        schema = open_part(self._path(name), here[0])[0].schema if here else pa.schema([])
        tickets = [f"columns/{name}/{shard.name}".encode() for shard in here]
        return flight.FlightInfo(
            schema,
            flight.FlightDescriptor.for_path(name),
            [flight.FlightEndpoint(ticket, []) for ticket in tickets],
            sum(shard.rows for shard in here),
            sum(shard.bytes for shard in here),
        )


def _pieces(path: str) -> Iterator[pa.RecordBatch]:
    with without_traceback(), open(path, "rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield batch_of(np.frombuffer(piece, np.uint8))


class ServerSource(FlightCaller):
    """The sets of a server. `where` is its URL."""

    def __init__(self, where: str, *, token: str = "", authority: bytes | None = None) -> None:
        super().__init__(where, token=token, authority=authority)
        self._client = self.connect()

    def error(self, why: str, *, gone: bool) -> Exception:
        """Return the error to raise for a call."""
        return PackedDataError(self.where, f"cannot be read from: {why}")

    def find(self, name: str) -> tuple[Index, set[str]] | None:
        """Return the index of a set, and the names of the parts that lie there. Raises PackedDataError."""
        action = flight.Action(_ACTION, name.encode())
        with self.naming():
            answers = self._client.do_action(action, self.options(_ANSWER_S))
            results = [answer.body.to_pybytes() for answer in answers]
            if not results:
                return None
            index, *here = results
            return parse_index(f"{self.where}/{name}", index), {part.decode() for part in here}

    def read(self, name: str, part: Shard) -> Iterator[memoryview]:
        """Yield the bytes of a part's file. Raises PackedDataError."""
        ticket = flight.Ticket(f"file/{name}/{part.name}")
        options = self.options(_ANSWER_S + part.bytes / _SLOWEST)
        with self.naming():
            for chunk in self._client.do_get(ticket, options):
                yield bytes_of(chunk.data).data
