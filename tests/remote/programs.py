"""Programs in processes of their own, for what a fork does, and for limits that a whole process has."""

from __future__ import annotations

import json

from tests.children import run_python
from tests.remote.servers import BUCKET

SOURCE = f"s3://{BUCKET}"
KEY = "processes/one"
LIMIT_S = 60.0

BEGIN = f'''
KEY = "{KEY}"
import json, os, pickle, select, signal, sys, traceback, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
from fastload.remote import open_store

def read(store):
    """What a read gives: its length, or its error."""
    try:
        return len(store.read(KEY))
    except Exception as error:
        return [type(error).__name__, str(error)]

def in_a_fork(work, seconds=8):
    """What `work` gives in a fork, or "hung"."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(theirs, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    said = select.select([ours], [], [], seconds)[0]
    found = json.loads(os.read(ours, 1 << 16) or b'"died"') if said else "hung"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ours)
    return found

store = open_store("{SOURCE}")
'''


def run(program: str, first: str = "") -> list[object]:
    """Return what a program prints, as JSON. `first` stands before all imports."""
    ended = run_python("-c", first + BEGIN + program, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert isinstance(found, list)
    return found
