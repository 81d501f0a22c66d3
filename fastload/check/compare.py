"""Whether a data set can be read by threads: it is read serially and in threads, and compared.

fastload check my_package.data:train_set
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time
from typing import Any, Literal

from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe, default_collate

from fastload.check.equality import differing, same
from fastload.check.reading import (
    SERIALLY,
    Raised,
    Reading,
    noticing_seeds,
    read,
    read_filled,
    share_under_gil,
    switching_often,
)
from fastload.check.summary import Piece, Summary, summary
from fastload.cores import usable_cores
from fastload.errors import DatasetCopyError, SharedStateWarning
from fastload.faults import shown
from fastload.global_draws import global_states, restore_global_states
from fastload.isolation import Isolation
from fastload.telemetry import cores_busy_s

CROWDED, TICKS_S = 0.15, 0.02
"""Share of the cores that others may have, and of its time that a serial reading may lack one: beyond it a comparison
of two short readings says who else ran. The kernel counts what others have in ticks: two of 10 ms, at either end."""

Level = Literal["fault", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a data set, and what to do."""

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
            else "Do not read this data set with threads as it is."
        )
        return "\n".join([head, str(self.isolation), *map(str, self.findings), verdict])


@dataclass(slots=True)
class _Seen:
    """The results of the readings."""

    expected: list[Any]
    serial: Reading
    threads: Reading | None
    findings: list[Finding]
    compared: bool = True


def check(
    dataset: Any,
    *,
    samples: int = 64,
    workers: int = 4,
    seed: int = 0,
    say: Callable[[str], None] = lambda how: None,
) -> Report:
    """Read some samples of a data set serially and in threads, compare them, and say what to do.

    Args:
        dataset: a map-style or an iterable one. Copies of it are read, as workers read them, about five times as
            often as `samples` says.
        samples: how many are compared; of a map-style one, spread over its length.
        workers: threads that read at once.
        seed: of the random streams, the same for all readings.
        say: called with "serially" before the serial readings, and with "in 4 threads" before those in threads.

    What it can find: what cannot be copied for each worker; samples that raise; samples that differ between a
    serial loop and threads, or between two serial loops (the time); draws from global random state, and whether a
    sample seeds that state as well; a buffer that is used again; rows that `fill_rows` writes otherwise than
    `__getitem__` returns; an iterable dataset that is its own iterator, or
    that every worker would read whole; time under the GIL. A race that did not show in these readings it cannot find.

    The command of this name reads in a child process, and reports a dataset that ends it.

    Raises TypeError for what is no data set.
    """
    require_data_set(dataset)
    iterable = isinstance(dataset, IterableDataset)
    cores = usable_cores()
    started, others = perf_counter(), cores_busy_s() - process_time()
    with warnings.catch_warnings(record=True) as caught:  # also of files that copies leave open
        warnings.simplefilter("always")
        try:
            isolation = Isolation(dataset, None, None, copy_dataset="state")
            serially = isolation.own().dataset
        except DatasetCopyError as error:
            return _refused(dataset, workers, error)
        look = _check_iterable if iterable else _check_map
        say(SERIALLY)
        seen = look(dataset, serially, samples, workers, seed, say)
        expected, serial, threads, findings = (
            seen.expected,
            seen.serial,
            seen.threads,
            seen.findings,
        )
        failed = _find_failures(
            [*range(len(expected))] if iterable else _spread(dataset, samples), expected, findings
        )
        gil_share = 0.0
        if threads is not None and failed < len(expected):
            gil_share = share_under_gil(
                dataset, None if iterable else _spread(dataset, samples), len(expected), seed
            )
    said = _shared_state(caught)
    findings += said
    if gil_share > 0.5 and serial.cpu_share > 0.5:
        findings.append(
            Finding(
                "note",
                f"{gil_share:.0%} of reading is under the GIL: threads cannot share it",
                'Let it run in NumPy, torch or Pillow, pack the data ready to use, or use worker_method="process"; '
                "in threads, few workers do as well as many.",
            )
        )
    others = cores_busy_s() - process_time() - others - cores * TICKS_S
    lacked = max(serial.lacked_share, others / (cores * (perf_counter() - started)))
    if crowded := lacked > CROWDED:
        findings.append(
            Finding(
                "note",
                "other processes take the cores: how much sooner threads are cannot be measured",
                "Check again on a quiet machine.",
            )
        )
    return Report(
        dataset=type(dataset).__name__,
        samples=len(expected),
        workers=workers,
        serial_ms=serial.ms,
        cpu_share=serial.cpu_share,
        gil_share=gil_share,
        threads_ratio=None if threads is None or crowded else serial.ms / threads.ms,
        failed=failed,
        findings=findings,
        isolation=_with_classes(summary(isolation.plan, isolation.unreached), said),
        compared=seen.compared,
    )


