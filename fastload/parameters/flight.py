"""A `Server` over Arrow Flight, and the stub that reaches it.

A call is a message on a stream of DoExchange: record batches of one column of bytes, at most 64 MiB each. The first
has metadata: the total number of bytes, in 8 bytes, then JSON. The answer has the same form. A stream stays open for
further calls, which takes half the time of a new stream. A client has one stream for each call in progress.

A call needs the header `authorization: Bearer TOKEN`, if the server has a token.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import flight

from fastload.distributed.addresses import is_loopback
from fastload.distributed.arrow_memory import SCHEMA
from fastload.distributed.flight import FlightCaller, GuardedServer, without_path
from fastload.errors import ParametersError, UsageError
from fastload.parameters.server import Server
from fastload.parameters.transport import Answer, ServerGoneError
from fastload.parameters.wire import Encoded, decode, gathered

_CALL = flight.FlightDescriptor.for_command(b"fastload.parameters 1")  # the version of messages


def _send(writer: Any, encoded: Encoded) -> None:
    first, *others = encoded.batches()
    head = struct.pack("<q", encoded.size) + encoded.text
    writer.write_with_metadata(first, pa.py_buffer(head))
    for batch in others:
        writer.write_batch(batch)


def _receive(reader: Any) -> dict[str, Any]:
    """Return a call or an answer. Raise StopIteration at the end of the stream, and others for a malformed message."""
    chunk = reader.read_chunk()
    head = chunk.app_metadata.to_pybytes() if chunk.app_metadata else b""
    (size,) = struct.unpack_from("<q", head)
    others = iter(lambda: reader.read_chunk().data, ())
    value = decode(head[8:], gathered(size, chain([chunk.data], others)))
    if not isinstance(value, dict):
        raise ValueError(f"a message must hold an object, got {type(value).__name__}")
    return value


class ParameterServer(GuardedServer):
    """Answers calls of clients with a `Server`.

    Args:
        host, port: address to listen on. Port 0 is any free port.
        guards: those of `GuardedServer`. Without a token, only this machine may call.

    `shutdown()` waits for clients to close their streams.
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
        """Answer the calls on a stream, until the client closes it."""
        self.expect_version(descriptor.command, _CALL.command)
        writer.begin(SCHEMA)
        while True:
            try:
                call = _receive(reader)
            except StopIteration:
                return
            except Exception as error:  # where the next message begins is not known
                said = {"error": f"a message cannot be read: {without_path(error)}"}
                _send(writer, Encoded(said))
                return
            try:
                answer = self._server.answer(call["method"], call["arguments"])
            except ParametersError as error:
                answer = {"error": str(error)}
            except Exception as error:  # such as a malformed call: the client raises it
                answer = {"error": without_path(error)}
            _send(writer, Encoded(answer))


class _Stream(NamedTuple):
    """A connection with an open stream, for one call at a time."""

    client: Any
    writer: Any
    reader: Any

    def close(self) -> None:
        with suppress(flight.FlightError, pa.ArrowException):
            self.writer.close()
        self.client.close()


class FlightStub(FlightCaller):
    """A stub for the server at an address, or at the one that a function returns for each new connection.

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
        self._idle: list[_Stream] = []

    @property
    def name(self) -> str:
        """The place of the server, for errors."""
        return f"at {self.where}" if self.where else "that was not reached"

    def error(self, why: str, *, gone: bool) -> Exception:
        """Return the error to raise for a call. If the server is gone, the call may be repeated."""
        told = f"the server {self.name} cannot be called: {why}"
        return ServerGoneError(why) if gone else ParametersError(told)

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call. Return a function that waits for the answer."""
        encoded = Encoded({"method": method, "arguments": arguments})
        stream = self._stream()
        with self._ending(stream):
            _send(stream.writer, encoded)
        return lambda: self._answer(stream)

    def close(self) -> None:
        """Close the connections that no call uses."""
        while self._idle:
            self._idle.pop().close()

    def _stream(self) -> _Stream:
        try:
            return self._idle.pop()
        except IndexError:
            self.where = self._place if isinstance(self._place, str) else self._place()
        client = self.connect()
        with self._ending(client):
            writer, reader = client.do_exchange(_CALL, self.options())
            writer.begin(SCHEMA)
        return _Stream(client, writer, reader)

    def _answer(self, stream: _Stream) -> Answer:
        with self._ending(stream):
            answer: Answer = _receive(stream.reader)
        self._idle.append(stream)
        if "error" in answer:
            raise ParametersError(f"the server {self.name}: {answer['error']}")
        return answer

    @contextmanager
    def _ending(self, used: Any) -> Iterator[None]:
        """Close `used` and all idle streams if a call fails, because the server may be gone."""
        try:
            with self.naming():
                yield
        except (ParametersError, ServerGoneError):
            used.close()
            self.close()
            raise
