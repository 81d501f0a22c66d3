"""Promise: A preparation that was killed resumes, even if processes that it had forked live on."""

import os
import signal
import subprocess

from fastload.store import prepare
from tests.children import Python

_PROGRAM = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from fastload.store import prepare

def make(source):
    sys.stdout.write(f"{os.getpid()}\\n"); sys.stdout.flush()
    sys.stdin.read()  # the test kills the parent before it lets go

prepare(make, [1], "a", root=ROOT, executor=ProcessPoolExecutor(1, get_context("fork")))
"""


def _make(source):
    return {"x": [source]}


def test_forked_workers_do_not_hold_the_lock(tmp_path):
    program = _PROGRAM.replace("ROOT", repr(str(tmp_path)))
    with Python(["-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        worker = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            assert prepare(_make, [1], "a", root=tmp_path, workers=0).made == 1
            os.kill(worker, 0)  # it lives
        finally:
            os.kill(worker, signal.SIGKILL)
