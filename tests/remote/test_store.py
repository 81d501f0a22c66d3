"""Promises of `open_store`, against a server of HTTP in the test's process that does what each object's name says:

- A read returns the right bytes, or raises an error that names object, range, attempts and cause.
- What may pass is tried again: 5xx, 429, cut bodies, wrong ranges, connections that break. 403 and 404 are not.
- An object whose ETag changes after the first read is an error.
- No password, key or signature is in a repr or an error; a pickle carries what was given, a repr not.
- A process that has not read by obstore may fork. A child of one that has read raises one sentence.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import fastload
from fastload.errors import NotInstalledError, RemoteError, UsageError
from fastload.remote import Entry, Store, attempts, open_store
from fastload.remote.store import planned

BODY = bytes(range(256)) * 400


class Server(ThreadingHTTPServer):
    """Serves BODY under each name. What it does first for a name is in `faults`, one for each request."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: dict[str, list[str]] = {}
        self.etags: dict[str, str] = {}
        self.asked: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/folder"


class Handler(BaseHTTPRequestHandler):
    """Answers a request, and closes the connection, so that no thread of the server is left."""

    server: Server

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name, span = self.path.rpartition("/")[2], self.headers["Range"]
        self.server.asked.append((name, span))
        faults = self.server.faults.get(name)
        fault = faults.pop(0) if faults else ""
        if fault.isdigit():
            self.send_response(int(fault))
            self.end_headers()
            self.wfile.write(b"<AWSAccessKeyId>key-of-mine</AWSAccessKeyId>")
        elif fault != "close":
            self._answer(name, span, fault)

    def _answer(self, name: str, span: str | None, fault: str) -> None:
        first, last = 0, len(BODY)
        if span and fault != "whole":
            begin, _, end = span.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(last, int(end) + 1) if end else last
        if fault == "shifted":
            first, last = first + 1, last + 1
        self.send_response(200 if (first, last) == (0, len(BODY)) else 206)
        self.send_header("Content-Length", str(last - first))
        self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(BODY)}")
        self.send_header("ETag", self.server.etags.get(name, '"one"'))
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 10:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(BODY[first : last - 5 if fault == "cut" else last])


@pytest.fixture
def server() -> Iterator[Server]:
    pytest.importorskip("obstore")
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts._jitter, "uniform", lambda *_: 0.0)


