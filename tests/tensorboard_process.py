"""`fastload tensorboard` as a process, for the tests that need one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT_S = 100  # of a start that takes seconds


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    said: str
    """What it printed up to "Press Ctrl-C to end TensorBoard."."""
    url: str


@contextmanager
def tensorboard(logdir: Path, *options: str, errors: Path) -> Iterator[Running]:
    """`fastload tensorboard LOGDIR OPTIONS`, once it answers; ended at the end. `errors`: a file for its stderr."""
    with open(errors, "w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "fastload", "tensorboard", str(logdir), *options],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    try:
        assert process.stdout
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("Press Ctrl-C"):
                break
        url = re.search(r" at (http://\S+)", said)
        assert url, f"it did not start: {said}{errors.read_text()}"
        yield Running(process, said, url[1])
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
