"""Runs functions of test modules as ranks under Accelerate, on CPUs, and returns what each rank's function returned."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.children import ROOT, Python

PROGRAM = "from tests.promises.framework_ranks import main; main()"
LIMIT_S = 100.0


def on_ranks(
    function: Callable[..., Any], *arguments: Any, world_size: int = 2, modules: str = "accelerate"
) -> list[Any]:
    """Call a module-level function as `world_size` ranks, and return its results in the order of the ranks.

    If a rank raises, or takes over `LIMIT_S` seconds, all ranks end, and AssertionError has what they printed.
    """
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder, "given")
        given.write_bytes(pickle.dumps((function.__module__, function.__qualname__, arguments)))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with contextlib.ExitStack() as stack:
            ranks = [
                stack.enter_context(_rank(folder, rank, world_size, port, modules.split()))
                for rank in range(world_size)
            ]
            try:
                _wait(ranks)
            finally:
                for rank in ranks:
                    if rank.poll() is None:
                        os.kill(rank.pid, 9)
        if any(rank.returncode for rank in ranks):
            said = (Path(folder, f"output-{rank}").read_text() for rank in range(world_size))
            raise AssertionError(
                "\n".join([f"a rank failed: {[r.returncode for r in ranks]}", *said])
            )
        return [
            pickle.loads(Path(folder, f"result-{rank}").read_bytes()) for rank in range(world_size)
        ]


def _rank(folder: str, rank: int, world_size: int, port: int, modules: list[str]) -> Python:
    own = {name: text for name, text in os.environ.items() if not name.startswith("ACCELERATE_")}
    own |= {
        "ACCELERATE_USE_CPU": "true",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "FASTLOAD_WORKER_METHOD": os.environ.get("FASTLOAD_WORKER_METHOD", "thread"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    with Path(folder, f"output-{rank}").open("w") as output:
        return Python(
            ["-c", PROGRAM, folder, str(rank)],
            modules=modules,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=own,
            cwd=folder,
        )


def _wait(ranks: list[Python]) -> None:
    """Wait until all ranks ended, or one failed, or the time is over."""
    end = time.monotonic() + LIMIT_S
    for rank in ranks:
        while rank.poll() is None:
            if any(other.returncode for other in ranks if other.poll() is not None):
                return
            if time.monotonic() > end:
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(0.05)


def main() -> None:
    """Run as a rank: call the function, and write what it returns."""
    folder, rank = sys.argv[1:]
    module, name, arguments = pickle.loads(Path(folder, "given").read_bytes())
    import torch

    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    result = function(*arguments)
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    torch.distributed.destroy_process_group()
