"""Tokens and certificates of Arrow Flight servers and their clients. Needs pyarrow (extra `arrow`)."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow import flight


class TokenCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
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


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def client_token() -> str:
    """Return the token in the file `$FASTLOAD_TOKEN_FILE`, or "" if that is not set."""
    return _file_of("FASTLOAD_TOKEN_FILE").decode().strip()


def client_authority() -> bytes | None:
    """Return the certificate in the file `$FASTLOAD_TLS_CA`, or None if that is not set."""
    return _file_of("FASTLOAD_TLS_CA") or None


def _file_of(variable: str) -> bytes:
    path = os.environ.get(variable)
    return Path(path).read_bytes() if path else b""
