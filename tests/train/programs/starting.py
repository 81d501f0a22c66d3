"""Ranks on this machine, started by hand: each has the variables that a launcher would set."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.children import Python

ROOT = Path(__file__).parents[3]


@contextmanager
def ranks_started(
    world_size: int, arguments: Sequence[str], **options: Any
) -> Iterator[list[subprocess.Popen[str]]]:
    """`python ARGUMENTS` on so many ranks, output and errors of each in its `stdout`; ended with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "PYTHONUNBUFFERED": "1",  # a rank that is killed has said what it said
    }
    with ExitStack() as stack:
        started = []
        for rank in range(world_size):
            process = Python(
                arguments,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                **options,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            started.append(process)
        yield started
