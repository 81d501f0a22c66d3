"""The report at the end of a training run, and its row in stats.csv. Each figure is labelled."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

import fastload
from fastload.distributed import Control, Rank
from fastload.measure import WARMUP_STEPS
from fastload.measure.averages import QUANTILES, figure, quantiles_ms
from fastload.measure.loop_timer import Measured
from fastload.telemetry.diagnosis import bound
from fastload.telemetry.snapshot import percent, waited_share
from fastload.train.control import signal_name
from fastload.train.data import Cached
from fastload.train.learner import Learner, describe
from fastload.train.recipe import Recipe

_RANKS_SHOWN = 16


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


@dataclass(frozen=True, slots=True)
class AllRanks:
    """The figures of all ranks, by rank. Rates and shares are None if the run ended in its warm-up."""

    rates: list[float | None]
    wait_shares: list[float | None]
    samples: int
    unique_samples: int

    @property
    def known_rates(self) -> list[float]:
        """Rates of the ranks that have one."""
        return [rate for rate in self.rates if rate is not None]

    @property
    def global_rate(self) -> float | None:
        """Samples per second of all ranks together."""
        return sum(self.known_rates) if None not in self.rates else None

    @property
    def mean_rate(self) -> float | None:
        """Mean samples per second of a rank."""
        return sum(self.known_rates) / len(self.known_rates) if self.known_rates else None

    @property
    def worst_wait(self) -> float | None:
        """Largest share of time that a rank waited."""
        return max((share for share in self.wait_shares if share is not None), default=None)


def gather(trained: Trained, control: Control) -> AllRanks:
    """Return the figures of all ranks, on every rank. Collective."""
    measured = trained.measured
    share = measured.wait_share
    if share is not None and measured.stats is not None:
        share = waited_share(measured.stats)  # as the sentence about rank 0 counts it
    ranks = control.gather((measured.rate, share, measured.samples))
    return AllRanks(
        rates=[rate for rate, _, _ in ranks],
        wait_shares=[share for _, share, _ in ranks],
        samples=sum(samples for _, _, samples in ranks),
        unique_samples=int(control.union(trained.seen).sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The report of a finished run by rank 0."""

    recipe: Recipe
    trained: Trained
    ranks: AllRanks
    learner: Learner
    cached: Cached
    rank: Rank

    @property
    def measured(self) -> Measured:
        """The measurements of rank 0."""
        return self.trained.measured

    def lines(self) -> list[str]:
        """Return the figures as lines of text: name, value, and what it covers."""
        recipe, measured, ranks = self.recipe, self.measured, self.ranks
        at_least = f"; simulated: at least {recipe.step_ms:g} ms, without an accelerator"
        launcher = "no launcher" if self.rank.launcher == "none" else self.rank.launcher
        figures = {
            "model": describe(self.learner, weights=recipe.weights, simulated=recipe.step_ms > 0),
            "loader": _loader(recipe),
            "ranks": f"{self.rank.world_size}, started by {launcher}",
            "steps": _steps(self.trained),
            "image rate": _rates(ranks),
            "samples": f"{ranks.samples:,} trained on, {ranks.unique_samples:,} of them different",
            "page cache": str(self.cached),
            "loop waited": _waits(ranks),
            "step ms": f"{_quantiles(measured.step)} (rank 0){at_least if recipe.step_ms else ''}",
            "wait ms": f"{_quantiles(measured.wait)} (rank 0)",
            "training": f"{measured.training_s:.2f} s, warm-up included",
            "loss": f"{figure(self.trained.loss, '.4f')}, last batch of rank 0",
        }
        if self.rank.world_size > 1:
            figures["gradients"] = (
                f"averaged in {measured.communication_s:.2f} s, much of it during the backward pass"
            )
        if measured.checkpoints:
            figures["checkpoints"] = (
                f"{measured.checkpoints} saved in {measured.checkpoint_s:.2f} s, and the rates include this time; "
                f"the last checkpoint is of step {self.trained.checkpoint_step}, in {recipe.checkpoint}"
            )
        said = [f"{name:<13}{value}" for name, value in figures.items()]
        if measured.stats is not None and measured.steps:
            said.append(f"Rank 0: {bound(measured.stats).sentence}")
        return said

    def row(self) -> dict[str, Any]:
        """Return the run as a row of stats.csv, by `COLUMNS`. Unknown figures are None."""
        return {name: _rounded(value(self)) for name, value in _COLUMNS.items()}


def _loader(recipe: Recipe) -> str:
    if recipe.loader == "cached":
        return "none: a few batches in memory, repeated"
    if recipe.workers == 0:
        return "fastload, serial: in the thread of the loop"
    kind = {"thread": ("thread", "threads"), "process": ("process", "processes")}[recipe.loader]
    workers = f"{recipe.workers} {kind[recipe.workers > 1]}"
    return f"fastload, {workers} per rank, at most {recipe.prefetch_batches} batches in flight"


