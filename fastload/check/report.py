"""What `check` found out about a dataset, and how it is said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fastload.check.summary import Summary

Level = Literal["fault", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a dataset, and what to do."""

    level: Level
    """"fault": threads would give other samples than a serial loop, or there is nothing to compare; "note": they
    would not, but read this."""
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level}: {self.what}\n       {self.advice}"


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` saw."""

    dataset: str
    samples: int
    workers: int
    serial_ms: float
    """Milliseconds a sample, read serially."""
    cpu_share: float
    """Share (0 to 1) of that in which the thread computed; the rest it waited. Time without a core is in neither."""
    gil_share: float
    """Estimated share (0 to 1) of reading in which the GIL is held: for how much of it another thread that wakes
    beside one reader does not get it at once."""
    threads_ratio: float | None
    """Samples a second in threads over those read serially; None where it could not be measured, as other
    processes took the cores, or nothing was read in threads."""
    failed: int = 0
    """How many of the samples raised, read serially."""
    findings: list[Finding] = field(default_factory=list)
    isolation: Summary = field(default_factory=Summary)
    """What each worker has its own copy of, and what all workers share."""
    compared: bool = True
    """Whether samples of threads can be compared with serial ones; not if they depend on global random draws."""

    @property
    def ok(self) -> bool:
        """Whether threads gave what a serial loop gives, and that was something for every sample."""
        return all(finding.level != "fault" for finding in self.findings)

    def __str__(self) -> str:
        head = (
            f"{self.dataset}: {self.samples} samples, {self.serial_ms:.3g} ms each, {self.cpu_share:.0%} of it "
            f"computing, {self.gil_share:.0%} of it under the GIL (estimated); {self.workers} threads: "
            + (
                "not measured"
                if self.threads_ratio is None
                else f"{self.threads_ratio:.2f} x serial"
            )
        )
        verdict = (
            "Threads gave the samples of a serial loop, bit for bit."
            if self.ok and self.compared
            else "Threads read it as a serial loop does; samples with global draws cannot be compared."
            if self.ok
            else "Nothing could be compared."
            if self.failed == self.samples
            else "Do not read this dataset with threads as it is."
        )
        return "\n".join([head, str(self.isolation), *map(str, self.findings), verdict])
