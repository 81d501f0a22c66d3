"""Promises:
- The programs of the pages "first training" train: their loss falls.
- Killed between two checkpoints and started again, they end with the losses and weights of a whole run, bit for bit. So
  do two ranks.
- Two ranks have the losses of one rank, but for rounding, also if they resume what one rank has begun.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.children import ROOT, run_python
from tests.distributed.launching import run, warm_environment

PROGRAM = """\
import os, runpy, signal, sys
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

torch.set_num_threads(1)  # on busy cores the threads of a step wait for one another
program, left = sys.argv[1], int(sys.argv[2])
del sys.argv[:2]
sys.argv[0] = program

def count(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

register_optimizer_step_post_hook(count)
runpy.run_path(program, run_name="__main__")
"""
"""Runs PROGRAM STEPS ARGUMENT..., and kills it after that many steps, or never if they are 0."""


@dataclass(frozen=True)
class First:
    """A program, the library that it needs, arguments that make it short, and what these lead to."""

    name: str
    needs: str
    arguments: tuple[str, ...]
    steps: int
    killed: int
    """The step after which it is killed."""
    saved: int
    """The step of the last checkpoint before that."""

    def run(self, place: Path, folder: str, *, ranks: int = 1, killed: bool = False) -> str:
        """Run the program in `place`, and return what it printed. `killed`: its first rank is, after a step."""
        wrapper = place / "program.py"
        wrapper.write_text(PROGRAM)
        program = [str(ROOT / "examples" / self.name), str(self.killed if killed else 0)]
        line = [str(wrapper), *program, *self.arguments, "--folder", folder]
        if ranks == 1:
            ended = run_python(*line, cwd=place, env=warm_environment({}))
            assert ended.returncode == (-signal.SIGKILL if killed else 0), ended.stderr
            return ended.stdout
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        job = run([*launcher, f"--nproc-per-node={ranks}", *line], place)
        assert bool(job.code) == killed, job.text
        return job.text

    def run_killed_and_again(self, place: Path, folder: str, *, ranks: int) -> None:
        self.run(place, folder, ranks=ranks, killed=True)
        assert len(ended(place, folder)["losses"]) == self.saved
        said = self.run(place, folder, ranks=ranks)
        assert said.count(f"resumes after step {self.saved}\n") == ranks, said


IMAGES = ("--epochs", "2", "--save-every", "6")
FIRST = [
    First("first_images.py", "PIL", IMAGES, steps=38, killed=29, saved=24),
    First(
        "first_language_model.py", "tokenizers", ("--steps", "16", "--save-every", "6"), 16, 11, 6
    ),
]


def ended(place: Path, folder: str) -> Any:
    """Return the last checkpoint of a run."""
    return torch.load(place / folder / "checkpoint.pt")


@pytest.fixture(scope="module", params=FIRST, ids=lambda first: first.name)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A program, and the folder in which it ran once, from its start to its end, into `whole`."""
    first, place = request.param, tmp_path_factory.mktemp("first")
    pytest.importorskip(first.needs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTLOAD_WORKER_METHOD", "auto")  # as users have it
        first.run(place, "whole")
    return first, place


def test_it_trains_to_its_end(whole: tuple[First, Path]) -> None:
    first, place = whole
    losses = ended(place, "whole")["losses"]
    assert len(losses) == first.steps
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])


def test_killed_and_resumed_it_ends_as_a_whole_run(whole: tuple[First, Path]) -> None:
    first, place = whole
    first.run_killed_and_again(place, "killed", ranks=1)
    equal(ended(place, "killed"), ended(place, "whole"))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_ranks_resumes_with_the_same_losses(
    whole: tuple[First, Path], before: int, after: int
) -> None:
    first, place = whole
    folder = f"then-{after}"
    first.run(place, folder, ranks=before, killed=True)
    said = first.run(place, folder, ranks=after)
    assert said.count(f"resumes after step {first.saved}\n") == after, said
    nearly(ended(place, folder), ended(place, "whole"))


@pytest.mark.slow
def test_two_ranks_that_were_killed_end_as_two_that_were_not(whole: tuple[First, Path]) -> None:
    first, place = whole
    first.run(place, "two-whole", ranks=2)
    nearly(ended(place, "two-whole"), ended(place, "whole"))
    first.run_killed_and_again(place, "two-killed", ranks=2)
    equal(ended(place, "two-killed"), ended(place, "two-whole"))


def nearly(one: Any, other: Any) -> None:
    """Check that two checkpoints have the same losses, but for rounding, which each step passes on to the next."""
    torch.testing.assert_close(one["losses"], other["losses"], rtol=0.01, atol=0.01)


def equal(one: Any, other: Any) -> None:
    """Check that two checkpoints have the same losses, and the same weights, bit for bit."""
    assert one["losses"] == other["losses"]
    assert one["loader"] == other["loader"]
    torch.testing.assert_close(one["model"], other["model"], rtol=0, atol=0)
