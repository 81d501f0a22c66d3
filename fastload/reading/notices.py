"""Warnings on their way from the threads to the loop."""

from __future__ import annotations

from collections import deque

from fastload.reading.tripwire import Tripwire


class Notices:
    """Collects warnings, which the loop issues. It needs no lock: appending to and popping from a deque are atomic.

    Attributes:
        warnings: kinds and sentences. The loop warns once for each kind.
        noticed: pairs of a warning category and the end of a sentence "the dataset seems to ...": what samples do
            that depends on other threads. The loop warns once for each.
        tripwire: finds faults, for which the loop raises.
        shared: a clause that names a state which the workers share; "" if there is none, None if no
            workers run.
    """

    def __init__(self, tripwire: Tripwire) -> None:
        self.tripwire = tripwire
        self.warnings: deque[tuple[str, str]] = deque()
        self.noticed: deque[tuple[type[Warning], str]] = deque()
        self.shared: str | None = None

    def __bool__(self) -> bool:
        return bool(self.warnings or self.noticed)

    def warn(self, kind: str, sentence: str) -> None:
        """Let the loop warn, once for each kind."""
        self.warnings.append((kind, sentence))

    def notice(self, category: type[Warning], sentence: str) -> None:
        """Let the loop warn, once for each sentence, that the dataset depends on other threads."""
        self.noticed.append((category, sentence))
        if category is not UserWarning and self.shared == "":
            self.shared = f"samples seem to {sentence.partition(': ')[0]}"
