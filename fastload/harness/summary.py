"""What a training run says at its end, and its row in stats.csv: each figure labelled with what it is of."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import fastload
from fastload.diagnosis import bound
from fastload.distributed import Rank
from fastload.harness.control import Control, signal_name
from fastload.harness.meter import QUANTILES, Measured
from fastload.harness.plan import WARMUP_STEPS
from fastload.harness.rates import figure
from fastload.harness.recipe import Recipe

if TYPE_CHECKING:
    from fastload.harness.learner import Learner
    from fastload.harness.train import Trained

_RANKS_SHOWN = 16

COLUMNS = (
    *("world_size", "training_s", "communication_s", "testing_s"),
    *("date", "ended", "launcher", "device", "model", "precision", "compile", "channels_last"),
    *("loader", "workers", "batch_size", "prefetch_batches", "transform", "image_size", "packed"),
    *("first_step", "last_step", "warmup_steps", "simulated_step_ms", "samples", "unique_samples"),
    *("rate_global", "rate_rank_mean", "rate_rank_min", "rate_rank_max"),
    *("wait_share_max", "first_batch_s", "page_cache"),
    *(f"step_p{p:.0f}_ms" for p in QUANTILES),
    *(f"wait_p{p:.0f}_ms" for p in QUANTILES),
    *("checkpoints", "checkpoint_s", "loss", "bound", "seed", "fastload", "torch"),
)
"""Of stats.csv: first the four of the document that the file comes from. Rates are samples a second, steady; seconds,
quantiles and loss are rank 0's. `testing_s` is 0, as nothing is tested."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Of all ranks, by rank; rates and shares are None for a run that ended in its warm-up."""

    rates: list[float | None]
    wait_shares: list[float | None]
    samples: int
    unique_samples: int

    @property
    def global_rate(self) -> float | None:
        """Samples a second of all ranks together."""
        known = [rate for rate in self.rates if rate is not None]
        return sum(known) if len(known) == len(self.rates) else None

    @property
    def worst_wait(self) -> float | None:
        """The greatest of the shares waited."""
        return max((share for share in self.wait_shares if share is not None), default=None)


def gather(measured: Measured, control: Control) -> Figures:
    """Bring the ranks' figures together, on every rank."""
    ranks = control.gather((measured.rate, measured.wait_share, measured.samples))
    return Figures(
        rates=[rate for rate, _, _ in ranks],
        wait_shares=[share for _, share, _ in ranks],
        samples=sum(samples for _, _, samples in ranks),
        unique_samples=int(control.union(measured.seen).sum()),
    )


def lines(
    recipe: Recipe, trained: Trained, figures: Figures, *, model: str, cache: str, rank: Rank
) -> list[str]:
    """The figures in words, for people: name, value, what it is of."""
    measured = trained.measured
    entries = [
        ("model", model),
        ("loader", _loader(recipe)),
        ("ranks", f"{rank.world_size}, started by {_launcher(rank)}"),
        ("steps", _steps(trained)),
        ("image rate", _rates(figures)),
        ("samples", f"{figures.samples:,} trained on, {figures.unique_samples:,} different ones"),
        ("read ahead", _ahead(measured)),
        ("page cache", cache),
        ("loop waited", _waits(figures)),
        ("step ms", f"{_quantiles(measured.step.at(*QUANTILES))} (rank 0){_simulated(recipe)}"),
        ("wait ms", f"{_quantiles(measured.wait.at(*QUANTILES))} (rank 0)"),
        ("training", f"{measured.training_s:.2f} s, warm-up included"),
        ("loss", f"{figure(measured.loss, '.4f')}, of rank 0's last batch"),
    ]
    if recipe.step_ms and measured.overran:
        entries.append(
            (
                "simulated",
                f"{measured.overran} of {measured.steps} steps took longer by themselves than {recipe.step_ms:g} ms",
            )
        )
    if rank.world_size > 1:
        entries.append(
            (
                "gradients",
                f"under way for {measured.communication_s:.2f} s, much of it beside the backward pass",
            )
        )
    if measured.checkpoints:
        entries.append(
            (
                "checkpoints",
                f"{measured.checkpoints} in {measured.checkpoint_s:.2f} s, which rates contain; the last "
                f"of step {trained.checkpoint_step}, in {recipe.checkpoint}",
            )
        )
    said = [f"{name:<13}{value}" for name, value in entries]
    if measured.stats is not None:
        said.append(f"Rank 0, epoch {measured.stats.epoch}: {bound(measured.stats).sentence}")
    return said


