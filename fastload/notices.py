"""What the threads notice and the loop is to warn of."""

from __future__ import annotations

from collections import deque


class Notices:
    """Collects warnings, which the loop gives. No lock: threads append to deques and the loop pops, which is atomic.

    Attributes:
        warnings: kinds and sentences; the loop warns once for each kind.
        noticed: categories and sentences of samples that depend on other threads: "the dataset seems to ...".
        shared: the first object with a state that the workers share; "" if there is none, None without workers.
    """

    def __init__(self) -> None:
        self.warnings: deque[tuple[str, str]] = deque()
        self.noticed: deque[tuple[type[Warning], str]] = deque()
        self.shared: str | None = None

    def __bool__(self) -> bool:
        return bool(self.warnings or self.noticed)

    def warn(self, kind: str, sentence: str) -> None:
        """Let the loop warn, once for each kind."""
        self.warnings.append((kind, sentence))

    def notice(self, category: type[Warning], sentence: str) -> None:
        """Let the loop warn, once for each sentence, that the dataset seems to depend on other threads."""
        self.noticed.append((category, sentence))
        if category is not UserWarning and self.shared == "":
            self.shared = f"samples seem to {sentence.partition(': ')[0]}"
