"""The report at the end of a training run, and its row in stats.csv. Each figure is labelled."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from textwrap import dedent
from typing import Any

import torch

import fastload
from fastload._kit.texts import counted
from fastload.distributed import Control, Rank
from fastload.measure import WARMUP_STEPS
from fastload.measure.averages import quantiles_ms
from fastload.measure.figures import Figures
from fastload.measure.loop_timer import Measured
from fastload.measure.repeats import figure
from fastload.telemetry.snapshot import percent
from fastload.train.control import signal_name
from fastload.train.learner import Learner, describe
from fastload.train.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The result of a run. Only the first three fields differ between ranks."""

    measured: Measured
    seen: torch.Tensor
    """bool[number of samples in the dataset], on the device. True for samples that were trained on."""
    loss: float | None
    """Loss of the last batch, or None without one."""
    first_step: int
    """Number of steps done before the run: 0, or those of a checkpoint."""
    last_step: int
    total_steps: int
    stopped_by: int
    """The signal that ended the run early, or 0."""
    checkpoint_step: int | None = None
    """The step of the latest checkpoint."""
    folder: Path | None = None
    """Folder of the run's profile and scalars, or None without them."""


def gather(trained: Trained, control: Control) -> Figures:
    """Return the figures of all ranks together, on every rank. Collective."""
    unique = int(control.union(trained.seen).sum())
    return together(
        control.gather(Figures.of(trained.measured, unique_samples=0)), unique_samples=unique
    )


def together(ranks: Sequence[Figures], *, unique_samples: int) -> Figures:
    """Combine the figures of all ranks of a run (at least one) into those of the run.

    Times are the longest of any rank, because a training step waits for the slowest one. CPU is a mean, because all
    ranks load the same number of samples. Ranks are in step, so the rate is the sum of theirs. Windows, stats
    and finding are those of rank 0.
    """
    rates = [figures.rate for figures in ranks if figures.rate is not None]
    cpu = [figures.cpu_s_per_1000 for figures in ranks if figures.cpu_s_per_1000 is not None]
    slowest = ("first_batch_s", "steady_s", "total_s")
    return replace(
        ranks[0],
        rate=sum(rates) if len(rates) == len(ranks) else None,
        rank_rates=[figures.rate for figures in ranks],
        wait_shares=[share for figures in ranks for share in figures.wait_shares],
        cpu_s_per_1000=statistics.fmean(cpu) if len(cpu) == len(ranks) else None,
        samples=sum(figures.samples for figures in ranks),
        unique_samples=unique_samples,
        **{name: max(getattr(figures, name) for figures in ranks) for name in slowest},
    )


_LINES = """
    model        {described}
    loader       {loader}, {read_by} per rank, at most {ahead} in flight
    ranks        {world_size}, started by {launcher}
    steps        {first_step} to {last_step} of {total_steps}; no figure counts the first {warmup_steps}
    image rate   {rate_global:.2f} images/s, all ranks together; a rank {rate_rank_min:.2f} to {rate_rank_max:.2f}
    samples      {samples:,} trained on, {unique_samples:,} of them different
    page cache   {cached_share:.0%} of the first files of rank 0 were in it at the start of the run
    loop waited  {waited} of the time waiting for the loader, on rank {waited_rank}
    step ms      p50 {step_p50_ms:.2f}, p95 {step_p95_ms:.2f}, p99 {step_p99_ms:.2f}, on rank 0{simulated}
    wait ms      p50 {wait_p50_ms:.2f}, p95 {wait_p95_ms:.2f}, p99 {wait_p99_ms:.2f}, on rank 0
    training     {training_s:.2f} s, warm-up included
    loss         {loss:.4f}, last batch of rank 0
    gradients    averaged in {communication_s:.2f} s, much of it during the backward pass
    checkpoints  {checkpoints} saved in {checkpoint_s:.2f} s, which the rates include; the last is of step {saved}
"""


