"""Promise: Whatever a server or the way to it does, a store gives the right bytes or an error that names the object,
the range and the attempts. It never gives wrong bytes, never loses a read, and never hangs.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

from fastload.errors import RemoteError
from fastload.remote import Store, open_store
from tests.remote.conftest import use
from tests.remote.programs import run
from tests.remote.proxy import Fault, Kind, Proxy, Request
from tests.remote.servers import BUCKET, Bucket, Rclone, content

SOURCE = f"s3://{BUCKET}"
KINDS: tuple[Kind, ...] = get_args(Kind)
SHARE = 0.05
"""How many requests have a fault of each kind."""
IN_A_ROW = 2
"""Faults of one request, at most: the third attempt goes well."""
TIMEOUT_S = 0.5
STALL_S = 1.5
CAUSES: dict[Kind, str] = {
    "slow_down": "503",
    "too_many": "429",
    "cut": "body|cut|ended|connection",
    "stall": "[Tt]ime",
    "wrong_range": "range|bytes",
    "whole": "range",
    "refuse": "connection|sending",
}
"""What the error says of each."""
OBJECTS = 100
OBJECT_BYTES = 100_000


def faults(request: Request) -> Fault | None:
    """Draw the fault of a request. It is the same in every order of the requests."""
    if not request.of_object or request.attempt >= IN_A_ROW:
        return None
    drawn = random.Random(
        f"{request.key} {request.start} {request.stop} {request.attempt}"
    ).random()
    number = int(drawn / SHARE)
    if number >= len(KINDS):
        return None
    kind = KINDS[number]
    return Fault(kind, STALL_S if kind == "stall" else 0.0)


def first_only(kind: Kind, seconds: float = 0.0):
    """Return a plan by which the first attempt of each read has a fault."""

    def plan(request: Request) -> Fault | None:
        return Fault(kind, seconds) if request.of_object and not request.attempt else None

    return plan


Ask = tuple[str, int, int]


def asked(count: int) -> list[Ask]:
    """Return small ranges of many objects, each another one."""
    drawn = random.Random(0)
    found = []
    for i in range(count):
        start = i // OBJECTS * (OBJECT_BYTES * OBJECTS // count)
        found.append((f"faults/{i % OBJECTS}", start, start + drawn.randint(1, 900)))
    drawn.shuffle(found)
    return found


@pytest.fixture(scope="module")
def bodies(weed: object) -> dict[str, bytes]:
    """The objects that are read under faults."""
    return Bucket(weed).fill({f"faults/{i}": OBJECT_BYTES for i in range(OBJECTS)})  # type: ignore[arg-type]


def read_all(store: Store, asks: list[Ask]) -> Iterator[tuple[Ask, bytes]]:
    """Read half by sixteen threads, one by one, and half in batches."""
    half = len(asks) // 2
    with ThreadPoolExecutor(16) as pool:
        yield from zip(
            asks[:half], pool.map(lambda ask: store.read(*ask), asks[:half]), strict=True
        )
        for batch in (asks[i : i + 50] for i in range(half, len(asks), 50)):
            yield from zip(batch, store.read_many(batch), strict=True)


@pytest.mark.parametrize(
    "count",
    [500, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_nothing_is_wrong_and_nothing_lost(
    bodies: dict[str, bytes], proxy: Proxy, count: int
) -> None:
    proxy.plan = faults
    store = open_store(SOURCE, timeout=TIMEOUT_S)
    asks = asked(count)
    assert len(set(asks)) == count
    found = list(read_all(store, asks))
    wrong = [ask for ask, body in found if body != bodies[ask[0]][ask[1] : ask[2]]]
    assert not wrong
    assert sorted(ask for ask, _ in found) == sorted(asks)
    assert set(proxy.faults) == set(KINDS)
    stats = store.stats()
    assert stats["retries"] > 0
    assert stats["throttled"] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("span", [(), (10, 20)], ids=["whole", "range"])
def test_a_fault_is_mended_by_another_attempt(
    bucket: Bucket, proxy: Proxy, kind: Kind, span: tuple[int, int]
) -> None:
    """A stalled body counts as a fault after `timeout`, long before the rest of it would come."""
    key = f"mended/{kind}"
    body = bucket.put(key, content(key, 100))
    proxy.plan = first_only(kind, seconds=60.0 if kind == "stall" else 0.0)
    store = open_store(SOURCE, timeout=1.0)
    began = time.monotonic()
    assert store.read(key, *span) == (body[slice(*span)] if span else body)
    assert time.monotonic() - began < 30
    untouched = not span and kind in ("wrong_range", "whole")
    assert len(proxy.objects(key)) == 1 + (not untouched)
    assert store.stats()["retries"] == int(not untouched)
    if kind != "stall":  # late answers may count as throttling
        assert store.stats()["throttled"] == int(kind in ("slow_down", "too_many"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_stays_is_an_error(bucket: Bucket, proxy: Proxy, kind: Kind) -> None:
    key = f"stays/{kind}"
    bucket.put(key, content(key, 100))
    proxy.plan = lambda request: Fault(kind, 60.0 if kind == "stall" else 0.0)
    began = time.monotonic()
    with pytest.raises(RemoteError) as raised:
        open_store(SOURCE, retries=2, timeout=0.5).read(key, 10, 20)
    assert time.monotonic() - began < 30
    text = str(raised.value)
    assert f"{SOURCE}/{key}" in text
    assert "10" in text
    assert "20" in text
    if kind != "whole":  # a server that knows no ranges need not be asked again
        assert len(proxy.objects(key)) == 3
        assert re.search(r"\b(3|three)\b", text), text
    assert re.search(CAUSES[kind], text), text


def test_one_fault_holds_no_other_read_up(bucket: Bucket, proxy: Proxy) -> None:
    """A read whose answer never comes, and sixty others beside it that all come."""
    bodies = bucket.fill({f"beside/{i}": 100 for i in range(60)})
    bucket.put("stuck", content("stuck", 100))
    proxy.plan = lambda request: Fault("stall", 60.0) if request.key == "stuck" else None
    store = open_store(SOURCE, timeout=20.0, retries=0)
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(store.read, "stuck")
        assert proxy.wait_for(1)
        assert store.read_many(list(bodies)) == list(bodies.values())
        assert not stuck.done()
        proxy.close()
        with pytest.raises(RemoteError):
            stuck.result()


def test_a_throttled_store_asks_for_fewer_at_once(bucket: Bucket, proxy: Proxy) -> None:
    """Limits are of the process, hence one of its own."""
    bucket.put("throttled", content("throttled", 100))
    proxy.latency_s = 0.02
    proxy.plan = lambda request: Fault("slow_down") if 200 <= request.attempt < 300 else None
    before, during, throttled, lengths = run("""
