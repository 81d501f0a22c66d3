"""Promises:
- An lmdb environment that workers open lazily is opened once, and closed with the last `close()`. See also
  `tests/compat/test_lmdb.py`.
- A worker that closes its lmdb environment does not close it for other workers.
- Outside of workers, and for other arguments, lmdb does what it always did.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastload.isolation import lmdb_once
from fastload.testing import Sequencer
from tests.fakes import hasty

lmdb = pytest.importorskip("lmdb", minversion="3.0")  # older ones do not refuse the same

WORKERS = 8
RECORDS = {b"%03d" % i: os.urandom(1 + i * 7) for i in range(300)}
NAMES = [b"name%d" % i for i in range(WORKERS)]
ROLE = threading.local()


@pytest.fixture(autouse=True)
def _installed() -> None:
    lmdb_once.install(lambda: getattr(ROLE, "worker", False))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("lmdb") / "set")
    with lmdb.open(path, map_size=1 << 24, max_dbs=WORKERS) as env:
        for name in NAMES:
            db = env.open_db(name)
            with env.begin(write=True, db=db) as txn:
                txn.put(b"who", name)
        with env.begin(write=True) as txn:
            for key, value in RECORDS.items():
                txn.put(key, value)
    return path


@pytest.fixture
def path(made: str) -> Iterator[str]:
    """The environment of every test, which must leave it closed."""
    yield made
    gc.collect()
    lmdb.open(made, map_size=1 << 23, readonly=True).close()  # refused if it is open


def opened(path: str, **options: Any) -> Any:
    return lmdb.open(path, readonly=True, lock=False, **options)


def get(env: Any, key: bytes) -> bytes:
    with env.begin() as txn:
        value: bytes = txn.get(key)
        return value


def as_worker(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a call in a worker thread that ends with it."""
    return in_workers(function, [args])[0]


def in_workers(function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """The results of calls, each in a worker thread of its own, begun together."""
    barrier = threading.Barrier(len(calls))

    def call(args: tuple[Any, ...]) -> Any:
        ROLE.worker = True
        barrier.wait(30)
        return function(*args)

    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result() for f in [pool.submit(call, args) for args in calls]]


@pytest.fixture
def _hasty() -> Iterator[None]:
    with hasty():
        yield


