"""The `fastload` command. Each of its commands has a file, which imports what it needs only when it is called."""

from __future__ import annotations

import click

import fastload
from fastload.cli._common import EndsInOneLine
from fastload.cli.bench import bench
from fastload.cli.check import check
from fastload.cli.env import env
from fastload.cli.featurize import featurize
from fastload.cli.flow import flow
from fastload.cli.images import images
from fastload.cli.inspect import inspect
from fastload.cli.mnist import mnist
from fastload.cli.pack import pack
from fastload.cli.parameters import parameters
from fastload.cli.predict import predict
from fastload.cli.stage import stage
from fastload.cli.store import store
from fastload.cli.submit import submit
from fastload.cli.tensorboard import tensorboard
from fastload.cli.train import train
from fastload.cli.verify import verify


class _Commands(EndsInOneLine, click.Group):
    """The group of all commands."""


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(fastload.__version__, prog_name="fastload")
def main() -> None:
    """A data loader for PyTorch, with threads or processes.

    In your own training loop change one import and keep every argument:

    \b
        from fastload import DataLoader

    To measure it on this machine, make sample images. Then compare serial loading, fastload's threads and torch's
    worker processes on them. Images need pip install '.[images]' in the clone:

    \b
        fastload images samples
        fastload bench --file-list-path samples/filelist.txt
    """


for command in (
    images,
    mnist,
    bench,
    check,
    pack,
    parameters,
    verify,
    inspect,
    env,
    tensorboard,
    train,
    featurize,
    predict,
    flow,
    stage,
    store,
    submit,
):
    main.add_command(command)
