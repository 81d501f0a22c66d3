"""Names for what a thread does: its recorder counts the time, and a running torch profiler sees a span."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

from fastload._kit.torch_private import all_threads_profiler_config, profiler_is_on
from fastload.telemetry.recorder import Recorder
from fastload.telemetry.snapshot import LOADER_STAGES


class _Local(threading.local):
    recorder: Recorder | None = None  # on the class: a thread without one finds it as fast


_local = _Local()


class recording:
    """Make `recorder` this thread's in a `with` block, and then restore the previous one.

    Args:
        recorder: gets the times of the stages in the block.

    Examples:
        >>> recorder = fastload.telemetry.Recorder()
        >>> with fastload.telemetry.recording(recorder), fastload.stage("decode"):
        ...     sample = dataset[0]
    """

    __slots__ = ("_before", "_recorder")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        self._before = _local.recorder
        _local.recorder = self._recorder

    def __exit__(self, *_: object) -> None:
        _local.recorder = self._before


class _Stage:
    """Holds only its name, so that all threads can share it, and a thread can enter it again inside itself."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        recorder = _local.recorder
        if recorder is not None:
            traced = span(self._name)
            traced.__enter__()
            recorder.running.append((self, perf_counter(), thread_time(), traced))

    def __exit__(self, *raised: Any) -> None:
        recorder = _local.recorder
        if recorder is None:
            return
        ended = perf_counter()
        running = recorder.running
        at = len(running) - 1
        while at >= 0 and running[at][0] is not self:
            at -= 1  # a generator paused inside another stage
        if at < 0:
            return  # it was entered in another thread
        _, started, cpu_started, traced = running.pop(at)
        recorder.add(self._name, ended - started, cpu_seconds=thread_time() - cpu_started)
        traced.__exit__(*raised)


def stage(name: str) -> AbstractContextManager[None]:
    """Name a part of reading a sample, for `loader.stats()` and for a torch profiler's trace.

    The time in the block counts under the name. The report knows the names "read" and "decode". A block that raises
    counts too. A stage inside another counts in both. While a torch profiler runs, the block is the span
    `fastload.<name>`; for spans of worker threads see `profiler_config`. A block costs about 1 us in a loader.
    Elsewhere it does nothing and costs 0.2 us. After some 30 names in one loader, further ones count as "other".

    Args:
        name: name of the part, of any words.

    Returns:
        A context manager, which threads may share.

    Raises:
        ValueError: `name` is empty, or one of the loader's own stages (sampler, sample, collate, pin).

    Examples:
        >>> def load(index):
        ...     with fastload.stage("decode"):
        ...         return dataset[index]
    """
    if not isinstance(name, str) or not name or name in LOADER_STAGES:
        raise ValueError(
            f"a stage name must be a non-empty string other than {', '.join(LOADER_STAGES)}, got {name!r}"
        )
    return _Stage(name)


if not TYPE_CHECKING:  # an editor would show no arguments
    stage = lru_cache(maxsize=256)(stage)


def add_to_stage(name: str, seconds: float, count: int, *, computed: bool) -> None:
    """Count `count` samples that together took `seconds` in a stage. `stage` does this for one sample.

    Args:
        name: as in `stage`.
        seconds: time of all samples together.
        count: number of samples.
        computed: whether the thread used a core all the time.

    Examples:
        >>> fastload.telemetry.add_to_stage("decode", 0.2, 64, computed=True)
    """
    recorder = _local.recorder
    if recorder is not None:
        recorder.add(name, seconds / count, count, cpu_seconds=seconds if computed else 0.0)


def span(name: str) -> AbstractContextManager[Any]:
    """Return the span `fastload.<name>` for a running torch profiler. Without one, return a null context in 0.1 us.

    Args:
        name: name of the span in the trace, after `fastload.`

    Examples:
        >>> with fastload.telemetry.span("copy"):
        ...     images = torch.zeros(64, 3, 224, 224).clone()
    """
    return record_function(f"fastload.{name}") if profiler_is_on() else _NO_SPAN


def waiting_span() -> AbstractContextManager[Any]:
    """Return a span for the loop's wait: `fastload::wait`, which TensorBoard's profiler counts as DataLoader.

    Examples:
        >>> with fastload.telemetry.waiting_span():
        ...     batch = next(iter(loader))
    """
    return _waiting() if profiler_is_on() else _NO_SPAN


@contextmanager
def _waiting() -> Iterator[None]:
    tensorboards = record_function("enumerate(DataLoader)#fastload.DataLoader.__next__")
    with tensorboards, record_function("fastload::wait"):
        yield


_NO_SPAN = nullcontext()


def profiler_config() -> Any:
    """Return an `experimental_config` with which a torch profiler sees the worker threads.

    Examples:
        >>> config = fastload.profiler_config()
        >>> with torch.profiler.profile(experimental_config=config) as profile:
        ...     batch = next(iter(loader))
    """
    return all_threads_profiler_config()
