"""What holds for every test: fixed seeds, no fastload thread and no file descriptor left behind.

A hang is ended by the settings `timeout` and `faulthandler_timeout` of pyproject.toml, which dump
all stacks. The variable `FASTLOAD_TEST_COPY_DATASET=False` (or `True`) runs the tests under another default
of `copy_dataset`. `--hypothesis-profile=full` tries 300 examples of each kind instead of 20, and keeps those that fail.
"""

from __future__ import annotations

import os

# Threads of OpenMP that wait for one another spin, and take the core from the one that works. Read with torch's import.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import ctypes
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_sharer
import multiprocessing.resource_tracker
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis.database import DirectoryBasedExampleDatabase

import fastload
from fastload._kit.disk import Descriptor
from fastload.engine.waiting import Bell
from fastload.loader import ENVIRONMENT
from fastload.processes import starting
from tests.children import warm_server

pytest.register_assert_rewrite("tests.contracts")

GRACE_S = 5.0  # threads of a collected iterator end by themselves, after the call in progress
DESCRIPTORS = Path("/proc/self/fd")
MAPS = Path("/proc/self/maps")
LARGE_PAGE = 1 << 21
MADV_COLLAPSE = 25
T = TypeVar("T")

hypothesis.settings.register_profile(
    "quick",
    max_examples=20,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    print_blob=True,
    derandomize="CI" in os.environ,
    database=None,
)
hypothesis.settings.load_profile("quick")
hypothesis.settings.register_profile(  # `scripts/test --all` asks for it
    "full",
    max_examples=300,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(Path(__file__).parents[1] / ".hypothesis"),
)

FAILED = pytest.StashKey[bool]()
_frozen = [0]  # how many modules there were when their objects were last frozen

# Torch asks for the name of each TCP connection's other end, which no hosts file has. A name server that loses the
# request would cost 5 s, more than the 3 s in which leases connect.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")

# A shell ignores SIGINT in what it starts with `&`, and so would every child of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let slow tests take longer than others before they count as hanging: they start processes, on busy cores."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(240))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note whether the test failed. Then its traceback keeps its loaders alive, which is not a leak."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(scope="session", autouse=True)
def _one_time_descriptors() -> None:
    """Open what multiprocessing and torch's stores open once per process, so that no test is blamed for it."""
    warm_server()
    multiprocessing.resource_tracker.ensure_running()
    torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


fastload.threads_ok("tests")
"""Datasets of tests record what happens in lists and events that all threads share. They mean to."""


def pytest_xdist_auto_num_workers() -> int:
    """Let half as many processes again run tests as there are cores: every second test waits for something."""
    return 3 * len(os.sched_getaffinity(0)) // 2


@pytest.fixture(autouse=True)
def _imports_are_no_garbage() -> None:
    """Let a garbage collection look at what tests make, not at the half a million objects of torch and the tests.

    It takes a millisecond then instead of a third of a second, and hundreds of tests, and Lightning, collect.
    """
    if len(sys.modules) > _frozen[0] + 100:
        _frozen[0] = len(sys.modules)
        gc.collect()
        gc.freeze()
        _use_large_pages()


def _use_large_pages() -> None:
    """Move this process's memory into pages of 2 MiB, if the kernel can (Linux 6.1).

    A fork copies an entry for each page, and an end of the fork frees it. With small pages, of which a process of the
    tests has 300,000, that takes 0.1 s of CPU time, and the tests fork thousands of times.
    """
    if not MAPS.exists():
        return
    advise = ctypes.CDLL(None).madvise
    for line in MAPS.read_text().splitlines():
        place, access, _, _, _, *name = line.split()
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in place.split("-"))
            start, end = -(-start // LARGE_PAGE) * LARGE_PAGE, end // LARGE_PAGE * LARGE_PAGE
            if start < end:
                advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_COLLAPSE)


