"""The `fastload` command. Each of its commands has a file, which imports what it needs only when it is called."""

from __future__ import annotations

import os
from typing import Any

import click

import fastload
from fastload.cli._common import INTERRUPTED, TERMINATED, Terminated
from fastload.cli.bench import bench
from fastload.cli.check import check
from fastload.cli.env import env
from fastload.cli.featurize import featurize
from fastload.cli.flow import flow
from fastload.cli.images import images
from fastload.cli.mnist import mnist
from fastload.cli.parameters import parameters
from fastload.cli.predict import predict
from fastload.cli.sets import sets
from fastload.cli.submit import submit
from fastload.cli.train import train
from fastload.errors import FastloadError, UsageError, in_one_line


class _Commands(click.Group):
    """The group of all commands. A user error is one line. Exit codes: 130 after Ctrl-C, 143 after SIGTERM."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the arguments before the command."""
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            raise _without_usage(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Parse the arguments of the command, and run it."""
        try:
            return super().invoke(ctx)
        except Terminated:
            click.echo("Terminated.", err=True)
            ctx.exit(TERMINATED)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except click.UsageError as error:
            raise _without_usage(error) from None
        except UsageError as error:
            raise click.UsageError(in_one_line(error)) from error
        except BrokenPipeError:  # The reader of our output stopped reading. Click ends quietly.
            raise
        except (FastloadError, OSError) as error:
            if isinstance(error.__cause__, BrokenPipeError):  # the flush at exit would fail again
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise click.ClickException(in_one_line(error)) from error


def _without_usage(error: click.UsageError) -> click.UsageError:
    """Return the error without its context, so that click prints no usage lines."""
    if not isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.ctx = None
    return error


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"fastload, version {fastload.__version__}")
        ctx.exit()


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    callback=_version,
    expose_value=False,
    help="Show the version and exit.",
)
def main() -> None:
    """A data loader for PyTorch, with threads or processes.

    In your own training loop change one import and keep every argument:

    \b
        from fastload import DataLoader

    To measure it on this machine, make sample images. Then compare serial loading, fastload's default and torch's
    worker processes on them. Images need pip install 'torch-fastload[images]':

    \b
        fastload images samples
        fastload bench --file-list-path samples/filelist.txt
    """


for command in (
    *(images, mnist, bench, check, sets, parameters),
    *(env, train, featurize, predict, flow, submit),
):
    main.add_command(command)
