"""A function run in a forked child."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_child(function: Callable[[], T]) -> T:
    """Return `function()` as computed by a child of `os.fork`, which is killed if it hangs."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(30)
            os.write(writer, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with open(reader, "rb") as pipe:
            result: T = pickle.load(pipe)
            return result
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
