"""Forks a server for each line of its input, which says how: JSON. Answers with the process id.

Imports take seconds, and a test restarts a server a hundred times: so they are done once, before the forks.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from typing import Any

import torch

from fastload.distributed import FolderStore
from fastload.parameters import Optimizer, Server
from fastload.parameters.flight import ParameterServer
from fastload.parameters.transport import publish


def serve(about: dict[str, Any]) -> None:
    number, of = about["number"], about["of"]
    server = Server(number, of, optimizer=Optimizer(**about["optimizer"]), **about["options"])
    front = ParameterServer(server)
    publish(FolderStore(about["store"]), number, of, front.address("127.0.0.1"))
    while True:
        signal.pause()


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    children = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            serve(json.loads(line))
        children.append(pid)
        print(pid, flush=True)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
