"""Warnings on their way from the threads to the loop."""

from __future__ import annotations

import warnings
from collections import deque


class Notices:
    """Collects warnings, which the loop issues. It needs no lock: appending to and popping from a deque are atomic.

    Args:
        warned: the warnings that the loader has given already. It gives each once.

    Attributes:
        warnings: kinds and sentences. The loop warns once for each kind.
        noticed: ends of a sentence "the dataset seems to ...": what samples do that depends on other threads. The loop
            warns once for each.
        shared: a clause that names a state which the workers share; "" if there is none, None if no
            workers run.
    """

    def __init__(self, warned: set[str] | None = None) -> None:
        self.warned = set[str]() if warned is None else warned
        self.warnings: deque[tuple[str, str]] = deque()
        self.noticed: deque[str] = deque()
        self.shared: str | None = None

    def __bool__(self) -> bool:
        return bool(self.warnings or self.noticed)

    def warn(self, kind: str, sentence: str) -> None:
        """Let the loop warn, once for each kind."""
        self.warnings.append((kind, sentence))

    def tell(self, stacklevel: int) -> None:
        """Issue the warnings. Call it in the loop's thread."""
        while self.warnings:
            kind, what = self.warnings.popleft()
            if kind not in self.warned:
                self.warned.add(kind)
                warnings.warn(f"fastload: {what}", RuntimeWarning, stacklevel=stacklevel + 1)

    def notice(self, sentence: str) -> None:
        """Let the loop warn, once for each sentence, that the dataset depends on other threads."""
        self.noticed.append(sentence)