def _refused(dataset: Any, workers: int, error: DatasetCopyError) -> Report:
    """Return the report on a dataset that no worker can have a copy of."""
    finding = Finding("fault", *_in_two(str(error)))
    nothing = {"samples": 0, "serial_ms": 0.0, "cpu_share": 0.0, "gil_share": 0.0}
    return Report(
        dataset=type(dataset).__name__,
        workers=workers,
        threads_ratio=None,
        findings=[finding],
        **nothing,  # type: ignore[arg-type]
    )


def _shared_state(caught: Iterable[warnings.WarningMessage]) -> list[Finding]:
    """Return what the loader warned of while it read, each once."""
    said = {str(w.message): None for w in caught if issubclass(w.category, SharedStateWarning)}
    return [Finding("note", *_in_two(text.removeprefix("fastload: "))) for text in said]


def _with_classes(summary: Summary, said: Iterable[Finding]) -> Summary:
    """Return `summary` with the classes to whose attributes samples assign, which all workers share."""
    names = [name for finding in said for name in _CLASS_ATTRIBUTE.findall(finding.what)]
    shared = [Piece(name, "class attribute", 1, why="data") for name in dict.fromkeys(names)]
    return Summary(summary.copied, [*summary.shared, *shared])


_CLASS_ATTRIBUTE = re.compile("class attribute `([^`]+)`")


def _in_two(text: str) -> tuple[str, str]:
    """Return the first sentence and the rest."""
    what, _, advice = text.partition(". ")
    return what, advice


def require_data_set(dataset: Any) -> None:
    """Raise TypeError, with what to give in its place, for what is no data set that threads could read."""
    if isinstance(dataset, TorchDataLoader):
        raise TypeError(f"expected a data set, got a {type(dataset).__name__}: give its data set")
    if isinstance(dataset, IterDataPipe | MapDataPipe):
        raise TypeError(
            "expected a data set, got a data pipe, which torch reads in processes: threads never do"
        )
    if isinstance(dataset, type):
        raise TypeError(f"expected a data set, got the class {dataset.__name__}: give an instance")
    if isinstance(dataset, IterableDataset):
        return  # whose length no reading needs
    if isinstance(dataset, str | bytes) or not all(
        hasattr(dataset, name) for name in ("__getitem__", "__len__")
    ):
        raise TypeError(
            f"expected a data set (with __getitem__ and __len__, or an IterableDataset), got {type(dataset).__name__}"
        )
    try:
        len(dataset)
    except Exception as error:  # code of the user's
        raise TypeError(
            f"the length of {type(dataset).__name__} cannot be told: len() raises {type(error).__name__}: "
            f"{shown(error, str)}. Return the number of samples, 0 or more"
        ) from error


def _check_map(
    dataset: Any,
    serially: Any,
    samples: int,
    workers: int,
    seed: int,
    say: Callable[[str], None],
) -> _Seen:
    findings: list[Finding] = []
    indices = _spread(dataset, samples)
    before = global_states()
    buffers: list[int] = []
    with noticing_seeds() as seeded:
        expected, _ = read(serially, indices, 0, seed, buffers=buffers)
    drawn = _drawn(before, global_states())
    if buffers:
        findings.append(
            Finding(
                "fault",
                f"a sample changes when the next one is read: {len(buffers)} of {len(indices)} did",
                "Return a copy of the buffer that is used again.",
            )
        )
    compared = True
    if drawn:  # samples that depend on it are others after what was drawn
        compared = not differing(indices, expected, read(serially, indices, 0, seed)[0])
        restore_global_states(before)  # so that the next readings draw what the first one drew
    findings += [_of_draws(w, seeded=w in seeded, matters=not compared) for w in drawn]
    again, serial = read(serially, indices, 0, seed)  # as warm as the threads will be
    say(in_threads(workers))
    _, threads = read(dataset, indices, workers, seed)
    if wrong := differing(indices, expected, again):
        findings.append(
            Finding(
                "fault",
                f"two serial readings differ, in {wrong}",
                "It depends on something beside index and random stream: draw from fastload.sample_generator() or "
                "fastload.sample_rng(), keep nothing between samples.",
            )
        )
    else:
        _find_races(dataset, indices, expected, workers, seed, findings, compared=compared)
        if compared:
            _find_fills(serially, indices, expected, seed, findings)
    return _Seen(expected, serial, threads, findings, compared)


def in_threads(workers: int) -> str:
    """Return the words for a reading in threads."""
    return f"in {workers} threads"


