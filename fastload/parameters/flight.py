"""A `Server` over Arrow Flight, and the stub that reaches it.

A call is a message on a stream of DoExchange: record batches of one column of bytes, at most 64 MiB each. The
first has metadata: the total number of bytes, in 8 bytes, then JSON. The answer has the same form.
A stream stays open for further calls, which takes half the time of a new one. An error ends it.

A call needs the header `authorization: Bearer TOKEN`, if the server has a token.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import pyarrow as pa
from pyarrow import flight

from fastload.distributed.addresses import is_loopback
from fastload.distributed.arrow_memory import SCHEMA
from fastload.distributed.flight import FlightCaller, GuardedServer, without_path
from fastload.errors import ParametersError, UsageError
from fastload.parameters.server import Server
from fastload.parameters.transport import RESUME, Answer, ServerGoneError
from fastload.parameters.wire import Encoded, decode, gathered

_CALL = flight.FlightDescriptor.for_command(b"fastload.parameters 2")  # the version of messages


def _send(writer: Any, encoded: Encoded) -> None:
    first, *others = encoded.batches()
    head = struct.pack("<q", encoded.size) + encoded.text
    writer.write_with_metadata(first, pa.py_buffer(head))
    for batch in others:
        writer.write_batch(batch)


def _receive(reader: Any) -> dict[str, Any]:
    """Return a call or an answer. Raise StopIteration for none, and other errors for a malformed one."""
    chunk = reader.read_chunk()
    head = chunk.app_metadata.to_pybytes() if chunk.app_metadata else b""
    (size,) = struct.unpack_from("<q", head)
    others = iter(lambda: reader.read_chunk().data, ())
    value = decode(head[8:], gathered(size, chain([chunk.data], others)))
    if not isinstance(value, dict):
        raise ValueError(f"a message must hold an object, got {type(value).__name__}")
    return value


def _end(streams: list[tuple[Any, Any]]) -> None:
    """Close streams. Arrow prints a line for each that breaks before it is closed."""
    while streams:
        writer, _ = streams.pop()
        with suppress(flight.FlightError, pa.ArrowException):
            writer.close()


class ParameterServer(GuardedServer):
    """Answers calls of clients with a `Server`.

    Args:
        host, port: address to listen on. Port 0 is any free port.
        guards: those of `GuardedServer`. Without a token, only this machine may call.

    `shutdown()` waits for clients to close.
    """

    def __init__(
        self, server: Server, host: str = "127.0.0.1", port: int = 0, **guards: Any
    ) -> None:
        if not guards.get("token") and not is_loopback(host):
            raise UsageError(
                f"host {host} lets other machines change the parameters, and there is no token. Give --token-file "
                "(in Python token=), or listen on 127.0.0.1"
            )
        self._server = server
        super().__init__(host, port, **guards)

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answer the calls on a stream, until the client closes it or one of them fails."""
        self.expect_version(descriptor.command, _CALL.command)
        writer.begin(SCHEMA)
        answer: Answer = {}
        while "error" not in answer:
            try:
                call = _receive(reader)
                answer = self._server.answer(call["method"], call["arguments"])
            except StopIteration:
                return
            except ParametersError as error:
                answer = {"error": str(error)}
            except Exception as error:  # such as a malformed call: the client raises it
                answer = {"error": without_path(error)}
            _send(writer, Encoded(answer))


class FlightStub(FlightCaller):
    """A stub for the server at an address, or at the one that a function returns for the first call.

    Without a token or an authority, it uses those of the environment; see `connect`.
    """

    def __init__(
        self, place: str | Callable[[], str], *, token: str = "", authority: bytes | None = None
    ) -> None:
        if isinstance(place, str) and not place.startswith(("grpc://", "grpc+tls://")):
            raise ValueError(
                f"{place!r} is not a server address. Use grpc://HOST:PORT or grpc+tls://HOST:PORT. For a folder given "
                "to `fastload parameters serve --store`, use file:// and its absolute path"
            )
        super().__init__("", token=token, authority=authority)
        self._place = place
        self._client: Any = None
        self._pid = 0  # the process that has made the client
        self._idle: list[tuple[Any, Any]] = []  # its open streams, for one call each

    @property
    def name(self) -> str:
        """The place of the server, for errors."""
        return f"at {self.where}" if self.where else "that was not reached"

    def error(self, why: str, *, gone: bool) -> Exception:
        """Return the error to raise for a call."""
        if gone:
            self._client = None  # a restarted server may have another address
            _end(self._idle)
            return ServerGoneError(f"the server {self.name} does not answer: {why}. {RESUME}")
        return ParametersError(f"the server {self.name} cannot be called: {why}")

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call. Return a function that waits for the answer."""
        encoded = Encoded({"method": method, "arguments": arguments})
        with self.naming():
            stream = self._stream()
            _send(stream[0], encoded)
        idle = self._idle
        return lambda: self._answer(*stream, idle)

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None and self._pid == os.getpid():
            _end(self._idle)
            self._client.close()
        self._client = None

    def _stream(self) -> tuple[Any, Any]:
        """Return the writer and the reader of an idle stream, or of a new one."""
        if self._client is None or self._pid != os.getpid():
            self.where = self._place if isinstance(self._place, str) else self._place()
            self._client, self._pid, self._idle = self.connect(), os.getpid(), []
        with suppress(IndexError):
            return self._idle.pop()
        writer, reader = self._client.do_exchange(_CALL, self.options())
        writer.begin(SCHEMA)
        return writer, reader

    def _answer(self, writer: Any, reader: Any, idle: list[tuple[Any, Any]]) -> Answer:
        answer: Answer = {}
        try:
            with self.naming():
                answer = _receive(reader)
        finally:
            if not answer:
                _end([(writer, reader)])
        if "error" in answer:
            raise ParametersError(f"the server {self.name}: {answer['error']}")
        idle.append((writer, reader))
        return answer
