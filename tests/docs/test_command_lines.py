"""Promise: Every command line of the README, the pages and `--help` names a command, options and values that exist.

Lines of scripts/, benchmarks/ and examples/ name files that exist, and options that these have. Nothing is run.
"""

from __future__ import annotations

import inspect

import click

from tests.commands import COMMANDS
from tests.docs.command_checks import program, wrong
from tests.docs.pages import PAGES, ROOT, command_lines, commands, spans

CHECKED = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it tells of what was


def lines_of_help(command: click.Command) -> list[str]:
    text = inspect.cleandoc(command.help or "").replace("\b\n", "\n")
    return [line for _, line in command_lines(text)]


def test_the_commands_of_the_pages_exist_with_their_options_and_values() -> None:
    found = []
    for page in CHECKED:
        text = page.read_text()
        checked = [(number, line, False) for number, line in command_lines(text)]
        checked += [
            (number, code, True)
            for number, code in spans(text)
            if code.startswith(("fastload ", "scripts/"))
        ]
        found += [
            f"{page.relative_to(ROOT)}:{number}: {line}: {error}"
            for number, line, part in checked
            for error in wrong(line, part=part)
        ]
    assert not found, "\n".join(found)


def test_the_examples_of_help_hold() -> None:
    lines = [line for one in COMMANDS.values() for line in lines_of_help(one.command)]
    assert not [f"{line}: {error}" for line in lines for error in wrong(line)]


def test_the_examples_of_scripts_hold() -> None:
    lines = [
        line.removeprefix("#").strip().split("   ")[0]
        for script in (ROOT / "scripts").iterdir()
        if script.is_file() and not script.name.startswith("_")
        for line in script.read_text().partition("\n\n")[0].splitlines()
        if line.startswith("#   scripts/") and "[" not in line
    ]
    assert lines
    assert not [f"{line}: {error}" for line in lines for error in wrong(line)]


def test_lines_are_found() -> None:
    """The tests above would hold if none were."""
    lines = [line for page in CHECKED for _, line in command_lines(page.read_text())]
    checked = [program(words)[0] for line in lines if "'" not in line for words in commands(line)]
    assert checked.count("fastload") > 30
    assert {"scripts/test", "scripts/bench", "examples/alcf.py"} <= set(checked)
    of_help = [line for one in COMMANDS.values() for line in lines_of_help(one.command)]
    assert len([line for line in of_help if "fastload " in line]) > 10


WRONG = [
    ("fastload bnch", "bnch"),
    ("fastload bench --file-list-path x --no-such", "--no-such"),
    ("fastload set pt x", "pt"),
    ("fastload train --file-list-path x -w two", "two"),
    ("fastload train --file-list-path x --loader nothing", "nothing"),
    ("fastload set verify", "SET"),
    ("mpiexec -n 2 fastload env --met", "--met"),
    ("torchrun --nproc-per-node=2 -m fastload predict a:b --nam x", "--nam"),
    ("cat x | fastload predict a:b --sik y > z", "--sik"),
    ("fastload env --timeout", "--timeout"),
    ("fastload env --compile 'x", "quote"),
    ("scripts/tests --slow", "scripts/tests"),
    ("scripts/demo --repaets 3", "--repaets"),
    ("scripts/bench --smok", "--smok"),
    ("python -m benchmarks photo", "photo"),
    ("python examples/none.py", "examples/none.py"),
    ("mpiexec -n 2 python examples/leases.py folder --dei", "--dei"),
    ("qsub submit/none.pbs", "submit/none.pbs"),
    ("fastload flow run examples/none.toml", "examples/none.toml"),
]


def test_a_wrong_line_is_caught() -> None:
    assert not [line for line, error in WRONG if not any(error in found for found in wrong(line))]


def test_a_sentence_may_name_a_part_of_a_command_but_no_other_one() -> None:
    parts = ["fastload set", "fastload set verify", "fastload parameters serve --store"]
    for part in [*parts, "scripts/bench [NAME...]", "scripts/demo OPTION..."]:
        assert not list(wrong(part, part=True))
    for part in ("fastload stor", "fastload set pt", "fastload env --met"):
        assert list(wrong(part, part=True))


def test_a_backslash_continues_a_line_and_fenced_code_is_left_out() -> None:
    text = "Text\n\n    fastload env \\\n        --met\n\n```python\n    fastload bnch\n```\n\n    a | b\n"
    assert list(command_lines(text)) == [(4, "fastload env     --met"), (10, "a | b")]
    assert list(spans("`fastload\nenv` and\n\n    `a`\n")) == [(1, "fastload env")]
