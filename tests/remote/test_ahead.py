"""Promise: What a store is told that it will read, it asks for at once. The read that comes then asks for nothing more.
What is told is forgotten when told so, and never holds more memory than the process allows.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastload.errors import RemoteError
from fastload.remote import open_store
from tests.remote.proxy import Fault, Proxy
from tests.remote.servers import BUCKET, Bucket, content

SOURCE = f"s3://{BUCKET}"
EIGHT_MIB = 8 << 20
MOST_HELD = 1 << 30
"""More than the process allows by default, and a quarter of what these tests tell."""


def test_what_will_be_read_is_asked_for_once(bucket: Bucket, proxy: Proxy) -> None:
    bodies = bucket.fill({f"ahead/{i}": 1000 for i in range(20)})
    names = list(bodies)
    store = open_store(SOURCE)
    store.will_read([*names[:10], *((name, 100, 200) for name in names[10:])])
    assert proxy.wait_for(20)  # before anything is read
    assert [store.read(name) for name in names[:5]] == [bodies[name] for name in names[:5]]
    rest = store.read_many([*names[5:10], *((name, 100, 200) for name in names[10:])])
    assert rest == [bodies[x] for x in names[5:10]] + [bodies[x][100:200] for x in names[10:]]
    assert len(proxy.objects()) == 20


def test_a_read_waits_for_what_is_on_its_way(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("on its way", content("on its way", 1000))
    store = open_store(SOURCE)
    proxy.hold()
    store.will_read(["on its way"])
    assert proxy.wait_for(1)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(store.read, "on its way")
        proxy.release()
        assert found.result(timeout=20) == body
    assert len(proxy.objects()) == 1


def test_neighbours_that_will_be_read_are_one_request(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("ahead near", content("ahead near", 500_000))
    asked = [("ahead near", i * 1000, i * 1000 + 700) for i in range(100)]
    store = open_store(SOURCE)
    store.will_read(asked)
    assert store.read_many(asked) == [body[start:stop] for _, start, stop in asked]
    assert len(proxy.objects()) <= 2


def test_what_is_claimed_is_not_kept(bucket: Bucket, proxy: Proxy) -> None:
    """A second read asks anew: look-ahead is no cache."""
    body = bucket.put("claimed", content("claimed", 100))
    store = open_store(SOURCE)
    store.will_read(["claimed"])
    assert store.read("claimed") == body
    assert store.read("claimed") == body
    assert len(proxy.objects()) == 2


def test_an_order_that_is_told_twice_is_read_twice(bucket: Bucket, proxy: Proxy) -> None:
    """A sampler with replacement draws a sample twice."""
    body = bucket.put("twice", content("twice", 100))
    store = open_store(SOURCE)
    store.will_read(["twice", "twice"])
    assert store.read("twice") == body
    assert store.read("twice") == body
    assert len(proxy.objects()) <= 2


def test_what_is_forgotten_is_not_asked_for(bucket: Bucket, proxy: Proxy) -> None:
    """No answer comes until all is forgotten. Only what was in flight then has been asked for."""
    names = [f"forgotten/{i}" for i in range(1000)]
    for name in (*names[-5:], "after"):
        bucket.put(name, content(name, 100))
    store = open_store(SOURCE)
    proxy.hold()
    store.will_read(names)
    assert proxy.wait_for(1)
    store.will_read([])
    proxy.release()
    for _ in range(20):
        assert store.read("after") == content("after", 100)
    asked = proxy.objects()
    assert len(asked) - 20 <= store.stats()["in_flight_limit"]
    assert store.read(names[-1]) == content(names[-1], 100)


def test_forgetting_does_not_disturb_a_read(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("disturbed", content("disturbed", 100))
    store = open_store(SOURCE)
    proxy.hold()
    with ThreadPoolExecutor(2) as pool:
        store.will_read(["disturbed"])
        assert proxy.wait_for(1)
        claimed = pool.submit(store.read, "disturbed")
        plain = pool.submit(store.read, "disturbed", 1, 5)
        assert proxy.wait_for(2)
        store.will_read([])
        proxy.release()
        assert claimed.result(timeout=20) == body
        assert plain.result(timeout=20) == body[1:5]


def test_what_cannot_be_read_ahead_fails_the_read_alone(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("well", content("well", 100))
    bucket.put("ill", content("ill", 100))
    proxy.plan = lambda request: Fault("slow_down") if request.key == "ill" else None
    store = open_store(SOURCE, retries=1)
    store.will_read(["missing", "ill", "well"])
    assert store.read("well") == body
    with pytest.raises(RemoteError):
        store.read("ill")
    with pytest.raises(FileNotFoundError):
        store.read("missing")


def test_a_read_comes_before_what_is_only_told(bucket: Bucket, proxy: Proxy) -> None:
    """Hundreds wait for their turn, and one is read: it does not stand behind them."""
    names = [f"told/{i}" for i in range(500)]
    bucket.put("urgent", content("urgent", 100))
    store = open_store(SOURCE)
    proxy.latency_s = 0.02
    store.will_read(names)
    assert proxy.wait_for(1)
    assert store.read("urgent") == content("urgent", 100)
    place = [key for key, _, _ in proxy.objects()].index("urgent")
    store.will_read([])
    assert place < 250


def test_stores_do_not_claim_from_one_another(bucket: Bucket, proxy: Proxy) -> None:
    """Two stores may have other credentials, though their objects have the same names."""
    body = bucket.put("whose", content("whose", 100))
    one, other = open_store(SOURCE), open_store(SOURCE)
    one.will_read(["whose"])
    assert proxy.wait_for(1)
    assert other.read("whose") == body
    other.will_read([])
    assert one.read("whose") == body
    assert len(proxy.objects()) == 2


class Large:
    """A source of objects of eight mebibytes. It counts how many it gave that nobody has claimed."""

    def __init__(self) -> None:
        self.claimed = 0
        self.given: Counter[str] = Counter()
        self.most_held = 0
        self._lock = threading.Lock()

    def read(self, url: str) -> bytes:
        with self._lock:
            self.given[url] += 1
            self.most_held = max(self.most_held, self.given.total() - self.claimed)
        return bytes(EIGHT_MIB)


@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_held_is_bounded_for_the_process(backwards: bool) -> None:
    """Four gibibytes are told. Who reads them from the end is not kept waiting by what is held from the start."""
    source = Large()
    store = open_store(source)
    names = [f"{i}" for i in range(512)]
    store.will_read(names)
    for name in reversed(names) if backwards else names:
        assert len(store.read(name)) == EIGHT_MIB
        source.claimed += 1
    assert source.most_held * EIGHT_MIB <= MOST_HELD
    assert source.given.total() <= len(names) * (1.5 if backwards else 1.0)


def test_two_stores_hold_no_more_than_one() -> None:
    source = Large()
    stores = [open_store(source) for _ in range(8)]
    for store in stores:
        store.will_read([f"{i}" for i in range(64)])
    for i in range(64):
        for store in stores:
            assert len(store.read(f"{i}")) == EIGHT_MIB
            source.claimed += 1
    assert source.most_held * EIGHT_MIB <= MOST_HELD
