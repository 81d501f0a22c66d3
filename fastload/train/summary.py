"""What a training run says at its end, and its row in stats.csv: each figure labelled with what it is of."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import fastload
from fastload.distributed import Control, Rank
from fastload.measure import WARMUP_STEPS
from fastload.measure.averages import Quantiles, figure
from fastload.measure.loop_timer import QUANTILES, Measured
from fastload.telemetry.diagnosis import bound
from fastload.train.control import signal_name
from fastload.train.data import Cached
from fastload.train.learner import Learner, describe
from fastload.train.recipe import Recipe

_RANKS_SHOWN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of a run, the same on all ranks but for the first three."""

    measured: Measured
    seen: torch.Tensor
    """bool[number of samples in the dataset], on the device: which were trained on."""
    loss: float | None
    """Of the last batch; None if there was none."""
    first_step: int
    """The step that the run began behind: 0, or a checkpoint's."""
    last_step: int
    total_steps: int
    stopped_by: int
    """The signal that ended it early; 0 where none did."""
    checkpoint_step: int | None = None
    """The step of the checkpoint that is there now."""
    folder: Path | None = None
    """Where the run's profile and scalars are; None if it has none."""


@dataclass(frozen=True, slots=True)
class AllRanks:
    """What the ranks measured, by rank; rates and shares are None for a run that ended in its warm-up."""

    rates: list[float | None]
    wait_shares: list[float | None]
    samples: int
    unique_samples: int

    @property
    def known_rates(self) -> list[float]:
        """The rates of the ranks that have one."""
        return [rate for rate in self.rates if rate is not None]

    @property
    def global_rate(self) -> float | None:
        """Samples a second of all ranks together."""
        return sum(self.known_rates) if None not in self.rates else None

    @property
    def mean_rate(self) -> float | None:
        """Samples a second of a rank."""
        return sum(self.known_rates) / len(self.known_rates) if self.known_rates else None

    @property
    def worst_wait(self) -> float | None:
        """The greatest of the shares waited."""
        return max((share for share in self.wait_shares if share is not None), default=None)


