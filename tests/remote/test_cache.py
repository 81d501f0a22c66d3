"""Promises of the local cache of objects:
- A kill in the middle of a write leaves nothing wrong: the block is fetched again. So is one that was damaged on disk.
- Processes and threads share a cache that is too small for what they read. What they read is right, always.
- The longest unused blocks make room, and none that a reader holds. The disk space stays within the limit.
- On a full disk, reads go on without the cache, with one warning.
- An object that was replaced has blocks of its own. One without an ETag is not kept.
"""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastload.remote import Store, cache, open_store
from fastload.remote.cache import BLOCK, Cache, CachedObject
from tests.children import ROOT
from tests.remote.servers import content


class Noting:
    """Reads objects of a folder, and notes what is asked for. `etag` is what each is said to have."""

    def __init__(self, folder: Path) -> None:
        self.store = open_store(f"file://{folder}")
        self.asked: list[tuple[int, int | None]] = []
        read_many = self.store.read_many

        def noting(requests: Any) -> list[bytes]:
            wanted = [*requests]
            self.asked += [(start, stop) for _, start, stop in wanted]
            return read_many(wanted)

        self.store.read_many = noting  # type: ignore[method-assign]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "objects").mkdir()
    return tmp_path / "objects"


@pytest.fixture
def noting(folder: Path) -> Noting:
    return Noting(folder)


def put(folder: Path, name: str, blocks: float) -> bytes:
    body = content(name, int(blocks * BLOCK))
    (folder / name).write_bytes(body)
    return body


def opened(at: Cache, store: Store, folder: Path, name: str) -> CachedObject:
    url = f"file://{folder}/{name}"
    [etag] = store.etags([url])
    return CachedObject(at, store, url, (folder / name).stat().st_size, etag)


