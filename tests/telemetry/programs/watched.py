"""A rank of a job whose ranks end, stop or say nothing, and which step by themselves.

    watched.py ROLES

ROLES are those of the ranks, such as asks,reads,idle. "asks" prints what it hears as JSON lines. "idle" begins no
loader. All end with the end of their input.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from fastload import DataLoader, distributed
from fastload.engine import ranks
from fastload.telemetry import ranks as rules
from tests.fakes import Numbers


def main(roles: str) -> None:
    ranks.BEAT_S, ranks.ANSWER_S, rules.SILENT_S = 0.1, 1.0, 2.0
    rank = distributed.init("gloo").rank
    role = roles.split(",")[rank]
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    steps = 0
    loader = DataLoader(Numbers(10**7), 8, num_workers=1, worker_method="thread")
    if role == "idle":
        ended.wait()
    with loader:
        for _ in loader:
            steps += 1
            if ended.wait(0.01):
                break
            if role == "asks" and steps % 10 == 0:
                began = time.monotonic()
                heard = loader.stats(ranks=True)
                report = {
                    "heard": [one.rank for one in heard.ranks],
                    "silent": [one.rank for one in heard.silent],
                    "unheard": heard.unheard,
                    "note": heard.note,
                    "said": str(heard),
                    "took_s": time.monotonic() - began,
                    "steps": steps,
                }
                print(json.dumps(report), flush=True)
    os._exit(0)  # without the group's end: other ranks may be gone


if __name__ == "__main__":
    main(sys.argv[1])
