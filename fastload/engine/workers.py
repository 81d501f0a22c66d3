"""A loader's threads: how they start, are set up, get work and end. No other file creates such threads.

A thread holds the window and the fetcher, never the iterator that the user holds. So an iterator that the user drops
is collected, its finalizer closes the window, and the threads end by themselves.

The threads are daemons, because a thread that hangs in a dead file system must not keep the process alive. They are
also ended at interpreter exit, because a thread in C++ code would abort the process while the interpreter shuts down.
"""

from __future__ import annotations

import atexit
import contextvars
import resource
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch

from fastload._kit.torch_private import (
    make_worker_info,
    set_worker_info,
    show_worker_info_in_threads,
)
from fastload._kit.user_errors import annotate, contained
from fastload.engine import waiting
from fastload.engine.window import Window
from fastload.engine.worker_context import (
    WorkerContext,
    finish,
    neutral_modes,
    pin_batch,
    read_run,
)
from fastload.isolation import Isolation, WorkerCopies
from fastload.memory.batch import Batch
from fastload.random.global_draws import global_states, restore_global_states
from fastload.random.streams import Streams, entered
from fastload.reading.fetch import Fetcher

JOIN_SECONDS = 5.0
"""How long `close()` waits for calls in progress. Then it warns of the threads that hang, and returns."""

STACK_BYTES = 8 * 2**20
"""The least stack of a loader thread, as a worker process usually has. Without a limit on stacks, glibc gives 2 MiB."""

_local = threading.local()

_alive: dict[threading.Thread, Window[Batch]] = {}
"""Every loader thread of this process that may still run, with its window."""


def start(
    window: Window[Batch],
    fetcher: Fetcher,
    isolation: Isolation,
    streams: Streams,
    *,
    num_workers: int,
    base_seed: int,
) -> list[threading.Thread]:
    """Start the worker threads of a window, and its collector if it has one. Return once all of them are set up.

    Args:
        window: hands out the work and takes the batches.
        fetcher: reads the samples and finishes the batches.
        isolation: makes the copies of each worker, which starts as soon as it has them. Each worker calls its
            `init_fn` with its id, in its thread, one worker after another. The global random states of Python,
            NumPy and torch are restored afterwards.
        streams: makes the random stream of each worker, in its thread.
        num_workers: number of worker threads.
        base_seed: `get_worker_info().seed` of worker i is `base_seed + i`.

    Raises what `init_fn` or a user's copy method raised. Then no thread is left.
    """
    show_worker_info_in_threads()
    device = _current_device()
    threads: list[threading.Thread] = []
    # Each thread puts None once it is set up, or the error that it raised.
    set_up: SimpleQueue[Exception | None] = SimpleQueue()

    def launch(name: str, target: Callable[..., None], *args: Any) -> None:
        thread = new_thread(name, target, *args, set_up)
        _alive[thread] = window
        try:
            with deep_stacks():
                thread.start()
        except BaseException:
            _alive.pop(thread, None)
            raise
        threads.append(thread)

    def wait_for(count: int) -> None:
        for _ in range(count):
            if (error := set_up.get()) is not None:
                raise error

    try:
        with torch_threads_kept() as torch_threads, _random_states_kept(isolation.initialises):
            for i in range(num_workers):
                with neutral_modes():  # inference mode would make inference tensors of copies
                    own = isolation.own(watching=i == 0 and num_workers > 1)
                if i == 0:
                    isolation.warn_of_shared(stacklevel=7)
                    fetcher.notices.shared = isolation.shared_state() if num_workers > 1 else ""
                info = make_worker_info(i, num_workers, base_seed + i, own.dataset)
                worker = window, fetcher, own, info, streams, device, torch_threads
                launch(f"fastload-worker-{i}", _work, *worker)
                if isolation.initialises:
                    wait_for(1)
            initialised = len(threads) if isolation.initialises else 0
            if window.collected:
                launch("fastload-collector", _collect, window, device, torch_threads)
            wait_for(len(threads) - initialised)
    except BaseException:
        window.close()
        join(threads)
        raise
    return threads


def new_thread(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Return a daemon thread that begins with the caller's context variables, as a worker process does.

    Among them are those of np.errstate and decimal.localcontext. Start it in `deep_stacks()`.
    """
    run = contextvars.copy_context().run
    return threading.Thread(target=run, args=(target, *args), name=name, daemon=True)


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait at most `JOIN_SECONDS` for threads whose window is closed to return from their current calls.

    Name threads that hang in a warning, with their stacks, and abandon them: no later call waits for them.
    """
    deadline = perf_counter() + JOIN_SECONDS
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline - perf_counter()))
    stuck = [thread for thread in others if thread.is_alive()]
    if stuck:
        for thread in stuck:
            _alive.pop(thread, None)
        names = ", ".join(thread.name for thread in stuck)
        warnings.warn(
            f"{names} did not return from a call within {JOIN_SECONDS:g} s, and are abandoned. The threads are "
            f"here:\n{whereabouts(stuck)}",
            RuntimeWarning,
            stacklevel=3,
        )


