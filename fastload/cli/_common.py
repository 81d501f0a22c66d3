"""What several commands share."""

from __future__ import annotations

import importlib.util
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from fastload.errors import FastloadError

if TYPE_CHECKING:
    from collections.abc import Iterator


_INTERRUPTED, _TERMINATED = 130, 143  # 128 + SIGINT, + SIGTERM, as shells report them.


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken as Ctrl-C is."""


class EndsInOneLine(click.Command):
    """A command that ends in one line on a user's error, and with exit code 130 on Ctrl-C, 143 on SIGTERM."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
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


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the block: what is under way is ended, and what was done is not lost."""

    def stop(signum: int, frame: Any) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def require(extra: str, **modules: str) -> None:
    """Say which extra to install where a module is missing. `modules`: import name -> name for people."""
    missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise click.ClickException(
            f"this needs {' and '.join(missing)}, which is not installed: pip install 'fastload[{extra}]'"
        )
