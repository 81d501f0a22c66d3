"""Promise: The signatures that stand on the pages are those of the code.

`.venv/bin/python -m tests.docs.test_signatures` writes them anew. A block fenced as "```python signature" has one
or more: each begins with a full name and an open parenthesis.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any, Literal, Union, get_args, get_origin

import pytest

from tests.docs.pages import DOCS, FENCE, PAGES, ROOT, fenced

FENCED = "python signature"
WIDTH = 100
OF_OTHERS = ("from-", "twister2", "alcf", "CHANGELOG")
"""Pages about other programs, by the beginnings of their names."""


def rendered(name: str) -> str:
    """Return the signature of a class, function or method with its defaults and types, as a page shows it."""
    found = resolve_name(name)
    signature = inspect.signature(found)
    names = vars(sys.modules[found.__module__])
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    shown = list(_with_markers([_shown(p, names) for p in parameters], parameters))
    returned = "" if isinstance(found, type) else f" -> {_returned(found, names)}"
    together = ", ".join(shown)
    if len(line := f"{name}({together}){returned}") <= WIDTH:
        return line
    lines = [f"    {together}"] if len(together) < WIDTH - 4 else [f"    {one}," for one in shown]
    return "\n".join([f"{name}(", *lines, f"){returned}"])


def _returned(found: Any, names: dict[str, Any]) -> str:
    shown = _type(inspect.signature(found).return_annotation, names)
    managed = found is not (inner := inspect.unwrap(found)) and inspect.isgeneratorfunction(inner)
    return shown.replace("Iterator", "AbstractContextManager") if managed else shown


def _shown(parameter: inspect.Parameter, names: dict[str, Any]) -> str:
    star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    default = parameter.default
    text = repr(default).replace("'", '"') if isinstance(default, str) else repr(default)
    given = "" if default is parameter.empty else f" = {text}"
    return f"{star}{parameter.name}: {_type(parameter.annotation, names)}{given}"


def _with_markers(shown: list[str], parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Yield the parameters, and `*` before the first one that only a keyword gives."""
    kinds = [parameter.kind for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    yield from shown


def _type(annotation: Any, names: dict[str, Any]) -> str:
    """Return an annotation as its source has it, but what a name of its file stands for instead of the name."""
    source = str(getattr(annotation, "__forward_arg__", annotation)).replace("'", '"')
    return re.sub(r'(?<![\w."])\w+\b(?![."])', lambda word: _spelt_out(word[0], names), source)


def _spelt_out(word: str, names: dict[str, Any]) -> str:
    alias = names.get(word)
    if get_origin(alias) not in (Literal, Union, types.UnionType):
        return word
    parts = [alias] if get_origin(alias) is Literal else get_args(alias)
    plain = [part.__name__ if isinstance(part, type) else str(part) for part in parts]
    short = re.sub(
        r"\b(?:typing|collections\.abc|fastload[\w.]*)\.", "", " | ".join(plain)
    ).replace("'", '"')
    return short.replace("NoneType", "None")


def written(block: str) -> str:
    """Return a block with its signatures as the code has them now."""
    names = re.findall(r"^([\w.]+)\(", block, flags=re.M)
    return "".join(f"{rendered(name)}\n" for name in names)


def shown() -> set[str]:
    """Return the names whose signatures stand on pages."""
    blocks = [block.text for page in PAGES for block in fenced(page, FENCED)]
    return {name for block in blocks for name in re.findall(r"^([\w.]+)\(", block, flags=re.M)}


@pytest.fixture(autouse=True)
def _with_what_the_signatures_need() -> None:
    for name in ("PIL", "pyarrow", "watchdog"):
        pytest.importorskip(name)


def test_the_signatures_of_the_pages_are_those_of_the_code() -> None:
    blocks = [block for page in PAGES for block in fenced(page, FENCED)]
    drifted = [str(block) for block in blocks if block.text != written(block.text)]
    assert not drifted, "run .venv/bin/python -m tests.docs.test_signatures"


def test_what_the_examples_call_stands_with_its_signature() -> None:
    """That is each public name with arguments, on the pages about fastload itself."""
    pages = [page for page in PAGES if not page.name.startswith(OF_OTHERS)]
    code = "\n".join(block.text for page in pages for block in fenced(page, "python"))
    reference = [page for page in (DOCS / "reference").glob("*.md") if page.name != "compat.md"]
    public = [
        name
        for page in reference
        for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.M)
        if re.search(rf"\b{name.rpartition('.')[2]}\(", code)
    ]
    assert len(public) > 30
    called = {name for name in public if inspect.signature(resolve_name(name)).parameters}
    missing = sorted(called - shown())
    assert not missing, f"give each a block fenced as {FENCED!r}: {missing}"


def test_a_signature_that_drifted_is_found() -> None:
    right = rendered("fastload.prefetch_to") + "\n"
    assert written(right) == right
    for old, new in (("depth: int = 1", "depth: int = 2"), ("str | int", "str"), ("*, ", "")):
        assert old in right
        assert written(right.replace(old, new)) != right.replace(old, new)


def test_names_of_types_are_spelt_out() -> None:
    assert 'on_error: Literal["raise", "skip"] | Callable' in rendered("fastload.DataLoader")


if __name__ == "__main__":
    for page in PAGES:
        text = FENCE.sub(
            lambda block: (
                f"```{block[1]}\n{written(block[2])}```" if block[1] == FENCED else block[0]
            ),
            page.read_text(),
        )
        if text != page.read_text():
            page.write_text(text)
            print(page.relative_to(ROOT))
