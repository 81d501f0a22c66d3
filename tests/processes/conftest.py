"""What holds after every test of worker processes: no process and no memory file is left."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import FAILED, settle
from tests.processes.holding import Gate, Pipe, descendants, memfds


@pytest.fixture(scope="session", autouse=True)
def _servers(forkserver: object) -> Iterator[None]:
    """Start multiprocessing's fork server before any test, which would be blamed for its descriptors.

    The memory in which multiprocessing has its values stays too, if there is a value in it.
    """
    first = multiprocessing.Value("i", 0)
    yield
    del first


@pytest.fixture(autouse=True)
def _no_process_and_no_memory_left(request: pytest.FixtureRequest) -> Iterator[None]:
    before, mapped = descendants(), set(memfds())
    yield
    if request.node.stash.get(FAILED, False):
        return
    left = settle(lambda: descendants() - before)
    assert not left, f"these processes still run: {left}"
    segments = settle(lambda: [line for line in memfds() if line not in mapped])
    assert not segments, f"these segments are still mapped: {segments}"


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    """Return a named pipe in which workers say where they are."""
    made = Pipe(tmp_path / "pipe")
    yield made
    made.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """Return a closed gate for workers."""
    made = Gate(tmp_path / "gate")
    yield made
    made.close()