store = open_store("s3://data", retries=100)
store.read_many(["throttled"] * 200)
before = store.stats()["in_flight_limit"]
lengths = {len(x) for x in store.read_many(["throttled"] * 50)}
after = store.stats()
print(json.dumps([before, after["in_flight_limit"], after["throttled"], list(lengths)]))
""")
    assert lengths == [100]
    assert throttled == 100
    assert isinstance(before, int | float)
    assert isinstance(during, int | float)
    assert during < before


def test_a_server_may_end_and_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed when a third of the reads are through, and begins again when a read has failed."""
    with Rclone(tmp_path) as server:
        use(monkeypatch, server.url)
        bodies = Bucket(server).fill({f"{i}": 1000 for i in range(300)})
        store = open_store(SOURCE, retries=20, timeout=5.0)
        through = threading.Semaphore(0)

        def read(key: str) -> bytes:
            body = store.read(key)
            through.release()
            return body

        with ThreadPoolExecutor(8) as pool:
            found = [pool.submit(read, key) for key in bodies]
            for _ in range(100):
                assert through.acquire(timeout=20)
            server.kill()
            server.start()
            assert [x.result(timeout=60) for x in found] == list(bodies.values())


def test_a_server_that_is_gone_is_an_error_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rclone(tmp_path) as server:
        use(monkeypatch, server.url)
        body = Bucket(server).put("gone", b"x")
        store = open_store(SOURCE, retries=2, timeout=2.0)
        assert store.read("gone") == body
    began = time.monotonic()
    with pytest.raises(RemoteError) as raised:
        store.read_many(["gone"] * 3)
    assert time.monotonic() - began < 30
    assert f"{SOURCE}/gone" in str(raised.value)
