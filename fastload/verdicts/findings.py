"""What a verdict may find, and how it says so."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something for which threads are not known to be right.

    Args:
        what: a clause that names it, and the code that decides.
        proven: whether threads would read wrong samples, or fail. False if reading the code cannot tell.
        remedy: what would let threads read it.
        state: it is an object that threads share, and that keeps something from one sample to another.
        refused: the copies for threads will raise `DatasetCopyError` for it.
    """

    what: str
    proven: bool = False
    remedy: str = ""
    state: bool = False
    refused: bool = False


_FINDINGS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def finding(key: str, *, proven: bool | None = None, **names: Any) -> Finding:
    """Return the finding of the table under a key, with `names` in the place of its braces.

    `proven` replaces the table's value.
    """
    entry = _FINDINGS[key] | ({} if proven is None else {"proven": proven})
    texts = {k: entry[k].format(**names) for k in ("what", "remedy") if k in entry}
    return Finding(**entry | texts)
