"""A `torch.distributed.Store` in a folder, which survives the death of any process at any moment."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from urllib.parse import quote

from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from fastload._kit.disk import locked_path, write_file

_NAP_S = 0.02  # between two checks for keys
_kept: list[FolderStore] = []
"""All stores of this process. Torch's C++ code, such as a `PrefixStore`, does not keep its Python object alive."""


class FolderStore(Store):
    """Keys and values that processes share through a folder, without a server.

    Torch's own `FileStore` appends records to one file. A process that is killed while it writes a record leaves an
    incomplete one, and then every process that reads the file hangs. Here each key is a file. It is replaced as a
    whole, under a lock that the kernel releases if its holder ends.

    Args:
        path: the folder, which is created if it does not exist. All processes must see it, on a file system with locks.
        timeout: time that `get` and `wait` wait for a key. `set_timeout` changes it.

    Reading a key takes about 20 us, and changing one about 250 us. `wait` checks its keys every 20 ms, because no file
    system reports changes by other machines. Any thread may make any call. A store stays in memory until the
    process ends.

    Raises:
        OSError: the folder is gone, or cannot be read or written.
        DistStoreError: `wait` or `get` takes too long.

    Examples:
        >>> store = fastload.distributed.FolderStore("keys")
        >>> store.set("epoch", "3")
        >>> store.get("epoch")
        b'3'
    """

    def __init__(
        self, path: str | os.PathLike[str], timeout: timedelta = timedelta(seconds=300)
    ) -> None:
        super().__init__()
        self.set_timeout(timeout)
        _kept.append(self)
        self._folder = os.path.abspath(path)
        os.makedirs(self._folder, exist_ok=True)

    def clone(self) -> FolderStore:
        """Return this store itself. Its `wait` in one thread does not block calls in others."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        with self._changing():
            self._write(key, _bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key to `desired` if its value is `expected`, or if it is absent and `expected` is empty.

        Return the value of the key afterwards. For an absent key, return `expected`, as torch's stores do.
        """
        with self._changing():
            found = self._read(key)
            if (b"" if found is None else found) == _bytes(expected):
                self._write(key, _bytes(desired))
                return _bytes(desired)
            return _bytes(expected) if found is None else found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return its value."""
        with self._changing():
            value = int(self._read(key) or 0) + amount
            self._write(key, str(value).encode())
            return value

    def get(self, key: str) -> bytes:
        """Return the value of a key, after waiting for it."""
        self.wait([key])
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of existing keys."""
        found = [self._read(key) for key in keys]
        if None in found:
            raise DistStoreError(f"{self._folder} has no key {keys[found.index(None)]!r}")
        return [value for value in found if value is not None]

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all keys exist."""
        # Raise OSError if the folder is gone, because no key would ever appear.
        os.stat(self._folder)
        return all(os.path.exists(self._path(key)) for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Without `timeout`, use that of the store."""
        limit = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        limit_s = limit.total_seconds()
        deadline = time.monotonic() + limit_s
        while missing := [key for key in keys if not self.check([key])]:
            if time.monotonic() > deadline:
                raise DistStoreError(
                    f"{self._folder} has no key {missing[0]!r} after {limit_s:g} s"
                )
            time.sleep(_NAP_S)

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return True if it existed."""
        with self._changing():
            try:
                os.unlink(self._path(key))
            except FileNotFoundError:
                return False
            return True

    def num_keys(self) -> int:
        """Return the number of keys."""
        return sum(not name.startswith(".") for name in os.listdir(self._folder))

    # Torch's `PrefixStore` calls them by the names that they have in C++.
    deleteKey, getNumKeys = delete_key, num_keys

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, quote(f"k{key}", safe=""))

    def _changing(self) -> AbstractContextManager[None]:
        # `locked_path` would create a lost folder again, as a store without its old keys.
        os.stat(self._folder)
        return locked_path(os.path.join(self._folder, ".lock"))

    def _read(self, key: str) -> bytes | None:
        try:
            with open(self._path(key), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _write(self, key: str, value: bytes) -> None:
        # It need not survive a power loss: all processes end then, and a new run needs a new store.
        write_file(self._path(key), value, durable=False)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
