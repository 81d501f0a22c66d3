"""`fastload train`: train a model on every rank with fastload's loader."""

from __future__ import annotations

import click

from fastload.cli._command import Command
from fastload.cli._common import require, sigterm_raises
from fastload.train.recipe import Recipe


@Command
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
    if recipe.scalars:
        require("tensorboard", tensorboard="tensorboard")
    if recipe.metrics_port is not None:
        require("prometheus", prometheus_client="prometheus_client")
    from fastload.train import loop

    with sigterm_raises():
        trained = loop.train(recipe, say=click.echo)
    if trained.stopped_by:
        raise SystemExit(128 + trained.stopped_by)
