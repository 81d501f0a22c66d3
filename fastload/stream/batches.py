"""The batches of a stream: a thread reads the messages, workers decode them, and a batch comes by size or by deadline.

    reader: next(source) -> the open batch, and a job -> worker: decode; the last of a closed batch: collate -> loop

The reader closes a batch that is full. The loop closes one whose deadline has passed while the loop waits. So a batch
becomes fuller while the loop is busy with the one before it. A worker collates it. Without workers, the loop decodes
and collates.

The threads hold `MessageBatches`, and never the generator that the user holds. So a generator that the user drops is
collected, and its finalizer calls `MessageBatches.end`. That sets flags, wakes threads and never waits: it may run in
any thread, also in the middle of a section under the lock. The lock is re-entrant for this. The threads are daemons,
because a source that waits for ever must not keep the process alive.
"""

from __future__ import annotations

import atexit
import copy
import math
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch

from fastload._kit.integers import integer
from fastload._kit.torch_private import (
    make_worker_info,
    set_worker_info,
    show_worker_info_in_threads,
)
from fastload._kit.user_errors import annotate, contained
from fastload.engine import threads, waiting
from fastload.errors import SharedStateWarning, StreamError, WorkerCrashError
from fastload.random.streams import Streams, chosen_modules, entered, routable
from fastload.reading.modes import Modes
from fastload.safety import Survey, WorkerCopies
from fastload.stream.batch import MessageBatch
from fastload.stream.message import Message, Poison, Source

AHEAD = 2
"""The batches that the reader is ahead of the loop, at most. The messages in them are decoded side by side."""

EXIT_SECONDS = 1.0
"""How long the end of the interpreter waits for calls in progress: a thread in C++ code could abort the process."""


class _Decoding:
    """The root of what each worker copies. Its paths begin with `dataset.decode`."""

    def __init__(self, decode: Callable[[Any], Any]) -> None:
        self.decode = decode


