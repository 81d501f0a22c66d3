"""Promise: A store goes into other processes: forked before or after its first read, spawned, and by a pickle. Each
process opens a client of its own. None hangs.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.children import ROOT, Python
from tests.remote.programs import BEGIN, KEY, run
from tests.remote.proxy import Fault, Proxy
from tests.remote.servers import Bucket, content


@pytest.fixture(autouse=True)
def _one_object(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put(KEY, content(KEY, 1234))
    bucket.put("other", b"other")


def is_read_or_said(found: object) -> None:
    """A child of a process that has read must read too, or say in one sentence why it cannot."""
    if found != 1234:
        assert isinstance(found, list), found
        _, text = found
        assert "fork" in text
        assert "\n" not in text
        assert len(text) < 300


def test_a_store_is_read_in_a_fork_of_a_process_that_has_not_read() -> None:
    found = run("""
print(json.dumps([in_a_fork(lambda: read(store)), in_a_fork(lambda: read(store)), read(store)]))
""")
    assert found == [1234, 1234, 1234]


def test_a_fork_of_a_process_that_has_read_reads_or_says_why_not() -> None:
    first, same, new, copied, after = run("""
first = read(store)
copy = pickle.dumps(store)
print(json.dumps([
    first,
    in_a_fork(lambda: read(store)),
    in_a_fork(lambda: read(open_store("s3://data"))),
    in_a_fork(lambda: read(pickle.loads(copy))),
    read(store),
]))
""")
    assert first == after == 1234
    for found in (same, new, copied):
        is_read_or_said(found)


def test_a_fork_in_the_middle_of_reads_does_not_hang() -> None:
    """Threads hold the store's locks while the process forks, again and again."""
    *forked, after = run(
        """
import threading
ended = threading.Event()

def go():
    while not ended.is_set():
        store.will_read([KEY] * 3)
        store.read(KEY)

threads = [threading.Thread(target=go) for _ in range(4)]
for thread in threads:
    thread.start()
found = [in_a_fork(lambda: read(store)) for _ in range(10)]
ended.set()
for thread in threads:
    thread.join()
print(json.dumps([*found, read(store)]))
"""
    )
    assert after == 1234
    for found in forked:
        is_read_or_said(found)


def test_the_end_of_a_fork_that_has_read_does_not_hang() -> None:
    """It ends as multiprocessing ends a child, with exit handlers, while its parent still reads."""
    found = run("""
import multiprocessing
child = multiprocessing.get_context("fork").Process(target=lambda: sys.exit(0 if read(store) == 1234 else 3))
child.start()
child.join(20)
print(json.dumps([child.exitcode, read(store)]))
""")
    assert found == [0, 1234]


def test_a_process_ends_though_it_reads_ahead(proxy: Proxy) -> None:
    """Answers never come, and nobody waits for them. The exit handler that is registered first runs last."""
    proxy.plan = lambda request: Fault("stall", 60.0) if request.key == KEY else None
    (seconds,) = run(
        """
store.will_read([KEY] * 50)
assert store.read("other") == b"other"
ended = time.monotonic()
""",
        first="""
import atexit, json, time
atexit.register(lambda: print(json.dumps([time.monotonic() - ended])))
""",
    )
    assert isinstance(seconds, float)
    assert seconds < 3


def test_a_read_that_waits_is_interrupted(proxy: Proxy) -> None:
    """Ctrl-C arrives while the answer is held. The next read goes on as before."""
    program = """
try:
    print(json.dumps(["early", len(store.read(KEY))]))
except KeyboardInterrupt:
    print(json.dumps(["interrupted", len(store.read("other"))]))
"""
    proxy.plan = lambda request: Fault("stall", 60.0) if request.key == KEY else None
    arguments = ["-c", BEGIN + program]
    with Python(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert proxy.wait_for(1)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=20)
    assert child.returncode == 0, err
    assert json.loads(out) == ["interrupted", 5]


def printed(program: str) -> Any:
    """Return the JSON that a program prints."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_a_pickled_store_is_read_in_a_spawned_process() -> None:
    program = (
        BEGIN
        + """
import multiprocessing
if __name__ == "__main__":
    read(store)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        print(json.dumps(pool.map(store.size, [KEY] * 4)))
"""
    )
    assert printed(program) == [1234] * 4


def test_nothing_is_imported_or_begun_before_the_first_read() -> None:
    program = f"""
KEY = "{KEY}"
import json, sys, threading
import fastload
early = [name for name in ("obstore", "fsspec", "fastload.remote") if name in sys.modules]
from fastload.remote import open_store
store = open_store("s3://data")
repr(store)
print(json.dumps([early, threading.active_count(), len(store.read(KEY)), "obstore" in sys.modules]))
"""
    assert printed(program) == [[], 1, 1234, True]


WORKERS = """
import fastload, torch

class Objects(torch.utils.data.Dataset):
    def __init__(self):
        self.store = store
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return len(self.store.read(KEY)) + index

def epoch():
    try:
        loader = fastload.DataLoader(Objects(), batch_size=4, num_workers=2, worker_method=METHOD)
        return [x for batch in loader for x in batch.tolist()]
    except Exception as error:
        return str(error)

first = epoch()
read(store)
print(json.dumps([first, epoch()]))
"""


@pytest.mark.parametrize("method", ["thread", "process", "torch"])
def test_workers_read_a_store(method: str) -> None:
    """Also in an epoch after the loop's own process has read, or an error says why not."""
    first, second = run(f"METHOD = {method!r}\n" + WORKERS)
    expected = [1234 + i for i in range(32)]
    assert first == expected
    assert second == expected or (method != "thread" and "fork" in str(second)), second
