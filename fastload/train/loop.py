"""Training on every rank, with any loader. `train` connects the parts, and `fit` is the loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastload
from fastload import distributed
from fastload._kit.texts import counted
from fastload.distributed import Control
from fastload.errors import FastloadError, RemoteError, UsageError, in_one_line
from fastload.measure.averages import average_line
from fastload.measure.loop_timer import Meter
from fastload.measure.samples import Numbered
from fastload.telemetry.snapshot import duration
from fastload.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    Place,
    exists,
    expect_writable,
    path_of,
    random_states,
    restore_random_states,
)
from fastload.train.control import Stopping, signal_name
from fastload.train.data import Batch, cached, open_dataset, open_loader, upcoming
from fastload.train.learner import Learner, open_learner
from fastload.train.recipe import Recipe, TrainError
from fastload.train.stats_file import StatsFileError, append_row, check_table
from fastload.train.summary import COLUMNS, Trained, gather, lines_of, row_of
from fastload.train.tensorboard import Recording

Say = Callable[[str], None]
OnStep = Callable[[int, torch.Tensor], None]
STATS_FILE = "stats.csv"


def train(recipe: Recipe, *, say: Say = print, on_step: OnStep | None = None) -> Trained:
    """Train by the recipe on this rank of a job. Call this in the main thread.

    The lines are those of the tutorial's parallel script, or of its serial one without workers.

    Args:
        recipe: settings of the run, the same on all ranks.
        say: called with each line of the run, on rank 0 only.
        on_step: called after each step on each rank. It gets the number of the step, from 1, and the indices of the
            samples of this rank in the step, int64[B] on the device.

    Raise `FastloadError` (`TrainError`, `CheckpointError`, `StateError`, ...) if the recipe cannot be followed, and
    any exception of reading a sample. With several ranks, each prints its error, and raises SystemExit.
    """
    began = time.perf_counter()
    rank = distributed.init("gloo" if recipe.device == "cpu" else "auto")
    try:
        voice: Say = say if rank.rank == 0 else lambda line: None
        trained = _train(recipe, rank, voice, on_step)
        total_s = time.perf_counter() - began
        voice(f"{'All Done; total runtime' if not recipe.workers else 'All Done'}: {total_s:.2f}")
        return trained
    except BaseException as error:
        users = isinstance(error, FastloadError | OSError)
        line = f"Error: {in_one_line(error)}" if users else None
        distributed.end_job(error, line=line, code=2 if isinstance(error, UsageError) else 1)
        raise
    finally:
        distributed.shutdown()


def _train(recipe: Recipe, rank: distributed.Rank, voice: Say, on_step: OnStep | None) -> Trained:
    control = Control(rank)
    torch.manual_seed(recipe.seed)
    _expect_writable(recipe.logdir / STATS_FILE, "--logdir", StatsFileError, control)
    dataset = open_dataset(recipe)
    learner = open_learner(recipe, rank, classes=len(dataset.classes))
    torch.manual_seed(recipe.seed + rank.rank)  # so that dropout differs between ranks
    if rank.world_size > 1 and learner.device.type == "cpu":
        torch.set_num_threads(distributed.cores())
    loader = open_loader(
        recipe,
        Numbered(dataset),
        rank=rank.rank,
        world_size=rank.world_size,
        pin_memory=learner.device.type != "cpu",
    )
    voice(f"Batch size: {recipe.batch_size}")
    if recipe.workers:
        voice(f"num workers: {recipe.workers}")
        voice("Starting data loader")
    if rank.world_size > 1:
        voice(
            f"{rank.world_size} ranks, each with batches of {recipe.batch_size}; step_img_rate and its average are "
            "those of rank 0"
        )
    metrics: Any = nullcontext()
    if (port := recipe.metrics_port) is not None:
        metrics = fastload.serve_metrics(loader, port=port and port + rank.local_rank)
        voice(f"Metrics of rank 0: {metrics.url}")
    with loader, metrics:
        source, first = begin(recipe, loader, learner, control, say=voice)
        steps = recipe.total_steps(len(loader)) - first
        found = cached(recipe, dataset, upcoming(loader, first=first, steps=steps))
        trained = fit(recipe, source, learner, control, first=first, say=voice, on_step=on_step)
        voice(average_line(trained.measured.window_rates))
        if recipe.workers:
            voice("Stopping data loader")
    _report(recipe, trained, learner, control, found, voice)
    return trained


def _expect_writable(
    path: str | Path, option: str, kind: type[FastloadError], control: Control
) -> None:
    """Raise an error of this kind on all ranks, before training, if rank 0 cannot write that file or object.

    If rank 0 raised alone, the others would wait for it.
    """
    problem: str | None = None
    if control.rank.rank == 0:
        try:
            if isinstance(path, str):
                expect_writable(path)
            elif not _writable(path):
                problem = f"{path} is not writable. Choose another {option}"
        except RemoteError as error:
            problem = f"{error}. Choose another {option}"
        except StatsFileError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{path}: {error.strerror}. Choose another {option}"
    if problem := control.broadcast(problem):
        raise kind(problem)


def _writable(path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    appends = path.name == STATS_FILE and path.exists()  # a checkpoint is replaced
    if path.name == STATS_FILE:
        check_table(path, COLUMNS)
    return os.access(path if appends else path.parent, os.W_OK)


def begin(
    recipe: Recipe,
    loader: fastload.DataLoader[Batch],
    learner: Learner,
    control: Control,
    *,
    say: Say = print,
) -> tuple[Any, int]:
    """Return the source of batches on the device, and the number of steps done before: 0, or those of a checkpoint.

    `loader` yields `(images, class numbers, indices)`. Collective.
    """
    source = fastload.prefetch_to(loader, learner.device)
    return source, _resume(recipe, source, learner, control, say)


def fit(
    recipe: Recipe,
    source: Any,
    learner: Learner,
    control: Control,
    *,
    first: int,
    say: Say = print,
    on_step: OnStep | None = None,
) -> Trained:
    """Run the training loop on the result of `begin`, until the last step or a signal. For arguments, see `train`."""
    total = max(first, recipe.total_steps(len(source)))
    saved = first or None
    stats = None if recipe.loader == "torch" else source.stats
    recording = Recording(recipe, control, first=first, steps=total - first, stats=stats, say=say)
    meter = Meter(
        stats and partial(stats, total=True),
        step_ms=recipe.step_ms,
        device=learner.device,
        traffic=learner.traffic,
    )
    seen = torch.zeros(len(source.dataset), dtype=torch.bool, device=learner.device)
    step, stopped = first, 0
    loss: torch.Tensor | None = None
    batches = _endless(source)
    with Stopping(control) as stopping, recording:
        while step < total:
            if stopped := stopping.asked():
                say(f"Stopped by {signal_name(stopped)} after step {step} of {total}")
                break
            with meter.waiting():
                images, targets, indices = next(batches)
            with meter.stepping(len(indices)):
                loss = learner.step(images, targets)
            seen[indices] = True
            step += 1
            recording.step()
            if on_step is not None:
                on_step(step, indices)
            if recipe.every is not None and step % recipe.every == 0:
                with meter.saving():
                    saved = _save(recipe.checkpoint, step, source, learner, control)
            if step % recipe.status_print_interval == 0:
                rate = meter.window()
                say(f"step_img_rate: {rate:.2f}")
                recording.window(step, rate=rate, loss=loss)
                if stats is not None and control.rank.rank == 0 < control.rank.world_size - 1:
                    slow = stats(ranks=True).slowest
                    if slow is not None:
                        say(f"slow rank: {slow.rank}, for {duration(slow.since_s)}: {slow.cause}")
        measured = meter.end()
        if recipe.checkpoint is not None and saved != step:
            with meter.saving():
                saved = _save(recipe.checkpoint, step, source, learner, control)
    return Trained(
        measured=measured,
        seen=seen,
        loss=None if loss is None else float(loss),
        first_step=first,
        last_step=step,
        total_steps=total,
        stopped_by=stopped,
        checkpoint_step=saved,
        folder=recording.folder,
    )


def _endless(source: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches epoch after epoch.

    After a checkpoint at the end of an epoch, the rest of that epoch is empty. Two empty epochs in a row are an error.
    """
    empty = False
    while True:
        before, empty = empty, True
        for batch in source:
            empty = False
            yield batch
        if before and empty:
            raise TrainError(
                "the loader gives no batches, because the dataset is empty or smaller than a batch. Give more samples, "
                "or a smaller --nbatch"
            )


