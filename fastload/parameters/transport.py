"""How clients reach servers: a stub for each, which is an object of this process or a connection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from fastload.distributed.folder_store import FolderStore
from fastload.errors import ParametersError
from fastload.parameters.server import Server

Answer = dict[str, Any]
_KEY, _COUNT = "fastload/parameters/{}", "fastload/parameters/servers"


class ServerGoneError(ConnectionError):
    """A call has no answer: the connection broke, or there is none. It may have been done, or not."""


class Stub(Protocol):
    """The way to one server. All methods can be called from several threads."""

    @property
    def name(self) -> str:
        """Return what an error calls the server."""

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call; return a function that waits for the answer, and must be called.

        Both raise ServerGoneError if the connection breaks, and ParametersError if the server refuses the call.
        """

    def close(self) -> None:
        """Close connections."""


class InProcess:
    """A server in this process: calls are made when they are started, and tensors are not copied on the way there."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.name = f"server {server.number} in this process"

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Make a call."""
        answer = self._server.answer(method, arguments)
        return lambda: answer

    def close(self) -> None:
        """Close nothing: the server is its maker's."""


Where = None | Server | Store | str | Sequence[Server | str]


def stubs(
    where: Where, make_stub: Callable[[Callable[[], str]], Stub], *, wait_s: float
) -> list[Stub]:
    """Return a stub for each server. See `client.connect`.

    Args:
        make_stub: makes the stub of a server in another process, from a function that returns its address.
    """
    if isinstance(where, str) and where.startswith("file://"):
        where = FolderStore(where.removeprefix("file://"))
    if isinstance(where, Store):
        number = servers_in(where, wait_s)
        return [make_stub(functools.partial(address_in, where, i)) for i in range(number)]
    if where is None or isinstance(where, Server | str):
        where = [Server() if where is None else where]
    return [
        InProcess(each)
        if isinstance(each, Server)
        else make_stub(functools.partial(str, _checked(each)))
        for each in where
    ]


def _checked(address: str) -> str:
    """Return an address. Raise ValueError if it has none of the schemes that servers print."""
    if not address.startswith(("grpc://", "grpc+tls://")):
        raise ValueError(
            f"{address!r} is not a server address. Use grpc://HOST:PORT or grpc+tls://HOST:PORT. For a folder given "
            "to `fastload parameters serve --store`, use file:// and its absolute path"
        )
    return address


def servers_in(store: Store, wait_s: float) -> int:
    """Return how many servers have written their addresses into a store, after waiting for all of them."""
    try:
        store.wait([_COUNT], timedelta(seconds=wait_s))
        number = int(store.get(_COUNT))
        store.wait([_KEY.format(i) for i in range(number)], timedelta(seconds=wait_s))
    except RuntimeError as error:
        raise ParametersError(
            f"not all servers have written their addresses into the store within {wait_s:g} s. Start them with "
            "`fastload parameters serve`, and give them the same store"
        ) from error
    return number


def address_in(store: Store, number: int) -> str:
    """Return the address of a server."""
    return str(store.get(_KEY.format(number)).decode())


def publish(store: Store, number: int, of: int, address: str) -> None:
    """Write the address of a server into a store. Raise ParametersError if the store has other servers."""
    count = store.compare_set(_COUNT, "", str(of)).decode()
    if count != str(of):
        raise ParametersError(
            f"the store has the addresses of {count} servers, but this server is one of {of}. For another number of "
            "servers, give a new store. The servers may load the same checkpoint folder"
        )
    store.set(_KEY.format(number), address)


def is_published(store: Store, number: int) -> bool:
    """Return whether a server has written its address before."""
    return bool(store.check([_KEY.format(number)]))
