"""The check of a dataset: samples are read serially and by workers, and compared.

fastload check my_package.data:train_set
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from fastload.check.equality import differing, same
from fastload.check.reading import (
    SERIALLY,
    Raised,
    Reading,
    noticing_seeds,
    read,
    read_filled,
    require_dataset,
    share_under_gil,
    switching_often,
)
from fastload.check.report import Finding, Findings, Report
from fastload.check.summary import summary
from fastload.errors import DatasetCopyError, SharedStateWarning
from fastload.random.global_draws import global_states, restore_global_states
from fastload.safety import Finding as Unknown
from fastload.safety import Survey

MOST_UNKNOWN = 5
"""The most findings of code for which threads are not known to be right. All may have one cause."""


@dataclass(slots=True)
class _Seen:
    """The results of the readings."""

    expected: list[Any]
    serial: Reading
    findings: Findings
    compared: bool = True


def check(
    dataset: Any,
    *,
    samples: int = 64,
    workers: int = 4,
    seed: int = 0,
    say: Callable[[str], None] = lambda how: None,
) -> Report:
    """Read some samples of a dataset serially and by workers, compare them, and say what to do.

    Threads read a dataset that is plainly safe in threads, and processes read any other. A loader may choose otherwise.

    Args:
        dataset: a map-style or an iterable dataset. The check reads copies of it, as workers do, and about five times
            as many samples as it compares.
        samples: how many samples to compare. Those of a map-style dataset are spread over its length.
        workers: number of workers that read at once.
        seed: seed of the random streams, the same for all readings.
        say: called with "serially" before the serial readings, and with "in 4 threads" or the like before the others.

    It can find:

    - objects that cannot be copied for each worker;
    - samples that raise;
    - code for which threads are not known to be right;
    - samples that differ between a serial loop and workers, or between two serial loops;
    - draws from global random states, and samples that seed these;
    - a buffer that samples share;
    - rows that differ between `fill_rows` and `__getitem__`;
    - an iterable dataset that is its own iterator, or whose workers repeat or leave out samples;
    - time under the GIL.

    It cannot find a race that did not happen in these readings.

    The command `fastload check` reads in a child process, and also reports a dataset that ends its process.

    Raises TypeError if `dataset` is not a dataset.
    """
    require_dataset(dataset)

    def begin() -> None:
        say(f"in {workers} {kind}")

    with warnings.catch_warnings(record=True) as caught:  # also of files that copies leave open
        warnings.simplefilter("always")
        try:
            survey = Survey(dataset)
            serially = survey.own().dataset
            found = survey.code(whole=True)
            kind = "threads" if found.plain else "processes"
            say(SERIALLY)
            if isinstance(dataset, IterableDataset):
                indices = None
                seen = _check_iterable(dataset, serially, samples, workers, seed, begin)
            else:
                indices = _spread(dataset, samples)
                rounds = (
                    4 if kind == "threads" else 1
                )  # processes share nothing that a race could change
                seen = _check_map(dataset, serially, indices, workers, seed, begin, rounds)
        except DatasetCopyError as error:
            return _refused(dataset, workers, error)
        count = len(seen.expected)
        failed = _find_failures(indices or range(count), seen.expected, seen.findings)
        gil_share = 0.0
        if failed < count and kind == "threads":
            gil_share = share_under_gil(dataset, indices, count, seed)
    seen.findings += [_unknown(each) for each in found.findings[:MOST_UNKNOWN]]
    seen.findings += _shared_state(caught)
    if gil_share > 0.5 and seen.serial.cpu_share > 0.5:
        seen.findings.note(
            f"{gil_share:.0%} of the reading time holds the GIL: threads take turns",
            'Do this work with NumPy, torch or Pillow, pack the data ready to use, or use worker_method="process". '
            "With threads, few workers are as fast as many.",
        )
    return Report(
        dataset=type(dataset).__name__,
        samples=count,
        workers=workers,
        serial_ms=seen.serial.ms,
        cpu_share=seen.serial.cpu_share,
        gil_share=gil_share,
        failed=failed,
        findings=seen.findings,
        kind=kind,
        copies=summary(survey.graph),
        compared=seen.compared,
    )


def _unknown(finding: Unknown) -> Finding:
    """Return the finding that code is not plainly safe in threads."""
    what = "threads would share this" if finding.shared else "this is not plainly safe in threads"
    remedy = finding.remedy or "leave it out of samples, or name it to fastload.threads_ok()"
    advice = f"Processes read it as torch does. For threads, {remedy}."
    return Finding("note", f"{what}: {finding.what}", advice)


def _refused(dataset: Any, workers: int, error: Exception) -> Report:
    """Return the report on a dataset that cannot be copied for workers."""
    finding = Finding("fault", *_in_two(str(error)))
    nothing = {"samples": 0, "serial_ms": 0.0, "cpu_share": 0.0, "gil_share": 0.0}
    return Report(
        dataset=type(dataset).__name__,
        workers=workers,
        findings=[finding],
        **nothing,  # type: ignore[arg-type]
    )


def _shared_state(caught: Iterable[warnings.WarningMessage]) -> list[Finding]:
    """Return a finding for each different warning of the loader during the readings."""
    said = {str(w.message): None for w in caught if issubclass(w.category, SharedStateWarning)}
    return [Finding("note", *_in_two(text.removeprefix("fastload: "))) for text in said]


def _in_two(text: str) -> tuple[str, str]:
    """Return the first sentence and the rest."""
    what, _, advice = text.partition(". ")
    return what, advice


def _check_map(
    dataset: Any,
    serially: Any,
    indices: list[int],
    workers: int,
    seed: int,
    begin: Callable[[], None],
    rounds: int,
) -> _Seen:
    findings = Findings()
    before = global_states()
    buffers: list[int] = []
    with noticing_seeds() as seeded:
        expected, _ = read(serially, indices, 0, seed, buffers=buffers)
    drawn = _drawn(before, global_states())
    if buffers:
        findings.fault(
            f"a sample changes when the next one is read: {len(buffers)} of {len(indices)} did",
            "Return a copy of the buffer that __getitem__ reuses.",
        )
    compared = True
    if drawn:  # samples that depend on this state differ now, after the draws
        compared = not differing(indices, expected, read(serially, indices, 0, seed)[0])
        restore_global_states(before)  # so that the next readings draw what the first one drew
    findings += [_of_draws(w, seeded=w in seeded, matters=not compared) for w in drawn]
    again, serial = read(serially, indices, 0, seed)  # as warm as the threads will be
    begin()
    got, _ = read(dataset, indices, workers, seed)
    if wrong := differing(indices, expected, again):
        findings.fault(
            f"two serial readings differ, in {wrong}",
            "Samples depend on more than index and random stream. Draw from fastload.sample_generator() or "
            "fastload.sample_rng(), and keep nothing between samples.",
        )
    else:
        readings = chain([got], _readings(dataset, indices, workers, seed, rounds - 1))
        _find_races(indices, expected, workers, readings, findings, compared=compared)
        if compared:
            _find_fills(serially, indices, expected, seed, findings)
    return _Seen(expected, serial, findings, compared)


def _spread(dataset: Any, samples: int) -> list[int]:
    """Return the indices of some samples, spread over the dataset."""
    length = len(dataset)
    count = min(samples, length)
    return [i * length // count for i in range(count)]


def _find_failures(indices: Sequence[Any], got: Sequence[Any], findings: Findings) -> int:
    """Return how many samples raised."""
    failed = [(k, sample) for k, sample in zip(indices, got, strict=True) if type(sample) is Raised]
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


def _readings(
    dataset: Any, indices: list[int], workers: int, seed: int, count: int
) -> Iterator[list[Any]]:
    """Yield what workers read, `count` times."""
    for _ in range(count):
        with switching_often():
            yield read(dataset, indices, workers, seed)[0]


def _find_races(
    indices: list[int],
    expected: list[Any],
    workers: int,
    readings: Iterable[list[Any]],
    findings: Findings,
    *,
    compared: bool,
) -> None:
    """Look at what workers read. A sample that differs from the serial reading depends on what they share.

    If samples cannot be compared, look only for samples that raise.
    """
    if not compared:
        expected = [_raised(sample) for sample in expected]
    for got in readings:
        found = got if compared else [_raised(sample) for sample in got]
        if wrong := differing(indices, expected, found):
            findings.fault(
                f"{workers} workers read other samples than a serial loop, in {wrong}",
                "Something that workers share keeps state between two calls. Look for it among the shared objects, "
                "at the top of modules and in class attributes. Create it in __getitem__, or use "
                'worker_method="process".',
            )
            return


def _find_fills(
    dataset: Any, indices: list[int], expected: list[Any], seed: int, findings: Findings
) -> None:
    """Compare the rows that the dataset fills itself, if it does, with what `__getitem__` returned."""
    if filled := read_filled(dataset, indices, seed):
        batches = [_raised(sample) or default_collate([sample]) for sample in expected]
        if wrong := differing(indices, batches, filled):
            findings.fault(
                f"fill_rows() writes other samples than __getitem__ returns, in {wrong}",
                "Write what self[index] returns, with random numbers from run.keys; see docs/rows.md.",
            )


def _raised(sample: Any) -> Raised | None:
    return sample if type(sample) is Raised else None


def _drawn(before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    """Return the owners of the global random states that have changed."""
    states = zip(("Python's", "NumPy's", "torch's"), before, after, strict=True)
    return [whose for whose, old, new in states if old != new]


def _of_draws(whose: str, *, seeded: bool, matters: bool) -> Finding:
    """Return the finding that samples draw from a global random state. `matters`: they depend on it."""
    what = f"the dataset draws from {whose} global random state, which threads share"
    source = "fastload.sample_generator() (torch) or fastload.sample_rng() (NumPy, Python's random)"
    if not matters:
        return Finding("note", what, "No sample depends on these draws, so there is nothing to do.")
    if seeded:
        what += ", and seeds that state: draws that should be equal, for an image and its mask, can differ"
        return Finding("fault", what, f"Draw from {source}.")
    advice = f"Samples are right but not reproducible. To reproduce them, draw from {source}."
    return Finding("note", what, advice)


def _check_iterable(
    dataset: Any,
    serially: Any,
    samples: int,
    workers: int,
    seed: int,
    begin: Callable[[], None],
) -> _Seen:
    findings = Findings()
    if _is_own_iterator(dataset):
        findings.note(
            "the dataset is its own iterator: two loops over it at once share one position",
            "A loader is safe, as each worker has a copy. Still, let __iter__ return a new iterator.",
        )
    before = global_states()
    with noticing_seeds() as seeded:
        expected, serial = read(serially, None, 0, seed, limit=samples)
    drawn = _drawn(before, global_states())
    findings += [_of_draws(w, seeded=w in seeded, matters=True) for w in drawn]
    begin()
    threaded, _ = read(dataset, None, workers, seed, limit=samples)
    raised = [sample for sample in threaded if type(sample) is Raised]
    if raised and not any(type(sample) is Raised for sample in expected):
        findings.fault(
            f"with {workers} workers, the dataset raises {raised[0]}, but not in a serial loop",
            "Check how it uses get_worker_info().",
        )
    if not raised:
        _check_division(expected, threaded, workers, findings)
    again, _ = read(serially, None, 0, seed, limit=samples)
    alike = len(again) == len(expected) and all(map(same, again, expected))
    if not alike and not drawn:
        findings.note(
            "two serial readings of the stream differ",
            "Let its order and samples depend on fixed seeds and set_epoch() alone, or give it state_dict() and "
            "load_state_dict(state). Else a state of it cannot be resumed.",
        )
    compared = alike and len(expected) < samples and not _missing(threaded, expected)
    return _Seen(expected, serial, findings, compared=compared)


def _check_division(
    expected: list[Any], threaded: list[Any], workers: int, findings: Findings
) -> None:
    """Find samples that workers repeat or leave out."""
    more = _repeated(threaded) - _repeated(expected)
    if workers > 1 and more > 0:
        findings.fault(
            f"{workers} workers repeat samples: {more} of {len(threaded)}",
            "Let each worker yield its part, by torch.utils.data.get_worker_info().id and .num_workers. If the order "
            "is shuffled, shuffle alike in all workers.",
        )
    elif not _missing(threaded, expected) and (lost := _missing(expected, threaded)):
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
