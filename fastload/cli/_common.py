"""What several commands share."""

from __future__ import annotations

import importlib.util
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminated(KeyboardInterrupt):
    """SIGTERM, taken as Ctrl-C is."""


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
