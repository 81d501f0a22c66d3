"""Promises of `fastload.remote.fetching`, in a forced order, over stores that tests hold in their hands:

- A read that was not announced never waits for look-ahead: not for its bytes, its requests or its place.
- Look-ahead begins in order, within its bytes and requests, which all stores of the process share.
- What is cancelled begins no more, and gives its bytes back. A read that has asked already gets its bytes.
- The limit grows while that gets more done, is taken back if not, and halves once for each burst of throttling.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastload.errors import RemoteError
from fastload.remote import Store, attempts, fetching, open_store
from fastload.remote.fetching import Fetching
from fastload.remote.turns import Limit

WAIT_S = 30.0


class Held:
    """A store of which each read waits until the test lets it go on."""

    def __init__(self, size: int = 10) -> None:
        self.size = size
        self.begun: list[str] = []
        self.failing: dict[str, list[Exception]] = {}
        self._free: set[str] = set()
        self._all = False
        self._changed = threading.Condition()

    def read(self, url: str) -> bytes:
        with self._changed:
            self.begun.append(url)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._all or url in self._free, WAIT_S)
        if self.failing.get(url):
            raise self.failing[url].pop(0)
        return url.encode().ljust(self.size, b".")

    def let(self, *urls: str) -> None:
        with self._changed:
            self._free |= {*urls}
            self._changed.notify_all()

    def let_all(self) -> None:
        with self._changed:
            self._all = True
            self._changed.notify_all()

    def wait_begun(self, *urls: str, count: int = 0) -> None:
        def begun() -> bool:
            return {*urls} <= {*self.begun} and len(self.begun) >= count

        with self._changed:
            assert self._changed.wait_for(begun, WAIT_S), self.begun


def answer(url: str, size: int = 10) -> bytes:
    return url.encode().ljust(size, b".")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fetching]:
    """The requests of a process of this test, with 100 bytes of look-ahead."""
    found = Fetching(ahead_bytes=100)
    monkeypatch.setattr(fetching, "process", found)
    yield found
    found.close()


def learnt(store: Store, source: Held) -> None:
    """Let a store know how large its objects are."""
    source.let("first")
    assert store.read("first") == answer("first", source.size)
    source.begun.clear()


def test_look_ahead_begins_in_order_and_is_what_a_read_gets(process: Fetching) -> None:
    source = Held()
    store = open_store(source)
    process.limit.allowed = 2
    store.will_read(["a", "b", "c"])
    source.wait_begun("a", "b")
    assert source.begun == ["a", "b"] or source.begun == ["b", "a"]
    source.let("a")
    source.wait_begun("c")
    source.let_all()
    assert [store.read(name) for name in "abc"] == [answer(name) for name in "abc"]
    assert len(source.begun) == 3


def test_a_read_that_was_not_announced_passes_look_ahead_that_has_all_requests(
    process: Fetching,
) -> None:
    source = Held()
    store = open_store(source)
    process.limit.allowed = 2
    store.will_read(["a", "b", "c"])
    source.wait_begun("a", "b")
    source.let("other", "another")
    assert store.read("other") == answer("other")
    assert store.read_many(["another", "other"]) == [answer("another"), answer("other")]
    assert "c" not in source.begun
    source.let_all()
    store.will_read([])


def test_a_read_that_was_not_announced_passes_look_ahead_that_has_all_bytes(
    process: Fetching,
) -> None:
    source = Held(size=40)
    store = open_store(source)
    learnt(store, source)
    source.let_all()
    names = [f"n{i}" for i in range(9)]
    store.will_read([(name, 0, 40) for name in names])
    source.wait_begun("n0", "n1")
    assert store.read("other") == answer("other", 40)
    assert sorted(source.begun) == ["n0", "n1", "other"]  # 120 bytes are too many
    assert store.read("n8", 0, 40) == answer(
        "n8", 40
    )  # at the end of the line, which has not begun
    assert sorted(source.begun) == ["n0", "n1", "n8", "other"]
    assert store.read("n0", 0, 40) == answer("n0", 40)
    source.wait_begun("n2")
    assert [store.read(name, 0, 40) for name in names[1:8]] == [
        answer(name, 40) for name in names[1:8]
    ]
    assert len(source.begun) == 10


def test_an_object_that_is_larger_than_all_look_ahead_begins_alone(process: Fetching) -> None:
    source = Held(size=1000)
    store = open_store(source)
    learnt(store, source)
    source.let_all()
    store.will_read(["a", "b"])
    source.wait_begun("a")
    assert store.read("a") == answer("a", 1000)
    source.wait_begun("b")
    assert store.read("b") == answer("b", 1000)


def test_bytes_are_those_of_all_stores(process: Fetching) -> None:
    first, second = Held(size=60), Held(size=60)
    one, other = open_store(first), open_store(second)
    first.let_all()
    second.let_all()
    one.will_read([("a", 0, 60)])
    first.wait_begun("a")
    other.will_read([("b", 0, 60)])
    assert second.begun == []
    assert one.read("a", 0, 60) == answer("a", 60)
    second.wait_begun("b")
    other.will_read([])


def test_what_is_cancelled_begins_no_more_and_gives_its_bytes_back(process: Fetching) -> None:
    source = Held(size=60)
    store = open_store(source)
    store.will_read([("a", 0, 60), ("b", 0, 60)])
    source.wait_begun("a")
    store.will_read([])
    store.will_read([("c", 0, 60)])
    assert "c" not in source.begun  # the bytes of a request in flight are held until it ends
    source.let_all()
    source.wait_begun("c")
    assert store.read("c", 0, 60) == answer("c", 60)
    assert source.begun == ["a", "c"]


def test_a_read_that_waits_is_not_cancelled(process: Fetching) -> None:
    source = Held()
    store = open_store(source)
    store.will_read(["a"])
    source.wait_begun("a")
    claimed = threading.Event()
    claim = process.claim

    def seen(*args: object) -> object:
        job = claim(*args)  # type: ignore[arg-type]
        claimed.set()
        return job

    process.claim = seen  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read, "a")
        assert claimed.wait(WAIT_S)
        store.will_read([])
        source.let_all()
        assert reading.result(WAIT_S) == answer("a")
    assert source.begun == ["a"]


def test_an_owner_cancels_what_it_announced_only(process: Fetching) -> None:
    source = Held()
    store = open_store(source)
    process.limit.allowed = 1
    store.will_read(["a", "b"], owner=1)
    source.wait_begun("a")
    store.will_read(["b", "c"], owner=2)
    store.will_read([], owner=1)
    source.let_all()
    source.wait_begun("b", "c")
    assert store.read_many(["b", "c"]) == [answer("b"), answer("c")]
    assert source.begun == ["a", "b", "c"]


def test_one_announced_read_can_be_forgotten(process: Fetching) -> None:
    source = Held()
    store = open_store(source)
    process.limit.allowed = 1
    store.will_read(["a", "b", "c"])
    source.wait_begun("a")
    store.forget(["b", "never announced"])
    source.let_all()
    source.wait_begun("c")
    assert [store.read("a"), store.read("c")] == [answer("a"), answer("c")]
    assert source.begun == ["a", "c"]


def test_a_store_that_is_gone_gives_its_look_ahead_back(process: Fetching) -> None:
    source, other = Held(size=60), Held(size=60)
    source.let_all()
    other.let_all()
    store = open_store(source)
    store.will_read([("a", 0, 60)])
    source.wait_begun("a")
    del store
    gc.collect()
    left = open_store(other)
    left.will_read([("b", 0, 60)])
    other.wait_begun("b")
    assert left.read("b", 0, 60) == answer("b", 60)


def test_look_ahead_that_failed_is_asked_for_again(process: Fetching) -> None:
    source = Held()
    source.failing["a"] = [ValueError("once")]
    store = open_store(source)
    source.let_all()
    store.will_read(["a", "b"])
    source.wait_begun("a", "b")
    assert store.read("b") == answer("b")
    # Whether the read comes before the failure or after it, it raises what it sees, or gets the bytes.
    try:
        assert store.read("a") == answer("a")
    except RemoteError as error:
        assert "once" in str(error)
    assert store.read("a") == answer("a")


def test_ranges_of_one_look_ahead_are_one_request_until_the_last_is_taken(
    process: Fetching,
) -> None:
    source = Held(size=50)
    source.let_all()
    store = open_store(source)
    store.will_read([("a", 0, 10), ("a", 20, 30), ("a", 30, 50)])
    parts = [store.read("a", *span) for span in ((30, 50), (0, 10), (20, 30))]
    whole = answer("a", 50)
    assert parts == [whole[30:50], whole[:10], whole[20:30]]
    assert source.begun == ["a"]
    assert not [t for t in threading.enumerate() if t.name == "fastload-remote" and not ended(t)]


def assert_nothing_is_held(process: Fetching) -> None:
    with process._lock:
        assert (process._lines.held, process._turns.in_flight) == (0, 0)
        assert not any(session.claims for session in process._lines._sessions)


def ended(thread: threading.Thread) -> bool:
    """Wait for a thread that has nothing to do: it ends, because no look-ahead is left."""
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_the_others_of_many_are_dropped_if_one_fails(process: Fetching) -> None:
    source = Held()
    process.limit.allowed = 1
    source.failing["a"] = [ValueError("wrong")]
    store = open_store(source)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.read_many, ["a", *map(str, range(50))])
        for count in range(1, 50):
            source.wait_begun(count=count)
            source.let(*source.begun)
            if "a" in source.begun:
                break
        with pytest.raises(RemoteError, match=r"^a: ValueError: wrong \(1 attempt\)$"):
            reading.result(WAIT_S)
    source.let_all()
    assert store.read("z") == answer("z")
    assert len(source.begun) < 50
    assert all(map(ended, [t for t in threading.enumerate() if t.name == "fastload-remote"]))
    assert_nothing_is_held(process)


def test_callers_have_their_turns_in_order_and_before_the_others_of_many(process: Fetching) -> None:
    source, in_line = Held(), threading.Semaphore(0)

    class Line(deque[threading.Lock]):
        def append(self, turn: threading.Lock, /) -> None:
            super().append(turn)
            in_line.release()

    process._turns.line = Line()
    process.limit.allowed = 1
    store = open_store(source)
    names = [str(i) for i in range(20)]
    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(store.read_many, ["first"])]
        source.wait_begun("first")
        assert in_line.acquire(timeout=WAIT_S)
        for read in (names, ["one"]):
            results.append(pool.submit(store.read_many, read))
            assert in_line.acquire(timeout=WAIT_S)
        with process._lock:  # the last has joined, and let the lock go
            assert len(process._turns.line) == 2
        source.let_all()
        for result, read in zip(results, (["first"], names, ["one"]), strict=True):
            assert result.result(WAIT_S) == [answer(name) for name in read]
    assert source.begun[:3] == ["first", "0", "one"]


def test_threads_that_found_all_requests_taken_end(process: Fetching) -> None:
    source = Held()
    process.limit.allowed = 2
    store = open_store(source)
    with ThreadPoolExecutor(2) as pool:
        names = [[f"{k}{i}" for i in range(20)] for k in "ab"]
        reading = [pool.submit(store.read_many, some) for some in names]
        source.wait_begun(count=2)
        source.let_all()
        for some, read in zip(names, reading, strict=True):
            assert read.result(WAIT_S) == [answer(name) for name in some]
    assert all(map(ended, [t for t in threading.enumerate() if t.name == "fastload-remote"]))
    assert_nothing_is_held(process)


def test_many_threads_and_look_ahead_give_each_its_own(process: Fetching) -> None:
    """What is in flight, announced, claimed and cancelled changes all the time."""
    source = Held()
    source.let_all()
    store = open_store(source)
    names = [f"object{i}" for i in range(400)]

    def reads(k: int) -> None:
        for i in range(k, 400, 8):
            store.will_read(names[i + 8 : i + 40 : 8])
            if i % 50 == k:
                store.will_read([])
            assert store.read(names[i]) == answer(names[i])

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(reads, k) for k in range(8)]:
            done.result(WAIT_S)
    store.will_read([])
    assert process.stats(store._opened())["bytes_wanted"] == 4000
    assert_nothing_is_held(process)


def test_an_interrupted_read_leaves_no_one_waiting(process: Fetching) -> None:
    source = Held()
    source.let_all()
    source.failing["a"] = [KeyboardInterrupt()]  # type: ignore[list-item]
    store = open_store(source)
    with pytest.raises(KeyboardInterrupt):
        store.read("a")
    assert store.read("a") == answer("a")
    assert_nothing_is_held(process)


# ---- retries ----


def test_a_failure_that_may_pass_is_tried_again_with_jitter(
    process: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(
        attempts._jitter, "uniform", lambda least, most: asked.append((least, most)) or 0.0
    )
    source = Held()
    source.let_all()
    source.failing["a"] = [ConnectionError("cut"), TimeoutError("slow"), OSError("again")]
    store = open_store(source, retries=3)
    assert store.read("a") == answer("a")
    assert asked == [(0, pytest.approx(0.02 * 5**i)) for i in range(3)]
    stats = store.stats()
    assert (stats["requests"], stats["retries"], stats["throttled"]) == (4, 3, 1)
    source.failing["b"] = [ConnectionError("cut")] * 4
    with pytest.raises(
        RemoteError, match=r"^b, bytes 1 to 5: ConnectionError: cut \(4 attempts\)$"
    ):
        store.read("b", 1, 5)


@pytest.mark.parametrize(
    "error", [PermissionError("no"), ValueError("no"), FileNotFoundError("no")]
)
def test_a_failure_that_stays_is_not_tried_again(process: Fetching, error: Exception) -> None:
    source = Held()
    source.let_all()
    source.failing["a"] = [error]
    with pytest.raises(OSError, match="a"):
        open_store(source).read("a")
    assert source.begun == ["a"]


def test_a_pause_before_a_retry_ends_with_the_look_ahead(
    process: Fetching, monkeypatch: pytest.MonkeyPatch
) -> None:
    pausing = threading.Event()
    monkeypatch.setattr(attempts._jitter, "uniform", lambda *_: pausing.set() or 1000.0)
    source = Held()
    source.let_all()
    source.failing["a"] = [ConnectionError("cut")] * 9
    store = open_store(source)
    store.will_read(["a"])
    assert pausing.wait(WAIT_S)
    store.will_read([])
    assert all(map(ended, [t for t in threading.enumerate() if t.name == "fastload-remote"]))


# ---- the limit ----


def rounds(limit: Limit, now: float, rate: Callable[[int], float], times: int) -> float:
    """Let full rounds of small requests pass, as fast as `rate` says for what is in flight. Return the time."""
    for _ in range(times):
        for _ in range(2 * limit.allowed):
            now += 1 / rate(limit.allowed)
            before = limit.allowed
            limit.succeeded(0, True, now)
            if limit.allowed != before:
                break
    return now


def test_the_limit_grows_with_the_throughput_and_stays_where_it_ends() -> None:
    limit = Limit(0.0)
    rounds(limit, 0.0, lambda n: min(n, 80) * 50.0, 40)  # 20 ms each; the server does 80 at once
    assert 54 <= limit.allowed <= 121
    limit = Limit(0.0)
    rounds(limit, 0.0, lambda n: 1000.0, 33)  # one core of the server
    assert limit.allowed == 16
    limit = Limit(0.0)
    rounds(limit, 0.0, lambda n: n * 10.0, 40)
    assert limit.allowed == Limit.MOST


def test_the_limit_does_not_grow_if_it_is_not_reached() -> None:
    limit = Limit(0.0)
    for i in range(1000):
        limit.succeeded(1000, False, i / 10)
    assert limit.allowed == 16


def test_throttling_halves_the_limit_once_for_what_was_in_flight() -> None:
    limit = Limit(0.0)
    for halved in (8, Limit.LEAST, Limit.LEAST):
        now = limit._halved + 1.0
        for _ in range(100):
            limit.throttled(now, now + 1.0)
        assert limit.allowed == halved
    rounds(limit, 9.0, lambda n: n * 50.0, 3)
    assert limit.allowed == Limit.LEAST + 3  # it grows by one, not by half


def test_a_server_that_fails_at_random_is_asked_as_much_as_before() -> None:
    """Of 10,000 requests 15 % are throttled, by chance. Of the next 100 each second one is, because there are many."""
    limit, drawn, now = Limit(0.0), random.Random(0), 0.0
    for _ in range(10_000):
        now += 0.001
        if drawn.random() < 0.15:
            limit.throttled(now - 0.001, now)
        else:
            limit.succeeded(0, True, now)
        assert limit.allowed >= Limit.FIRST
    before = limit.allowed
    for _ in range(50):
        limit.succeeded(0, True, now)
        limit.throttled(now, now)
    assert limit.allowed < before


# ---- finalizers ----


@pytest.mark.parametrize("collected", ["file", "dataset"])
def test_what_is_collected_under_the_lock_gives_its_look_ahead_back(
    process: Fetching, collected: str
) -> None:
    """The garbage collector runs at any allocation, so also in the code that has the lock."""
    source = Held(size=3 << 20)
    source.let_all()
    store = open_store(source)

    class Dataset:
        def __del__(self) -> None:
            store.will_read([], owner="dataset")

    if collected == "file":
        file = store.open("a")
        file.read(1 << 19)
        file.read(1 << 19)
        circle: list[object] = [file]
        del file
    else:
        store.will_read(["a"], owner="dataset")
        circle = [Dataset()]
    circle.append(circle)
    assert any(session.claims for session in process._lines._sessions)

    def collect() -> None:
        nonlocal circle
        with process._locked():
            del circle
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    assert ended(thread)
    assert all(map(ended, [t for t in threading.enumerate() if t.name == "fastload-remote"]))
    assert_nothing_is_held(process)


def test_what_is_forgotten_while_another_thread_has_the_lock_is_done_by_that(
    process: Fetching,
) -> None:
    source = Held()
    store = open_store(source)
    store.will_read(["a"])
    source.wait_begun("a")
    with process._locked():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(store.will_read, []).result(WAIT_S)  # does not wait for the lock
        assert process._lines._sessions.pop().claims
    source.let_all()
    assert all(map(ended, [t for t in threading.enumerate() if t.name == "fastload-remote"]))
    assert_nothing_is_held(process)


# ---- forks ----


def test_a_child_that_is_forked_amid_look_ahead_reads(process: Fetching) -> None:
    source = Held()
    store = open_store(source)
    store.will_read(["a", "b"])
    source.wait_begun("a", "b")
    child = os.fork()
    if not child:
        try:
            source.__init__()  # type: ignore[misc]  # whose condition is the parent's
            source.let_all()
            store.will_read(["c"])
            right = [store.read("c"), store.read("a")] == [answer("c"), answer("a")]
            store.will_read([])
        finally:
            os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    source.let_all()
    assert store.read("a") == answer("a")
    store.will_read([])


class Opening:
    """A file system of fsspec's kind that takes long to open."""

    def __init__(self, *events: threading.Event) -> None:
        self._events = events

    def cat_file(self, path: str) -> bytes:
        return path.encode()

    def __reduce__(self) -> tuple[object, ...]:
        opening, go_on = self._events
        opening.set()
        assert go_on.wait(WAIT_S)
        return Opening, ()


def test_a_fork_waits_until_a_store_is_open() -> None:
    """A child that is forked while another thread imports the client waits for that import, for ever."""
    opening, go_on, forked = threading.Event(), threading.Event(), threading.Event()
    store = open_store(Opening(opening, go_on))

    def fork() -> int:
        child = os.fork()
        if not child:
            right = False
            try:
                right = go_on.is_set() and store.read("a") == b"a"
            finally:
                os._exit(not right)
        forked.set()
        return os.waitpid(child, 0)[1]

    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(store.read, "a")
        assert opening.wait(WAIT_S)
        forking = pool.submit(fork)
        early = forked.wait(0.3)
        go_on.set()
        assert (reading.result(WAIT_S), forking.result(WAIT_S)) == (b"a", 0)
    assert not early