def _loader(recipe: Recipe) -> str:
    if recipe.loader == "cached":
        return "none: a few batches in memory, again and again"
    if recipe.loader == "process":
        return f"torch's, worker processes on each rank: {recipe.workers}"
    if recipe.workers == 0:
        return "fastload, serial: in the loop's own thread"
    threads = f"{recipe.workers} thread{'s' * (recipe.workers > 1)}"
    return f"fastload, {threads} on each rank, {recipe.prefetch_batches} batches in flight at most"


def _launcher(rank: Rank) -> str:
    return "no launcher" if rank.launcher == "none" else rank.launcher


def _steps(trained: Trained) -> str:
    done = trained.last_step - trained.first_step
    text = f"{done}"
    if trained.first_step:
        text += f", from {trained.first_step + 1} to {trained.last_step}"
    if trained.last_step < trained.total_steps:
        text += f" of {trained.total_steps}: stopped"
    return text + f"; the first {min(done, WARMUP_STEPS)} are warm-up, which no figure below counts"


def _rates(figures: Figures) -> str:
    if figures.global_rate is None:
        return f"n/a: a rate needs more than {WARMUP_STEPS} steps"
    if len(figures.rates) == 1:
        return f"{figures.global_rate:.2f} images/s, one rank, which is all"
    shown = ", ".join(
        f"rank {rank}: {figure(rate)}" for rank, rate in enumerate(figures.rates[:_RANKS_SHOWN])
    )
    more = len(figures.rates) - _RANKS_SHOWN
    return f"{figures.global_rate:.2f} images/s, all ranks together; {shown}" + (
        f", {more} more" if more > 0 else ""
    )


def _ahead(measured: Measured) -> str:
    if not measured.ahead:
        return "n/a"
    moments = ("as step 1 began", "as the warm-up ended", "at the end")
    at = moments if len(measured.ahead) == 3 else (moments[0], moments[2])
    return (
        ", ".join(
            f"{batches:.1f} {moment}" for batches, moment in zip(measured.ahead, at, strict=False)
        )
        + " (batches, rank 0)"
    )


def _waits(figures: Figures) -> str:
    if figures.worst_wait is None:
        return "n/a"
    mine = figures.wait_shares[0] or 0.0
    if len(figures.wait_shares) == 1:
        return f"{mine:.0%} of the time for the loader"
    worst = figures.wait_shares.index(figures.worst_wait)
    text = f"{mine:.0%} of the time for the loader on rank 0"
    return (
        f"{text}, {figures.worst_wait:.0%} on rank {worst}, the most"
        if worst
        else f"{text}, the most"
    )


def _quantiles(values_s: Sequence[float]) -> str:
    return ", ".join(
        f"p{percent:.0f} {figure(seconds * 1000)}"
        for percent, seconds in zip(QUANTILES, values_s, strict=True)
    )


def _simulated(recipe: Recipe) -> str:
    if not recipe.step_ms:
        return ""
    return f"; simulated: filled up to {recipe.step_ms:g} ms, with no accelerator behind it"


def row(
    recipe: Recipe,
    trained: Trained,
    figures: Figures,
    learner: Learner,
    cache: str,
    rank: Rank,
) -> dict[str, Any]:
    """The run as a row of stats.csv; what is not known is None."""
    measured = trained.measured
    known = [rate for rate in figures.rates if rate is not None]
    quantiles = [*measured.step.at(*QUANTILES), *measured.wait.at(*QUANTILES)]
    values = (
        *(rank.world_size, _s(measured.training_s), _s(measured.communication_s), 0.0),
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        signal_name(trained.stopped_by) if trained.stopped_by else "complete",
        *(rank.launcher, str(learner.device), learner.about["model"], recipe.precision),
        *(recipe.compile, recipe.channels_last),
        *(recipe.loader, recipe.workers, recipe.batch_size, recipe.prefetch_batches),
        *(recipe.transform, recipe.size, recipe.packed is not None),
        *(trained.first_step, trained.last_step, WARMUP_STEPS, recipe.step_ms),
        *(figures.samples, figures.unique_samples, _s(figures.global_rate)),
        _s(sum(known) / len(known) if known else None),
        *(_s(min(known, default=None)), _s(max(known, default=None))),
        *(_s(figures.worst_wait), _s(measured.first_batch_s), cache.split(" ")[0]),
        *(_s(seconds * 1000) for seconds in quantiles),
        *(measured.checkpoints, _s(measured.checkpoint_s), _s(measured.loss)),
        None if measured.stats is None else bound(measured.stats).cause,
        *(recipe.seed, fastload.__version__, torch.__version__),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _s(value: float | None) -> float | None:
    """A figure to microseconds; None where there is none."""
    return None if value is None or value != value else round(value, 6)