@pytest.fixture(scope="session", autouse=True)
def _defaults_of_tests() -> Iterator[None]:
    """Let threads read by default, and let `copy_dataset` have the default that FASTLOAD_TEST_COPY_DATASET names.

    Most tests are about the engine and its threads. Those of the choice pass `worker_method="auto"`, and programs that
    tests start have the package's own default.
    """
    name = os.environ.get("FASTLOAD_TEST_COPY_DATASET", "")
    init = fastload.DataLoader.__init__

    @functools.wraps(init)
    def with_default(self: fastload.DataLoader[Any], *args: Any, **options: Any) -> None:
        if ENVIRONMENT not in os.environ:
            options["worker_method"] = options.get("worker_method") or "thread"
        if (
            name and options.get("worker_method") != "torch"
        ):  # which refuses all but its own default
            options.setdefault("copy_dataset", {"False": False}[name])
        init(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastload.DataLoader, "__init__", with_default)
        yield


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def forkserver() -> ForkServerContext:
    """Start the server before a test begins: it keeps its descriptors."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "fastload.elastic"])
    multiprocessing.forkserver.ensure_running()
    return context


@pytest.fixture(scope="session")
def descriptors_that_stay() -> None:
    """Let Arrow and gRPC open what they keep: the tests look for descriptors that are left open."""
    from pyarrow import flight

    with (
        flight.FlightServerBase("grpc://127.0.0.1:0") as server,
        flight.FlightClient(f"grpc://127.0.0.1:{server.port}") as client,
    ):
        client.wait_for_available()


@pytest.fixture(scope="session", autouse=True)
def _default_server(request: pytest.FixtureRequest) -> None:
    """Where a fork server is the default, torch's loader would start it within some test."""
    if multiprocessing.get_all_start_methods()[0] == "forkserver":
        request.getfixturevalue("forkserver")


@pytest.fixture
def forks() -> Iterator[None]:
    """Let multiprocessing fork, and so torch's loader, as before Python 3.14."""
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(None, force=True)


@pytest.fixture(autouse=True)
def _what_other_tests_imported_is_no_hazard() -> Iterator[None]:
    """Let workers fork, although an earlier test imported gRPC or another library that starts threads."""
    threaded = {k: v for k, v in starting._THREADED.items() if k not in sys.modules}
    # Not the fixture `monkeypatch`: begun here, it would end after the fixtures of each test file.
    with mock.patch.object(starting, "_THREADED", threaded):
        yield


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread of fastload or an open file, pipe or socket behind."""
    threads, descriptors = fastload_threads(), open_descriptors()
    yield
    if request.node.stash.get(FAILED, False):
        return
    left_threads = settle(lambda: fastload_threads() - threads)
    assert not left_threads, "threads left behind:\n" + "\n".join(map(stack_of, left_threads))
    left = settle(lambda: new_descriptors(descriptors))
    assert not left, f"file descriptors left open: {left}"


def settle(leftovers: Callable[[], T]) -> T:
    """Return `leftovers()` once it is empty, or its result after `GRACE_S` seconds.

    If something is left, collect garbage, and poll. A thread that ends late cannot tell.
    """
    left = leftovers()
    deadline = time.monotonic() + GRACE_S
    if left:
        gc.collect()
        multiprocessing.resource_sharer.stop()  # the socket that hands tensors to other processes
    while (left := leftovers()) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()  # a thread that was ending held its frames at the last one
    return left


def fastload_threads() -> set[threading.Thread]:
    """Return the threads of fastload that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("fastload-")}


def stack_of(thread: threading.Thread) -> str:
    """Return a thread's name and where it stands."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}\n" + "".join(traceback.format_stack(frame) if frame else ["(ended)"])


def open_descriptors() -> dict[int, str]:
    """Return what each file descriptor of this process refers to; empty without a /proc."""
    found: dict[int, str] = {}
    for name in os.listdir(DESCRIPTORS) if DESCRIPTORS.is_dir() else []:
        try:
            found[int(name)] = os.readlink(DESCRIPTORS / name)
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def new_descriptors(before: dict[int, str]) -> dict[int, str]:
    """Return the descriptors that were not there `before`, except those that libraries open once and keep.

    These are devices, and files of installed packages (matplotlib keeps its fonts open). gRPC's threads open and close
    event descriptors when they like, so only those count that an object of fastload holds.
    """
    new = {fd: name for fd, name in open_descriptors().items() if before.get(fd) != name}
    if events := {fd for fd, name in new.items() if name == "anon_inode:[eventfd]"}:
        ours = [x for x in gc.get_objects() if type(x) in (Bell, Descriptor)]
        for fd in events - {getattr(x, "descriptor", None) or x.fd for x in ours}:
            del new[fd]
    if any(name.startswith("/dev/nvidia") for name in new.values()):
        return {}  # CUDA came up in this test, with devices, pipes and event descriptors of its own
    return {
        fd: name
        for fd, name in new.items()
        if (name.startswith("/dev/shm/") or not name.startswith("/dev/"))
        and not {"site-packages", "dist-packages"} & set(Path(name).parts)
    }