class MessageBatches(Iterator[MessageBatch]):
    """The batches of a source, in its order. `start` starts the threads, and one thread iterates, once.

    Args:
        source: a thread of its own iterates over it.
        decode, collate_fn, batch_size, max_wait_ms, num_workers: see `fastload.predict`.

    Attributes:
        error: the exception that ended the source. The loop raises it after the answers of all earlier messages.
        idle_s: seconds in which the loop waited for a message, and none was there.
        threads: the reader and the workers.
    """

    def __init__(
        self,
        source: Source,
        decode: Callable[[Any], Any],
        collate_fn: Callable[[list[Any]], Any],
        *,
        batch_size: int,
        max_wait_ms: float,
        num_workers: int,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
            if integer(name, value) < least:
                raise ValueError(f"{name} must be {least} or more, got {value}")
        if not isinstance(max_wait_ms, int | float) or not 0 <= max_wait_ms < math.inf:
            raise ValueError(f"max_wait_ms must be a number, 0 or more, got {max_wait_ms!r}")
        self.error: Exception | None = None
        self.idle_s = 0.0
        self.threads: list[threading.Thread] = []
        self.source = source
        self._decode, self.collate_fn = decode, collate_fn
        self._batch_size, self._max_wait_s = batch_size, max_wait_ms / 1e3
        self._num_workers = num_workers
        self._process = os.getpid()  # whose threads they are
        # Owns the attributes from here to the fault. Each thread holds it for a few instructions.
        self._lock = threading.RLock()
        self._line = deque[MessageBatch]()  # read, and not yet given. Only the last may be open
        self._ahead = 0  # messages in the line
        self._read_all = False
        self._closed = False
        self._reader_closes = False  # the source, because no other thread waits to do that
        self._fault: BaseException | None = None
        # The loop and the reader wait here, and each worker for its next job: the position of a message in a batch,
        # None to collate the batch, or no batch at the end.
        self._changes = waiting.Changes(self._lock)
        self._jobs: SimpleQueue[tuple[MessageBatch, int | None] | None] = SimpleQueue()

    # ---- the loop ----

    def start(self, device: torch.device) -> None:
        """Start the threads, and return once they are set up.

        Args:
            device: the model's. On an accelerator, the threads get the loop's current device.

        Raise DatasetCopyError if `decode` or `collate_fn` can neither be copied nor shared.
        """
        self._process = os.getpid()
        show_worker_info_in_threads()
        index = torch.accelerator.current_device_index() if device.type != "cpu" else None
        set_up: SimpleQueue[None] = SimpleQueue()
        _running.add(self)
        with threads.torch_threads_kept() as torch_threads:
            prepare = partial(threads.become_worker, index, torch_threads)
            common = self._run, set_up, prepare
            for i, own in enumerate(self._copies()):
                work = partial(self._work, i, own)
                self.threads.append(threads.started(f"fastload-worker-{i}", *common, work))
            self.threads.append(threads.started("fastload-reader", *common, self._read))
            for _ in self.threads:
                set_up.get()

    def _copies(self) -> Iterator[WorkerCopies]:
        """Yield what each worker owns."""
        if not self._num_workers:
            return
        survey = Survey(_Decoding(self._decode), self.collate_fn)
        for i in range(self._num_workers):
            with Modes().entered():  # inference mode would make inference tensors of copies
                own = survey.own()
            if i == 0:
                survey.warn_of_shared(stacklevel=5)
                for fault in survey.code(whole=True).findings:
                    if fault.shared:
                        said = f"fastload: data race, so samples can be wrong: {fault.what}"
                        warnings.warn(said, SharedStateWarning, stacklevel=5)
                        break
            yield own

    def __next__(self) -> MessageBatch:
        began = perf_counter()
        self._wait(lambda: bool(self._line) or self._read_all)
        self.idle_s += perf_counter() - began
        if not self._line:
            raise StopIteration
        batch = self._line[0]
        left = batch.arrived + self._max_wait_s - perf_counter()
        self._wait(lambda: batch.closed or self._read_all, max(0.0, left))
        with self._lock:
            # If messages are left to decode, the worker that decodes the last one sees that the batch is closed.
            # Otherwise a worker has to be asked to collate it, with its own copy of `collate_fn`.
            is_decoded = not (batch.closed or batch.left)
            batch.closed = True
        if not self._num_workers:
            for k in range(len(batch.messages)):
                self._decode_at(batch, k, self._decode)
            self._collate(batch, self.collate_fn)
        elif is_decoded:
            self._jobs.put((batch, None))
        self._wait(lambda: batch.made)
        with self._lock:
            self._line.popleft()
            self._ahead -= len(batch.messages)
        self._changes.tell()  # the reader has room
        return batch

    def _wait(self, until: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait. Raise StopIteration if the stream was closed, WorkerCrashError after a fault, StreamError in a fork."""
        # None of the threads is in a fork, and one may have held the lock.
        if os.getpid() != self._process:
            raise StreamError(
                f"the stream belongs to process {self._process}, and this process is a fork of it. Call predict() "
                "here, with a source of its own"
            )
        self._changes.wait(until, seconds)
        if self._fault is not None:
            message = "a fault of fastload ended a thread of the stream"
            raise WorkerCrashError(message) from self._fault
        if self._closed:
            raise StopIteration

    # ---- the threads ----

    def _run(
        self, set_up: SimpleQueue[None], prepare: Callable[[], None], work: Callable[[], None]
    ) -> None:
        """Make this thread like a loader's worker, and let it work."""
        try:
            try:
                prepare()
            finally:
                set_up.put(None)
            work()
        except BaseException as exc:
            self._fault = exc
            self.end()

    def _read(self) -> None:
        """Read the source, at most `AHEAD` batches ahead of the loop."""
        try:
            for number, message in enumerate(self.source):
                if not isinstance(message, Message):
                    raise TypeError(
                        f"{type(self.source).__name__} must yield fastload.stream.Message, got {message!r:.200}"
                    )
                self._add(number, message)
                self._changes.wait(lambda: self._ahead < AHEAD * self._batch_size)
                if self._closed:
                    break
        except BaseException as exc:
            if not self._closed:  # a source may raise because it was stopped
                self.error = contained(exc)
        self._read_all = True
        self._changes.tell()
        self._changes.wait(lambda: False)  # until the end
        if self._reader_closes:
            self.source.close()

    def _add(self, number: int, message: Message) -> None:
        """Add a message to the open batch, and let a worker decode it."""
        with self._lock:
            if not self._line or self._line[-1].closed:
                self._line.append(MessageBatch(number))
            batch = self._line[-1]
            k = len(batch.messages)
            batch.messages.append(message)
            batch.left += 1
            batch.closed = k + 1 == self._batch_size
            self._ahead += 1
            awaited = batch is self._line[0] and (k == 0 or batch.closed)
        if self._num_workers:
            self._jobs.put((batch, k))
        if awaited:
            self._changes.tell()

    def _work(self, i: int, own: WorkerCopies) -> None:
        """Decode messages, and collate batches that are closed and decoded."""
        streams = Streams(routable(chosen_modules(None)), keyed=True, seeded=True)
        stream = streams.make(own.generators, initialised=False)
        info = make_worker_info(i, self._num_workers, i, own.dataset)
        with entered(stream):
            while (job := self._jobs.get()) is not None:
                batch, k = job
                if k is None:
                    stream.move(batch, None)
                    self._collate(batch, own.collate_fn)
                elif not self._closed:
                    stream.move(batch, k)
                    set_worker_info(info)
                    self._decode_at(batch, k, own.dataset.decode, f"; worker {i}")
                    set_worker_info(None)  # or torch's collate would use shared memory
                    with self._lock:
                        batch.left -= 1
                        last = batch.closed and not batch.left
                    if last:
                        stream.move(batch, None)
                        self._collate(batch, own.collate_fn)
                stream.move(None, None)
                del job, batch  # not kept while waiting

    def _decode_at(
        self, batch: MessageBatch, k: int, decode: Callable[[Any], Any], where: str = ""
    ) -> None:
        """Put the sample of a message, or the error of decoding it, at its position."""
        key, value, _ = batch.messages[k]
        if isinstance(value, Poison):
            batch.failures[k] = value.error
            return
        sample, error = _outcome(decode, value)
        if error is None:
            batch.samples[k] = sample
        else:
            annotate(error, f"message {key!r}{where}; stage: decode")
            batch.failures[k] = error

    def _collate(self, batch: MessageBatch, collate_fn: Callable[[list[Any]], Any]) -> None:
        """Make a batch whose messages are decoded, and wake the loop."""
        # `collate_fn` may take items out of its samples, and a batch that fails is answered sample by sample.
        samples = [_own_container(batch.samples[k]) for k in sorted(batch.samples)]
        if samples:
            batch.data, batch.error = _outcome(collate_fn, samples)
        batch.made = True
        self._changes.tell()

    # ---- anyone's ----

    def end(self, *, reader_closes: bool = False) -> None:
        """Let the threads end after their current calls, and stop the source. This never waits.

        Args:
            reader_closes: let the reader close the source, because the caller may not wait until the reader has ended.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            self._reader_closes |= reader_closes
            if self._closed:
                return
            self._closed = True
        try:
            self.source.stop()  # before the reader is woken, which may close the source
        finally:
            self._changes.close()
            for _ in range(self._num_workers):
                self._jobs.put(None)

    def close(self) -> None:
        """End the threads, and close the source. Wait at most five seconds for calls in progress."""
        if os.getpid() != self._process:  # the source is the other process's
            return
        try:
            self.end()
        finally:
            threads.abandon(threads.wait(self.threads, threads.JOIN_SECONDS))
            self.source.close()


def _own_container(sample: Any) -> Any:
    return copy.copy(sample) if type(sample) in (dict, list) else sample


def _outcome(function: Callable[[Any], Any], value: Any) -> tuple[Any, Exception | None]:
    """Return what a function of the user's returns, or the error that it raises."""
    try:
        return function(value), None
    except BaseException as exc:
        return None, contained(exc)


_running: weakref.WeakSet[MessageBatches] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    ends = perf_counter() + EXIT_SECONDS
    batches = list(_running)
    for one in batches:
        with suppress(Exception):  # of a user's source; the others must end too
            one.end(reader_closes=True)
    for thread in [thread for one in batches for thread in one.threads]:
        thread.join(max(0.0, ends - perf_counter()))