def test_a_path_is_below_the_url_or_a_whole_url(server: Server) -> None:
    store = open_store(server.url)
    assert store.read("a") == store.read(f"{server.url}/a") == BODY
    assert open_store(f"{server.url}/").read("a", 3, 9) == BODY[3:9]
    assert type(store.read("a")) is bytes
    assert store.read("a", 100) == BODY[100:]
    assert store.read("a", 5, 5) == b""
    assert store.size("a") == len(BODY)
    with pytest.raises(ValueError, match="is not below"):
        store.read("https://example.org/a")
    for start, stop in ((-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="are no range"):
            store.read("a", start, stop)


def test_many_come_in_order_and_neighbours_in_one_request(server: Server) -> None:
    store = open_store(server.url)
    wanted = [("a", 500, 600), "b", ("a", 0, 100), ("a", 50, 200), ("c", 1, None), ("a", 9, 9)]
    assert store.read_many(wanted) == [
        BODY[500:600],
        BODY,
        BODY[:100],
        BODY[50:200],
        BODY[1:],
        b"",
    ]
    assert sorted(server.asked, key=str) == [("a", "bytes=0-599"), ("b", None), ("c", "bytes=1-")]
    assert store.read_many([]) == []


def test_ranges_far_apart_or_large_are_requests_of_their_own() -> None:
    mib = 1 << 20
    apart = {i: ("a", i * 2 * mib, i * 2 * mib + 10) for i in range(3)}
    assert [request for request, _ in planned(apart)] == list(apart.values())
    large = {i: ("a", i * mib, (i + 1) * mib) for i in range(20)}
    found = planned(large)
    assert [(start, stop) for (_, start, stop), _ in found] == [
        (0, 8 * mib),
        (8 * mib, 16 * mib),
        (16 * mib, 20 * mib),
    ]
    assert sorted(i for _, of in found for i in of) == list(range(20))
    assert planned({0: ("a", 0, 20 * mib)}) == [(("a", 0, 20 * mib), [0])]


@pytest.mark.usefixtures("_no_pause")
@pytest.mark.parametrize("fault", ["500", "502", "503", "429", "cut", "shifted", "close"])
def test_what_may_pass_is_tried_again(server: Server, fault: str) -> None:
    store = open_store(server.url, retries=3)
    server.faults["a"] = [fault] * 3
    assert store.read("a", 10, 50) == BODY[10:50]
    assert len(server.asked) == 4
    stats = store.stats()
    assert (stats["requests"], stats["retries"]) == (4, 3)
    assert stats["throttled"] == (3 if fault in ("503", "429") else 0)
    server.faults["b"] = [fault] * 9
    with pytest.raises(RemoteError) as caught:
        store.read("b", 10, 50)
    text = str(caught.value)
    assert text.startswith(f"{server.url}/b, bytes 10 to 50: ")
    assert text.endswith(" (4 attempts)")
    if fault.isdigit():
        assert f"status {fault}" in text


@pytest.mark.usefixtures("_no_pause")
@pytest.mark.parametrize("fault", ["400", "401", "403", "416"])
def test_what_stays_is_not_tried_again(server: Server, fault: str) -> None:
    server.faults["a"] = [fault] * 9
    with pytest.raises(RemoteError, match=rf"/a: .*\b{fault}\b.* \(1 attempt\)$"):
        open_store(server.url).read("a")
    assert len(server.asked) == 1


def test_a_server_that_ignores_ranges_is_an_error(server: Server) -> None:
    server.faults["a"] = ["whole"] * 9
    with pytest.raises(RemoteError, match=r"answers a range with the whole object \(2 attempts\)$"):
        open_store(server.url).read("a", 10, 50)
    assert len(server.asked) == 2
    server.faults["b"] = ["whole"]
    assert open_store(server.url).read("b", 10, 50) == BODY[10:50]


def test_a_missing_object_is_a_file_not_found(server: Server) -> None:
    server.faults["a"] = ["404"] * 9
    store = open_store(server.url)
    for call in (lambda: store.read("a"), lambda: store.size("a"), lambda: store.read_many(["a"])):
        with pytest.raises(FileNotFoundError, match="No such object") as caught:
            call()
        assert caught.value.filename == f"{server.url}/a"
    assert len(server.asked) == 3


def test_a_range_past_the_end_is_an_error_at_once(server: Server) -> None:
    size = len(BODY)
    with pytest.raises(RemoteError, match=rf"to {size} of {size} came \(1 attempt\)"):
        open_store(server.url).read("a", 10, size + 1)


@pytest.mark.usefixtures("_no_pause")
def test_a_server_that_is_gone_is_named() -> None:
    pytest.importorskip("obstore")
    with Server() as gone:
        url = gone.url
    with pytest.raises(RemoteError, match=r"/folder/a: .*error sending .*Connect.*\(3 attempts\)$"):
        open_store(url, retries=2).read("a")


def test_an_object_that_changes_after_its_first_read_is_an_error(server: Server) -> None:
    store = open_store(server.url)
    assert store.read("a", 0, 10) == BODY[:10]
    store.will_read(["a"])
    assert store.read("a") == BODY
    server.etags["a"] = '"two"'
    for call in (lambda: store.read("a", 10, 20), lambda: store.size("a")):
        with pytest.raises(RemoteError, match=r'/a: .*has changed.*"one".*"two"'):
            call()
    assert open_store(server.url).read("a") == BODY


@pytest.mark.usefixtures("_no_pause")
def test_credentials_are_nowhere_but_in_pickles(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = server.url.replace("//", "//user:password@")
    store = open_store(secret, retries=1)
    server.faults["a"] = ["503", "close", "403", "404"]
    seen = [repr(store), str(store)]
    for _ in range(3):
        with pytest.raises(OSError, match="folder/a") as caught:
            store.read("a")
        seen += [str(caught.value), repr(caught.value), repr(caught.value.__cause__)]
    keyed = open_store(
        "s3://bucket/folder",
        access_key_id="user",
        secret_access_key="password",
        endpoint=server.url,
        retries=0,
    )
    server.faults["b"] = ["403"]
    with pytest.raises(RemoteError, match=r"^s3://bucket/folder/b: status 403") as caught:
        keyed.read("b")
    seen += [str(caught.value), repr(caught.value.__cause__), repr(keyed), *capfd.readouterr()]
    text = " ".join(seen)
    assert not [word for word in ("user", "password", "key-of-mine") if word in text], text
    assert b"password" in pickle.dumps(keyed)


def test_a_copy_reads_for_itself(server: Server) -> None:
    store = open_store(server.url)
    assert store.read("a") == BODY
    for other in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):
        assert isinstance(other, Store)
        assert other.stats()["requests"] == 0
        assert other.read("a") == BODY


def test_look_ahead_is_what_a_read_gets(server: Server) -> None:
    store = open_store(server.url)
    names = [f"n{i}" for i in range(30)]
    store.will_read([(name, 10, 90) for name in names])
    assert [store.read(name, 10, 90) for name in names] == [BODY[10:90]] * 30
    assert sorted(server.asked) == sorted((name, "bytes=10-89") for name in names)
    stats = store.stats()
    assert stats["bytes_wanted"] == stats["bytes_fetched"] == 30 * 80
    assert 0 < stats["p50_s"] <= stats["p99_s"]


# ---- processes ----


def in_child(call: str, before: str = "pass") -> str:
    """Return what a forked child prints for `call`, in a program that ran `before`."""
    program = f"""
import os, sys, threading
from fastload.remote import open_store
store = open_store(sys.argv[1])
{before}
child = os.fork()
if not child:
    try:
        print({call}, flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    return program


def run(program: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_that_made_a_store_may_fork(server: Server) -> None:
    assert run(in_child("len(store.read('a'))"), server.url) == f"{len(BODY)}\n"


def test_a_child_of_a_process_that_read_says_what_to_do(server: Server) -> None:
    for call in ("store.read('a')", "open_store(sys.argv[1]).size('a')", "store.list()"):
        said = run(in_child(call, "store.read('a')"), server.url)
        assert said.startswith(f"RemoteError {server.url}: this process was forked from one"), said
        assert "spawn or forkserver" in said


def test_an_import_of_fastload_loads_no_client() -> None:
    said = run(
        "import sys, fastload, fastload.remote as r; r.open_store('s3://b/c');"
        "print({'obstore', 'fsspec'} & {*sys.modules}, len(__import__('os').listdir('/proc/self/task')))"
    )
    assert said.startswith("set() ")


def test_the_interpreter_ends_amid_look_ahead(server: Server) -> None:
    program = """
import sys
from fastload.remote import open_store
store = open_store(sys.argv[1])
store.will_read([f"n{i}" for i in range(500)])
print(len(store.read("n0")))
"""
    assert run(program, server.url) == f"{len(BODY)}\n"


# ---- other sources ----


def test_files_are_read_without_a_client_and_may_be_forked_after(tmp_path: Path) -> None:
    (tmp_path / "sub dir").mkdir()
    (tmp_path / "sub dir" / "a").write_bytes(BODY)
    (tmp_path / "b").write_bytes(b"")
    store = open_store(f"file://{tmp_path}")
    assert store.read("sub dir/a", 5, 9) == BODY[5:9]
    assert store.read(f"file://{tmp_path}/b") == b""
    assert store.read("sub dir/a", 100) == BODY[100:]
    listed = store.list()
    assert [entry[:2] for entry in listed] == [("b", 0), ("sub dir/a", len(BODY))]
    assert store.list("sub dir") == listed[1:]
    assert isinstance(listed[0], Entry)
    (tmp_path / "sub dir" / "a").write_bytes(BODY[:-1])
    with pytest.raises(RemoteError, match="has changed"):
        store.read("sub dir/a", 5, 9)
    with pytest.raises(FileNotFoundError) as caught:
        store.read("none")
    assert caught.value.filename == f"file://{tmp_path}/none"
    with pytest.raises(RemoteError, match=r"of 0 came \(1 attempt\)"):
        store.read("b", 0, 1)
    said = run(in_child("len(store.read('b'))", "store.read('b')"), f"file://{tmp_path}")
    assert said == "0\n"


def test_a_file_system_of_fsspec_reads() -> None:
    fsspec = pytest.importorskip("fsspec")
    fs = fsspec.filesystem("memory")
    fs.pipe_file("/remote-test/a", BODY)
    store = open_store(fs, retries=1)
    assert store.read("/remote-test/a") == BODY
    assert store.read_many([("/remote-test/a", 0, 5), ("/remote-test/a", 9, None)]) == [
        BODY[:5],
        BODY[9:],
    ]
    assert store.size("/remote-test/a") == len(BODY)
    assert [entry.path for entry in store.list("/remote-test")] == ["/remote-test/a"]
    with pytest.raises(FileNotFoundError):
        store.read("/remote-test/b")
    assert pickle.loads(pickle.dumps(store)).read("/remote-test/a", 0, 3) == BODY[:3]
    fs.rm("/remote-test", recursive=True)


class Reader:
    """A store of a user's own."""

    def read(self, url: str) -> bytes:
        return f"what is at {url}".encode()


def test_any_object_that_reads_urls_is_a_store() -> None:
    store = open_store(Reader())
    assert store.read("x://y") == b"what is at x://y"
    assert store.read("x://y", 5, 7) == b"is"
    assert store.size("x://y") == 16
    assert repr(store) == "Store(Reader)"
    with pytest.raises(UsageError, match="no way to list"):
        store.list()


def test_what_cannot_be_read_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for source, says in (("bucket/a", "is not a URL"), (object(), r"has no read\(url\)")):
        with pytest.raises(UsageError, match=says):
            open_store(source)
    with pytest.raises(UsageError, match="region"):
        open_store(Reader(), region="x")
    pytest.importorskip("obstore")
    with pytest.raises(UsageError, match=r"^s3://bucket: .*no_such_option"):
        open_store("s3://bucket", no_such_option=1).read("a")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(NotInstalledError, match=r"torch-fastload\[remote\]"):
        open_store("s3://bucket")


class Samples(torch.utils.data.Dataset[int]):
    """A user's dataset that has a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> int:
        return len(self.store.read("a", i, 2 * i))


def test_threads_of_a_loader_share_a_store(server: Server) -> None:
    store = open_store(server.url)
    loader = fastload.DataLoader(
        Samples(store), batch_size=4, num_workers=4, worker_method="thread"
    )
    assert torch.cat([*loader]).tolist() == list(range(40))
    assert store.stats()["requests"] == 39
