"""`fastload train`: train a model on every rank with fastload's loader."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import click

from fastload.cli import options as opt
from fastload.cli._common import (
    OnRanks,
    device_option,
    list_options,
    require,
    sigterm_raises,
)

_LARGEST_SEED = 2**63 - 1
"""torch takes seeds of 64 bits, and each rank adds its rank number to the seed."""
_FOLDER = click.Path(path_type=Path, file_okay=False)
_ILSVRC = "/lus/eagle/projects/datasets/ImageNet/ILSVRC"


@click.command(cls=OnRanks)
@list_options
@opt.folder(
    "--packed",
    exists=True,
    help="Folder of a packed set (`fastload pack`), instead of a list. Needs pip install '.[arrow]' in the clone.",
)
@opt.choice(
    "--transform",
    ["resize", "rrc"],
    help="Transform of the images. resize: resize to a square. rrc: RandomResizedCrop and flip. Batches are uint8, and "
    "the device normalises them.",
)
@opt.count(
    "--image-size",
    within=(1, 4096),
    help="Side of the square, in pixels.  [default: 256, or 224 with --transform rrc]",
)
@opt.count(
    "-w --nworkers workers",
    within=(0, 1024),
    default=1,
    help="Threads per rank that load. 0: the training loop loads by itself.",
)
@opt.count(
    "-b --nbatch batch_size",
    default=64,
    help="Batch size per rank. The global batch is this times the number of ranks.",
)
@opt.count(
    "--cache-size prefetch_batches",
    default=2,
    help="Maximum number of batches that are read, or being read, ahead of the loop.",
)
@opt.choice(
    "--loader",
    ["thread", "process", "cached"],
    help="Loader of the samples. thread: fastload's threads. process: its worker processes. cached: repeat a few "
    "batches, to measure training without loading.",
)
@opt.count(
    "-s --nsteps steps",
    help="Total number of steps, including steps before a resume.  [default: 20, or all of --epochs]",
)
@opt.count(
    "--epochs",
    help="Number of passes over the dataset. With -s, training ends at the smaller limit.  [default: as many as "
    "--nsteps needs]",
)
@opt.count("--status-print-interval", default=5, help="Steps between two lines with the rate.")
@opt.number(
    "--step-ms",
    within=(0, 3_600_000),
    default=0.0,
    help="Simulated accelerator: minimum time of a step, in milliseconds.",
)
@click.option(
    "--model",
    help="Model: tiny, or a classification model of torchvision.  [default: resnet50, or tiny without an accelerator]",
)
@opt.file(
    "--weights",
    exists=True,
    help="File with the initial state_dict of the model.  [default: random parameters]",
)
@opt.count(
    "--classes", help="Number of outputs of the model.  [default: number of classes in the dataset]"
)
@opt.number("--lr", default=0.001, help="Learning rate of SGD.")
@opt.number("--momentum", within=(0, 1), default=0.9, help="Momentum of SGD.")
@opt.count(
    "--seed",
    within=(0, _LARGEST_SEED),
    default=0,
    help="Seed of the order, the augmentation and the initial parameters.",
)
@device_option
@opt.choice(
    "--precision",
    ["fp32", "tf32", "bf16"],
    help="Precision for training. fp32: float32. tf32: float32 with faster, less exact matrix multiplication. bf16: "
    "autocast to bfloat16.",
)
@opt.flag("--compile", help="Compile the model with torch.compile.")
@opt.flag(
    "--channels-last",
    help="Use the channels-last memory format, which makes many convolutions faster.",
)
@click.option(
    "--checkpoint",
    type=_FOLDER,
    help="Folder for the checkpoint: model, optimiser, position in the data and random states. All ranks must see "
    "this folder.  [default: no checkpoint]",
)
@opt.count(
    "--every",
    help="Steps between checkpoints.  [default: one at the end, or when the run is stopped]",
)
@opt.flag(
    "--resume",
    help="Resume from the checkpoint if it exists. The number of ranks may differ, but not the global batch.",
)
@opt.flag(
    "--profile",
    help="Record torch's profiler on rank 0 into the run's folder in --logdir: 10 steps, after 5 skipped steps and 1 "
    "warm-up step.",
)
@opt.flag(
    "--scalars",
    help="Write TensorBoard scalars into the run's folder in --logdir. Needs pip install '.[tensorboard]' in the "
    "clone.",
)
@click.option(
    "--logdir",
    default="logdir",
    type=_FOLDER,
    help="Folder for the results: stats.csv with one row per run, and a folder DATE-TIME-workersN-ranksN for each run "
    "with --profile or --scalars.",
)
def train(**options: Any) -> None:
    """Train a model, and report its rate and what limits it.

    Under mpiexec, srun or torchrun, each process is a rank. It trains on its part of every epoch, and the gradients of
    all ranks are averaged. Rates are reported per rank and for all ranks together. The first 5 steps are warm-up, and
    no rate counts them.

    After Ctrl-C or SIGTERM, all ranks finish the step in progress, and write a checkpoint if --checkpoint is given.
    They end with exit code 130 or 143. Ctrl-C more than 2 s later ends the process at once. Another SIGTERM never does.

    A killed run can be started again with --resume, on any number of ranks with the same global batch (ranks times
    -b). Steps after the last checkpoint are repeated from the restored model. So the final model has been trained on
    every sample of an epoch exactly once. All ranks need the same number of samples. If the dataset does not divide
    evenly, some samples from the start of the order are repeated.

    \b
    Examples:
        fastload train --file-list-path samples/filelist.txt -w 4
        fastload train --packed packed -w 2 --step-ms 150 --epochs 2
        fastload train --packed packed --epochs 90 --checkpoint ckpt --every 500 --resume
        mpiexec -n 4 fastload train --file-list-path train.txt --base-dir /data/imagenet -w 8 --profile
        torchrun --nproc-per-node 2 -m fastload train --packed packed -b 32
    """
    _run(options)


def tutorial(*, serial: bool) -> click.Command:
    """Return the command of a tutorial script: `fastload train` with the script's options, lines and defaults.

    It trains on a list of files. The serial script has no workers, and no options for them.
    """
    fixed: dict[str, Any] = {"packed": None}
    loads = "the loop loads by itself." if serial else "threads load during training."
    if serial:
        fixed |= {"workers": 0, "prefetch_batches": 2, "loader": "thread"}
    params = [copy.copy(param) for param in train.params if param.name not in fixed]
    for param in params:
        if param.name == "file_list":
            param.default = "ilsvrc_train_filelist.txt"
        if param.name == "base_dir" and Path(_ILSVRC).is_dir():  # on the tutorial's machine
            param.default = _ILSVRC
    return OnRanks(
        None,
        callback=lambda **options: _run({**options, **fixed}, serial_lines=serial),
        params=params,
        help=f"""Run the tutorial's {"serial" if serial else "parallel"} script: {loads}

        The path of the list, and the paths in it, may be relative to --base-dir:

        \b
            python benchmarks/imagenet_{"serial" if serial else "parallel"}.py --base-dir samples \\
                --file-list-path filelist.txt -b 16 -s 20
        """,
        context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    )


def _run(options: dict[str, Any], *, serial_lines: bool = False) -> None:
    """Train with the options of `fastload train`. Raise SystemExit with 130 or 143 if a signal stopped the training."""
    require("images", PIL="Pillow")
    if options.get("packed") is not None:
        require("arrow", pyarrow="pyarrow")
    if options.get("scalars"):
        require("tensorboard", tensorboard="tensorboard")
    from fastload.train import loop
    from fastload.train.recipe import Recipe

    with sigterm_raises():
        trained = loop.train(Recipe(**options), say=click.echo, serial_lines=serial_lines)
    if trained.stopped_by:
        raise SystemExit(128 + trained.stopped_by)
