"""Promise: CPU seconds and memory are those of a process with all its descendants, as /proc has them."""

from __future__ import annotations

import subprocess
import sys

from fastload.measure.processes import cpu_seconds, descendants, tree_memory

ALLOCATE = """
import os, sys
held = bytearray(os.urandom(1 << 20)) * 64
if os.fork() == 0:
    held[:] = bytes(len(held))  # The child's own copy: written to, so no longer shared.
    print("ready", flush=True)
sys.stdin.read()
"""


def test_the_memory_of_a_process_has_its_children_in_it_and_shared_pages_once() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ALLOCATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdin
        assert parent.stdout
        parent.stdout.readline()
        children = list(descendants(parent.pid))
        memory = tree_memory(parent.pid)
        parent.stdin.close()
    assert len(children) == 1
    assert memory is not None
    assert 128 * 2**20 <= memory < 200 * 2**20


def test_a_process_that_is_gone_has_no_memory_and_no_children() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert tree_memory(gone.pid) is None
    assert list(descendants(gone.pid)) == []


BURN = "import time\nwhile time.process_time() < 0.3: pass\nprint('burnt', flush=True)\ninput()"


def test_cpu_seconds_have_living_and_ended_children_in_them() -> None:
    before = cpu_seconds()
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin
        assert child.stdout
        child.stdout.readline()
        living = cpu_seconds()
        child.stdin.write(b"\n")
    ended = cpu_seconds()
    assert before is not None
    assert living is not None
    assert ended is not None
    assert living - before >= 0.28  # Ticks of 10 ms, cut off.
    assert ended - before >= 0.28
