"""The report of `check` about a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from fastload._kit.texts import counted

Level = Literal["fault", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a dataset, and what to do.

    Examples:
        >>> from fastload.check import Finding
        >>> print(Finding("note", "samples draw", "Nothing to do."))
        note: samples draw
               Nothing to do.
    """

    level: Level
    """"fault": samples of workers would differ from those of a serial loop, or nothing can be compared. "note":
    workers give the same samples, but the user should know this."""
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}\n       {self.advice}"


class Findings(list[Finding]):
    """Facts about a dataset, in the order of the report."""

    def fault(self, what: str, advice: str) -> None:
        """Add a fault."""
        self.append(Finding("fault", what, advice))

    def note(self, what: str, advice: str) -> None:
        """Add a note."""
        self.append(Finding("note", what, advice))


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `check`.

    Examples:
        >>> from fastload.check import check
        >>> report = check(dataset, samples=8, workers=2)
        >>> report.samples, report.failed
        (8, 0)
    """

    dataset: str
    workers: int
    samples: int = 0
    """Number of samples that were compared."""
    serial_ms: float = 0.0
    """Milliseconds per sample, read serially."""
    kind: str = "threads"
    """The kinds of workers that read here: "threads", "processes", or "processes and threads"."""
    default: str = ""
    """What reads by default, and why. `loader.chosen()` says it for a loader of yours."""
    failed: int = 0
    """Number of samples that raised in the serial reading."""
    findings: list[Finding] = field(default_factory=list)
    copies: str = ""
    """What each worker copies, and what all workers share."""
    compared: bool = True
    """True if samples of workers were compared with serial ones. They cannot be if they depend on global draws, if two
    readings differ, or if a stream has more samples than were read."""

    @property
    def ok(self) -> bool:
        """True if workers gave what a serial loop gives, for every sample."""
        return all(finding.level != "fault" for finding in self.findings)

    def __str__(self) -> str:
        workers = self.kind.capitalize()
        read = f"{counted(self.samples, 'sample')}, {self.serial_ms:.3g} ms each"
        lines = [f"{self.dataset}: {read}; {counted(self.workers, 'worker')}: {self.kind}"]
        if self.default:
            lines += [f"By default, with num_workers={self.workers}, {self.default}", self.copies]
        lines += self._findings()
        if self.ok and self.compared:
            lines.append(f"{workers} gave the samples of a serial loop, bit for bit.")
        elif self.ok:
            lines.append(
                f"{workers} read this dataset without a fault. Its samples cannot be compared with a serial loop's: "
                "they draw from global random state, two readings differ, or the stream has more of them."
            )
        elif self.failed == self.samples:
            lines.append("Nothing could be compared.")
        elif self.failed and sum(finding.level == "fault" for finding in self.findings) == 1:
            lines.append(
                f"{workers} gave the other samples as a serial loop does. Fix those that raise."
            )
        else:
            lines.append(
                f"This dataset is not safe to read with {counted(self.workers, 'worker')}. Fix what is listed above "
                "first."
            )
        return "\n".join(lines)

    def _findings(self) -> Iterator[str]:
        """Yield the lines of the findings. Several with the same advice stand above it."""
        alike: dict[tuple[Level, str], list[str]] = {}
        for finding in self.findings:
            alike.setdefault((finding.level, finding.advice), []).append(finding.what)
        for (level, advice), facts in alike.items():
            *others, last = facts
            yield from (f"{level}: {what}" for what in others)
            yield str(Finding(level, last, advice))
