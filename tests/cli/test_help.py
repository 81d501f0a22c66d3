"""Promises:
- The help pages are those of `tests/cli/help`, and every command and option has a help. If you change one on purpose,
  run `.venv/bin/python -m tests.cli.test_help`, and commit the pages.
- Help needs no torch.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from tests.commands import COMMANDS

PAGES = Path(__file__).parent / "help"
ROOT = Path(__file__).parents[2]


def pages() -> dict[str, str]:
    return {
        f"{name.replace(' ', '-')}.txt": f"{context.get_help()}\n"
        for name, context in COMMANDS.items()
    }


def test_the_pages_are_the_recorded_ones() -> None:
    recorded = {path.name: path.read_text() for path in PAGES.iterdir()}
    assert pages() == recorded, "run .venv/bin/python -m tests.cli.test_help"


def test_every_command_and_every_option_has_its_help() -> None:
    for name, context in COMMANDS.items():
        assert context.command.help, name
        options = context.command.get_params(context)
        assert [p.name for p in options if isinstance(p, click.Option) and not p.help] == [], name


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from tests.cli.test_help import pages; pages(); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for path in PAGES.iterdir():
        path.unlink()
    for name, text in pages().items():
        (PAGES / name).write_text(text)
