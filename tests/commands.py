"""The commands of `fastload`, each with the context that it has in `fastload ... --help`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from fastload.cli import main


def contexts(
    command: click.Command = main, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """Yield the context of each command that is not hidden. Click keeps the help option of the first one."""
    name = command.name if parent else "fastload"
    settings = {**command.context_settings, "terminal_width": 80}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context
    for inner in getattr(command, "commands", {}).values():
        if not inner.hidden:
            yield from contexts(inner, context)


COMMANDS = {context.command_path: context for context in contexts()}
