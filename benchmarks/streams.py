"""Promise: Streams are measured beside those of other libraries: what is right after a resume, rate, state, resume.

A table says for each public fault whether each library has it. Each number of samples is of 480, or of the epochs
that follow the resume together. Then samples go through a shuffle buffer. Each library reads by its own recipe, and
nothing calls `set_epoch` of what Accelerate prepared.
"""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from time import perf_counter
from typing import Any

from benchmarks._measure import NotMeasuredError
from benchmarks._report import Aim, Results, Row, row
from benchmarks._run import Case
from benchmarks.stream_recipes import (
    RECIPES,
    NoSuchFeatureError,
    Recipe,
    Stream,
    Task,
    in_accelerate,
    in_lightning,
    numbers,
    written,
)
from fastload._kit.tables import columns
from fastload.measure.processes import cpu_seconds

TITLE = "streams: JSON lines of 60 bytes in 16 files, shuffle buffer of 100,000, batches of 64, first 90 % of an epoch"
REPEATS = 3
PACKAGES = ("datasets", "grain", "litdata", "torchdata", "accelerate", "lightning")


# ---- what is right ----


def _epoch(stream: Stream, epoch: int, count: int | None = None) -> list[int]:
    stream.set_epoch(epoch)
    return numbers(stream.loader, count)


def _resumed(
    recipe: Recipe, task: Task, stops: Sequence[int] = (5,), last: Any = (), **how: Any
) -> tuple[list[int], list[int]]:
    """Read an epoch that is stopped and resumed, the last time with the changes of `last`."""
    task = task._replace(**how)
    found, state = [], None
    for stop in (*stops, None):
        stream = recipe(task if stop is not None else task._replace(**dict(last)))
        if state is not None:
            stream.loader.load_state_dict(state)
        found += _epoch(stream, 0, stop)
        state = pickle.loads(pickle.dumps(stream.loader.state_dict()))
    return found, _epoch(recipe(task), 0)


def _later_epoch(recipe: Recipe, task: Task, stop: int | None) -> tuple[list[int], list[int]]:
    """Return the second epoch of a loader that resumed in the first, and of one that did not."""
    stopped, resumed, whole = (recipe(task) for _ in range(3))
    _epoch(stopped, 0, stop)
    resumed.loader.load_state_dict(pickle.loads(pickle.dumps(stopped.loader.state_dict())))
    if stop is not None:
        _epoch(resumed, 0)
    _epoch(whole, 0)
    return _epoch(resumed, 1), _epoch(whole, 1)


def _few_files(recipe: Recipe, task: Task) -> tuple[list[int], list[int]]:
    """Return as many numbers as workers that read something, and as many as there are."""
    stream = recipe(task._replace(workers=3, buffer=64, says_reader=True))
    stream.set_epoch(0)
    read = [(batch["process"].tolist(), batch["worker"].tolist()) for batch in stream.loader]
    busy = max(len(set(chain.from_iterable(of))) for of in zip(*read, strict=True))
    return [*range(busy)], [0, 1, 2]


SHARDS, PER_SHARD = 8, 60
TEXT = "0123456789 abcdefghijklmnopqrstuvwxyz"
SIZES = 480, 160, 3
"""Different numbers in an epoch: of all samples, of those that the filter keeps, of workers."""
FAULTS: dict[str, Callable[..., tuple[list[int], list[int]]]] = {
    "resumed twice": partial(_resumed, stops=(5, 5)),
    "saved again right after a resume": partial(_resumed, stops=(5, 0, 5)),
    "map and filter in batches, then a resume": partial(_resumed, steps=True),
    "shuffle buffer, then a resume": partial(_resumed, buffer=64),
    "the same, without workers": partial(_resumed, buffer=64, workers=0),
    "the epoch after a resume": partial(_later_epoch, stop=5),
    "the epoch after a resume at an epoch's end": partial(_later_epoch, stop=None),
    "shuffle of 8 files: each of 3 workers reads": _few_files,
    "saved with 2 workers, resumed with 3": partial(_resumed, last={"workers": 3}),
    "Accelerate: resumed in the second epoch": in_accelerate,
    "Lightning: resumed in the second epoch": partial(in_lightning, stop=65),
}
"""Each returns the numbers of the samples that came, and those of an undisturbed run."""