def gather(trained: Trained, control: Control) -> AllRanks:
    """Bring the ranks' figures together, on every rank."""
    measured = trained.measured
    ranks = control.gather((measured.rate, measured.wait_share, measured.samples))
    return AllRanks(
        rates=[rate for rate, _, _ in ranks],
        wait_shares=[share for _, share, _ in ranks],
        samples=sum(samples for _, _, samples in ranks),
        unique_samples=int(control.union(trained.seen).sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run that has ended, as rank 0 tells it."""

    recipe: Recipe
    trained: Trained
    ranks: AllRanks
    learner: Learner
    cached: Cached
    rank: Rank

    @property
    def measured(self) -> Measured:
        """What rank 0 measured."""
        return self.trained.measured

    def lines(self) -> list[str]:
        """The figures in words, for people: name, value, what it is of."""
        said = [f"{name:<13}{value}" for name, value in (*self._always(), *self._sometimes())]
        if self.measured.stats is not None and self.measured.steps:
            said.append(f"Rank 0: {bound(self.measured.stats).sentence}")
        return said

    def row(self) -> dict[str, Any]:
        """The run as a row of stats.csv, by `COLUMNS`; what is not known is None."""
        return {name: _rounded(value(self)) for name, value in _COLUMNS.items()}

    def _always(self) -> list[tuple[str, str]]:
        recipe, measured, ranks = self.recipe, self.measured, self.ranks
        model = describe(self.learner, weights=recipe.weights, simulated=recipe.step_ms > 0)
        step, wait = (_quantiles(times.at(*QUANTILES)) for times in (measured.step, measured.wait))
        return [
            ("model", model),
            ("loader", _loader(recipe)),
            ("ranks", f"{self.rank.world_size}, started by {_launcher(self.rank)}"),
            ("steps", _steps(self.trained)),
            ("image rate", _rates(ranks)),
            ("samples", f"{ranks.samples:,} trained on, {ranks.unique_samples:,} different ones"),
            ("read ahead", _ahead(measured)),
            ("page cache", str(self.cached)),
            ("loop waited", _waits(ranks)),
            ("step ms", f"{step} (rank 0){_simulated(recipe)}"),
            ("wait ms", f"{wait} (rank 0)"),
            ("training", f"{measured.training_s:.2f} s, warm-up included"),
            ("loss", f"{figure(self.trained.loss, '.4f')}, of rank 0's last batch"),
        ]

    def _sometimes(self) -> list[tuple[str, str]]:
        recipe, measured = self.recipe, self.measured
        said = []
        if recipe.step_ms and measured.overran:
            said.append(
                (
                    "simulated",
                    f"{measured.overran} of {measured.steps} steps took longer by themselves than "
                    f"{recipe.step_ms:g} ms",
                )
            )
        if self.rank.world_size > 1:
            said.append(
                (
                    "gradients",
                    f"under way for {measured.communication_s:.2f} s, much of it beside the backward pass",
                )
            )
        if measured.checkpoints:
            said.append(
                (
                    "checkpoints",
                    f"{measured.checkpoints} in {measured.checkpoint_s:.2f} s, which rates contain; the last "
                    f"of step {self.trained.checkpoint_step}, in {recipe.checkpoint}",
                )
            )
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
    if not done and trained.last_step == trained.total_steps:
        at = f"the checkpoint is of step {trained.last_step}, the last one"
        return f"none left: {at}; more --epochs or --nsteps go on"
    text = f"{done}"
    if trained.first_step:
        text += f", from {trained.first_step + 1} to {trained.last_step}"
    if trained.last_step < trained.total_steps:
        text += f" of {trained.total_steps}: stopped"
    return text + f"; the first {min(done, WARMUP_STEPS)} are warm-up, which no figure below counts"


def _rates(ranks: AllRanks) -> str:
    if ranks.global_rate is None:
        return f"n/a: a rate needs more than {WARMUP_STEPS} steps"
    if len(ranks.rates) == 1:
        return f"{ranks.global_rate:.2f} images/s, one rank, which is all"
    shown = ", ".join(
        f"rank {rank}: {figure(rate)}" for rank, rate in enumerate(ranks.rates[:_RANKS_SHOWN])
    )
    more = len(ranks.rates) - _RANKS_SHOWN
    return f"{ranks.global_rate:.2f} images/s, all ranks together; {shown}" + (
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


def _waits(ranks: AllRanks) -> str:
    if ranks.worst_wait is None:
        return "n/a"
    mine = ranks.wait_shares[0] or 0.0
    if len(ranks.wait_shares) == 1:
        return f"{mine:.0%} of the time for the loader"
    worst = ranks.wait_shares.index(ranks.worst_wait)
    text = f"{mine:.0%} of the time for the loader on rank 0"
    return (
        f"{text}, {ranks.worst_wait:.0%} on rank {worst}, the most"
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


# ---- stats.csv ----


def _ended(run: Summary) -> str:
    return signal_name(run.trained.stopped_by) if run.trained.stopped_by else "complete"


def _bound(run: Summary) -> str | None:
    return None if run.measured.stats is None else bound(run.measured.stats).cause


def _rounded(value: Any) -> Any:
    """A float to six places, which is microseconds; None for one that is no number."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 6)
    return value


_Value = Callable[[Summary], Any]


def _quantile_columns(name: str, seconds: Callable[[Measured], Quantiles]) -> dict[str, _Value]:
    def column(percent: float) -> _Value:
        return lambda run: seconds(run.measured).at(percent)[0] * 1000

    return {f"{name}_p{percent:.0f}_ms": column(percent) for percent in QUANTILES}


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
    "precision": lambda run: run.recipe.precision,
    "compile": lambda run: run.recipe.compile,
    "channels_last": lambda run: run.recipe.channels_last,
    "loader": lambda run: run.recipe.loader,
    "workers": lambda run: run.recipe.workers,
    "batch_size": lambda run: run.recipe.batch_size,
    "prefetch_batches": lambda run: run.recipe.prefetch_batches,
    "transform": lambda run: run.recipe.transform,
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
    **_quantile_columns("step", lambda measured: measured.step),
    **_quantile_columns("wait", lambda measured: measured.wait),
    "checkpoints": lambda run: run.measured.checkpoints,
    "checkpoint_s": lambda run: run.measured.checkpoint_s,
    "loss": lambda run: run.trained.loss,
    "bound": _bound,
    "seed": lambda run: run.recipe.seed,
    "fastload": lambda _: fastload.__version__,
    "torch": lambda _: torch.__version__,
}
COLUMNS = tuple(_COLUMNS)
"""Of stats.csv: first those of the document that the file comes from, but for `testing_s`: nothing is tested. `folder`
is that of the run's profile and scalars, beside the file. Rates are samples a second, steady; seconds, quantiles,
cached share, loss and bound are rank 0's."""
