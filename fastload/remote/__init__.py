"""Objects that are not on this machine: `open_store` reads s3://, gs://, az://, https:// and file:// URLs.

`store` is what users see. `fetching` has the threads, limits and retries of a process, and `backends` the clients.
"""

from fastload.remote.backends import Entry
from fastload.remote.store import Store, open_store

__all__ = ["Entry", "Store", "open_store"]
