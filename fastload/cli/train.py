"""`fastload train`: train a model on every rank with fastload's loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from fastload.cli._command import parameters_of
from fastload.cli._common import OnRanks, require, sigterm_raises
from fastload.train.recipe import Recipe

_ILSVRC = "/lus/eagle/projects/datasets/ImageNet/ILSVRC"


@OnRanks
def train(recipe: Recipe) -> None:
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
    _run(recipe)


def tutorial(*, serial: bool) -> click.Command:
    """Return the command of a tutorial script: `fastload train` with the script's options, lines and defaults.

    It trains on a list of files. The serial script has no workers, and no options for them.
    """
    fixed: dict[str, Any] = {"packed": None}
    loads = "the loop loads by itself." if serial else "threads load during training."
    if serial:
        fixed |= {"workers": 0, "prefetch_batches": 2, "loader": "thread"}
    params = [param for param in parameters_of(Recipe) if param.name not in fixed]
    for param in params:
        if param.name == "file_list":
            param.default = "ilsvrc_train_filelist.txt"
        if param.name == "base_dir" and Path(_ILSVRC).is_dir():  # on the tutorial's machine
            param.default = _ILSVRC
    command = OnRanks(train.function)
    command.params = params
    command.callback = lambda **options: _run(Recipe(**options, **fixed), serial_lines=serial)
    command.context_settings = {"help_option_names": ["-h", "--help"], "show_default": True}
    command.help = f"""Run the tutorial's {"serial" if serial else "parallel"} script: {loads}

        The path of the list, and the paths in it, may be relative to --base-dir:

        \b
            python benchmarks/imagenet_{"serial" if serial else "parallel"}.py --base-dir samples \\
                --file-list-path filelist.txt -b 16 -s 20
        """
    return command


def _run(recipe: Recipe, *, serial_lines: bool = False) -> None:
    """Train by a recipe. Raise SystemExit with 130 or 143 if a signal stopped the training."""
    require("images", PIL="Pillow")
    if recipe.packed is not None:
        require("arrow", pyarrow="pyarrow")
    if recipe.scalars:
        require("tensorboard", tensorboard="tensorboard")
    from fastload.train import loop

    with sigterm_raises():
        trained = loop.train(recipe, say=click.echo, serial_lines=serial_lines)
    if trained.stopped_by:
        raise SystemExit(128 + trained.stopped_by)