def _resume(recipe: Recipe, source: Any, learner: Learner, control: Control, say: Say) -> int:
    """Restore everything from the checkpoint, and return its step. Return 0 without a checkpoint or --resume."""
    folder = recipe.checkpoint
    if folder is None:
        return 0
    path = path_of(folder)
    _expect_writable(path, "--checkpoint", CheckpointError, control)
    if not recipe.resume:
        if any(control.gather(exists(folder))):
            raise CheckpointError(
                f"{path} exists already. Give --resume to continue from it, or another --checkpoint folder"
            )
        return 0
    found = Checkpoint.load(folder)
    steps = control.gather(None if found is None else found.step)
    if len(set(steps)) > 1:
        other = next(rank for rank, step in enumerate(steps) if step != steps[0])
        raise CheckpointError(
            f"{path}: rank 0 finds step {steps[0]}, but rank {other} finds step {steps[other]}. Choose a "
            "--checkpoint folder that all ranks see"
        )
    if found is None:
        say(f"No checkpoint in {folder} yet: training starts from the beginning")
        return 0
    found.check(folder, about=learner.about, model=learner.model.state_dict())
    source.load_state_dict(found.loader)
    learner.model.load_state_dict(found.model)
    learner.optimizer.load_state_dict(found.optimizer)
    restore_random_states(
        found.randomness,
        rank=control.rank.rank,
        world_size=control.rank.world_size,
        device=learner.device,
    )
    before = len(found.randomness)
    say(f"Resumed after step {found.step} of a run with {counted(before, 'rank')}")
    return found.step


def _save(folder: Place | None, step: int, source: Any, learner: Learner, control: Control) -> int:
    """Write the checkpoint of a step on rank 0, and return the step. Collective."""
    assert folder is not None  # checked by the recipe
    states = control.gather(random_states(learner.device))
    if control.rank.rank == 0:
        Checkpoint(
            step=step,
            about=learner.about,
            model=learner.model.state_dict(),
            optimizer=learner.optimizer.state_dict(),
            loader=source.state_dict(),
            randomness=states,
        ).save(folder)
    return step


def _report(
    recipe: Recipe,
    trained: Trained,
    learner: Learner,
    control: Control,
    cached: float | None,
    say: Say,
) -> None:
    """Report the results of the run, and write them into stats.csv. Collective."""
    figures = gather(trained, control)
    if control.rank.rank == 0:
        row = row_of(recipe, trained, figures, learner, control.rank, cached)
        for line in lines_of(row, recipe, trained, figures, learner):
            say(line)
        append_row(recipe.logdir / STATS_FILE, row)
        say(f"Row of this run added to: {recipe.logdir / STATS_FILE}")
