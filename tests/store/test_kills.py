"""Promise: `put` and `prepare`, killed at a hundred random moments each, leave nothing half visible and lose no
complete part.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fastload import store
from fastload.store.root import collect, sets
from tests.children import Python

PARTS, ROWS = 20, 50

PROGRAM = """
import os, sys, time, torch
from fastload import store

def rows_of(number):
    time.sleep(0.002)
    return {"x": torch.full((50, 4), number), "y": torch.arange(50) + 50 * number}

def write(how, out):
    if how == "put":
        store.put((rows_of(number) for number in range(20)), out)
    else:
        store.prepare(rows_of, range(20), out, workers=0)

for line in sys.stdin:  # one import, and a new process for each
    pid = os.fork()
    if not pid:
        write(*line.split())
        os._exit(0)
    print(pid, flush=True)
    sys.stdin.readline()
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def rows_in(path: Path) -> list[int]:
    dataset = store.get(path, data="x", label="y")
    samples = dataset.__getitems__(range(len(dataset)))
    assert all(bool((x == y // ROWS).all()) for x, y in samples)
    return [int(y) for _, y in samples]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["put", "prepare"])
def test_killed_at_a_hundred_moments(how: str, tmp_path: Path) -> None:
    draws = random.Random(0)
    finished = 0
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with Python(["-c", PROGRAM], text=True, **pipes) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        killed = 0
        while killed < 100:
            out = tmp_path / f"set-{finished}"
            print(how, out, file=program.stdin, flush=True)
            writer = int(program.stdout.readline())
            time.sleep(draws.uniform(0, 0.08))
            os.kill(writer, signal.SIGKILL)
            print(file=program.stdin, flush=True)
            killed += int(program.stdout.readline()) == signal.SIGKILL
            if out.exists():
                finished += 1
                assert rows_in(out) == list(range(PARTS * ROWS))
            names = {found.name for found in sets(os.fspath(tmp_path))}
            assert names == {f"set-{number}" for number in range(finished)}
        program.stdin.close()
    collect(os.fspath(tmp_path))
    left = [*tmp_path.glob(".unsealed/*")]
    assert all(path.suffix == ".lock" for path in left)
    assert len(names) == finished