def test_a_second_open_waits_for_the_first(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = lmdb_once._real, []

    def slow(*args: Any, **kwargs: Any) -> Any:
        calls.append(threading.get_ident())
        with ThreadPoolExecutor(1) as other:
            assert not other.submit(lmdb_once._lock.acquire, blocking=False).result()
        return real(*args, **kwargs)

    monkeypatch.setattr(lmdb_once, "_real", slow)
    handles = in_workers(opened, [(path,)] * WORKERS)
    monkeypatch.undo()
    assert len(calls) == 1
    assert len({id(handle) for handle in handles}) == WORKERS


def test_outside_of_workers_lmdb_refuses_a_second_open(path: str) -> None:
    with opened(path) as env:
        assert type(env) is lmdb_once._real
        with pytest.raises(lmdb.Error, match="already open"):
            opened(path)


def test_one_that_closes_takes_it_from_nobody_else(path: str) -> None:
    sequencer = Sequencer()

    def closes() -> None:
        with sequencer(0):
            env = opened(path)
        with sequencer(2):
            assert get(env, b"007") == RECORDS[b"007"]
            env.close()
            env.close()  # counts once
        with sequencer(4):
            for name in ("begin", "stat", "path", "open_db"):
                with pytest.raises(lmdb.Error, match="closed"):
                    getattr(env, name)()

    def reads() -> None:
        with sequencer(1):
            env = opened(path)
            txn = env.begin()
            cursor = txn.cursor()
            assert cursor.first()
        with sequencer(3):
            rest = dict(cursor)
            assert {key: rest[key] for key in RECORDS} == RECORDS
            assert env.stat()["entries"] == len(RECORDS) + len(NAMES)
        with sequencer(5):
            env.close()
            with pytest.raises(lmdb.Error, match="closed"):
                txn.get(b"007")  # the last close closes, as it always did

    in_workers(lambda work: work(), [(closes,), (reads,)])


def test_it_closes_when_the_last_handle_is_closed_or_dropped(path: str) -> None:
    first, second, third = in_workers(opened, [(path,)] * 3)
    real = weakref.ref(first._env)
    first.close()
    del second
    assert get(third, b"001") == RECORDS[b"001"]
    with pytest.raises(lmdb.Error, match="already open"):
        lmdb.open(path, readonly=True)
    third.close()
    assert real() is None
    lmdb.open(path, readonly=True).close()  # with other arguments, in the main thread


def test_an_open_waits_for_a_close_in_progress(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lmdb forgets a file only after it has closed it, without the GIL."""
    as_worker(opened, path).close()
    real, refusals = lmdb_once._real, [lmdb.Error("already open"), lmdb.Error("already open")]

    def closing(*args: Any, **kwargs: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return real(*args, **kwargs)

    monkeypatch.setattr(lmdb_once, "_real", closing)
    handle = as_worker(opened, path)
    monkeypatch.undo()
    assert get(handle, b"009") == RECORDS[b"009"]


@pytest.mark.usefixtures("_hasty")
def test_workers_that_drop_it_do_not_keep_others_from_opening_it(path: str) -> None:
    """The last reference is that of a transaction, which no handle sees."""

    def read(seed: int) -> int:
        for key in random.Random(seed).choices(list(RECORDS), k=200):
            txn = opened(path).begin()
            if txn.get(key) != RECORDS[key]:
                return 1
        return 0

    assert in_workers(read, [(i,) for i in range(WORKERS)]) == [0] * WORKERS


def test_a_transaction_keeps_it_open_without_its_handle(path: str) -> None:
    txn = as_worker(lambda: opened(path).begin())
    other = as_worker(opened, path)
    other.close()
    assert txn.get(b"002") == RECORDS[b"002"]
    assert get(as_worker(opened, path), b"002") == RECORDS[b"002"]


@pytest.mark.parametrize(
    "options", [{"lock": True}, {"max_readers": 5}, {"readonly": False}, {"map_size": 1 << 25}]
)
def test_with_other_arguments_lmdb_refuses(path: str, options: dict[str, Any]) -> None:
    with as_worker(opened, path) as env:
        with pytest.raises(lmdb.Error, match="already open"):
            as_worker(lambda: lmdb.open(path, **{"readonly": True, "lock": False, **options}))
        assert get(env, b"003") == RECORDS[b"003"]
        assert env._opened.unclosed == 1


def test_equal_arguments_are_equal_however_they_are_written(path: str) -> None:
    link = Path(path).with_name("link")
    link.symlink_to(path)
    ways: list[Callable[[], Any]] = [
        lambda: lmdb.open(path, 10485760, True, True, lock=False),
        lambda: lmdb.Environment(path=os.path.relpath(path), readonly=True, lock=False),
        lambda: lmdb.open(os.fsencode(link), readonly=1, lock=0),
    ]
    handles = in_workers(lambda way: way(), [(way,) for way in ways])
    assert len({handle._env for handle in handles}) == 1
    link.unlink()


def test_an_environment_in_the_place_of_one_that_is_open_is_another(tmp_path: Path) -> None:
    def make(value: bytes) -> str:
        path = str(tmp_path / "set")
        with lmdb.open(path) as env, env.begin(write=True) as txn:
            txn.put(b"a", value)
        return path

    first = as_worker(opened, make(b"1"))
    (tmp_path / "set").rename(tmp_path / "old")
    second = as_worker(opened, make(b"2"))
    assert (get(first, b"a"), get(second, b"a")) == (b"1", b"2")


def test_a_worker_shares_what_the_main_thread_has_open(path: str) -> None:
    with opened(path) as env:
        handle = as_worker(opened, path)
        assert handle._env is env
        handle.close()
        assert get(env, b"004") == RECORDS[b"004"]
        left = as_worker(opened, path)
    own = as_worker(opened, path)  # the main thread has closed its own
    assert get(own, b"004") == RECORDS[b"004"]
    with pytest.raises(lmdb.Error, match="closed"):
        left.begin()


def test_a_worker_shares_what_was_opened_before_install_if_that_is_adopted(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmdb_once, "_by_file", {})  # so nothing is being closed
    env = lmdb_once._real(path, readonly=True, lock=False)
    with pytest.raises(lmdb.Error, match="already open"):
        as_worker(opened, path)
    lmdb_once.adopt(env)
    lmdb_once.adopt(env)
    with as_worker(opened, path) as handle:
        assert handle._env is env
    with pytest.raises(lmdb.Error, match="already open"):
        as_worker(lambda: lmdb.open(path, readonly=True, lock=True))
    assert get(env, b"005") == RECORDS[b"005"]
    env.close()


def test_errors_are_those_of_lmdb(tmp_path: Path) -> None:
    with pytest.raises(lmdb.Error, match="No such file"):
        as_worker(opened, str(tmp_path / "missing"))


def test_a_handle_passes_for_an_environment(path: str) -> None:
    with opened(path) as env, as_worker(opened, path) as handle:
        assert isinstance(env, lmdb.Environment)
        assert isinstance(handle, lmdb.Environment)
        with pytest.raises(TypeError, match="cannot pickle 'Environment' object"):
            pickle.dumps(handle)


@pytest.mark.usefixtures("_hasty")
def test_named_databases_opened_at_once_are_not_mixed_up(path: str) -> None:
    """lmdb numbers them as they are opened, and two threads at once take the same number."""

    def read(first: int) -> list[bytes]:
        env = opened(path, max_dbs=WORKERS)
        names = NAMES[first:] + NAMES[:first]
        dbs = {name: env.open_db(name, create=False) for name in names}
        with env.begin() as txn:
            return [name for name in names if txn.get(b"who", db=dbs[name]) != name]

    for _ in range(20):
        assert in_workers(read, [(i,) for i in range(WORKERS)]) == [[]] * WORKERS


def test_a_named_database_inside_a_transaction_is_refused(path: str) -> None:
    env = as_worker(lambda: opened(path, max_dbs=2))
    with env.begin() as txn:
        with pytest.raises(lmdb.Error, match="before the transaction"):
            env.open_db(b"name1", txn=txn)
        assert txn.get(b"006", db=env.open_db(None, txn=txn)) == RECORDS[b"006"]


def test_early_names_and_late_imports_find_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lmdb_once._real
    early = ModuleType("early")
    early.lmdb_open = early.Environment = early.__dict__["another"] = real  # type: ignore[attr-defined]
    early.other = value = object()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "early", early)
    monkeypatch.setitem(sys.modules, "no_module", value)  # type: ignore[arg-type]
    monkeypatch.setattr(lmdb, "Environment", real)
    lmdb_once.install(lambda: getattr(ROLE, "worker", False))
    assert lmdb_once._real is real
    assert early.other is value
    late = importlib.import_module("lmdb")
    for name in (early.lmdb_open, early.Environment, early.another, late.open, late.Environment):
        assert name is lmdb_once.Environment
    handles = in_workers(lambda f: f(path, readonly=True), [(early.another,), (late.open,)])
    assert handles[0]._env is handles[1]._env


def test_without_lmdb_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmdb", None)
    lmdb_once.install(lambda: True)
    monkeypatch.undo()
    assert not lmdb_once._is_worker()


def test_a_forked_child_shares_nothing_with_its_parent(path: str) -> None:
    """An environment must not be used after a fork. lmdb itself refuses to open it again there."""
    handle = as_worker(opened, path)
    child = os.fork()
    if not child:
        ROLE.worker, own = True, None
        try:
            own = opened(path)._env
        except lmdb.Error:
            pass
        finally:
            os._exit(own is handle._env)
    assert os.waitpid(child, 0)[1] == 0


def test_a_child_can_open_whatever_other_threads_did_during_the_fork(path: str) -> None:
    over, begun = threading.Event(), threading.Event()

    def opens() -> None:
        while not over.wait(1e-4):
            with lmdb_once._lock:  # most of the time
                begun.set()
                over.wait(2e-3)

    thread = threading.Thread(target=opens)
    thread.start()
    assert begun.wait(30)
    for _ in range(5):
        child = os.fork()
        if not child:
            os._exit(not lmdb_once._lock.acquire(timeout=1))
        assert os.waitpid(child, 0)[1] == 0
    over.set()
    thread.join()


def test_garbage_that_closes_while_another_opens(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection in the middle of an open may run a finalizer that closes the very environment."""
    dropped = [as_worker(opened, path)]
    flags = lmdb_once._Opened.flags

    def collecting(self: Any) -> Any:
        found = flags(self)
        if dropped:
            dropped.pop().close()
        return found

    monkeypatch.setattr(lmdb_once._Opened, "flags", collecting)
    assert get(as_worker(opened, path), b"008") == RECORDS[b"008"]
