"""Runs an example of a framework in this process, as it is or as it was for torch's loader, and tells what it did."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import tempfile
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchvision import transforms

from fastload.telemetry import diagnosis
from tests.children import ROOT

CHANGED = re.compile(r"^from fastload\S* import \w+  # was: (from .+)$", re.M)
ADDED = re.compile(r"^.+  # new: .+\n", re.M)


class Read(NamedTuple):
    """An image that was read for training, and the thread that read it, "MainThread" in a process of torch's."""

    image: int
    thread: str


class Run(NamedTuple):
    """What an example did: its output, the steps of its optimizer, what it read, and what its reports say."""

    printed: str
    steps: int
    reads: list[Read]
    findings: list[diagnosis.Finding]


def as_before(source: str) -> str:
    """Return an example as it was for torch's loader: with the import that its comment names, without new lines."""
    return ADDED.sub("", CHANGED.sub(r"\1", source))


class Logged(transforms.RandomAffine):
    """Writes down each image that it turns, also in another process."""

    log_of_the_run: Path

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log = (
            self.log_of_the_run
        )  # a killed run's workers may still read when the next one begins

    def forward(self, image: Any) -> Any:
        with self.log.open("a") as log:
            log.write(f"{zlib.crc32(image.tobytes())} {threading.current_thread().name}\n")
        return super().forward(image)


def run_example(
    name: str, arguments: Sequence[str], *, before: bool = False, killed_after: int | None = None
) -> Run:
    """Run an example, as it was `before` fastload if asked for. It ends by Ctrl-C after `killed_after` steps."""
    source = (ROOT / "examples" / name).read_text()
    output, steps, findings = io.StringIO(), [], []
    bound = diagnosis.bound

    def count(*_: Any) -> None:
        steps.append(1)
        if len(steps) == killed_after:
            raise KeyboardInterrupt

    def noted(stats: Any) -> Any:
        findings.append(bound(stats))
        return findings[-1]

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        program, Logged.log_of_the_run = Path(folder, name), Path(folder, "reads")
        program.write_text(as_before(source) if before else source)
        stack.enter_context(mock.patch("sys.argv", [str(program), *arguments]))
        stack.enter_context(mock.patch.object(transforms, "RandomAffine", Logged))
        stack.enter_context(mock.patch.object(diagnosis, "bound", noted))
        stack.enter_context(mock.patch.object(diagnosis, "SHORTEST_S", 0.0))  # machines may be fast
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # the workers need the cores, too
        stack.callback(register_optimizer_step_post_hook(count).remove)
        with contextlib.suppress(*([KeyboardInterrupt] if killed_after else [])):
            runpy.run_path(str(program), run_name="__main__")
        lines = Logged.log_of_the_run.read_text().splitlines()
    reads = [Read(int(image), thread) for image, thread in map(str.split, lines)]
    return Run(output.getvalue(), len(steps), reads, findings)