def read(file: CachedObject, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    assert file.read_into(memoryview(buffer), start) == stop - start
    return bytes(buffer)


def taken(at: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in at.glob("*.data"))


def test_blocks_are_fetched_once(folder: Path, noting: Noting, tmp_path: Path) -> None:
    body = put(folder, "a", 3.5)
    noting.store.etags([f"file://{folder}/a"])
    noting.asked.clear()
    for _ in range(2):
        file = opened(Cache(tmp_path / "cache", 1 << 30), noting.store, folder, "a")
        for start, stop in ((BLOCK - 5, BLOCK + 5), (0, 7), (3 * BLOCK, len(body)), (9, 9)):
            assert read(file, start, stop) == body[start:stop]
    spans = [(0, BLOCK), (BLOCK, 2 * BLOCK), (3 * BLOCK, len(body))]
    assert sorted(noting.asked) == spans


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from fastload.remote import cache, open_store
from tests.remote.test_cache import BLOCK, opened, read
folder, at, when = sys.argv[1:]
store = open_store(f"file://{folder}")
file = opened(cache.Cache(at, 1 << 30), store, Path(folder), "a")

def write(fd, data, at):
    os.pwrite(fd, data if when == "after" else data[: len(data) // 2], at)
    os.kill(os.getpid(), signal.SIGKILL)

cache._write = write
read(file, 0, 5)
"""


@pytest.mark.parametrize("when", ["amid", "after"])
def test_a_kill_leaves_nothing_wrong(
    when: str, folder: Path, noting: Noting, tmp_path: Path
) -> None:
    body = put(folder, "a", 1)
    arguments = [str(folder), str(tmp_path / "cache"), when]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=ROOT, timeout=60)
    assert done.returncode == -9
    assert taken(tmp_path / "cache") >= BLOCK // 2
    file = opened(Cache(tmp_path / "cache", 1 << 30), noting.store, folder, "a")
    noting.asked.clear()
    assert read(file, 0, BLOCK) == body
    assert noting.asked == [(0, BLOCK)]


@pytest.mark.parametrize("harm", ["flip", "cut", "table"])
def test_a_damaged_block_is_fetched_again(
    harm: str, folder: Path, noting: Noting, tmp_path: Path
) -> None:
    body = put(folder, "a", 2)
    at = tmp_path / "cache"
    assert read(opened(Cache(at, 1 << 30), noting.store, folder, "a"), 0, len(body)) == body
    [data], [table] = at.glob("*.data"), at.glob("*.table")
    with (table if harm == "table" else data).open("r+b") as file:
        if harm == "cut":
            file.truncate(BLOCK + 9)
        else:
            file.seek(8 if harm == "table" else BLOCK + 4)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    noting.asked.clear()
    again = opened(Cache(at, 1 << 30), noting.store, folder, "a")
    assert read(again, 0, len(body)) == body
    assert noting.asked == [(BLOCK, 2 * BLOCK)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    now = [1]
    monkeypatch.setattr(cache, "_now", lambda: now[0])
    return now


def test_the_longest_unused_makes_room(
    folder: Path, noting: Noting, tmp_path: Path, clock: list[int]
) -> None:
    bodies = {name: put(folder, name, 1) for name in "abcd"}
    at = Cache(tmp_path / "cache", 3 * BLOCK + BLOCK // 2)
    files = {name: opened(at, noting.store, folder, name) for name in bodies}
    for name in "abcad":
        clock[0] += 1
        assert read(files[name], 0, 9) == bodies[name][:9]
    assert taken(tmp_path / "cache") <= at.most_bytes
    noting.asked.clear()
    for name in "acd":
        assert read(files[name], 0, BLOCK) == bodies[name]
    assert not noting.asked  # b had not been used for longest
    assert read(files["b"], 0, BLOCK) == bodies["b"]
    assert noting.asked == [(0, BLOCK)]


def test_nothing_is_deleted_under_a_reader(
    folder: Path, noting: Noting, tmp_path: Path, clock: list[int]
) -> None:
    bodies = {name: put(folder, name, 1) for name in "abc"}
    at, other = (Cache(tmp_path / "cache", 2 * BLOCK + BLOCK // 2) for _ in range(2))
    first = opened(at, noting.store, folder, "a")
    with first.held([(0, 5)]) as ready, first.held([(0, 5)]):
        assert ready
        for name in "bcbc":
            clock[0] += 1
            assert read(opened(other, noting.store, folder, name), 0, BLOCK) == bodies[name]
        assert os.pread(first.fd, BLOCK, 0) == bodies["a"]
        assert taken(tmp_path / "cache") <= other.most_bytes
        both = opened(other, noting.store, folder, "b"), opened(other, noting.store, folder, "c")
        with both[0].held([(0, 1)]) as held, both[1].held([(0, 1)]) as lacks:
            assert (held, lacks) in ((True, False), (False, True))  # no room for a third
            assert taken(tmp_path / "cache") <= other.most_bytes
            for file, name in zip(both, "bc", strict=True):
                assert read(file, 3, 9) == bodies[name][3:9]
    clock[0] += 1
    for name in "bc":
        read(opened(other, noting.store, folder, name), 0, BLOCK)
    noting.asked.clear()
    assert read(first, 0, BLOCK) == bodies["a"]
    assert noting.asked == [(0, BLOCK)]  # released, it has made room


SHARING = """
import os, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
from tests.remote.test_cache import read_at_random
print(read_at_random(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
"""


def read_at_random(folder: Path, at: Path, seed: int) -> int:
    """Read ranges by three threads, with announcements, and compare them. Return how many."""
    bodies = {path.name: path.read_bytes() for path in folder.iterdir()}
    store, small = open_store(f"file://{folder}"), Cache(at, 12 * BLOCK)
    files = {name: opened(small, store, folder, name) for name in bodies}

    def go(number: int) -> int:
        draw = random.Random(f"{seed}/{number}")
        for _ in range(120):
            name = draw.choice([*bodies])
            start = draw.randrange(len(bodies[name]) - 1)
            stop = min(start + draw.randrange(1, 2 * BLOCK), len(bodies[name]))
            if draw.random() < 0.3:
                files[draw.choice([*bodies])].announce([(start, min(stop, BLOCK))])
            with files[name].held([(start, stop)]) as ready:
                found = os.pread(files[name].fd, stop - start, start) if ready else None
            assert found in (None, bodies[name][start:stop])
            assert read(files[name], start, stop) == bodies[name][start:stop]
        return 120

    with ThreadPoolExecutor(3) as pool:
        done = sum(pool.map(go, range(3)))
    for file in files.values():
        file.forget()
    return done


def test_processes_share_a_cache_that_is_too_small(folder: Path, tmp_path: Path) -> None:
    for name, blocks in {"a": 9.5, "b": 7, "c": 0.3, "d": 12}.items():
        put(folder, name, blocks)
    at = tmp_path / "cache"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", SHARING, folder, at, str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for seed in range(2)
    ]
    for child in children:
        out, err = child.communicate(timeout=200)
        assert (out.split(), child.returncode) == (["360"], 0), err
    # Beside the limit: what both were writing when they looked.
    assert taken(at) <= (12 + 2 * 3 * 3) * BLOCK
    body = (folder / "b").read_bytes()
    file = opened(Cache(at, 12 * BLOCK), open_store(f"file://{folder}"), folder, "b")
    assert read(file, 0, len(body)) == body


@pytest.mark.parametrize("where", ["block", "entry", "folder"])
def test_a_full_disk_only_warns(
    where: str, folder: Path, noting: Noting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = put(folder, "a", 3)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    at = Cache(tmp_path / "cache", 1 << 30)
    if where == "folder":
        monkeypatch.setattr(cache.os, "truncate", full)
    elif where == "block":
        monkeypatch.setattr(cache, "_write", full)
    else:
        monkeypatch.setattr(CachedObject, "_write_entry", full)

    def opened_and_read() -> CachedObject:
        file = opened(at, noting.store, folder, "a")
        file.announce([(5, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 5)])
        assert read(file, 5, 2 * BLOCK) == body[5 : 2 * BLOCK]
        return file

    with pytest.warns(RuntimeWarning, match="cache cannot be written .No space left on device"):
        file = opened_and_read()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(file, 7, 9) == body[7:9]
        assert noting.asked[-1] == (7, 9)
        assert read(opened(at, noting.store, folder, "a"), 7, 9) == body[7:9]
    file.announce([(100, 200)])
    for start, stop in ((100, 200), (2 * BLOCK, 2 * BLOCK + 5)):
        assert read(file, start, stop) == body[start:stop]
    assert not file._known.announced


def test_an_object_that_was_replaced_has_blocks_of_its_own(folder: Path, tmp_path: Path) -> None:
    at = Cache(tmp_path / "cache", 1 << 30)
    for version in range(2):
        body = content("a", 2 * BLOCK, version)
        (folder / "new").write_bytes(body)
        (folder / "new").rename(folder / "a")
        store = open_store(f"file://{folder}")  # as another process
        assert read(opened(at, store, folder, "a"), 0, len(body)) == body


def test_an_object_without_an_etag_is_not_kept(
    folder: Path, noting: Noting, tmp_path: Path
) -> None:
    body = put(folder, "a", 1)
    at = Cache(tmp_path / "cache", 1 << 30)
    file = CachedObject(at, noting.store, f"file://{folder}/a", BLOCK, None)
    assert [read(file, 1, 5), read(file, 1, 5)] == [body[1:5]] * 2
    assert noting.asked == [(1, 5)] * 2
    assert not [*(tmp_path / "cache").iterdir()]
