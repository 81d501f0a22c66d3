"""How clients reach servers: a stub for each, which is an object of this process or a connection."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

from torch.distributed import Store  # type: ignore[attr-defined]

from fastload.errors import ParametersError
from fastload.parameters.server import Server

Answer = dict[str, Any]
_KEY, _COUNT = "fastload/parameters/{}", "fastload/parameters/servers"


RESUME = (
    "End all servers and workers, and start them again with the same --checkpoint: they resume from the newest "
    "complete checkpoint"
)


class ServerGoneError(ParametersError):
    """A call has no answer, because the connection broke or could not be made. The server may have made the call."""


class Stub(Protocol):
    """The link to one server. All methods can be called from several threads.

    Examples:
        >>> [stub] = fastload.parameters.connect()
        >>> stub.close()
    """

    @property
    def name(self) -> str:
        """Return the place of the server, for errors."""

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Send a call; return a function that waits for the answer, and must be called.

        Raises:
            ParametersError: the server refuses the call, or gives no answer. The returned function raises it, too.
        """

    def close(self) -> None:
        """Close connections."""


class InProcess:
    """A server in this process. `start` makes the call at once, and does not copy its tensors.

    Args:
        server: the server.

    Examples:
        >>> server = fastload.parameters.Server()
        >>> client = fastload.parameters.PSClient([fastload.parameters.InProcess(server)])
        >>> client.close()
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self.name = "in this process"

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        """Make a call, and return a function that returns its answer."""
        answer = self._server.answer(method, arguments)
        return lambda: answer

    def close(self) -> None:
        """Do nothing, because the server belongs to its caller."""


def servers_in(store: Store, wait_s: float) -> int:
    """Wait until all servers have written their addresses into a store. Return their number."""
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
    """Return the address of a server. Raise ParametersError if the store does not answer."""
    try:
        return str(store.get(_KEY.format(number)).decode())
    except (RuntimeError, OSError) as error:
        raise ParametersError(
            f"the store has no address of server {number}: {error}. Give workers the store of the servers"
        ) from error


def publish(store: Store, number: int, of: int, address: str) -> None:
    """Write the address of a server into a store. Raise ParametersError if the store has other servers."""
    count = store.compare_set(_COUNT, "", str(of)).decode()
    if count != str(of):
        raise ParametersError(
            f"the store has the addresses of {count} servers, but this server is one of {of}. For another number of "
            "servers, give a new store. The servers may load the same checkpoint folder"
        )
    store.set(_KEY.format(number), address)
