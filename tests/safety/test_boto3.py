"""Promises:
- A sample that makes a boto3 client or session is known to be unsafe in threads: threads that the user asked for warn.
- A client that the dataset holds is shared by the threads, without a warning: clients are thread-safe.

boto3 need not be installed: a module of its name stands in for it.
"""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import Dataset

import fastload
from fastload.errors import SharedStateWarning
from fastload.safety import libraries


def client(name: str) -> Any:
    """Make a client of the default session, as `boto3.client` does."""
    return SimpleNamespace(name=name)


boto3: Any = ModuleType("boto3")
boto3.client = client
boto3.session = ModuleType("boto3.session")
boto3.session.Session = type("Session", (), {"client": staticmethod(client)})
boto3.Session = boto3.session.Session


class Base(Dataset[int]):
    def __len__(self) -> int:
        return 4


class ByDefaultSession(Base):
    def __getitem__(self, index: int) -> int:
        return len(boto3.client("s3").name)


class BySession(Base):
    def __getitem__(self, index: int) -> int:
        return len(boto3.Session().client("s3").name)


@pytest.fixture(autouse=True)
def _stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", boto3)
    monkeypatch.setitem(sys.modules, "boto3.session", boto3.session)
    monkeypatch.setattr(libraries, "_allowed", set())  # so that the code of this file is read


@pytest.mark.parametrize(
    ("dataset", "name"),
    [(ByDefaultSession(), "boto3.client"), (BySession(), "boto3.session.Session")],
)
def test_threads_warn_of_clients_made_in_samples(dataset: Any, name: str) -> None:
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2}
    with (
        pytest.warns(SharedStateWarning, match=rf"data race.*{name}.*process-wide state"),
        fastload.DataLoader(dataset, worker_method="thread", **options) as loader,
    ):
        assert [batch.tolist() for batch in loader] == [[2, 2], [2, 2]]
    with fastload.DataLoader(dataset, worker_method="auto", **options) as loader:
        assert len(list(loader)) == 2
        assert loader.stats().worker_method == "process"


class BaseClient:
    """Stands in for botocore's, which no copy comes of: it holds a TLS context."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle 'SSLContext' object")


BaseClient.__module__ = "botocore.client"


class Held(Base):
    def __init__(self) -> None:
        self.client = type("S3", (BaseClient,), {})()
        self.known = id(self.client)

    def __getitem__(self, index: int) -> int:
        return int(id(self.client) == self.known)


def test_a_held_client_is_shared_by_threads() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SharedStateWarning)
        with fastload.DataLoader(Held(), 2, num_workers=2, worker_method="thread") as loader:
            assert [batch.tolist() for batch in loader] == [[1, 1], [1, 1]]
