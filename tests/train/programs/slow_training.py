"""A training whose rank 1 reads slowly, until rank 0 has named it.

slow_training.py IMAGES LOGDIR
"""

from __future__ import annotations

import os
import re
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any
from unittest import mock

from fastload.measure.samples import Numbered
from fastload.train import loop
from fastload.train.recipe import Recipe

STEPS = 400  # a minute and more, if nobody is named


class Slow(Numbered):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05)
        return super().__getitem__(index)


Slow.__name__ = Numbered.__name__  # a loader has the name of its dataset's class


def say(line: str) -> None:
    print(line, flush=True)
    if line.startswith("Metrics of rank 0: "):
        say.url = line.split()[-1]  # type: ignore[attr-defined]
    if re.match("slow rank: 1, .*: storage", line):
        text = urllib.request.urlopen(say.url, timeout=10).read().decode()  # type: ignore[attr-defined]
        print(re.findall(r"fastload_slow_rank_seconds\{.*", text), flush=True)
        os.kill(os.getpid(), 15)  # all ranks end after this step


def main(images: str, logdir: str) -> None:
    recipe = Recipe(
        file_list=Path(images) / "list.txt", logdir=Path(logdir), metrics_port=0, image_size=8,
        batch_size=4, device="cpu", steps=STEPS, status_print_interval=5,
    )  # fmt: skip
    reads = Slow if os.environ["RANK"] == "1" else Numbered
    with mock.patch.object(loop, "Numbered", reads):
        loop.train(recipe, say=say)


if __name__ == "__main__":
    main(*sys.argv[1:])
