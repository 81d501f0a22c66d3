"""The base of all servers of Arrow Flight, and the base of their clients. Needs pyarrow (extra `arrow`).

A call needs the header `authorization: Bearer TOKEN`, if the server has a token. A caller learns what went wrong, but
gets no traceback and no path.
"""

from __future__ import annotations

import hmac
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from fastload.distributed.addresses import in_url
from fastload.errors import FastloadError, UsageError

_CALLS = "list_flights get_flight_info list_actions do_get do_put do_exchange do_action"
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),  # a new client does not wait as long as one that failed
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 330_000),  # servers end connections on which pings are more frequent
    ("grpc.keepalive_timeout_ms", 20_000),
]
_SAME_VERSION = "Use the same version of fastload on clients and servers"
_pid = 0  # the process that has used gRPC
_log = logging.getLogger("fastload")


class GuardedServer(flight.FlightServerBase):  # type: ignore[misc]
    """A server that answers callers with the token, and tells them no tracebacks.

    Args:
        host, port: address to listen on. Port 0 is any free port.
        token: token that calls must send. "": none is needed.
        certificate: (chain, key) in PEM, for TLS.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str = "",
        certificate: tuple[bytes, bytes] | None = None,
    ) -> None:
        self._scheme = "grpc+tls" if certificate else "grpc"
        super().__init__(
            f"{self._scheme}://{in_url(host)}:{port}",
            tls_certificates=[certificate] if certificate else None,
            middleware={"door": _Door(token)},
        )

    def __init_subclass__(cls) -> None:
        """Keep tracebacks from the callers of a subclass's methods."""
        for name in vars(cls).keys() & _CALLS.split():
            setattr(cls, name, without_traceback()(vars(cls)[name]))

    def address(self, host: str) -> str:
        """Return the address for clients, with `host` as the name of this machine."""
        return f"{self._scheme}://{in_url(host)}:{self.port}"

    @staticmethod
    def expect_version(found: str | bytes | None, expected: str | bytes) -> None:
        """Raise if the client and this server are of different versions."""
        if found != expected:
            raise flight.FlightServerError(f"the client has another version. {_SAME_VERSION}")

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        """Return no columns: Arrow sends the traceback of each error of this call."""
        return flight.SchemaResult(pa.schema([]))


def _no_such_call(*_: Any) -> None:
    raise flight.FlightServerError("this server has no such call")


for _call in _CALLS.split():
    setattr(GuardedServer, _call, _no_such_call)  # Arrow's own methods send a traceback


class _Door(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Rejects calls without the right token."""

    def __init__(self, token: str) -> None:
        self._token = f"Bearer {token}".encode() if token else b""

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        """Check the header of a call."""
        found = [value.encode() for value in headers.get("authorization", [])]
        if self._token and not any(hmac.compare_digest(value, self._token) for value in found):
            raise flight.FlightUnauthenticatedError(
                "the token is wrong for this server" if found else "this server needs a token"
            )


@contextmanager
def without_traceback() -> Iterator[None]:
    """Log an unexpected error of a call, and raise another without its traceback and paths, which Arrow would send."""
    try:
        yield
    except flight.FlightError:
        raise
    except Exception as error:
        _log.warning("a call failed: %s: %s", type(error).__name__, str(error))
        raise flight.FlightServerError(
            f"the call failed with {type(error).__name__}. The server has logged the error"
        ) from None


def without_path(error: Exception) -> str:
    """Return what callers may know of an unexpected error."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else error
    return f"{type(error).__name__}: {text}"


def read_token(path: str | os.PathLike[str] | None) -> str:
    """Return the token in a file, or "" for no file. Raise UsageError if it is empty, or if other users can read it."""
    if not path:
        return ""
    if os.stat(path).st_mode & 0o077:
        raise UsageError(f"{path}: other users can read the token. Run chmod 600 {path}")
    token = Path(path).read_text().strip()
    if not token:
        raise UsageError(f"{path} is empty. Write a token into the file")
    return token


class FlightCaller(ABC):
    """The base of clients.

    Args:
        where: the server's address, or "" if a subclass sets it later.
        token: "": the one in the file `$FASTLOAD_TOKEN_FILE`, if it is set. Raises as `read_token`.
        authority: certificate, in PEM, of the authority that signed the server's certificate. None: the one in the file
            `$FASTLOAD_TLS_CA`, if it is set.
    """

    def __init__(self, where: str, *, token: str = "", authority: bytes | None = None) -> None:
        self.where = where
        self._token = token or read_token(os.environ.get("FASTLOAD_TOKEN_FILE"))
        path = os.environ.get("FASTLOAD_TLS_CA")
        self._authority = authority or (Path(path).read_bytes() if path else b"") or None

    @abstractmethod
    def error(self, why: str, *, gone: bool) -> Exception:
        """Return the error to raise for a call. With `gone`, the same call may have an answer later."""

    def connect(self) -> flight.FlightClient:
        """Return a client of the server, which connects with its first call."""
        global _pid
        if _pid not in (0, os.getpid()):
            raise self.error(
                "this process was forked from one that talks to servers, which gRPC does not survive. Use threads or "
                'the start method "spawn", or fork before the first call',
                gone=False,
            )
        _pid = os.getpid()
        with self.naming():
            authority = self._authority
            return flight.FlightClient(
                self.where, tls_root_certs=authority, generic_options=_OPTIONS
            )

    def options(self, seconds: float | None = None) -> flight.FlightCallOptions:
        """Return the options of a call. Without a limit, a call to a hung server does not end, and Ctrl-C waits."""
        headers = [(b"authorization", f"Bearer {self._token}".encode())] if self._token else []
        return flight.FlightCallOptions(timeout=seconds, headers=headers)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Turn each error of a call, and of reading its answer, into one that names the cause and the remedy."""
        try:
            yield
        except FastloadError:
            raise
        except (flight.FlightError, pa.ArrowException, StopIteration) as error:
            said = str(error).partition(". Detail:")[0].partition(". gRPC client debug")[0]
            refused = ""
            if isinstance(error, flight.FlightUnauthenticatedError):
                refused = f"{said}. Set $FASTLOAD_TOKEN_FILE to the path of a file with the token"
            elif isinstance(error, flight.FlightServerError | MemoryError):
                refused = said
            why = refused or said or "the connection was closed"
            if not refused and self.where.startswith("grpc+tls"):
                why += " ($FASTLOAD_TLS_CA names the certificate of the authority that signed the server's)"
            raise self.error(why, gone=not refused) from error
        except Exception as error:
            raise self.error(
                f"the answer cannot be read: {without_path(error)}. {_SAME_VERSION}", gone=False
            ) from error
