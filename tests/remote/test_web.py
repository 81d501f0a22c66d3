"""Promises:
- Objects at http:// and https:// are read whole and in ranges, also by datasets. An untrusted certificate is named.
- URLs of Azure and Google lead to their endpoints: what is read and written there is right.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fastload.datasets import ImageFolder
from fastload.errors import RemoteError
from fastload.remote import Store, files, open_store
from fastload.sequences import TokenWindows
from tests.remote.servers import content
from tests.remote.web import Web, made_certificate

BODY = content("web", 1000)
UNSIGNED = {"gcs_base_url": "", "disable_oauth": True} | dict.fromkeys(
    ("client_email", "private_key", "private_key_id"), ""
)


@pytest.fixture(autouse=True)
def _stores_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store keeps the endpoint that its first read found, and each test has another."""
    monkeypatch.setattr(files, "_store", cache(open_store))


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        yield server


def check(store: Store, server: Web, path: str) -> None:
    """Read and write an object of a store, which is at this path of its server."""
    server.objects[path] = BODY
    name = path.rpartition("/")[2]
    assert store.read(name) == BODY
    assert store.read_many([(name, 10, 20), (name, 990, None)]) == [BODY[10:20], BODY[990:]]
    assert store.size(name) == 1000
    asked = {(method, span) for method, where, span in server.asked if where == path}
    assert asked == {
        *(("GET", None), ("HEAD", None), ("GET", "bytes=10-19")),
        ("GET", "bytes=990-"),
    }
    store.write(name, b"another")
    assert server.objects[path] == b"another" == store.read(name)
    with pytest.raises(FileNotFoundError):
        store.read("none")


@pytest.mark.parametrize("name", ["one", "größe 1"])
def test_a_web_server_is_read(name: str, web: Web) -> None:
    check(open_store(f"{web.url}/folder"), web, f"/folder/{name}")


@pytest.mark.parametrize("name", ["one", "größe 1"])
def test_azure_is_read_and_written(name: str, web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", web.url)
    store = open_store("az://box/in", account_name="someone", account_key="a2V5")
    check(store, web, f"/box/in/{name}")


@pytest.mark.parametrize("name", ["one", "größe 1"])
def test_google_is_read_and_written(name: str, web: Web) -> None:
    key = json.dumps(UNSIGNED | {"gcs_base_url": web.url})
    options = {"allow_http": True}
    store = open_store("gs://box/in", service_account_key=key, client_options=options)
    check(store, web, f"/box/in/{name}")


def test_a_web_server_that_lists_nothing_says_so(web: Web) -> None:
    with pytest.raises(RemoteError, match="status 501 .*: a web server lists and writes only if"):
        open_store(web.url, retries=0).list()
    with pytest.raises(RemoteError, match="a listing: status 501"):
        ImageFolder(f"{web.url}/images")


def test_https_is_read_with_a_trusted_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = made_certificate(tmp_path)
    with Web(certificate) as server:
        refused = r"/a: .*\(Connect, InvalidCertificate UnknownIssuer\) \(1 attempt\)"
        server.objects["/a"] = np.arange(100, dtype=np.uint16).tobytes()
        with pytest.raises(RemoteError, match=refused):
            open_store(server.url, retries=0).read("a")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        check(open_store(f"{server.url}/folder"), server, "/folder/one")
        server.asked.clear()
        windows = TokenWindows(f"{server.url}/a", 9, dtype="uint16")
        assert windows[1]["targets"].tolist() == [*range(10, 19)]
        assert server.asked == [("HEAD", "/a", None), ("GET", "/a", "bytes=18-37")]
