"""`fastload train`: a model on every rank, fed by the loader."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import click

from fastload.cli._common import Number, OnRanks, list_options, require, sigterm_raises

_LARGEST_SEED = 2**63 - 1
"""torch takes seeds of 64 bits; each rank adds its number to it."""
_FOLDER = click.Path(path_type=Path, file_okay=False)


@click.command(cls=OnRanks)
@list_options
@click.option(
    "--packed",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A packed set (`fastload pack`), in place of a list.",
)
@click.option(
    "--transform",
    default="resize",
    show_default=True,
    type=click.Choice(["resize", "rrc"]),
    help="resize: to a square. rrc: RandomResizedCrop and flip. Pictures travel as uint8; the device normalises them.",
)
@click.option(
    "--image-size",
    type=click.IntRange(1, 4096),
    help="Pixels of the square.  [default: 256, with rrc 224]",
)
@click.option(
    "-w",
    "--nworkers",
    "workers",
    default=1,
    show_default=True,
    type=click.IntRange(0, 1024),
    help="Threads that load, on each rank. 0: the loop loads for itself.",
)
@click.option(
    "-b",
    "--nbatch",
    "batch_size",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Samples in a batch of one rank; all ranks together take so many times their number in a step.",
)
@click.option(
    "--cache-size",
    "prefetch_batches",
    default=2,
    show_default=True,
    type=click.IntRange(min=1),
    help="Batches in flight at most: read, or being read, ahead of the loop.",
)
@click.option(
    "--loader",
    default="thread",
    show_default=True,
    type=click.Choice(["thread", "process", "cached"]),
    help="thread: fastload's. process: torch's worker processes. cached: a few batches again and again, no loading.",
)
@click.option(
    "-s",
    "--nsteps",
    "steps",
    type=click.IntRange(min=1),
    help="Steps of the training, those before a resume included.  [default: 20, or all of --epochs]",
)
@click.option(
    "--epochs",
    type=click.IntRange(min=1),
    help="Passes over the dataset; with -s, whichever ends first.",
)
@click.option(
    "--status-print-interval",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Steps between two lines of the rate.",
)
@click.option(
    "--step-ms",
    default=0.0,
    show_default=True,
    type=Number(min=0, max=3_600_000),
    help="Simulated accelerator: each step lasts at least so many milliseconds.",
)
@click.option(
    "--model",
    help='"tiny", or a classification model of torchvision\'s.  [default: resnet50; without an accelerator tiny]',
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="File with the model's state_dict to begin with; by default it begins with random parameters.",
)
@click.option(
    "--classes",
    type=click.IntRange(min=1),
    help="Outputs of the model.  [default: the dataset's classes]",
)
@click.option("--lr", default=0.001, show_default=True, type=Number(min=0), help="Of SGD.")
@click.option(
    "--momentum",
    default=0.9,
    show_default=True,
    type=Number(min=0, max=1),
    help="Of SGD.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(0, _LARGEST_SEED),
    help="Of the order, the augmentation and the model's first parameters.",
)
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="auto, cpu, cuda, cuda:1. auto: an accelerator for each rank where there are any.",
)
@click.option(
    "--precision",
    default="fp32",
    show_default=True,
    type=click.Choice(["fp32", "tf32", "bf16"]),
    help="tf32: float32 with faster, rounded products. bf16: autocast to bfloat16.",
)
@click.option("--compile", is_flag=True, help="torch.compile the model.")
@click.option(
    "--channels-last", is_flag=True, help="Channels-last memory, which convolutions like."
)
@click.option(
    "--checkpoint",
    type=_FOLDER,
    help="Folder for the checkpoint: model, optimiser, place in the data, random states. One that all ranks see.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    help="Steps between checkpoints; by default there is one at the end, and when the run is stopped.",
)
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the checkpoint if there is one; with any number of ranks at the same global batch.",
)
@click.option(
    "--profile",
    is_flag=True,
    help="torch's profiler on rank 0: 5 steps skipped, 1 warm-up, 10 recorded, into the run's folder in --logdir.",
)
@click.option(
    "--scalars", is_flag=True, help="Write TensorBoard scalars into the run's folder in --logdir."
)
@click.option(
    "--logdir",
    default="logdir",
    show_default=True,
    type=_FOLDER,
    help="Gets stats.csv, a row for each run, and a folder DATE-TIME-workersN-ranksN for each run that profiles or "
    "writes scalars.",
)
def train(**options: Any) -> None:
    """Train a model, and say how fast and what bounds it.

    One process trains alone. Started by mpiexec, srun or torchrun, each process is a rank, with its part of every
    epoch and its gradients averaged with the others'. Rates are given for each rank and for all together; the first 5
    steps are warm-up and in no rate.

    Ctrl-C and SIGTERM end all ranks behind the step in progress, with a checkpoint if --checkpoint names a folder, and
    exit codes 130 and 143; a second one ends the process at once. Killed at any moment and started again with
    --resume, on any number of ranks with the same global batch (ranks times -b), the model that results has been
    trained on every sample of an epoch exactly once: what was trained after the last checkpoint is not in the model
    that is restored, and is trained again. Where the dataset does not divide by the ranks, its order is filled up
    with some of its first samples, as all ranks need equally many.

    \b
    Examples:
        fastload train --file-list-path samples/filelist.txt -w 4
        fastload train --packed packed -w 2 --step-ms 150 --epochs 2
        fastload train --packed packed --epochs 90 --checkpoint ckpt --every 500 --resume
        mpiexec -n 4 fastload train --file-list-path train.txt --base-dir /data/imagenet -w 8 --profile
        torchrun --nproc-per-node 2 -m fastload train --packed packed -b 32
    """
    _run(options)


def tutorial(*, serial: bool, defaults: dict[str, Any]) -> click.Command:
    """A script of the tutorial that `fastload train` grew out of: its options and lines, with other defaults.

    It trains on a list of files; the serial one has no workers, and no options for them.
    """
    fixed: dict[str, Any] = {"packed": None}
    loads = "the loop loads for itself." if serial else "threads load while it trains."
    if serial:
        fixed |= {"workers": 0, "prefetch_batches": 2, "loader": "thread"}
    params = [copy.copy(param) for param in train.params if param.name not in fixed]
    if not Path(
        defaults["base_dir"]
    ).is_dir():  # another machine than the tutorial's: it has to be given
        defaults = {name: value for name, value in defaults.items() if name != "base_dir"}
    for param in params:
        param.default = defaults.get(param.name or "", param.default)
    return OnRanks(
        None,
        callback=lambda **options: _run({**options, **fixed}, serial_lines=serial),
        params=params,
        help=f"""The tutorial's {"serial" if serial else "parallel"} script: {loads}

        The list is relative to --base-dir, and so may be the paths in it:

        \b
            python benchmarks/imagenet_{"serial" if serial else "parallel"}.py --base-dir samples \\
                --file-list-path filelist.txt -b 16 -s 20
        """,
        context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    )


def _run(options: dict[str, Any], *, serial_lines: bool = False) -> None:
    """Train by the options of `fastload train`; SystemExit with 130 or 143 where a signal stopped it."""
    require("images", PIL="Pillow")
    if options.get("packed") is not None:
        require("arrow", pyarrow="pyarrow")
    if options.get("scalars"):
        require("tensorboard", tensorboard="tensorboard")
    from fastload.train import loop
    from fastload.train.recipe import Recipe

    with sigterm_raises():
        trained = loop.train(Recipe(**options), say=_say, serial_lines=serial_lines)
    if trained.stopped_by:
        raise SystemExit(128 + trained.stopped_by)


def _say(line: str) -> None:
    click.echo(line)
    sys.stdout.flush()
