"""Promise: Torch's TCPStore, FileStore and HashStore and a `FolderStore` keep the contract of stores
(`tests/contracts/stores.py`).
"""

from __future__ import annotations

from tests.contracts.stores import JobStoreContract, StoreContract


class TestHashStore(StoreContract):
    opening, shared = "HashStore()", False


class TestFileStore(StoreContract):
    opening, deletes = "FileStore(where)", False


class TestFolderStore(JobStoreContract):
    opening, gone = "FolderStore(where)", "os.rename(where, where + '-away')"


class TestTCPStore(JobStoreContract):
    opening = "TCPStore('127.0.0.1', port, is_master=False)"
    gone = "os.kill(int(server), signal.SIGKILL)"
