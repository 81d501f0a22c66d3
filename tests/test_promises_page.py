"""Promises:
- docs/promises.md is what `scripts/promises` writes, and every test module states a promise.
- A promise is one or two sentences of at most 30 words, without words that need a second reading.
"""

from __future__ import annotations

import re
from itertools import chain

import pytest

from tests.plain_words import hard_words
from tests.promises_page import PAGE, ROOT, page, promises, sections

HARDER = [
    (r"\b(where|whatever|meanwhile|anew|told|tells? of|for ever)\b", "a plain word"),
]
"""Words that a promise must not have, although other texts may."""


def faults(promise: str) -> list[str]:
    """Return what is wrong with the form and the words of a promise."""
    sentences = re.split(r"(?<=[.!?]) +", promise)
    found = [f"over 30 words: {sentence}" for sentence in sentences if len(sentence.split()) > 30]
    found += [f"a hard word: {word}" for word, _ in hard_words(promise, HARDER)]
    if len(sentences) > 2:
        found.append(f"{len(sentences)} sentences")
    if re.match("(It|They|This|These|Its|Their|Here) ", promise):
        found.append("no subject of its own, though it stands alone on the page")
    if not promise.endswith(".") or "|" in promise:
        found.append("it must end with a full stop, and stand in a row of a table")
    return found


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == page(), "run scripts/promises"


@pytest.mark.parametrize("module", [*chain(*sections().values())])
def test_a_module_makes_promises_in_plain_words(module: str) -> None:
    stated = promises(module)
    assert stated or module.startswith("benchmarks/"), (
        "its docstring begins neither with `Promise: ` nor with `Promises:` and a list"
    )
    assert [fault for promise, _ in stated for fault in faults(promise)] == []
    assert [file for _, also in stated for file in also if not (ROOT / file).exists()] == []


@pytest.mark.parametrize(
    ("promise", "fault"),
    [
        ("word " * 31 + ".", "over 30 words"),
        ("It raises where it fails.", "a hard word: where"),
        ("One. Two. Three.", "3 sentences"),
        ("It is.", "no subject"),
        ("No end", "full stop"),
    ],
)
def test_a_fault_is_seen(promise: str, fault: str) -> None:
    assert fault in "; ".join(faults(promise))
