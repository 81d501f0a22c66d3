"""The check of a dataset: samples are read serially and by workers, and compared.

fastload check my_package.data:train_set
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from fastload._kit.cores import usable_cores
from fastload.check.equality import differing, same
from fastload.check.reading import (
    Raised,
    each,
    read,
    read_filled,
    require_dataset,
    switching_often,
)
from fastload.check.report import Finding, Findings, Report
from fastload.check.summary import summary
from fastload.errors import DatasetCopyError
from fastload.loader import DataLoader
from fastload.random.global_states import global_states, restore_global_states
from fastload.safety import Finding as Unknown
from fastload.safety import Survey

NAMES = {"thread": "threads", "process": "processes", "torch": "torch's processes"}

MOST_UNKNOWN = 5
"""The most findings of code for which threads are not known to be right. All may have one cause."""


def check(
    dataset: Any,
    *,
    samples: int = 64,
    workers: int | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda how: None,
) -> Report:
    """Read some samples of a dataset serially and by workers, compare them, and say what to do.

    The workers are those that a loader chooses by default. The report says which, and why. If a later epoch may be read
    by threads, threads read too.

    Args:
        dataset: a map-style or an iterable dataset. The check reads copies of it, as workers do, and about five times
            as many samples as it compares.
        samples: how many samples to compare. Those of a map-style dataset are spread over its length.
        workers: number of workers that read at once. None: one for each core, but two at least.
        seed: seed of the random streams, the same for all readings.
        say: called with "serially" before the serial readings, and with "in 2 threads" or the like before the others.

    It can find:

    - objects that cannot be copied for each worker;
    - samples that raise;
    - code that is not known to be thread-safe;
    - samples that differ between a serial loop and workers, or between two serial loops;
    - draws from global random states;
    - a buffer that samples share;
    - rows that differ between `fill_rows` and `__getitem__`;
    - an iterable dataset that is its own iterator, or whose workers repeat or leave out samples.

    It cannot find a race that did not happen in these readings.

    The command `fastload check` reads in a child process, and also reports a dataset that ends its process.

    Raises:
        TypeError: `dataset` is not a dataset.

    Returns:
        A report. `print` shows it.

    Examples:
        >>> from fastload.check import check
        >>> check(dataset, samples=8, workers=2).ok
        True
    """
    require_dataset(dataset)
    workers = workers or max(2, usable_cores())
    name = type(dataset).__name__
    with warnings.catch_warnings(record=True) as caught:  # also of files that copies leave open
        warnings.simplefilter("always")
        try:
            survey = Survey(dataset)
            found = survey.code(whole=True)
            chosen = DataLoader(dataset, 64, num_workers=workers).chosen()
            kinds = _kinds(chosen.kind, adapts=chosen.adapts)
            reads = NAMES.get(chosen.kind, "the loop itself")
            # What has no copy may still be read by processes.
            copy = dataset if survey.graph.refused else survey.own().dataset
            this = _Check(dataset, copy, kinds, workers, seed, say)
            say("serially")
            if isinstance(dataset, IterableDataset):
                expected = this.stream(samples)
                indices = [*range(len(expected))]
            else:
                indices = _spread(dataset, samples)
                expected = this.samples(indices)
        except DatasetCopyError as error:
            return Report(name, workers, findings=[Finding("fault", *_in_two(str(error)))])
    failed = _find_failures(indices, expected, this.findings)
    this.findings += [*map(_unknown, found.findings[:MOST_UNKNOWN]), *_warned(caught)]
    return Report(
        name,
        workers,
        samples=len(expected),
        serial_ms=this.serial_ms,
        kind=" and ".join(NAMES[kind] for kind in kinds),
        default=f"{reads} read it: {chosen.reason or 'FASTLOAD_WORKER_METHOD says so'}",
        failed=failed,
        findings=this.findings,
        copies=summary(survey.graph),
        compared=this.compared,
    )


def _kinds(chosen: str, *, adapts: bool) -> list[str]:
    """Return the kinds of workers to compare: the chosen one, and threads if a later epoch may take them."""
    if chosen == "process" and adapts:
        return ["process", "thread"]
    return [chosen if chosen in NAMES else "thread"]


def _unknown(finding: Unknown) -> Finding:
    """Return the finding that code is not plainly thread-safe."""
    what = "threads would share this" if finding.shared else "this is not plainly thread-safe"
    remedy = finding.remedy or "leave it out of samples, or declare it by fastload.threads_ok()"
    return Finding("note", f"{what}: {finding.what}", f"For threads, {remedy}.")


def _warned(caught: Iterable[warnings.WarningMessage]) -> list[Finding]:
    """Return a finding for each different warning of the loader during the readings."""
    said = dict.fromkeys(str(w.message) for w in caught)
    ours = (text for text in said if text.startswith("fastload: "))
    return [Finding("note", *_in_two(text.removeprefix("fastload: "))) for text in ours]


def _in_two(text: str) -> tuple[str, str]:
    """Return the first sentence and the rest."""
    what, _, advice = text.partition(". ")
    return what, advice


@dataclass(slots=True)
class _Check:
    """Reads a dataset serially and by workers, and collects what it finds."""

    dataset: Any
    copy: Any
    """What serial readings read."""
    kinds: list[str]
    workers: int
    seed: int
    say: Callable[[str], None]
    findings: Findings = field(default_factory=Findings)
    compared: bool = True
    serial_ms: float = 0.0

    def _serially(self, indices: Iterable[int] | None, **how: Any) -> list[Any]:
        began = perf_counter()
        got = read(self.copy, indices, 0, self.seed, "thread", **how)
        self.serial_ms = (perf_counter() - began) * 1000 / max(1, len(got))
        return got

    def _by_workers(self, kind: str, indices: Iterable[int] | None, **how: Any) -> list[Any]:
        return read(self.dataset, indices, self.workers, self.seed, kind, **how)

    def samples(self, indices: list[int]) -> list[Any]:
        """Read a map-style dataset, and return its samples."""
        before = global_states()
        buffers: list[int] = []
        expected = self._serially(indices, buffers=buffers)
        drawn = _drawn(before, global_states())
        if buffers:
            self.findings.fault(
                f"a sample changes when the next one is read: {len(buffers)} of {len(indices)} did",
                "Return a copy of the buffer that __getitem__ reuses.",
            )
        if drawn:  # samples that depend on this state differ now, after the draws
            self.compared = not differing(indices, expected, self._serially(indices))
            restore_global_states(before)  # so that the next readings draw what the first one drew
        self.findings += [_of_draws(w, matters=not self.compared) for w in drawn]
        if wrong := differing(indices, expected, self._serially(indices)):
            self.findings.fault(
                f"two serial readings differ, in {wrong}",
                "Samples depend on more than index and random stream. Draw from fastload.sample_generator() or "
                "fastload.sample_rng(), and keep nothing between samples.",
            )
            return expected
        self._find_races(indices, expected)
        if self.compared and (filled := read_filled(self.copy, indices, self.seed)):
            made = each(map(default_collate, ([sample] for sample in expected)))
            batches = [_raised(x) or batch for x, batch in zip(expected, made, strict=True)]
            if wrong := differing(indices, batches, filled):
                self.findings.fault(
                    f"fill_rows() writes other samples than __getitem__ returns, in {wrong}",
                    "Write what self[index] returns, with random numbers from run.keys; see docs/rows.md.",
                )
        return expected

    def _find_races(self, indices: list[int], expected: list[Any]) -> None:
        """Read by workers. A sample that differs from the serial reading depends on what they share.

        If samples cannot be compared, look only for samples that raise.
        """
        shown = list if self.compared else _errors
        for kind in self.kinds:
            self.say(f"in {self.workers} {NAMES[kind]}")
            # A race may not show at once. Processes share nothing that a race could change.
            for number in range(4 if kind == "thread" else 1):
                with switching_often() if number else nullcontext():
                    got = self._by_workers(kind, indices)
                if wrong := differing(indices, shown(expected), shown(got)):
                    otherwise = ', or use worker_method="process"' if kind == "thread" else ""
                    self.findings.fault(
                        f"{self.workers} {NAMES[kind]} read other samples than a serial loop, in {wrong}",
                        "Something that workers share keeps state between two calls. Look for it among the shared "
                        "objects, at the top of modules and in class attributes. Create it in "
                        f"__getitem__{otherwise}.",
                    )
                    return

    def stream(self, limit: int) -> list[Any]:
        """Read an iterable dataset, and return its samples."""
        findings, workers = self.findings, self.workers
        if _is_own_iterator(self.dataset):
            findings.note(
                "the dataset is its own iterator: two loops over it at once share one position",
                "A loader is safe, as each worker has a copy. Still, let __iter__ return a new iterator.",
            )
        before = global_states()
        expected = self._serially(None, limit=limit)
        drawn = _drawn(before, global_states())
        findings += [_of_draws(w, matters=True) for w in drawn]
        kind = self.kinds[0]
        self.say(f"in {workers} {NAMES[kind]}")
        got = self._by_workers(kind, None, limit=limit)
        raised = next(filter(None, _errors(got)), None)
        if raised is None:
            _check_division(expected, got, workers, findings)
        elif not any(_errors(expected)):
            findings.fault(
                f"with {workers} workers, the dataset raises {raised}, but not in a serial loop",
                "Check how it uses get_worker_info().",
            )
        again = self._serially(None, limit=limit)
        alike = same(expected, again)
        if not alike and not drawn:
            findings.note(
                "two serial readings of the stream differ",
                "Let its order and samples depend on fixed seeds and set_epoch() alone, or give it state_dict() and "
                "load_state_dict(state). Else a state of it cannot be resumed.",
            )
        self.compared = alike and len(expected) < limit and not _missing(got, expected)
        return expected


def _spread(dataset: Any, samples: int) -> list[int]:
    """Return the indices of some samples, spread over the dataset."""
    length = len(dataset)
    count = min(samples, length)
    return [i * length // count for i in range(count)]


def _find_failures(indices: Sequence[Any], got: Sequence[Any], findings: Findings) -> int:
    """Return how many samples raised."""
    failed = [(k, error) for k, error in zip(indices, _errors(got), strict=True) if error]
    if failed:
        index, first = failed[0]
        findings.insert(
            0,
            Finding(
                "fault",
                f"{len(failed)} of {len(got)} samples raise {first} (index {index!r} first)",
                'These samples will raise in the training loop too. Fix them, or skip them with on_error="skip".',
            ),
        )
    if not got:
        findings.fault(
            "the dataset has no samples",
            "There is nothing to compare. Check the paths and filters of the dataset.",
        )
    return len(failed)


def _errors(samples: Sequence[Any]) -> list[Raised | None]:
    return [*map(_raised, samples)]


def _raised(sample: Any) -> Raised | None:
    return sample if type(sample) is Raised else None


def _drawn(before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    """Return the owners of the global random states that have changed."""
    states = zip(("Python's", "NumPy's", "torch's"), before, after, strict=True)
    return [whose for whose, old, new in states if old != new]


def _of_draws(whose: str, *, matters: bool) -> Finding:
    """Return the finding that samples draw from a global random state. `matters`: they depend on it."""
    what = f"the dataset draws from {whose} global random state, which threads share"
    if not matters:
        return Finding("note", what, "No sample depends on these draws, so there is nothing to do.")
    advice = (
        "Samples are right but not reproducible. To reproduce them, draw from fastload.sample_generator() (torch) or "
        "fastload.sample_rng() (NumPy, Python's random)."
    )
    return Finding("note", what, advice)


def _check_division(expected: list[Any], got: list[Any], workers: int, findings: Findings) -> None:
    """Find samples that workers repeat or leave out."""
    if workers > 1 and (more := _repeated(got) - _repeated(expected)) > 0:
        findings.fault(
            f"{workers} workers repeat samples: {more} of {len(got)}",
            "Let each worker yield its part, by torch.utils.data.get_worker_info().id and .num_workers. If the order "
            "is shuffled, shuffle alike in all workers.",
        )
    elif not _missing(got, expected) and (lost := _missing(expected, got)):
        findings.fault(
            f"{workers} workers leave out samples of a serial loop: {lost} of {len(expected)}",
            "Divide the samples so that each belongs to one worker, also if their number does not divide evenly.",
        )


def _repeated(samples: list[Any]) -> int:
    """Return how many samples equal an earlier one."""
    return sum(any(same(x, y) for y in samples[:k]) for k, x in enumerate(samples))


def _missing(samples: list[Any], among: list[Any]) -> int:
    """Return how many samples are not in `among`."""
    return sum(not any(same(x, y) for y in among) for x in samples)


def _is_own_iterator(dataset: Any) -> bool:
    try:
        return iter(dataset) is dataset
    except Exception:  # the readings report the error
        return False
