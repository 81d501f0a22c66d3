"""What a verdict may find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Why code is not plainly safe in threads.

    Args:
        what: a clause that names it, and the code that decides.
        remedy: what would make it plainly safe, or "".
        shared: threads are known to share it, and samples change it.
        changes: samples change something, which may be the worker's own.
    """

    what: str
    remedy: str = ""
    shared: bool = False
    changes: bool = False
