"""The folder that rank 0 of a training run writes for TensorBoard: a profile and scalars."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch

from fastload.distributed import Control
from fastload.telemetry import Stats
from fastload.telemetry.snapshot import waited_share
from fastload.telemetry.sums import less
from fastload.train.profiling import ACTIVE, STEPS, WAIT, WARMUP, StepProfiler
from fastload.train.recipe import Recipe, TrainError


class Recording:
    """The profile and the scalars of a run, if its recipe asks for them. It does nothing on ranks other than 0.

    Args:
        first: number of steps done before this run.
        steps: number of steps that the loop will make.
        stats: the loader's `stats`, or None if it has none.

    Raises `TrainError` on all ranks if the steps are too few for a profile.
    """

    def __init__(
        self,
        recipe: Recipe,
        control: Control,
        *,
        first: int,
        steps: int,
        stats: Callable[[], Stats] | None,
        say: Callable[[str], None],
    ) -> None:
        self.folder: Path | None = None
        """Folder of the files, or None if nothing is recorded."""
        self._profile: Any = None
        self._scalars: Any = None
        self._stats = stats
        self._before: Stats | None = None
        self._ends = ExitStack()
        if not (recipe.profile or recipe.scalars):
            return
        if recipe.profile and steps < STEPS:
            raise TrainError(
                f"--profile needs {STEPS} steps: {WAIT} are skipped, {WARMUP} is warm-up, {ACTIVE} are recorded. "
                f"This run has {steps}. Give --nsteps {first + STEPS} or more, or remove --profile"
            )
        self.folder = folder = run_folder(recipe, control)
        say(f"Folder of this run: {folder}")
        if control.rank.rank == 0:
            if recipe.profile:
                self._profile = StepProfiler(folder, say=say)
            if recipe.scalars:
                from torch.utils.tensorboard import SummaryWriter  # takes seconds

                self._scalars = SummaryWriter(str(folder))

    def step(self) -> None:
        """Record a step. Call this after each step."""
        if self._profile is not None:
            self._profile.step()

    def window(self, step: int, *, rate: float, loss: torch.Tensor) -> None:
        """Record a status window, after its end: its rate in samples per second, and the loss of its last batch."""
        if self._scalars is None:
            return
        values = {"rank0/images_per_s": rate, "train/loss": float(loss)}
        if self._stats is not None:
            now = self._stats()
            values |= loader_scalars(now, self._before)
            self._before = now
        for name, value in values.items():
            self._scalars.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        for each in (self._scalars, self._profile):
            if each is not None:
                self._ends.enter_context(each)
        return self

    def __exit__(self, *raised: Any) -> None:
        self._ends.__exit__(*raised)


def loader_scalars(now: Stats, before: Stats | None = None) -> dict[str, float]:
    """Return the work of a loader between two snapshots of one epoch, or since the epoch began if `before` is None.

        loader/samples_per_s     samples delivered to the loop
        loader/wait_share        0 to 1: the loop's time in which it waited for a batch or ran the sampler
        loader/queue_occupancy   0 to 1: mean share of the batches in flight that were ready, over the epoch so far
        stage_s/NAME             thread-seconds in each stage: sampler, sample, read, decode, collate, pin ...

    A snapshot of another epoch counts as None. The result is empty if no time has passed.
    """
    since = less(now, before) if before is not None and before.epoch == now.epoch else now
    if since.elapsed_s <= 0.0:
        return {}
    return {
        "loader/samples_per_s": since.samples / since.elapsed_s,
        "loader/wait_share": waited_share(since),
        "loader/queue_occupancy": now.occupancy,
        **{f"stage_s/{name}": stage.seconds for name, stage in since.stages.items()},
    }


def run_folder(recipe: Recipe, control: Control) -> Path:
    """Make a folder for this run in the recipe's `logdir`, on rank 0, and return it. Collective.

    Its name is that of the run in TensorBoard. It has the time of the start, and the settings that differ in a sweep.
    """
    path: Path | None = None
    if control.rank.rank == 0:
        recipe.logdir.mkdir(parents=True, exist_ok=True)
        kind = "" if recipe.loader == "auto" else f"-{recipe.loader}"
        name = datetime.datetime.now().strftime("%Y-%m-%d-%H-%M-%S")
        name += f"{kind}-workers{recipe.workers}-ranks{control.rank.world_size}"
        for number in count(1):
            path = recipe.logdir / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):  # another run started in the same second
                path.mkdir()
                break
    return control.broadcast(path)
