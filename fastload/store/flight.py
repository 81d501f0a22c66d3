"""Sets of a root over Arrow Flight, read only: server of `fastload set serve`, and client of `get(source=...)`.

A set is a flight, and its descriptor is the path [NAME]. Each of its endpoints is a part on this node, with a JSON
ticket: {"set": NAME, "part": FILE}. A ticket gives the columns of the part to any client of Flight. Clients should read
with `IpcReadOptions(ensure_alignment=Alignment.At64Byte)`, or values have unaligned addresses. With "file": true, a
ticket gives the bytes of the file instead, so that a copy can be mapped, and has the same checksum. The action "set"
with a name gives the bytes of its index, then the names of the parts on this node. For an unknown set it gives nothing.

A call needs the header `authorization: Bearer TOKEN`, if the server has a token.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyarrow import flight

from fastload.datasets.manifest import Index, Shard, dump_index, parse_index, read_index
from fastload.distributed.arrow_memory import checked
from fastload.distributed.flight_access import GuardedServer, tls_fault, without_traceback
from fastload.errors import PackedDataError
from fastload.store.parts import is_here, open_part
from fastload.store.pieces import PIECE_BYTES
from fastload.store.root import check_name, sets

_ANSWER_S = 30.0
"""Seconds in which a server must answer."""
_SLOWEST = 1e6
"""Bytes per second. A slower server counts as hung."""
_BYTES = pa.schema([pa.field("bytes", pa.binary(), nullable=False)])


class StoreServer(GuardedServer):
    """Serves the sets of `root`.

    Args:
        guards: those of `GuardedServer`.

    Memory: a few pieces of 4 MiB per call.
    """

    def __init__(self, root: str, host: str = "127.0.0.1", port: int = 0, **guards: Any) -> None:
        self._root = root
        super().__init__(host, port, **guards)

    @without_traceback()
    def list_flights(self, context: Any, criteria: bytes) -> list[flight.FlightInfo]:
        """Return the sealed sets."""
        found = (each for each in sets(self._root) if each.index.mode == "columns")
        return [self._info(each.name, each.index) for each in found]

    @without_traceback()
    def get_flight_info(
        self, context: Any, descriptor: flight.FlightDescriptor
    ) -> flight.FlightInfo:
        """Return the description of a set, and the tickets of its parts."""
        name = b"/".join(descriptor.path or ()).decode(errors="replace")
        return self._info(name, self._index(name))

    @without_traceback()
    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        """Return the columns of a part, or the bytes of its file."""
        try:
            about = json.loads(ticket.ticket)
            name, part, whole = about["set"], about["part"], about.get("file", False)
            if not isinstance(name, str) or not isinstance(part, str):
                raise TypeError("names must be strings")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise flight.FlightServerError(
                'a ticket is JSON: {"set": NAME, "part": FILE}'
            ) from error
        shards = {shard.name: shard for shard in self._index(name).shards}
        if part not in shards or not is_here(self._path(name), shards[part]):
            raise flight.FlightServerError(f"the set {name!r} has no part {part!r} on this node")
        if whole:
            return flight.GeneratorStream(_BYTES, _pieces(self._path(name, part)))
        batch, _ = open_part(self._path(name), shards[part])
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(batch.schema, [batch]))

    @without_traceback()
    def do_action(self, context: Any, action: flight.Action) -> list[flight.Result]:
        """Return the results of the action "set"."""
        if action.type != "set":
            raise flight.FlightServerError(f'the only action is "set", got {action.type!r}')
        name = action.body.to_pybytes().decode(errors="replace")
        if name not in {found.name for found in sets(self._root)}:
            return []
        index = self._index(name)
        here = [shard.name for shard in index.shards if is_here(self._path(name), shard)]
        return [flight.Result(dump_index(index)), flight.Result(json.dumps(here).encode())]

    def list_actions(self, context: Any) -> list[tuple[str, str]]:
        """Return the names of the actions, and what they do."""
        return [("set", "The index of a set, and the names of its parts on this node.")]

    def _index(self, name: str) -> Index:
        """Return the index of a set. A name that would lead out of the root is an error."""
        try:
            return read_index(self._path(check_name(name)))
        except (OSError, ValueError) as error:
            known = ", ".join(found.name for found in sets(self._root)) or "none"
            raise flight.FlightServerError(
                f"the set {name!r} does not exist. The sets here are {known}"
            ) from error

    def _path(self, *names: str) -> str:
        return os.path.join(self._root, *names)

    def _info(self, name: str, index: Index) -> flight.FlightInfo:
        here = [shard for shard in index.shards if is_here(self._path(name), shard)]
        schema = open_part(self._path(name), here[0])[0].schema if here else pa.schema([])
        tickets = [json.dumps({"set": name, "part": shard.name}).encode() for shard in here]
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
            yield pa.record_batch([pa.array([piece], pa.binary())], schema=_BYTES)


class ServerSource:
    """The sets of a server. `where` is its URL."""

    def __init__(self, where: str, *, token: str = "", authority: bytes | None = None) -> None:
        self.where, self._authority = where, authority
        self._headers = [(b"authorization", f"Bearer {token}".encode())] if token else []
        with self._naming():
            self._client = flight.FlightClient(where, tls_root_certs=authority)

    def _within(self, seconds: float) -> flight.FlightCallOptions:
        """Return the options of a call. Without a limit, a call to a hung server never ends, and Ctrl-C waits."""
        return flight.FlightCallOptions(timeout=seconds, headers=self._headers)

    def find(self, name: str) -> tuple[Index, set[str]] | None:
        """Return the index of a set, and the names of the parts that lie there. Raises PackedDataError."""
        with self._naming():
            action = flight.Action("set", name.encode())
            results = [
                r.body.to_pybytes() for r in self._client.do_action(action, self._within(_ANSWER_S))
            ]
            if not results:
                return None
            encoded, here = results
            names = {str(part) for part in json.loads(here)}
            return parse_index(f"{self.where}/{name}", encoded), names

    def read(self, name: str, part: Shard) -> Iterator[memoryview]:
        """Yield the bytes of a part's file. Raises PackedDataError."""
        ticket = json.dumps({"set": name, "part": part.name, "file": True}).encode()
        options = self._within(_ANSWER_S + part.bytes / _SLOWEST)
        left = part.bytes
        with self._naming():
            for chunk in self._client.do_get(flight.Ticket(ticket), options):
                for value in checked(chunk.data, _BYTES).column(0):
                    piece = memoryview(value.as_buffer())
                    if (left := left - len(piece)) < 0:
                        raise ValueError(f"{part.name} has more than {part.bytes:,} bytes there")
                    yield piece

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turn an error of the server into a PackedDataError."""
        try:
            yield
        except flight.FlightUnauthenticatedError as error:
            raise PackedDataError(
                self.where,
                "the server needs a token, or rejects this one. Name the file with the token in $FASTLOAD_TOKEN_FILE",
            ) from error
        except PackedDataError:
            raise
        except (
            flight.FlightError,
            pa.ArrowException,
            TypeError,
            ValueError,
            RecursionError,
        ) as error:
            gone = isinstance(error, flight.FlightUnavailableError)
            fault = tls_fault(self.where, self._authority) if gone else ""
            said = str(error).partition(". Detail:")[0].partition(". gRPC client debug")[0]
            raise PackedDataError(self.where, f"cannot be read from: {fault or said}") from error
