"""Promises:
- A `FolderStore` whose folder is gone is an error, and never an empty store.
- A `FolderStore` waits for keys as long as it is asked to, and names the one that did not come.

That it answers as torch's stores do is shown by `tests/contracts/stores.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import (  # type: ignore[attr-defined]
    DistStoreError,
    PrefixStore,
    Store,
)

from fastload.distributed import FolderStore

DEADLINE_S = 60
KILLS = 40


def test_wait_returns_once_another_thread_has_set_the_key(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    looked = threading.Event()

    class Looking(FolderStore):
        def check(self, keys: Any) -> bool:
            found = super().check(keys)
            looked.set()
            return found

    def set_later() -> None:
        looked.wait(DEADLINE_S)
        store.set("key", "value")

    thread = threading.Thread(target=set_later)
    thread.start()
    assert Looking(tmp_path).get("key") == b"value"
    thread.join()


def test_a_key_that_does_not_come_is_named(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, timedelta(seconds=0.01))
    with pytest.raises(DistStoreError, match=r"has no key 'key' after 0\.01 s"):
        store.get("key")
    with pytest.raises(DistStoreError, match="has no key 'key' after 0 s"):
        store.wait(["key"], timedelta(0))


def test_a_key_that_comes_at_the_last_moment_is_found(tmp_path: Path) -> None:
    class Late(FolderStore):
        def check(self, keys: Any) -> bool:
            found = super().check(keys)
            self.set("key", "value")
            return found

    store = Late(tmp_path)
    with suppress(DistStoreError):
        store.wait(["key"], timedelta(0))
    assert store.get("key") == b"value"


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.set("key", "value"),
        lambda s: s.add("count", 1),
        lambda s: s.compare_set("key", "", "value"),
        lambda s: s.delete_key("key"),
        lambda s: s.wait(["key"]),
        lambda s: s.check(["key"]),
    ],
)
def test_a_folder_that_is_gone_is_an_error_and_is_not_made_again(
    tmp_path: Path, call: Callable[[Store], Any]
) -> None:
    """Else a job whose store was deleted would go on in an empty one, as if it had just begun."""
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    with pytest.raises(FileNotFoundError, match="store"):
        call(PrefixStore("a", store))
    assert not (tmp_path / "store").exists()
