"""Says what is wrong with a command line of a page, without running it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from benchmarks.__main__ import main as benchmarks_main
from fastload.cli import main as fastload_main
from tests.docs.pages import ROOT, commands

LAUNCHERS = {"mpiexec", "mpirun", "srun", "torchrun", "time", "nohup", "env"}
FILE = re.compile(r"(?:scripts|examples|benchmarks|submit|docs)/[\w./-]+")


def wrong(line: str, *, part: bool = False) -> Iterator[str]:
    """Yield what is wrong with a line. `part`: it may lack arguments, as commands that a sentence names do."""
    try:
        found = list(commands(line))
    except ValueError:  # an open quote; text and what programs print have apostrophes
        found = []
        if program(line.split())[0]:
            yield "a quote is open"
    for all_words in found:
        words = [word for word in all_words if not _is_left_out(word, part=part)]
        for word in words:
            if FILE.fullmatch(word) and not (ROOT / word).exists():
                yield f"there is no {word}"
        name, arguments = program(words)
        if name == "fastload":
            yield from _parsed(fastload_main, name, arguments, part=part)
        elif name == "benchmarks":
            yield from _parsed(benchmarks_main, name, arguments)
        elif name.startswith("scripts/") and (ROOT / name).exists():
            yield from _script(name, arguments)
        elif name.startswith("examples/") and (ROOT / name).exists():
            source = (ROOT / name).read_text()
            yield from (f"{name} has no {o}" for o in options(arguments) if f'"{o}"' not in source)


def _is_left_out(word: str, *, part: bool) -> bool:
    """Return whether a word stands for others: "...", and in a sentence NAME..., [OPTION...] or NAME."""
    return word == "..." or (part and re.fullmatch(r"\[?[A-Z]+(\.\.\.)?\]?", word) is not None)


def program(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return what a command runs, and its arguments: "fastload", "benchmarks", a script, an example, or ""."""
    left = list(words)
    while left and re.match(r"\w+=", left[0]):
        del left[0]
    if not left:
        return "", []
    launched = left[0] in LAUNCHERS or re.fullmatch(r"(?:.*/)?python[\d.]*", left[0])
    for i, word in enumerate(left):
        module = i > 0 and left[i - 1] == "-m"
        if word == "fastload" or (word == "benchmarks" and module) or FILE.fullmatch(word):
            return word, left[i + 1 :]
        if not launched:
            break
    return "", []


def options(arguments: Sequence[str]) -> list[str]:
    """Return the names of the options among arguments."""
    return [a.partition("=")[0] for a in arguments if re.match(r"--?[A-Za-z]", a)]


def _script(name: str, arguments: Sequence[str]) -> Iterator[str]:
    header = (ROOT / name).read_text().partition("\n\n")[0]
    if name == "scripts/demo":
        theirs = arguments[arguments[:1] == ["--full"] :]
        yield from _parsed(fastload_main, "fastload", ["bench", *theirs], part=True)
    elif name == "scripts/bench":
        named = ["peers" if argument == "--peers" else argument for argument in arguments]
        yield from _parsed(benchmarks_main, "benchmarks", named)
    else:
        known = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", header))
        yield from (
            f"{name} has no {option}" for option in options(arguments) if option not in known
        )


def _path(self: click.Path, value: Any, *_: Any) -> Any:
    return Path(value) if self.type is Path else value  # a reader's file, which is not here


def _parsed(
    command: click.Command, name: str, arguments: Sequence[str], *, part: bool = False
) -> Iterator[str]:
    context = click.Context(command, info_name=name, **command.context_settings)
    try:
        while isinstance(command, click.Group):
            rest = command.make_parser(context).parse_args(list(arguments))[1]
            if not rest and (part or set(arguments) & set(context.help_option_names)):
                return
            name, found, arguments = command.resolve_command(context, rest)
            assert name is not None
            assert found is not None
            command = found
            if isinstance(command, click.Group):
                context = click.Context(command, info_name=name, parent=context)
        with patch.object(click.Path, "convert", _path):
            command.make_context(name, list(arguments), parent=context)
    except click.exceptions.Exit:  # --help
        pass
    except click.MissingParameter as error:
        if not part:
            yield error.format_message()
    except click.ClickException as error:
        if not (part and "requires an argument" in error.format_message()):
            yield error.format_message()