def _steps(trained: Trained) -> str:
    done = trained.last_step - trained.first_step
    if not done and trained.last_step == trained.total_steps:
        at = f"the checkpoint is of step {trained.last_step}, the last one"
        return f"none left: {at}; to continue, give more --epochs or --nsteps"
    text = f"{done}"
    if trained.first_step:
        text += f", from {trained.first_step + 1} to {trained.last_step}"
    if trained.last_step < trained.total_steps:
        text += f" of {trained.total_steps}: stopped"
    return (
        text + f"; the first {min(done, WARMUP_STEPS)} are warm-up, and no figure below counts them"
    )


def _rates(ranks: AllRanks) -> str:
    if ranks.global_rate is None:
        return f"n/a: a rate needs more than {WARMUP_STEPS} steps"
    shown = [f"rank {rank}: {figure(rate)}" for rank, rate in enumerate(ranks.rates[:_RANKS_SHOWN])]
    if (more := len(ranks.rates) - _RANKS_SHOWN) > 0:
        shown.append(f"{more} more")
    return f"{ranks.global_rate:.2f} images/s, all ranks together; {', '.join(shown)}"


def _waits(ranks: AllRanks) -> str:
    if ranks.worst_wait is None:
        return "n/a"
    said = f"{percent(ranks.wait_shares[0] or 0.0)} of the time waiting for the loader"
    if len(ranks.wait_shares) == 1:
        return said
    worst = ranks.wait_shares.index(ranks.worst_wait)
    return f"{said} on rank 0, at most {percent(ranks.worst_wait)} (rank {worst})"


def _quantiles(seconds: Sequence[float]) -> str:
    return ", ".join(f"{name} {figure(value)}" for name, value in quantiles_ms(seconds).items())


# ---- stats.csv ----


def _ended(run: Summary) -> str:
    return signal_name(run.trained.stopped_by) if run.trained.stopped_by else "complete"


def _rounded(value: Any) -> Any:
    """Return a float rounded to six places (microseconds), or None if it is not finite."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value


_Value = Callable[[Summary], Any]


def _quantile(times: str, name: str) -> _Value:
    return lambda run: quantiles_ms(getattr(run.measured, times))[name]


_OF_RECIPE = (
    *("precision", "compile", "channels_last"),
    *("loader", "workers", "batch_size", "prefetch_batches", "transform"),
)
_COLUMNS: dict[str, _Value] = {
    "world_size": lambda run: run.rank.world_size,
    "training_s": lambda run: run.measured.training_s,
    "communication_s": lambda run: run.measured.communication_s,
    "date": lambda _: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    "folder": lambda run: run.trained.folder and run.trained.folder.name,
    "ended": _ended,
    "launcher": lambda run: run.rank.launcher,
    "device": lambda run: str(run.learner.device),
    "model": lambda run: run.learner.about["model"],
    **{name: attrgetter(f"recipe.{name}") for name in _OF_RECIPE},
    "image_size": lambda run: run.recipe.size,
    "packed": lambda run: run.recipe.packed is not None,
    "first_step": lambda run: run.trained.first_step,
    "last_step": lambda run: run.trained.last_step,
    "warmup_steps": lambda _: WARMUP_STEPS,
    "simulated_step_ms": lambda run: run.recipe.step_ms,
    "samples": lambda run: run.ranks.samples,
    "unique_samples": lambda run: run.ranks.unique_samples,
    "rate_global": lambda run: run.ranks.global_rate,
    "rate_rank_mean": lambda run: run.ranks.mean_rate,
    "rate_rank_min": lambda run: min(run.ranks.known_rates, default=None),
    "rate_rank_max": lambda run: max(run.ranks.known_rates, default=None),
    "wait_share_max": lambda run: run.ranks.worst_wait,
    "first_batch_s": lambda run: run.measured.first_batch_s,
    "cached_share": lambda run: run.cached.share,
    **{
        f"{times}_p{percent}_ms": _quantile(times, f"p{percent}")
        for times in ("step", "wait")
        for percent in QUANTILES
    },
    "checkpoints": lambda run: run.measured.checkpoints,
    "checkpoint_s": lambda run: run.measured.checkpoint_s,
    "loss": lambda run: run.trained.loss,
    "bound": lambda run: run.measured.stats and bound(run.measured.stats).cause,
    "seed": lambda run: run.recipe.seed,
    "fastload": lambda _: fastload.__version__,
    "torch": lambda _: torch.__version__,
}
COLUMNS = tuple(_COLUMNS)
"""Columns of stats.csv. The first ones are those of the document that defined the file, except `testing_s`, because
nothing is tested. `folder` is the folder of the run's profile and scalars, next to the file. Rates are samples per
second in the steady time. Seconds, quantiles, cached share, loss and bound are those of rank 0."""
