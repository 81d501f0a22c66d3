"""What a thread of a loader has for itself: context, stack, torch's number of threads, device.

The threads are daemons, because a thread that hangs in a dead file system must not keep the process alive. They are
also ended at interpreter exit, because a thread in C++ code would abort the process while the interpreter shuts down.
"""

from __future__ import annotations

import contextvars
import resource
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from fastload.engine import waiting

JOIN_SECONDS = 5.0
"""How long `close()` waits for calls in progress. Then it warns of what hangs, and returns."""

STACK_BYTES = 8 * 2**20
"""The least stack of a loader thread, as a worker process usually has. Without a limit on stacks, glibc gives 2 MiB."""

_local = threading.local()


def started(name: str, target: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread with a deep stack and the caller's context variables, as a worker process has.

    Among them are those of np.errstate and decimal.localcontext.
    """
    run = contextvars.copy_context().run
    thread = threading.Thread(target=run, args=(target, *args), name=name, daemon=True)
    with deep_stacks():
        thread.start()
    return thread


def wait(threads: Iterable[threading.Thread], seconds: float) -> list[threading.Thread]:
    """Wait at most `seconds` for threads to end. Return those that still run."""
    deadline = perf_counter() + seconds
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline - perf_counter()))
    return [thread for thread in others if thread.is_alive()]


def abandon(stuck: Sequence[threading.Thread]) -> None:
    """Name threads that hang in a warning, with their stacks."""
    if stuck:
        names = ", ".join(thread.name for thread in stuck)
        warnings.warn(
            f"{names} did not return from a call within {JOIN_SECONDS:g} s. The loader abandons them "
            f"here:\n{whereabouts(stuck)}",
            RuntimeWarning,
            stacklevel=4,
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


def current_device() -> int | None:
    """Return the index of the consumer's accelerator if it uses one, without initialising CUDA."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let the calling thread use one thread for each operation of torch in the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
