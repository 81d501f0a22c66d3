"""Promise: Commands of the README, the pages and `--help` run after README's install, or name their extra beside them.

It stands on the same page as `pip install 'torch-fastload[arrow]'`: pip adds the extra to what is installed, from a
wheel or a clone. The help of the command or its group says "the extra `arrow`".
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.commands import COMMANDS
from tests.docs.pages import ROOT, command_lines, spans
from tests.docs.test_command_lines import CHECKED, lines_of_help

EXTRAS = {
    r"fastload (featurize|parameters|set )": "arrow",
    r"fastload train .*--packed|fastload predict .*--name": "arrow",
    r"fastload bench .*--(html|plot)": "bench",
    r"fastload train .*--scalars": "tensorboard",
    r"fastload train .*--metrics-port": "prometheus",
    r"fastload predict .*--source inbox": "stream",
}
NAMED = r"(?:pip install (?:-e )?'(?:\.|torch-fastload)\[|the extra `)([a-z,]+)(?:\]'|`)"
GENERATED = {"promises.md"}


def unnamed(lines: Iterator[str], beside: str) -> list[str]:
    """Return the lines whose extra is not in the text beside them."""
    named = {extra for found in re.findall(NAMED, beside) for extra in found.split(",")}
    return [
        f"{line}: name the extra {extra}"
        for line in lines
        for pattern, extra in EXTRAS.items()
        if re.search(pattern, line) and extra not in named
    ]


@pytest.mark.parametrize(
    "page", [page for page in CHECKED if page.name not in GENERATED], ids=lambda page: page.name
)
def test_a_page_names_the_extras_of_its_commands(page: Path) -> None:
    text = page.read_text()
    lines = [line for _, line in command_lines(text)]
    if page.name == "README.md":  # its table is the list of commands
        lines += [code for _, code in spans(text)]
    assert not unnamed(iter(lines), text)


def test_a_help_names_the_extras_of_its_examples() -> None:
    for name, context in COMMANDS.items():
        shown = [context, context.parent] if name.count(" ") == 2 else [context]
        beside = " ".join(" ".join(one.get_help() for one in shown).split())
        assert not unnamed(iter(lines_of_help(context.command)), beside), name


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with what README's install brings, out of the packages of this one."""
    place, left, seen = tmp_path_factory.mktemp("site"), ["torch-fastload[images]"], set[str]()
    while left:
        needed = Requirement(left.pop())
        try:
            found = distribution(needed.name)
        except PackageNotFoundError:
            continue
        extras = needed.extras or {""}
        inner = [Requirement(line) for line in found.requires or []]
        new = {
            str(r)
            for r in inner
            if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in extras)
        }
        left += new - seen
        seen |= new
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (place / top).exists() and needed.name != "torch-fastload":
                (place / top).symlink_to(str(found.locate_file(top)))
    return {**os.environ, "PYTHONPATH": f"{place}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}


def run(fresh: dict[str, str], folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    # -S: none of the environment's other packages
    words = [sys.executable, "-S", "-m", *line.split()]
    return subprocess.run(words, env=fresh, cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_the_commands_of_the_readme_run_after_its_install(
    fresh: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\ntrain_set = torch.utils.data.TensorDataset(torch.arange(99))\n"
    )
    listed = "--file-list-path samples/filelist.txt"
    for line in (
        "fastload --help",
        "fastload env",
        "fastload images samples --count 96",
        f"fastload bench {listed} --workers 1 --repeats 1 -b 8 -s 6",
        "fastload check mine:train_set",
        f"fastload train {listed} -w 1 -b 8 -s 2",
        "fastload submit --script mine.py --parallelism 1 --dry-run",
        "fastload mnist --synthetic digits --train 20 --test 20",
    ):
        ended = run(fresh, tmp_path, line)
        assert ended.returncode == 0, f"{line}\n{ended.stdout}\n{ended.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("set pack . packed", "arrow"),
        ("set verify .", "arrow"),
        ("set inspect .", "arrow"),
        ("set stage . packed", "arrow"),
        ("set ls", "arrow"),
        ("featurize . --name a", "arrow"),
        ("parameters serve --store . --number 0 --of 1", "arrow"),
        ("train --packed .", "arrow"),
        ("predict mine:model mine:samples --name a", "arrow"),
        ("bench --file-list-path index.json --html a.html", "bench"),
        ("train --file-list-path index.json --scalars", "tensorboard"),
        ("train --file-list-path index.json --metrics-port 0", "prometheus"),
        ("predict mine:model --source inbox --decode mine:model --sink .", "stream"),
    ],
)
def test_a_command_without_its_extra_says_what_to_install(
    line: str, extra: str, fresh: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "inbox").mkdir()
    (tmp_path / "mine.py").write_text("samples = [1]\ndef model(x): return x\n")
    assert any(
        re.search(pattern, f"fastload {line}") for pattern, e in EXTRAS.items() if e == extra
    )
    ended = run(fresh, tmp_path, f"fastload {line}")
    assert ended.returncode
    assert f"pip install 'torch-fastload[{extra}]'" in ended.stderr
