"""Servers for the tests of `fastload.remote`. `weed` and `rclone` run for all tests of a process, a proxy for one."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.remote import servers
from tests.remote.proxy import Proxy
from tests.remote.servers import Bucket, Rclone, SeaweedFS, Server, environment


@pytest.fixture(scope="session", autouse=True)
def _runtime_that_stays() -> None:
    """Let obstore open the descriptors that its runtime keeps, so that no test is blamed for them."""
    if importlib.util.find_spec("obstore"):
        from obstore.store import MemoryStore

        MemoryStore().put("a", b"")


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A running SeaweedFS. A test that ends it starts one of its own."""
    with SeaweedFS(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    """A running rclone."""
    with Rclone(tmp_path_factory.mktemp("rclone")) as server:
        yield server


@pytest.fixture(scope="session", params=["weed", "rclone"])
def server(request: pytest.FixtureRequest) -> Server:
    """Each server in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Server)
    return found


@pytest.fixture
def bucket(weed: SeaweedFS) -> Bucket:
    """The bucket of SeaweedFS, which all tests share: each takes names of its own."""
    return Bucket(weed)


@pytest.fixture
def proxy(weed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before SeaweedFS. The environment leads clients to it."""
    with Proxy(weed) as found:
        use(monkeypatch, found.url)
        yield found


def use(monkeypatch: pytest.MonkeyPatch, url: str, secret: str = servers.SECRET) -> None:
    """Lead this process's clients to an endpoint."""
    for name, value in environment(url, secret).items():
        monkeypatch.setenv(name, value)