_COLUMNS = """
    world_size training_s communication_s date folder ended launcher device model precision compile channels_last loader
    workers batch_size prefetch_batches transform image_size packed first_step last_step warmup_steps simulated_step_ms
    samples unique_samples rate_global rate_rank_mean rate_rank_min rate_rank_max wait_share_max first_batch_s
    cached_share step_p50_ms step_p95_ms step_p99_ms wait_p50_ms wait_p95_ms wait_p99_ms checkpoints checkpoint_s loss
    bound seed fastload torch
"""
COLUMNS = tuple(_COLUMNS.split())
"""Columns of stats.csv. The first ones are those of the document that defined the file, except `testing_s`, because
nothing is tested. `folder` is the folder of the run's profile and scalars, next to the file."""


class _OrNotKnown(Formatter):
    """Writes "n/a" for None and NaN."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        return value if isinstance(value, str) else figure(value, format_spec)


def row_of(
    recipe: Recipe,
    trained: Trained,
    figures: Figures,
    learner: Learner,
    rank: Rank,
    cached_share: float | None,
) -> dict[str, Any]:
    """Return a finished run as a row of stats.csv, by `COLUMNS`. Unknown figures are None.

    Rates are samples per second in the steady time. Seconds, quantiles, cached share, loss and bound are those of
    rank 0.

    Args:
        figures: those of all ranks.
        cached_share: of the first files that rank 0 reads, at the start of the run.
    """
    measured = trained.measured
    values = {
        **vars(recipe),
        **figures.values(),
        **{name: getattr(trained, name) for name in ("first_step", "last_step", "loss")},
        **{name: getattr(figures, name) for name in ("samples", "unique_samples")},
        **{name: getattr(measured, name) for name in _OF_MEASURED},
        **{f"step_{name}_ms": value for name, value in quantiles_ms(measured.step).items()},
        **{f"wait_{name}_ms": value for name, value in quantiles_ms(measured.wait).items()},
        "world_size": rank.world_size,
        "launcher": rank.launcher,
        "bound": figures.cause,
        "cached_share": cached_share,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "folder": trained.folder and trained.folder.name,
        "ended": signal_name(trained.stopped_by) if trained.stopped_by else "complete",
        "device": str(learner.device),
        "model": learner.about["model"],
        "image_size": recipe.size,
        "packed": recipe.packed is not None,
        "warmup_steps": WARMUP_STEPS,
        "simulated_step_ms": recipe.step_ms,
        "fastload": fastload.__version__,
        "torch": torch.__version__,
    }
    return {name: _rounded(values[name]) for name in COLUMNS}


_OF_MEASURED = "training_s", "communication_s", "checkpoints", "checkpoint_s", "first_batch_s"


def lines_of(
    row: dict[str, Any], recipe: Recipe, trained: Trained, figures: Figures, learner: Learner
) -> list[str]:
    """Return the figures of a row as lines of text: name, value, and what it covers."""
    worst = row["wait_share_max"]
    waits = [share or 0.0 for share in figures.wait_shares]
    at_least = f"; simulated: at least {recipe.step_ms:g} ms, without an accelerator"
    values = row | {
        "described": describe(learner, weights=recipe.weights, simulated=recipe.step_ms > 0),
        "read_by": counted(recipe.workers, "worker"),
        "ahead": counted(recipe.prefetch_batches, "batch"),
        "total_steps": trained.total_steps,
        "waited": None if worst is None else percent(worst),
        "waited_rank": max(range(len(waits)), key=waits.__getitem__),
        "simulated": at_least if recipe.step_ms else "",
        "saved": trained.checkpoint_step,
    }
    lines = _OrNotKnown().vformat(dedent(_LINES).strip(), (), values).splitlines()
    hidden = {"gradients": row["world_size"] == 1, "checkpoints": not row["checkpoints"]}
    lines = [line for line in lines if not hidden.get(line.split()[0])]
    if row["first_step"] == row["last_step"] == trained.total_steps:
        lines.append("No step was left. To continue, give more --epochs or --nsteps")
    if figures.finding and trained.measured.steps:
        lines.append(f"Rank 0: {figures.finding}")
    return lines


def _rounded(value: Any) -> Any:
    """Return a float rounded to six places (microseconds), or None for NaN."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value
