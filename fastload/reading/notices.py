"""Warnings on their way from the threads to the loop."""

from __future__ import annotations

import warnings
from collections import deque


class Notices:
    """Collects warnings, which the loop issues. It needs no lock: appending to and popping from a deque are atomic.

    Args:
        warned: the kinds of warnings that the loader has given already. It gives each once.

    Attributes:
        warnings: kinds, sentences and categories.
    """

    def __init__(self, warned: set[str]) -> None:
        self.warned = warned
        self.warnings: deque[tuple[str, str, type[Warning]]] = deque()

    def warn(self, kind: str, sentence: str, category: type[Warning] = RuntimeWarning) -> None:
        """Let the loop warn, once for each kind."""
        self.warnings.append((kind, sentence, category))

    def tell(self, stacklevel: int) -> None:
        """Issue the warnings. Call it in the loop before it takes a batch: if warnings are errors, none is lost."""
        while self.warnings:
            kind, sentence, category = self.warnings.popleft()
            if kind not in self.warned:
                self.warned.add(kind)
                warnings.warn(f"fastload: {sentence}", category, stacklevel=stacklevel + 1)