def _spread(dataset: Any, samples: int) -> list[int]:
    """The indices of some samples, spread over the data set."""
    length = len(dataset)
    count = min(samples, length)
    return [i * length // count for i in range(count)]


def _find_failures(indices: Sequence[Any], got: Sequence[Any], findings: list[Finding]) -> int:
    """How many samples raised."""
    failed = [(k, sample) for k, sample in zip(indices, got, strict=True) if type(sample) is Raised]
    if failed:
        index, first = failed[0]
        findings.insert(
            0,
            Finding(
                "fault",
                f"{len(failed)} of {len(got)} samples raise {first} (index {index!r} first)",
                'They raise in the training loop as well: mend them, or leave them out with on_error="skip".',
            ),
        )
    if not got:
        findings.append(
            Finding(
                "fault",
                "it has no samples",
                "Look at its paths and filters: there is nothing to compare.",
            )
        )
    return len(failed)


def _find_races(
    dataset: Any,
    indices: list[int],
    expected: list[Any],
    workers: int,
    seed: int,
    findings: list[Finding],
    *,
    compared: bool,
) -> None:
    """Read in threads, three times: what differs from the serial reading depends on what workers share.

    Of samples that cannot be compared, only what raises.
    """
    if not compared:
        expected = [_raised(sample) for sample in expected]
    for _ in range(3):
        with switching_often():
            threaded, _ = read(dataset, indices, workers, seed)
        if not compared:
            threaded = [_raised(sample) for sample in threaded]
        if wrong := differing(indices, expected, threaded):
            findings.append(
                Finding(
                    "fault",
                    f"in {workers} threads, other samples than serially, in {wrong}",
                    "Something that workers share keeps state between two calls: look for it among what is shared, at "
                    "the top of modules and in class attributes. Create it in __getitem__, or use "
                    'worker_method="process".',
                )
            )
            return


def _find_fills(
    dataset: Any, indices: list[int], expected: list[Any], seed: int, findings: list[Finding]
) -> None:
    """Compare the rows that the dataset fills itself, if it does, with what `__getitem__` returned."""
    if filled := read_filled(dataset, indices, seed):
        batches = [_raised(sample) or default_collate([sample]) for sample in expected]
        if wrong := differing(indices, batches, filled):
            findings.append(
                Finding(
                    "fault",
                    f"fill_rows() writes other samples than __getitem__ returns, in {wrong}",
                    "Write what self[index] returns, with random numbers from run.keys; see docs/rows.md.",
                )
            )


def _raised(sample: Any) -> Raised | None:
    return sample if type(sample) is Raised else None


def _drawn(before: Sequence[Any], after: Sequence[Any]) -> list[str]:
    """Return whose global random states have moved."""
    states = zip(("Python's", "NumPy's", "torch's"), before, after, strict=True)
    return [whose for whose, old, new in states if old != new]


def _of_draws(whose: str, *, seeded: bool, matters: bool) -> Finding:
    """Return what it means that samples draw from a global random state, if it `matters` to them."""
    what = f"it draws from {whose} global random state, which threads share"
    source = "fastload.sample_generator() (torch) or fastload.sample_rng() (NumPy, Python's random)"
    if not matters:
        return Finding("note", what, "No sample depends on it: there is nothing to do.")
    if seeded:
        what += ", and seeds it: draws that shall be alike, for an image and its mask, can differ"
        return Finding("fault", what, f"Draw from {source}.")
    advice = f"Samples are right but not reproducible. To reproduce them, draw from {source}."
    return Finding("note", what, advice)


def _check_iterable(
    dataset: Any,
    serially: Any,
    samples: int,
    workers: int,
    seed: int,
    say: Callable[[str], None],
) -> _Seen:
    findings: list[Finding] = []
    if _is_own_iterator(dataset):
        findings.append(
            Finding(
                "note",
                "it is its own iterator: two loops over it at once share one position",
                "Each worker has a copy, so a loader is safe; make __iter__ return a new generator all the same.",
            )
        )
    before = global_states()
    with noticing_seeds() as seeded:
        expected, serial = read(serially, None, 0, seed, limit=samples)
    drawn = _drawn(before, global_states())
    findings += [_of_draws(w, seeded=w in seeded, matters=True) for w in drawn]
    say(in_threads(workers))
    threaded, threads = read(dataset, None, workers, seed, limit=samples)
    raised = [sample for sample in threaded if type(sample) is Raised]
    if raised and not any(type(sample) is Raised for sample in expected):
        findings.append(
            Finding(
                "fault",
                f"in {workers} threads it raises {raised[0]}, and serially it does not",
                'Look at what it makes of torch.utils.data.get_worker_info(), or use worker_method="process".',
            )
        )
    each = threaded[:workers]
    if len(each) == workers > 1 and not raised and all(same(sample, each[0]) for sample in each):
        findings.append(
            Finding(
                "fault",
                f"each of {workers} workers yields the same samples: an epoch has every sample {workers} times",
                "Yield a part of them, by torch.utils.data.get_worker_info().id and .num_workers.",
            )
        )
    return _Seen(expected, serial, threads, findings, compared=not drawn)


def _is_own_iterator(dataset: Any) -> bool:
    try:
        return iter(dataset) is dataset
    except Exception:  # the readings say what it raises
        return False
