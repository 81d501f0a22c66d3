"""Promise: Files, options and values of options that the text of a page names in code exist."""

from __future__ import annotations

import re
from functools import cache
from typing import get_args, get_type_hints

import click

import fastload
from tests.commands import COMMANDS
from tests.docs.pages import PAGES, ROOT, spans

PLACES = [ROOT, ROOT / "fastload"]
# Folders that commands make, that users have, or that only a checkout has which git ignores.
NOT_OURS = {"build", "logdir", "packed", "path", "recipes", "results", "samples", "site"}
OF_OTHERS = [page for page in PAGES if page.name.startswith("from-")]  # they name others' arguments
# Of commits that the pages name.
ONCE = {"benchmarks/beside.py", "benchmarks/isolation.py", "scripts/promises"}


@cache
def source() -> str:
    return "\n".join(path.read_text() for path in (ROOT / "fastload").rglob("*.py"))


def exists(name: str) -> bool:
    """Return whether `engine/window`, `engine/window.py` or `order/batches.sampled_state` is there."""
    file, _, inner = name.partition(".")
    found = [place / (file + end) for place in PLACES for end in ("", ".py", ".c", ".md")]
    if any((place / name.rstrip("/")).exists() or list(place.glob(name)) for place in PLACES):
        return True
    defined = re.compile(rf"^\s*(def |class )?{inner}\b( =|:|\()", re.M)
    return any(path.is_file() and (not inner or defined.search(path.read_text())) for path in found)


def wrong(code: str) -> str | None:
    """Return what is wrong with code in the text, or None."""
    if re.fullmatch(r"[\w.]+(/[\w.*-]*)+", code) and code.partition("/")[0] not in NOT_OURS:
        known = code in ONCE or "NAME" in code or exists(code)
        return None if known else "there is no such file"
    if found := re.fullmatch(r'(\w+)="(\w+)"', code):
        name, value = found.groups()
        hint = get_type_hints(fastload.DataLoader.__init__).get(name)
        values = [one for part in (hint, *get_args(hint)) for one in get_args(part)]
        known = {one for one in values if isinstance(one, str)}
        return f"{name} takes {sorted(known)}" if known and value not in known else None
    if found := re.fullmatch(r"([A-Z]\w+)\.(\w+)", code):
        body = re.search(rf"^class {found[1]}\b.*?(?=^class |\Z)", source(), re.M | re.S)
        return None if not body or re.search(rf"\b{found[2]}\b", body[0]) else "no such attribute"
    if found := re.fullmatch(r"(\w+)=", code):
        return None if re.search(rf"\b{found[1]}\b *[:=,]", source()) else "no such argument"
    if found := re.match(r"(--[a-z-]+)(?: ([a-z]+))?$", code):
        params = [p for context in COMMANDS.values() for p in context.command.get_params(context)]
        options = [p for p in params if found[1] in p.opts]
        choices = [p.type.choices for p in options if isinstance(p.type, click.Choice)]
        if found[2] and choices and not any(found[2] in one for one in choices):
            return f"{found[1]} takes {choices}"
    return None


def test_what_the_text_of_a_page_names_exists() -> None:
    assert not [
        f"{page.relative_to(ROOT)}, line {line}: `{code}`: {what}"
        for page in PAGES
        if page not in OF_OTHERS
        for line, code in spans(page.read_text())
        if (what := wrong(code))
    ]


def test_what_does_not_exist_is_found() -> None:
    gone = "engine/worker_context isolation/ order/batches.nothing Window.none_such"
    codes = [*gone.split(), 'on_error="leap"', "max_wait="]
    assert [code for code in [*codes, "--loader dali"] if not wrong(code)] == []
