"""Promise: A store reads what real servers of S3 hold, whole and in ranges, one by one and many at once, says what is
missing or forbidden, and tells nobody its credentials.
"""

from __future__ import annotations

import io
import pickle
import re
import traceback
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastload.errors import RemoteError
from fastload.remote import Store, open_store
from tests.remote.conftest import use
from tests.remote.programs import run
from tests.remote.proxy import Proxy
from tests.remote.servers import BUCKET, KEY, SECRET, Bucket, Server, content, environment

MIB = 1 << 20
SOURCE = f"s3://{BUCKET}"
STRANGE = [
    "a b",
    "a+b",
    "100%",
    "50%25",
    "größe/名前.bin",
    "q?x=1&y#z",
    "~tilde'(1)*!",
]


@pytest.fixture
def led(server: Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Each server's bucket in turn. The environment leads to it."""
    use(monkeypatch, server.url)
    return Bucket(server)


def ranges_of(read: Callable[[], bytes], led: Bucket) -> bytes | None:
    """Return what a read of a range gives, or None from a server that is told not to know ranges (rclone 1.75)."""
    if led.server.NAME != "rclone":
        return read()
    try:
        return read()
    except RemoteError as error:
        assert "range" in str(error)
        return None


# ---- what is read ----


def test_an_object_is_read_whole_and_in_ranges(led: Bucket) -> None:
    body = led.put("whole", content("whole", 1000))
    led.put("empty", b"")
    store = open_store(SOURCE)
    assert store.read("whole") == body
    assert store.read(f"{SOURCE}/whole") == body
    assert store.read("empty") == b""
    for start, stop in ((0, 10), (10, 20), (990, 1000), (990, None), (0, 1000), (7, 7)):
        found = ranges_of(lambda start=start, stop=stop: store.read("whole", start, stop), led)  # type: ignore[misc]
        assert found in (None, body[start:stop]), (start, stop)
    assert type(store.read("whole")) is bytes


def test_a_range_past_the_end_gives_what_is_there_or_an_error(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("short", content("short", 100))
    store = open_store(SOURCE)
    for start, stop in ((90, 200), (100, 200), (150, 200), (150, None)):
        try:
            found = store.read("short", start, stop)
        except RemoteError as error:
            assert "short" in str(error)
        else:
            assert found == body[start:stop]


def test_many_are_read_in_the_order_asked_for(led: Bucket) -> None:
    bodies = led.fill({f"many/{i}": 100 + i for i in range(40)})
    store = open_store(f"{SOURCE}/many")
    names = [*bodies, *reversed(bodies), "many/3"]
    short = [name.removeprefix("many/") for name in names]
    assert store.read_many(short) == [bodies[name] for name in names]
    assert store.read_many([]) == []


def test_ranges_of_many_objects_come_in_order(bucket: Bucket, proxy: Proxy) -> None:
    bodies = bucket.fill({f"mixed/{i}": 3 * MIB for i in range(3)})
    asked = [(f"mixed/{i % 3}", i * 2003, i * 2003 + 500) for i in range(60)]
    requests: list[object] = [*asked, "mixed/1", ("mixed/2", 3 * MIB - 5, None)]
    found = open_store(SOURCE).read_many(requests)
    assert found[:60] == [bodies[key][start:stop] for key, start, stop in asked]
    assert found[60:] == [bodies["mixed/1"], bodies["mixed/2"][-5:]]


@pytest.mark.parametrize("key", STRANGE)
def test_a_strange_name_is_read(led: Bucket, key: str) -> None:
    name = f"strange/{key}"
    body = led.put(name, content(name, 50))
    store = open_store(f"{SOURCE}/strange")
    assert store.read(key) == body
    assert store.size(key) == 50
    assert key in [entry.path for entry in store.list()]


# ---- how it is asked for ----


def test_neighbours_are_one_request(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("near", content("near", 4 * MIB))
    spans = [(i * 20_000, i * 20_000 + 9_000) for i in range(100)]
    order = spans[50:] + spans[:50]
    store = open_store(SOURCE)
    found = store.read_many([("near", *span) for span in order])
    assert found == [body[start:stop] for start, stop in order]
    assert proxy.objects("near") == [("near", 0, spans[-1][1])]


def test_a_wide_gap_is_not_read(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("gap", content("gap", 5 * MIB))
    asked = [("gap", 0, 100), ("gap", 4 * MIB, 4 * MIB + 100)]
    assert open_store(SOURCE).read_many(asked) == [body[:100], body[4 * MIB : 4 * MIB + 100]]
    assert sorted(proxy.objects("gap")) == asked
    assert proxy.bytes_sent == 200


def test_a_merged_request_has_at_most_eight_mebibytes(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("large", content("large", 20 * MIB))
    asked = [("large", i * MIB, (i + 1) * MIB) for i in range(20)]
    found = open_store(SOURCE).read_many(asked)
    assert found == [body[start:stop] for _, start, stop in asked]
    spans = sorted((start, stop) for _, start, stop in proxy.objects("large"))
    assert all(stop - start <= 8 * MIB for start, stop in spans)  # type: ignore[operator]
    assert proxy.bytes_sent == 20 * MIB
    assert len(spans) <= 5


def test_a_small_read_is_one_request(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("small", content("small", 100))
    store = open_store(SOURCE)
    assert store.read("small") == body
    assert store.read("small", 5, 10) == body[5:10]
    assert len(proxy.requests) == 2
    assert len(proxy.objects("small")) == 2


# Limits are of the process, and faults of other tests lower them: hence processes of their own.


def test_reads_do_not_wait_for_one_another(bucket: Bucket, proxy: Proxy) -> None:
    """Answers are held until eight are asked for: 64 reads one by one would never come to that."""
    bucket.fill({f"together/{i}": 1000 for i in range(64)})
    proxy.latency_s = 0.02
    proxy.hold(together=8)
    found = run("""
names = [f"together/{i}" for i in range(64)]
print(json.dumps([len(x) for x in store.read_many(names)]))
""")
    assert found == [1000] * 64
    assert not proxy.gave_up
    assert proxy.most_in_flight > 8
    assert len(proxy.objects()) == 64


def test_sixteen_threads_share_a_store(bucket: Bucket, proxy: Proxy) -> None:
    bodies = bucket.fill({f"threads/{i}": 1000 for i in range(64)})
    proxy.hold(together=8)
    found = run("""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    print(json.dumps([x.hex() for x in pool.map(store.read, [f"threads/{i}" for i in range(64)])]))
""")
    assert found == [x.hex() for x in bodies.values()]
    assert not proxy.gave_up
    assert len(proxy.objects()) == 64


def test_more_are_in_flight_where_answers_come_late(bucket: Bucket, proxy: Proxy) -> None:
    """At 100 ms for each answer, as from another region, a thousand small objects would take 100 s one by one."""
    bucket.put("late", content("late", 10))
    proxy.latency_s = 0.1
    found = run("""
for _ in range(10):
    store.read_many(["late"] * 100)
print(json.dumps([store.stats()["in_flight_limit"]]))
""")
    assert isinstance(found[0], int | float)
    assert found[0] >= 16
    assert proxy.most_in_flight >= 16


def test_the_limit_is_of_the_process(bucket: Bucket, proxy: Proxy) -> None:
    """Three stores together have no more in flight than one may, while no answer comes."""
    bucket.fill({f"limit/{i}": 10 for i in range(400)})
    proxy.hold()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(
            run,
            """
from concurrent.futures import ThreadPoolExecutor
limit = store.stats()["in_flight_limit"]
names = [f"limit/{i}" for i in range(400)]
with ThreadPoolExecutor(3) as pool:
    found = list(pool.map(lambda _: len(open_store("s3://data").read_many(names)), range(3)))
print(json.dumps([limit, found]))
""",
        )
        assert proxy.wait_for(1)
        assert not proxy.wait_for(200, seconds=1.0)
        most = proxy.most_in_flight
        proxy.release()
        limit, found = ended.result()
    assert found == [400, 400, 400]
    assert isinstance(limit, int | float)
    assert most <= limit


def test_the_counts_are_those_of_the_server(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("counts", content("counts", 10_000))
    store = open_store(SOURCE)
    assert set(store.stats()) >= {"p50_s", "p99_s", "retries", "throttled", "cache_hits"}
    before = store.stats()
    store.read_many([("counts", 0, 100), ("counts", 200, 300), ("counts", 9_000, 9_001)])
    assert store.read("counts") == body
    after = store.stats()
    names = ("requests", "bytes_wanted", "bytes_fetched", "retries", "throttled")
    found = {name: after[name] - before[name] for name in names}
    assert found == {
        "requests": len(proxy.objects()),
        "bytes_wanted": 10_201,
        "bytes_fetched": proxy.bytes_sent,
        "retries": 0,
        "throttled": 0,
    }
    assert 0 < after["p50_s"] <= after["p99_s"] < 60


# ---- lists and sizes ----


def test_a_server_without_ranges_is_not_asked_in_vain(
    rclone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rclone 1.75 says of each range that it is the whole. Once more may help, five times more does not."""
    Bucket(rclone).put("no ranges", content("no ranges", 100))
    with Proxy(rclone) as before_it:
        use(monkeypatch, before_it.url)
        store = open_store(SOURCE)
        try:
            assert store.read("no ranges", 10, 20) == content("no ranges", 100)[10:20]
        except RemoteError as error:
            assert "range" in str(error)
        assert len(before_it.objects()) <= 2
        assert store.read("no ranges") == content("no ranges", 100)


def test_a_list_is_whole(led: Bucket) -> None:
    """A page of a list has 1,000 names."""
    sizes = {f"listed/{'ab'[i % 2]}/{i:04}": i % 5 for i in range(1_100)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: led.put(item[0], b"x" * item[1]), sizes.items()))
    store = open_store(f"{SOURCE}/listed")
    found = store.list()
    assert {entry.path: entry.size for entry in found} == {
        key.removeprefix("listed/"): size for key, size in sizes.items()
    }
    assert len(found) == 1_100
    assert all(entry.etag for entry in found)
    part = store.list("a/")
    assert sorted(x.path for x in part) == sorted(x.path for x in found if x.path.startswith("a/"))
    assert store.read(part[-1].path) == b"x" * part[-1].size
    assert store.list("nothing/") == []


def test_a_size_is_asked_for_without_the_bytes(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("sized", content("sized", 12_345))
    assert open_store(SOURCE).size("sized") == 12_345
    assert proxy.bytes_sent <= 1


# ---- what is not there, and what is forbidden ----


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.read("no such"),
        lambda store: store.read("no such", 0, 10),
        lambda store: store.read_many(["there", "no such"]),
        lambda store: store.size("no such"),
        lambda store: store.open("no such").read(),
    ],
    ids=["read", "range", "read_many", "size", "open"],
)
def test_a_missing_object_is_a_missing_file(led: Bucket, ask: Callable[[Store], object]) -> None:
    led.put("there", b"x")
    with pytest.raises(FileNotFoundError) as raised:
        ask(open_store(SOURCE))
    assert raised.value.filename == f"{SOURCE}/no such"


def test_a_missing_object_is_asked_for_once(proxy: Proxy) -> None:
    with pytest.raises(FileNotFoundError):
        open_store(SOURCE).read("no such")
    assert len(proxy.objects("no such")) == 1


def all_of(error: BaseException) -> str:
    """Return all that a traceback of an error shows, and what its objects say of themselves."""
    shown = "".join(traceback.format_exception(error, chain=True))
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return shown + repr(chain) + "".join(repr(vars(link)) for link in chain)


@pytest.mark.parametrize("explicit", [False, True])
def test_wrong_credentials_are_an_error_without_them(
    led: Bucket, monkeypatch: pytest.MonkeyPatch, explicit: bool
) -> None:
    wrong = SECRET[::-1]
    led.put("private", b"x")
    if explicit:
        store = open_store(SOURCE, access_key_id=KEY, secret_access_key=wrong)
    else:
        use(monkeypatch, led.server.url, wrong)
        store = open_store(SOURCE)
    with pytest.raises(RemoteError) as raised:
        store.read("private")
    assert f"{SOURCE}/private" in str(raised.value)
    for shown in (all_of(raised.value), repr(store), str(store), repr(store.stats())):
        assert wrong not in shown


def test_what_is_forbidden_is_not_asked_for_again(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.put("private", b"x")
    use(monkeypatch, proxy.url, SECRET[::-1])
    with pytest.raises(RemoteError):
        open_store(SOURCE).read("private")
    assert len(proxy.objects("private")) == 1


def test_a_user_in_the_url_is_not_shown() -> None:
    source = f"https://someone:{SECRET}@127.0.0.1:9/folder?X-Amz-Signature={SECRET}"
    with pytest.raises((RemoteError, ValueError)) as raised:
        open_store(source, retries=0, timeout=2.0).read("file")
    assert SECRET not in all_of(raised.value)


def test_credentials_of_the_environment_are_in_no_pickle(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("pickled", b"x")
    store = open_store(SOURCE)
    assert SECRET.encode() not in pickle.dumps(store)
    assert store.read("pickled") == b"x"
    assert SECRET.encode() not in pickle.dumps(store)
    assert pickle.loads(pickle.dumps(store)).read("pickled") == b"x"


def test_an_option_that_no_client_knows_is_an_error() -> None:
    with pytest.raises((TypeError, ValueError), match="no_such_option"):
        open_store(SOURCE, no_such_option=1).read("any")


def test_credentials_that_are_given_go_along(
    bucket: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has no other way to them."""
    bucket.put("given", b"x")
    for name in environment(proxy.url):
        monkeypatch.delenv(name)
    options = {"access_key_id": KEY, "secret_access_key": SECRET, "region": "us-east-1"}
    store = open_store(SOURCE, endpoint=proxy.url, **options)
    copy = pickle.loads(pickle.dumps(store))
    assert copy.read("given") == b"x"
    assert SECRET not in repr(store) + repr(copy)


# ---- a file over an object ----


def test_a_file_over_an_object_seeks_and_reads_ahead(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("file", content("file", 3 * MIB + 17))
    with open_store(SOURCE).open("file") as file:
        assert file.seekable()
        assert file.readable()
        assert b"".join(iter(lambda: file.read(10_000), b"")) == body
        assert len(proxy.objects("file")) <= 30  # 315 reads
        assert file.seek(-10, io.SEEK_END) == len(body) - 10
        assert file.read() == body[-10:]
        assert file.seek(1000) == 1000
        piece = bytearray(100)
        assert file.readinto(piece) == 100
        assert piece == body[1000:1100]
        assert file.seek(50, io.SEEK_CUR) == 1150
        assert file.tell() == 1150
        assert file.read(0) == b""
        file.seek(len(body) + 5)
        assert file.read(5) == b""
    assert file.closed
    with pytest.raises(ValueError, match="closed"):
        file.read(1)


def test_an_archive_over_an_object(bucket: Bucket, proxy: Proxy) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for i in range(20):
            archive.writestr(f"{i}", content(f"{i}", 100_000))
    bucket.put("archive.zip", packed.getvalue())
    with open_store(SOURCE).open("archive.zip") as file, zipfile.ZipFile(file) as archive:
        assert archive.read("13") == content("13", 100_000)
    assert proxy.bytes_sent < len(packed.getvalue())


# ---- an object that changes ----


@pytest.mark.parametrize("way", ["read", "range", "read_many", "will_read"])
def test_an_object_that_changes_is_an_error(bucket: Bucket, proxy: Proxy, way: str) -> None:
    key = f"changing/{way}"
    first = bucket.put(key, content(key, 1000))
    store = open_store(SOURCE)
    assert store.read(key, 0, 10) == first[:10]
    second = bucket.put(key, content(key, 1000, version=1))
    with pytest.raises(RemoteError, match="changed") as raised:
        match way:
            case "read":
                store.read(key)
            case "range":
                store.read(key, 500, 600)
            case "read_many":
                store.read_many([(key, 500, 600), (key, 700, 800)])
            case _:
                store.will_read([(key, 500, 600)])
                store.read(key, 500, 600)
    assert f"{SOURCE}/{key}" in str(raised.value)
    assert len(proxy.objects(key)) == 2  # no retry mends that
    assert open_store(SOURCE).read(key) == second


def test_an_object_that_changes_is_seen_without_if_match(
    rclone: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """rclone does not hear If-Match: what it answers with tells."""
    use(monkeypatch, rclone.url)
    bucket = Bucket(rclone)
    bucket.put("changing", content("changing", 100))
    store = open_store(SOURCE)
    store.read("changing")
    bucket.put("changing", content("changing", 100, version=1))
    with pytest.raises(RemoteError, match="changed"):
        store.read("changing")


# ---- other sources ----


class OfOnesOwn:
    """An object with `read(url)`: the least that a source is."""

    def __init__(self, bodies: dict[str, bytes]) -> None:
        self.bodies = bodies

    def read(self, url: str) -> bytes:
        return self.bodies[url]


def test_any_object_that_reads_is_a_source() -> None:
    store = open_store(OfOnesOwn({"a": b"0123456789", "b": b"x"}))
    assert store.read("a") == b"0123456789"
    assert store.read("a", 2, 5) == b"234"
    assert store.read_many([("a", 8, None), "b", ("a", 0, 2)]) == [b"89", b"x", b"01"]


def test_a_folder_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b").write_bytes(b"0123456789")
    store = open_store(tmp_path.as_uri())
    assert store.read("in/a b", 2, 5) == b"234"
    assert store.size("in/a b") == 10
    assert [(entry.path, entry.size) for entry in store.list()] == [("in/a b", 10)]
    with pytest.raises(FileNotFoundError):
        store.read("none")


def test_a_file_system_of_fsspec_is_a_source() -> None:
    memory = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem()
    memory.pipe({"/fastload/a b": b"0123456789", "/fastload/c": b"x"})
    try:
        store = open_store(memory)
        assert store.read("/fastload/a b", 2, 5) == b"234"
        assert store.read_many(["/fastload/c", "/fastload/a b"]) == [b"x", b"0123456789"]
        assert store.size("/fastload/a b") == 10
        with pytest.raises(FileNotFoundError):
            store.read("/fastload/none")
    finally:
        memory.rm("/fastload", recursive=True)


def test_a_path_outside_of_the_source_is_refused(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put("outside", b"x")
    store = open_store(f"{SOURCE}/inside")
    for path in (f"{SOURCE}/outside", "s3://other/inside/a", "../outside"):
        with pytest.raises((ValueError, OSError), match=re.compile("outside|below|inside|other")):
            store.read(path)
    assert proxy.objects("outside") == []