def _verdict(fault: str, name: str, task: Task) -> str:
    try:
        found, expected = FAULTS[fault](RECIPES[name], task)
    except NoSuchFeatureError:
        return "-"
    except ImportError as missing:
        return f"not run: no {missing.name}"
    except Exception as error:
        traceback.print_exc()
        return f"raises {type(error).__name__}"
    whole = Counter(expected)
    if len(whole) not in SIZES or len({*whole.values()}) > 1:
        return "wrong without a resume"
    if found == expected:
        return "right"
    lost, twice = (whole - Counter(found)).total(), (Counter(found) - whole).total()
    if lost or twice:
        return f"{lost} lost, {twice} twice"
    return "right" if "workers, resumed" in fault else "another order"


# ---- the benchmark ----

WORKERS = 0, 2
BUFFERED = [name for name in RECIPES if name != "StatefulDataLoader"]
"""Without `datasets`, StatefulDataLoader has no shuffle buffer."""
FAILED = "after a resume at 90 %, the next batch raises"
FIGURES = (
    ("rate", "samples/s", Aim(">=", 1)),
    ("cpu_us", "us CPU a sample", None),
    ("resume_s", "s", Aim("<=", 1)),
    ("state_kb", "kB", None),
)


def cases(*, smoke: bool) -> list[Case]:
    count = 2_000 if smoke else 400_000
    judged = [Case(f"{name}: right or wrong", {"name": name}) for name in RECIPES]
    return judged + [
        Case(f"{name}, {workers} workers", {"name": name, "workers": workers, "count": count})
        for name, workers in product(BUFFERED, WORKERS)
    ]


def measure(*, name: str, workers: int = 0, count: int = 0) -> Any:
    shards, per_shard = (16, count // 16) if count else (SHARDS, PER_SHARD)
    with tempfile.TemporaryDirectory() as folder:
        paths = written(folder, shards, per_shard, {"text": TEXT} if count else {})
        try:
            if count:
                task = Task(paths, workers, buffer=count // 4, batch=64)
                return _through_buffer(RECIPES[name], task, int(0.9 * count / 64))
            RECIPES[name](Task(paths))
        except ImportError as missing:
            raise NotMeasuredError(str(missing)) from missing
        return {fault: _verdict(fault, name, Task(paths)) for fault in FAULTS}


def _through_buffer(recipe: Recipe, task: Task, steps: int) -> dict[str, Any]:
    stream = recipe(task)
    stream.set_epoch(0)
    cpu, began = cpu_seconds() or 0, perf_counter()
    batches = iter(stream.loader)
    for _ in range(steps):
        next(batches)
    samples, seconds = steps * task.batch, perf_counter() - began
    cpu = (cpu_seconds() or 0) - cpu
    state = stream.loader.state_dict()
    del batches, stream
    figures = {"rate": samples / seconds, "cpu_us": 1e6 * cpu / samples}
    figures["state_kb"] = len(pickle.dumps(state)) / 1000
    resumed = recipe(task)
    began = perf_counter()
    try:
        resumed.loader.load_state_dict(state)
        resumed.set_epoch(0)
        batches = iter(resumed.loader)
        next(batches)
    except Exception as error:
        return {**figures, FAILED: type(error).__name__}
    return {**figures, "resume_s": perf_counter() - began}


def rows(results: Results) -> list[Row]:
    found = []
    for key, unit, aim in FIGURES:
        having = {
            case: [of if of and key in of else None for of in results[case]] for case in results
        }
        for name, workers in product(BUFFERED, WORKERS):
            case, ours = (f"{of}, {workers} workers" for of in (name, "fastload"))
            found.append(row(having, case, key, name=f"{key}: {case}", unit=unit))
            if not name.startswith("fastload"):
                of = partial(row, having, ours, key, unit=unit, aim=aim)
                found.append(of(name=f"{key}: fastload beside {case}", against=(case, key)))
    return found


def text(results: Results) -> str:
    """Return the table of what is right."""
    judged = {
        name: [found for found in results[f"{name}: right or wrong"] if found] for name in RECIPES
    }
    lines = [
        (
            fault,
            *(
                " / ".join(sorted({str(of[fault]) for of in judged[name]})) or "not run"
                for name in RECIPES
            ),
        )
        for fault in FAULTS
    ]
    failed = {
        f"{case}: {FAILED} {of[FAILED]}"
        for case in results
        for of in results[case]
        if of and FAILED in of
    }
    return "\n".join(
        [*columns([("", *RECIPES), *lines], left=range(1 + len(RECIPES))), *sorted(failed)]
    )
