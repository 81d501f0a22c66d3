"""Objects that are not on this machine: `open_store` reads s3://, gs://, az://, https:// and file:// URLs.

`store` is what users see. `fetching` has the threads, limits and retries of a process, and `backends` the clients.
`files` opens paths, local or not, and `remote_file` is an object as a file. `cache` keeps blocks of objects on this
machine, and `cache_room` makes room for them. `store` is imported at its first use: who reads local files only does
without it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastload.remote.backends import Entry
    from fastload.remote.store import Store, open_store

__all__ = ["Entry", "Store", "open_store"]


if not TYPE_CHECKING:  # one that sees it takes each name for one that exists

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fastload.remote import store

        return getattr(store, name)
