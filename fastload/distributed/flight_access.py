"""Who may call servers of Arrow Flight, what callers learn, and what clients need. Needs pyarrow (extra `arrow`)."""

from __future__ import annotations

import hmac
import logging
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from fastload.distributed.addresses import in_url
from fastload.errors import UsageError

MAX_CALLS = 1024
_PROBE_S = 2.0
_log = logging.getLogger("fastload")


class GuardedServer(flight.FlightServerBase):  # type: ignore[misc]
    """A server that answers callers with the token, a number of them at a time, and tells them no tracebacks.

    Args:
        host, port: address to listen on. Port 0 is any free port.
        token: token that calls must send. "": none is needed.
        certificate: (chain, key) in PEM, for TLS.
        max_calls: maximum number of open calls. Each holds a thread, which takes about 0.6 MiB.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str = "",
        certificate: tuple[bytes, bytes] | None = None,
        max_calls: int = MAX_CALLS,
    ) -> None:
        self._scheme = "grpc+tls" if certificate else "grpc"
        guards = {"token": _TokenCheck(token)} if token else {}
        super().__init__(
            f"{self._scheme}://{in_url(host)}:{port}",
            tls_certificates=[certificate] if certificate else None,
            middleware={**guards, "calls": _CallLimit(max_calls)},
        )

    def address(self, host: str) -> str:
        """Return the address for clients, with `host` as the name of this machine."""
        return f"{self._scheme}://{in_url(host)}:{self.port}"

    def get_schema(self, context: Any, descriptor: Any) -> flight.SchemaResult:
        """Return no columns: Arrow sends the traceback of each error of this call."""
        return flight.SchemaResult(pa.schema([]))


def _no_such_call(*_: Any) -> None:
    raise flight.FlightServerError("this server has no such call")


_CALLS = "list_flights get_flight_info list_actions do_get do_put do_exchange do_action"
for _call in _CALLS.split():
    setattr(GuardedServer, _call, _no_such_call)  # Arrow's own methods send a traceback


class _TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Rejects calls without the right token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        """Check the header of a call."""
        found = [value.encode() for value in headers.get("authorization", [])]
        if not any(hmac.compare_digest(value, self._expected) for value in found):
            raise flight.FlightUnauthenticatedError(
                "the token is wrong for this server" if found else "this server needs a token"
            )


class _CallLimit(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Rejects calls while too many are open."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: set[_OpenCall] = set()

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> _OpenCall:
        """Count a call."""
        if len(self._open) >= self._most:
            raise flight.FlightUnavailableError(
                f"the server has {self._most} open calls, and takes no more. Start it with a larger --max-calls"
            )
        return _OpenCall(self._open)


class _OpenCall(flight.ServerMiddleware):  # type: ignore[misc]
    def __init__(self, calls: set[_OpenCall]) -> None:
        self._calls = calls
        calls.add(self)

    def call_completed(self, exception: Any) -> None:
        """Count the call no longer."""
        self._calls.discard(self)


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


def client_token() -> str:
    """Return the token in the file `$FASTLOAD_TOKEN_FILE`, or "" if that is not set. Raises as `read_token`."""
    return read_token(os.environ.get("FASTLOAD_TOKEN_FILE"))


def client_authority() -> bytes | None:
    """Return the certificate in the file `$FASTLOAD_TLS_CA`, or None if that is not set."""
    path = os.environ.get("FASTLOAD_TLS_CA")
    return (Path(path).read_bytes() if path else b"") or None


def tls_fault(address: str, authority: bytes | None) -> str:
    """Return why TLS keeps a client from a server that listens, or "" if that is not the reason. Connects once."""
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    host, has_tls = host.strip("[]"), scheme == "grpc+tls"
    try:
        context = ssl.create_default_context(cadata=authority.decode() if authority else None)
        context.set_alpn_protocols(["h2"])
        if not has_tls:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with (
            socket.create_connection((host, int(port)), _PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return "" if has_tls else f"the server uses TLS. Its address is grpc+tls://{place}"
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of the server is not accepted: {error.verify_message}. Set $FASTLOAD_TLS_CA to the path "
            "of the certificate of the authority that signed it"
        )
    except ssl.SSLError as error:
        return f"there is no TLS with the server: {error.reason}" if has_tls else ""
    except (OSError, ValueError):
        return ""
