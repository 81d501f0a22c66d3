"""A `Server` over Arrow Flight, and the stub that reaches it.

A call is a message on a stream of DoExchange: record batches of one column of bytes, at most 64 MiB each. The first
has metadata: the total number of bytes, in 8 bytes, then JSON. The answer has the same form. A stream stays open for
further calls, which takes half the time of a new stream. A client has one stream for each call in progress.

A call needs the header `authorization: Bearer TOKEN`, if the server has a token.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import pyarrow as pa
from pyarrow import flight

from fastload.distributed.addresses import is_loopback
from fastload.distributed.flight_access import (
    GuardedServer,
    client_authority,
    client_token,
    tls_fault,
    without_traceback,
)
from fastload.errors import ParametersError, UsageError
from fastload.parameters.server import Server
from fastload.parameters.transport import Answer, ServerGoneError
from fastload.parameters.wire import SCHEMA, Encoded, Gathered, aligned, decode

_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new client does not wait as long as one that failed
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 330_000),  # servers end connections on which pings are more frequent
    ("grpc.keepalive_timeout_ms", 20_000),
]
_CALL = flight.FlightDescriptor.for_command(b"call")


def _send(writer: Any, value: Any) -> None:
    encoded = Encoded(value)
    head = pa.py_buffer(struct.pack("<q", encoded.size) + encoded.text)
    for batch in encoded.batches():
        if head is None:
            writer.write_batch(batch)
        else:
            writer.write_with_metadata(batch, head)
            head = None


def _receive(reader: Any) -> dict[str, Any]:
    """Return a call or an answer. Raise StopIteration at the end of the stream, and others for a malformed message."""
    chunk = reader.read_chunk()
    head = chunk.app_metadata.to_pybytes() if chunk.app_metadata else b""
    (size,) = struct.unpack_from("<q", head)
    content = aligned(chunk.data)
    if content is None or len(content) != size:
        gathered = Gathered(size)
        gathered.add(chunk.data)
        while gathered.missing:
            gathered.add(reader.read_chunk().data)
        content = gathered.content
    value = decode(head[8:], content)
    if not isinstance(value, dict):
        raise ValueError(f"a message must hold an object, got {type(value).__name__}")
    return value


def _said(error: Exception) -> str:
    """Return what callers may know of an unexpected error: no paths."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"{type(error).__name__}: {text}"


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

    @without_traceback()
    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answer the calls on a stream, until the client closes it."""
        writer.begin(SCHEMA)
        while True:
            try:
                call = _receive(reader)
            except StopIteration:
                return
            except Exception as error:  # where the next message begins is not known
                _send(writer, {"error": f"a message cannot be read: {_said(error)}"})
                return
            try:
                answer = self._server.answer(call["method"], call["arguments"])
            except ParametersError as error:
                answer = {"error": str(error)}
            except Exception as error:  # such as a malformed call: the client raises it
                answer = {"error": _said(error)}
            _send(writer, answer)


class _Stream(NamedTuple):
    """A connection with an open stream, for one call at a time."""

    client: Any
    writer: Any
    reader: Any

    def close(self) -> None:
        with suppress(flight.FlightError, pa.ArrowException):
            self.writer.close()
        self.client.close()


class FlightStub:
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
        self._place = place
        self._token = token or client_token()
        self._authority = authority or client_authority()
        self._idle: list[_Stream] = []
        self._address, self._has_answered = "", False

    @property
    def name(self) -> str:
        """The place of the server, for errors."""
        return f"at {self._address}" if self._address else "that was not reached"

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call. Return a function that waits for the answer."""
        stream: _Stream | None = None
        try:
            stream = self._stream()
            _send(stream.writer, {"method": method, "arguments": arguments})
        except (flight.FlightError, pa.ArrowException) as error:
            raise self._broken(stream, error) from error
        return lambda: self._answer(stream)

    def close(self) -> None:
        """Close the connections that no call uses."""
        while self._idle:
            self._idle.pop().close()

    def _stream(self) -> _Stream:
        try:
            return self._idle.pop()
        except IndexError:
            self._address = self._place if isinstance(self._place, str) else self._place()
        _refuse_fork()
        client = flight.FlightClient(
            self._address, tls_root_certs=self._authority, generic_options=_OPTIONS
        )
        bearer = f"Bearer {self._token}".encode()
        options = flight.FlightCallOptions(
            headers=[(b"authorization", bearer)] if self._token else [],
            read_options=pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte),
        )
        stream = _Stream(client, *client.do_exchange(_CALL, options))
        stream.writer.begin(SCHEMA)
        return stream

    def _answer(self, stream: _Stream) -> Answer:
        try:
            answer: Answer = _receive(stream.reader)
        except (flight.FlightError, pa.ArrowException, StopIteration) as error:
            raise self._broken(stream, error) from error
        except Exception as error:
            stream.close()
            raise ParametersError(
                f"the server {self.name} gave an answer that cannot be read: {_said(error)}. Use the same version of "
                "fastload on workers and servers"
            ) from error
        self._has_answered = True
        self._idle.append(stream)
        if "error" in answer:
            raise ParametersError(f"the server {self.name}: {answer['error']}")
        return answer

    def _broken(self, stream: _Stream | None, error: Exception) -> Exception:
        """Return the error to raise for a broken stream. Close all streams, because the server may be gone."""
        if stream is not None:
            stream.close()
        self.close()
        if isinstance(error, flight.FlightUnauthenticatedError):
            return ParametersError(
                f"the server {self.name} requires {'another token' if self._token else 'a token'}. Give token=, or set "
                "$FASTLOAD_TOKEN_FILE to the path of a file with the token"
            )
        fault = "" if self._has_answered else tls_fault(self._address, self._authority)
        if fault:
            return ParametersError(f"the server {self.name} cannot be called: {fault}")
        said = str(error).partition(". Detail:")[0].partition(". gRPC client debug")[0]
        return ServerGoneError(said or "the connection was closed")


_grpc_pid = 0  # the process that has used gRPC


def _refuse_fork() -> None:
    global _grpc_pid
    if _grpc_pid not in (0, os.getpid()):
        raise ParametersError(
            "this process was forked from one that talks to parameter servers, which gRPC does not survive. Use "
            'threads or the start method "spawn", or fork before the first call'
        )
    _grpc_pid = os.getpid()