def whereabouts(threads: Iterable[threading.Thread]) -> str:
    """Return the stack of each thread, innermost call last."""
    frames = sys._current_frames()
    stacks = []
    for thread in threads:
        frame = frames.get(thread.ident or -1)
        stack = "".join(traceback.format_stack(frame)) if frame else "  (ended)\n"
        stacks.append(f"{thread.name}:\n{stack}")
    return "".join(stacks)


@atexit.register
def _end_all() -> None:
    for window in list(_alive.values()):
        window.close()
    join(list(_alive))


# ---- what the threads run ----


def _work(
    window: Window[Batch],
    fetcher: Fetcher,
    own: WorkerCopies,
    info: Any,
    streams: Streams,
    device: int | None,
    torch_threads: int,
    set_up: SimpleQueue[Exception | None],
) -> None:
    """Prepare this thread for user code, call `worker_init_fn`, and serve a window until it is closed."""
    with _reporting_to(window):
        with _setting_up(set_up, f"worker {info.id}; stage: worker_init_fn"):
            become_worker(device, torch_threads)
            if own.init_fn:
                set_worker_info(info)
                with own.entered():
                    own.init_fn(info.id)
                set_worker_info(None)
                own = replace(own, generators=own.current_generators())
        stream = streams.make(own.generators, initialised=own.init_fn is not None)
        with own.entered(), entered(stream):
            lane = info.id if window.lanes > 1 else 0
            context = WorkerContext(
                info.id, own, info, stream, fetcher, window.changes.wait, lane=lane
            )
            while serve(window, context):
                pass
            window.discard()  # it is closed, and an error that a user keeps must not keep the batches


def serve(window: Window[Batch], context: WorkerContext) -> bool:
    """Claim one run of units, read them, and finish the batch if they were its last. Return False once closed."""
    claim = window.claim(context.lane)
    if claim is None:
        return False
    batch, start, stop = claim
    seconds = read_run(batch, start, stop, context)
    if window.deliver(batch, stop - start, seconds):
        finish(batch, context)
        window.complete(batch)
    context.stream.move(None, None)  # so that it keeps no batch
    batch.recorders[context.worker].probe()
    return True


def _collect(
    window: Window[Batch],
    device: int | None,
    torch_threads: int,
    set_up: SimpleQueue[Exception | None],
) -> None:
    with _reporting_to(window):
        with _setting_up(set_up, "collector; stage: start"):
            become_worker(device, torch_threads)
        while (batch := window.collect()) is not None:
            pin_batch(batch)
            window.publish(batch)
            del batch  # not kept while waiting


@contextmanager
def _reporting_to(window: Window[Batch]) -> Iterator[None]:
    """If the block raises, close the window with the fault. Then take this thread out of `_alive`."""
    try:
        yield
    except BaseException as exc:
        window.close(exc)
    finally:
        _alive.pop(threading.current_thread(), None)


@contextmanager
def _setting_up(set_up: SimpleQueue[Exception | None], where: str) -> Iterator[None]:
    """Run the block, and tell `start` whether that raised."""
    try:
        yield
    except BaseException as exc:
        error = contained(exc)
        annotate(error, where)
        set_up.put(error)
        raise
    set_up.put(None)


def become_worker(device: int | None, torch_threads: int) -> None:
    """Make this thread like one of torch's workers: one torch thread, and the consumer's device instead of device 0.

    `torch_threads` is what `torch_threads_kept` yielded to the thread that starts this one.
    """
    _local.torch_threads = torch_threads
    if decimal := sys.modules.get("decimal"):
        decimal.setcontext(decimal.getcontext().copy())  # `copy_context` shares the caller's
    torch.get_num_threads()  # or the first parallel operation would replace the 1 by the global number
    torch.set_num_threads(1)
    if device is not None:
        torch.accelerator.set_device_index(device)


def _current_device() -> int | None:
    """Return the index of the consumer's accelerator if it uses one, without initialising CUDA."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None


@contextmanager
def torch_threads_kept() -> Iterator[int]:
    """Yield the number of torch's threads, and restore it after the block.

    Setting it in any thread also sets it for new threads, and for the main thread unless that has read its own before.
    So this reads it, lets the workers set theirs, and restores it. Only one thread does so at a time. Otherwise one
    would read what another has set.
    """
    known: int | None = getattr(_local, "torch_threads", None)
    if known is not None:  # in a worker, whose own number is 1 and must stay 1
        try:
            yield known
        finally:
            setter = threading.Thread(target=torch.set_num_threads, args=(known,))
            setter.start()
            setter.join()
        return
    with waiting.starting:
        known = torch.get_num_threads()
        try:
            yield known
        finally:
            torch.set_num_threads(known)


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Let a thread that starts in the block have as much stack as the main thread, and `STACK_BYTES` at least.

    All threads that start meanwhile get it. If another thread sets a size meanwhile, that one stays.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_STACK)  # -1 if there is none
    size = max(limit, STACK_BYTES)
    with waiting.stack_size:
        before = threading.stack_size(size)  # this function cannot look without setting
        size = max(size, before)
        try:
            threading.stack_size(size)
            yield
        finally:
            if (now := threading.stack_size(before)) != size:
                threading.stack_size(now)


@contextmanager
def _random_states_kept(needed: bool) -> Iterator[None]:
    if not needed:
        yield
        return
    before = global_states()
    try:
        yield
    finally:
        restore_global_states(before)
