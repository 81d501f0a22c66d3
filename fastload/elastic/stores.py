"""A connection to a `torch.distributed.Store`: compare-and-set, events, and one error if the store is gone."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Event
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from fastload._kit.torch_private import default_store
from fastload.distributed.folder_store import FolderStore
from fastload.distributed.group import store_of_ranks
from fastload.distributed.rendezvous import torchrun_store
from fastload.errors import StoreLostError

T = TypeVar("T")

_RETRY_S = (0.2, 1.0)
# Torch's errors of stores and of files, and those of a `FolderStore`, as on a full disk.
_ERRORS = (RuntimeError, OSError)
_RECONNECT = timedelta(seconds=3)  # torch would try for 300 s to reach a store that has gone
_FOREVER = timedelta(days=30)
_NAP_S = 0.02


def find_store() -> Store:
    """Return the store of `init()`, else torchrun's, else that of the process group, else one in this process."""
    # The store of `init()` is the same on all nodes, even after a restart that torchrun counts on some nodes only.
    if (store := store_of_ranks() or torchrun_store()) is not None:
        return store
    if dist.is_available() and dist.is_initialized():
        found: Store = default_store()
        return found
    if os.environ.get("WORLD_SIZE", "1") not in ("0", "1"):
        warnings.warn(
            f"fastload: WORLD_SIZE is {os.environ['WORLD_SIZE']} in the environment, and these leases have no store "
            "that other processes share: each process reads all samples. Give Leases store=, start the processes by "
            "torchrun, or call torch.distributed.init_process_group() first",
            stacklevel=4,
        )
    return HashStore()


class Connection:
    """A connection of its own to a store.

    A blocked `wait` keeps a connection busy. So the thread that waits has a connection of its own.
    """

    def __init__(self, store: Store) -> None:
        self._store: Store = store.clone()
        inner = self._store
        while isinstance(inner, PrefixStore):
            inner = inner.underlying_store
        if isinstance(inner, TCPStore):  # clones of other stores share the timeout of the user's
            inner.set_timeout(_RECONNECT)
        self._polls = isinstance(inner, FolderStore)

    def cloned(self) -> Connection:
        """Return another connection to the same store."""
        return Connection(self._store)

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return the value of each key, or "" if it is absent. No key may be that of a counter.

        If all keys exist, this takes two requests.
        """
        if self._asked(lambda store: store.check(list(keys))):
            return [
                value.decode() for value in self._asked(lambda store: store.multi_get(list(keys)))
            ]
        return [self.compare_set(key, "", "") for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        """Set a key to `desired` if its value is `expected`, or if it is absent and that is "". Return its value then.

        The request is repeated if the connection breaks. So `desired` must be a string that no other worker sets here.
        """
        return self._asked(lambda store: store.compare_set(key, expected, desired)).decode()

    def agree(self, what: str, ours: str) -> None:
        """Raise ValueError if another worker has another value of `what`."""
        theirs = self.compare_set(f"about/{what}", "", ours)
        if theirs != ours:
            raise ValueError(
                f"these leases have {what} {ours!r}, but the leases of another worker in the same store have "
                f"{theirs!r}. Give all workers the same arguments, and other leases another name="
            )

    def set(self, key: str, text: str) -> None:
        """Set a key."""
        self._asked(lambda store: store.set(key, text))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return its value. If the connection breaks, it may be added twice."""
        return self._asked(lambda store: store.add(key, amount))

    def add_once(self, key: str, amount: int) -> int | None:
        """Add to a counter; return its value, or None if the connection broke: it may or may not have been added."""
        try:
            return self._store.add(key, amount)
        except _ERRORS:
            return None

    def tell(self, key: str, text: str) -> bool:
        """Set an absent key, to wake the workers that wait for it. Return False if another worker has set it."""
        try:
            return bool(self._store.compare_set(key, "", text) == text.encode())
        except _ERRORS:  # the store is gone, which the waiting workers notice by themselves
            return True

    def wait(self, key: str, closing: Event) -> None:
        """Wait until the key exists. A store in a folder is polled. If it is full, only `closing` ends the wait."""
        if not self._polls:
            self._asked(lambda store: store.wait([key], _FOREVER))
            return
        while not closing.is_set() and not self._asked(lambda store: store.check([key])):
            closing.wait(_NAP_S)

    def _asked(self, ask: Callable[[Store], T]) -> T:
        """Return the store's answer. After some tries, raise StoreLostError."""
        for delay in _RETRY_S:
            try:
                return ask(self._store)
            except _ERRORS:
                time.sleep(delay)
            try:
                self._store = self._store.clone()
            except _ERRORS:
                continue
        try:
            return ask(self._store)
        except _ERRORS as error:
            reason = str(error).splitlines()[0]
            raise StoreLostError(
                f"the store of the leases does not answer ({reason}). The process that kept it has ended, or its file "
                "is gone or cannot be written. The epoch is not complete. Start the job again from its last "
                "checkpoint"
            ) from error
