"""Words that make a reader stop. The test of texts looks for them."""

from __future__ import annotations

import re
from collections.abc import Iterator

HABITS = [
    (r"\bbehind\b", '"after", or the name of the relation'),
    (r"\bso (many|much|few)\b", "the number, or its name"),
    (r"\b(who|whom|whoever|nobody)\b", "the actor: caller, worker, rank, process or user"),
    (r"\b(is|are|was|were) (told|looked at)\b", "the actor and the active voice: the loader warns"),
    (r"\bdata[ -]sets?\b", '"dataset"'),
    (r"\bpictures?\b", '"image"'),
    (r"\bmini-?batch(es)?\b", '"batch"'),
    (r"\b(data points?|training examples?)\b", '"sample"'),
    (r"\b(go|goes|went) on\b", '"resumes" or "continues"'),
    (r"\bsave (for|that)\b", '"except" or "unless"'),
    (r"\bthere (is|are|was|were) none\b", 'what is missing: "no index was given"'),
    (r"\b(is|are|be) no (set|file|archive|image|number|JSON|Arrow)\b", '"is not a ..."'),
]
"""Pairs of a pattern, and what to write instead."""

PRIVATE = [
    (r"\b(plainly )?(safe|right) in threads\b", '"thread-safe"'),
    (r"\bhas one of\b", '"process-wide state"'),
    (r"\btakes (threads|processes)\b", '"uses worker processes"'),
    (r"\b(in threads, samples can be wrong)\b", '"data race"'),
    (r"\b(vouch(es|ed)?)\b", '"declare ... thread-safe"'),
    (r"\b(verdicts?|judged?|judges)\b", '"whether it is thread-safe", or "result"'),
    (r"\btripwires?\b", '"check"'),
    (r"\brooms\b", '"folders"'),
    (r"\blanes?\b(?!:)", '"shard of a worker"'),
    (r"\bdrivers?\b", '"thread of the loop\'s process"'),
    (r"\bkeyed\b", '"seeded"'),
    (r"\b(un)?rout(ed|es?|ing)\b", '"patched per thread"'),
]
"""Names of the code, which users do not know. A page for readers of the code sets them as code."""


def hard_words(text: str, *, private: bool = True) -> Iterator[tuple[str, str]]:
    """Yield each hard word of a text, and what to write instead. `private`: names of the code are hard words, too."""
    for pattern, instead in HABITS + PRIVATE * private:
        if hit := re.search(pattern, text, flags=re.I):
            yield hit[0], instead
