"""The `fastload` command: one file for each of its commands, which imports what it needs when it is called."""

from __future__ import annotations

from typing import Any

import click

import fastload
from fastload.cli._common import Terminated
from fastload.cli.bench import bench
from fastload.cli.check import check
from fastload.cli.env import env
from fastload.cli.images import images
from fastload.cli.inspect import inspect
from fastload.cli.pack import pack
from fastload.cli.tensorboard import tensorboard
from fastload.cli.verify import verify
from fastload.errors import FastloadError

_INTERRUPTED, _TERMINATED = 130, 143  # 128 + SIGINT, + SIGTERM, as shells report them.


class _Commands(click.Group):
    """A group whose commands end in one line on a user's error, and with exit code 130 on Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Terminated:
            click.echo("Terminated.", err=True)
            ctx.exit(_TERMINATED)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(_INTERRUPTED)
        except FastloadError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:  # Whoever read our output stopped reading; click ends quietly.
            raise
        except OSError as error:
            named = error.filename is not None and error.strerror is not None
            text = f"{error.filename}: {error.strerror}" if named else str(error)
            raise click.ClickException(text) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fastload.__version__, prog_name="fastload")
def main() -> None:
    """A data loader for PyTorch that loads with threads.

    In your own training loop change one import and keep every argument:

    \b
        from fastload import DataLoader

    To see what it does on this machine, make sample images and race serial loading, fastload's threads and torch's
    processes on them:

    \b
        fastload images samples
        fastload bench --file-list samples/filelist.txt --plot bench.png
    """


for command in (images, bench, check, pack, verify, inspect, env, tensorboard):
    main.add_command(command)
