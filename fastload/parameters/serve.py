"""A server as a process: it writes its address into a store, and saves at its end."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from fastload.distributed.addresses import numeric, own_address
from fastload.distributed.folder_store import FolderStore
from fastload.distributed.rendezvous import torchrun_store
from fastload.parameters.checkpoint import complete
from fastload.parameters.server import Server

_END = "fastload/parameters/end"


def job_store(path: str | None) -> Store | None:
    """Return the store in the folder `path`, or else torchrun's store, or else None."""
    return FolderStore(path) if path else torchrun_store()


def reached_as(host: str) -> str:
    """Return the name by which clients reach a server that listens on `host`."""
    with suppress(ValueError):
        if ipaddress.ip_address(numeric(host)).is_unspecified:
            return own_address()
    return host


def end(server: Server, store: Store | None) -> int:
    """Stop answering calls, and save. Return the version of the checkpoint."""
    server.lock.acquire()
    version = server.version
    if store is not None and not server.grads_to_wait and server.folder:
        version = _agreed(server, store)
    server.save(version)
    return version


def _agreed(server: Server, store: Store) -> int:
    """Return the version under which all servers save. Their own versions differ by the pushes in flight.

    Synchronous servers do not use this, because their parts must have the same version.
    """
    oldest, _ = next(complete(Path(server.folder)), (0, 0))
    proposed = b""
    while True:
        own = str(max(server.version, oldest))
        agreed = store.compare_set(_END, proposed.decode(), own)
        if int(agreed) >= oldest:
            return int(agreed)
        proposed = agreed  # left from an earlier end of some servers
