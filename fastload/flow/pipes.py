"""The input and the output of a task's process."""

from __future__ import annotations

import codecs
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fastload._kit.disk import write_all


@contextmanager
def stdin_of(content: bytes) -> Iterator[int]:
    """Yield a descriptor from which a process reads `content`."""
    if not content:
        yield subprocess.DEVNULL
        return
    with open(os.memfd_create("stdin"), "w+b", buffering=0) as file:
        write_all(file.fileno(), "stdin", content)
        file.seek(0)
        yield file.fileno()


def show(content: bytes, text: codecs.IncrementalDecoder) -> None:
    """Print the output of a task as bytes, or as text if standard output accepts only text, as in a notebook."""
    sys.stdout.flush()
    if (buffer := getattr(sys.stdout, "buffer", None)) is None:
        sys.stdout.write(text.decode(content))
    else:
        buffer.write(content)
    sys.stdout.flush()
