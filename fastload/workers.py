"""The threads of a loader: started, set up, given work, joined. The only file that creates a thread.

A thread holds the window and the fetcher, never the iterator that the user holds: so an abandoned
iterator is collected, its finalizer closes the window, and the threads end by themselves. They are
daemons, and all of them are ended at interpreter exit: a thread that still ran in C++ while the
interpreter is taken down would abort the process, and one that hangs in a dead file system must not
keep it from ending.
"""

from __future__ import annotations

import atexit
import contextvars
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from queue import SimpleQueue
from time import perf_counter, thread_time
from typing import Any

import torch

from fastload import window as window_module
from fastload.batch import Batch
from fastload.errors import ModuleStateWarning, SharedStateWarning
from fastload.faults import annotate, contained, file_of
from fastload.fetch import Fetcher
from fastload.isolation import Isolation, Own, Watch
from fastload.isolation.generators import NewGenerators
from fastload.randomness import (
    GlobalDraws,
    Stream,
    Streams,
    entered,
    global_states,
    restore_global_states,
)
from fastload.rows import Filler
from fastload.telemetry import Place, Recorder, recording, span
from fastload.torch_private import (
    current_worker_info,
    make_worker_info,
    pin,
    set_worker_info,
    show_worker_info_in_threads,
)
from fastload.window import Window

JOIN_SECONDS = 5.0
"""How long `close()` waits for calls in progress before it names the threads that hang and returns."""

COLLECTOR, LOOP = -2, -1
"""Of a batch's recorders, those that are not a worker's."""

_local = threading.local()

_alive: dict[threading.Thread, Window[Batch]] = {}
"""Every loader thread of this process that may still run, with what it serves."""


def start(
    window: Window[Batch],
    fetcher: Fetcher,
    isolation: Isolation,
    streams: Streams,
    *,
    num_workers: int,
    base_seed: int,
) -> list[threading.Thread]:
    """Start the worker threads of a window, and its collector if it has one; return when all of them are set up.

    Args:
        window: where the work comes from and goes to.
        fetcher: how it is done.
        isolation: gives each worker what it reads through. A worker starts as soon as that is made. Its
            `init_fn` is called with the worker's id in its thread, one worker after another, while the
            caller waits; Python's, NumPy's and torch's global random states are restored afterwards.
        streams: make each worker's random stream, in its thread.
        num_workers: threads; 0 starts none.
        base_seed: `get_worker_info().seed` of worker i is `base_seed + i`.

    Raises what `init_fn` raised, and what a class raised that copies itself; no thread is left then.
    """
    show_worker_info_in_threads()
    device = _current_device()
    threads: list[threading.Thread] = []
    # What came of setting up, of each thread.
    set_up: SimpleQueue[Exception | None] = SimpleQueue()

    def launch(name: str, target: Callable[..., None], *args: Any) -> None:
        # A worker process begins with its parent's context variables: np.errstate, decimal.localcontext.
        run = contextvars.copy_context().run
        thread = threading.Thread(target=run, args=(target, *args, set_up), name=name, daemon=True)
        _alive[thread] = window
        try:
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
        with _torch_threads_kept() as torch_threads, _random_states_kept(isolation.initialises):
            for i in range(num_workers):
                with neutral_modes():  # or a copied tensor is one of the caller's inference mode
                    own = isolation.own(watching=i == 0 and num_workers > 1)
                if i == 0:
                    isolation.warn_of_shared(stacklevel=6)
                    fetcher.shared = isolation.shared_state() if num_workers > 1 else ""
                info = make_worker_info(i, num_workers, base_seed + i, own.dataset)
                setting = (streams, device, torch_threads)
                launch(f"fastload-worker-{i}", _work, window, fetcher, own, info, *setting)
                if isolation.initialises:
                    wait_for(1)
            if window.collected:
                launch("fastload-collector", _collect, window, device)
            wait_for(len(threads) - (num_workers if isolation.initialises else 0))
    except BaseException:
        window.close()
        join(threads)
        raise
    return threads


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads whose window is closed to return from the calls they are in, `JOIN_SECONDS` at most.

    Threads that hang are named in a warning, with their stacks, and left behind; nobody waits again.
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
            f"after {JOIN_SECONDS:g} s, {names} had not returned from a call; left behind:\n"
            f"{whereabouts(stuck)}",
            RuntimeWarning,
            stacklevel=3,
        )


def whereabouts(threads: Iterable[threading.Thread]) -> str:
    """What each thread is doing: its stack, innermost call last."""
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


class Site:
    """Where claimed samples are read: by which worker, from which dataset, with which random stream.

    `own` is what the worker reads through. `filler` fills rows from its dataset, if anything does. `info` is what
    `get_worker_info()` returns in the dataset; None if the loop itself serves: then it returns whatever it did, which
    is an outer worker's if the loop runs in a sample.
    """

    def __init__(self, worker: int, own: Own, info: Any, stream: Stream, *, lane: int = 0) -> None:
        self.worker = worker
        self.dataset = own.dataset
        self.collate_fn = own.collate_fn
        self.info = info
        self.lane = lane
        self.stream = stream
        self.filler: Filler | None = None
        # Of what the loop is to warn, by category: "the dataset seems to ...".
        self.noticed: dict[type[Warning], set[str]] = {
            UserWarning: self.stream.noticed,
            SharedStateWarning: set(),
            ModuleStateWarning: set(),
        }
        self._looks: dict[str, list[GlobalDraws | Watch | NewGenerators]] = {}
        self._blocks = {"sample": 0, "collate": 0}
        if worker == 0:  # one looks for all: a look costs some 100 us, of each of them as it starts
            for stage in self._blocks:
                looked = GlobalDraws(stream.noticed, numpy="numpy" not in stream.modules)
                self._looks[stage] = [looked]
                if stream.keyed:
                    self._looks[stage].append(
                        NewGenerators(own.generators, own.current_generators, stream.noticed)
                    )
            for category, watched in (
                (SharedStateWarning, own.watched),
                (ModuleStateWarning, own.watched_modules),
            ):
                if watched:
                    self._looks["sample"].append(Watch(watched, self.noticed[category]))

    @contextmanager
    def looking(self, stage: str) -> Iterator[None]:
        """Notice in the block what makes samples depend on other threads.

        In the stage's first four blocks, then in every one whose number is a power of two.
        """
        self._blocks[stage] = number = self._blocks[stage] + 1
        looks = self._looks.get(stage, []) if number <= 4 or not number & (number - 1) else []
        try:  # which ends what Ctrl-C let begin
            for look in looks:
                look.begin()
            yield
        finally:
            for look in looks:
                look.end()


def _work(
    window: Window[Batch],
    fetcher: Fetcher,
    own: Own,
    info: Any,
    streams: Streams,
    device: int | None,
    torch_threads: int,
    set_up: SimpleQueue[Exception | None],
) -> None:
    _local.torch_threads = torch_threads
    if decimal := sys.modules.get("decimal"):
        decimal.setcontext(decimal.getcontext().copy())  # the variable only refers to it
    with _reporting_to(window):
        with _setting_up(set_up, device, f"worker {info.id}; stage: worker_init_fn"):
            if own.init_fn:
                set_worker_info(info)
                with own.entered():
                    own.init_fn(info.id)
                set_worker_info(None)
                own = replace(own, generators=own.current_generators())
        lane = info.id if window.lanes > 1 else 0
        site = Site(info.id, own, info, streams.make(own), lane=lane)
        with own.entered(), entered(site.stream):
            site.filler = fetcher.filler_of(own.dataset)
            while serve(window, fetcher, site):
                pass
        window.discard()  # it is closed: whoever keeps an error of ours shall not keep the batches


def neutral_modes() -> AbstractContextManager[None]:
    """Grad mode on, no inference mode, no autocast: the state of a fresh thread, where the loop serves itself."""
    accelerator = torch.accelerator.current_accelerator()
    devices = ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    autocast = [device for device in devices if torch.is_autocast_enabled(device)]
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not autocast:
        return nullcontext()
    return _neutral(autocast)


@contextmanager
def _neutral(autocast: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(mode=False))
        if not torch.is_grad_enabled():
            stack.enter_context(torch.enable_grad())
        for device in autocast:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def serve(window: Window[Batch], fetcher: Fetcher, site: Site) -> bool:
    """Claim one run of units, read them, finish the batch if they were its last. False if closed."""
    claim = window.claim(site.lane)
    if claim is None:
        return False
    batch, start, stop = claim
    seconds = read_run(batch, start, stop, fetcher, site)
    if window.deliver(batch, stop - start, seconds):
        finish(batch, fetcher, site)
        window.complete(batch)
    site.stream.move(None, None)  # which keeps no batch
    batch.recorders[site.worker].probe()
    return True


def read_run(batch: Batch, start: int, stop: int, fetcher: Fetcher, site: Site) -> float:
    """Read units `start` to `stop` of a batch, and return the seconds that it took."""
    recorder = batch.recorders[site.worker]
    started = perf_counter()
    if fetcher.copies:  # no code of the user's, nothing drawn: a batch may take 30 us in all
        fetcher.read(batch, start, stop, site)
        cpu_s = perf_counter() - started
    else:
        cpu_s = _read(batch, start, stop, fetcher, site, recorder)
    seconds = perf_counter() - started
    units = batch.size if fetcher.whole else stop - start
    if units:  # else the lane had ended, or nobody wants the batch

        def place() -> Place:
            index = batch.first_index(start)
            return Place(batch.epoch, batch.ordinal, index, file_of(site.dataset, index))

        recorder.run(units, seconds, cpu_s, place)
    # Told before the batch can be taken: so the loop hears of it at its next `next()` at the latest.
    _tell(site, fetcher)
    return seconds


def _tell(site: Site, fetcher: Fetcher) -> None:
    for category, sentences in site.noticed.items():
        while sentences:
            sentence = sentences.pop()
            fetcher.noticed.append((category, sentence))
            if category is not UserWarning and fetcher.shared == "":
                fetcher.shared = f"samples seem to {sentence.partition(': ')[0]}"


def _read(
    batch: Batch, start: int, stop: int, fetcher: Fetcher, site: Site, recorder: Recorder
) -> float:
    """Read what was claimed with all that user code may ask for in place; the CPU seconds that it took."""
    outer = current_worker_info()
    set_worker_info(site.info or outer)
    cpu_started = thread_time()
    try:
        with recording(recorder), span("sample"), site.looking("sample"):
            fetcher.read(batch, start, stop, site)
    finally:
        # Not while collating: where torch's collate finds a worker info, it takes shared memory.
        set_worker_info(outer)
    return thread_time() - cpu_started


def finish(batch: Batch, fetcher: Fetcher, site: Site) -> None:
    """Make a batch of its samples, all of which are read."""
    started = perf_counter()
    with span("collate"), site.looking("collate") if fetcher.collates else nullcontext():
        fetcher.finish(batch, site.collate_fn, site.stream)
    batch.recorders[site.worker].add("collate", perf_counter() - started)
    if batch.dropped:
        batch.release()  # `discard` may have done so before there was anything to let go
    _tell(site, fetcher)


def _collect(
    window: Window[Batch], device: int | None, set_up: SimpleQueue[Exception | None]
) -> None:
    with _reporting_to(window):
        with _setting_up(set_up, device, "collector; stage: start"):
            pass
        while (batch := window.collect()) is not None:
            started = perf_counter()
            with span("pin"):
                pin_batch(batch)
            batch.recorders[COLLECTOR].add("pin", perf_counter() - started)
            window.publish(batch)
            del batch  # not kept while waiting


@contextmanager
def _reporting_to(window: Window[Batch]) -> Iterator[None]:
    """Let the loop know when a thread ends by a fault, and the process when it ends."""
    try:
        yield
    except BaseException as exc:
        window.break_down(exc)
    finally:
        _alive.pop(threading.current_thread(), None)


@contextmanager
def _setting_up(
    set_up: SimpleQueue[Exception | None], device: int | None, where: str
) -> Iterator[None]:
    """Make this thread like a worker of torch's, then run the block; tell `start` what came of it, whatever it is.

    One torch thread, and the consumer's device: new threads begin on device 0.
    """
    try:
        torch.get_num_threads()  # or the first parallel operation takes the global number over this
        torch.set_num_threads(1)
        if device is not None:
            torch.accelerator.set_device_index(device)
        yield
    except BaseException as exc:
        error = contained(exc)
        annotate(error, where)
        set_up.put(error)
        raise
    set_up.put(None)


def pin_batch(batch: Batch) -> None:
    """Replace the data of `batch` by a pinned copy, or by the error that pinning raised."""
    try:
        batch.data = pin(batch.data)
    except Exception as exc:
        batch.data, batch.error, batch.where = None, exc, f"{batch}; stage: pin"


def can_pin(device: str, *, stacklevel: int) -> bool:
    """Return whether there is anything to pin for; warn in torch's words if there is not."""
    if device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{device}'.",
            stacklevel=stacklevel + 1,
        )
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if accelerator is None:
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=stacklevel + 1,
        )
    elif accelerator.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, device pinned memory won't be used.",
            stacklevel=stacklevel + 1,
        )
    return accelerator is not None and accelerator.type != "mps"


def _current_device() -> int | None:
    """The consumer's accelerator, if it uses one: asking must not initialise CUDA."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.accelerator.current_device_index() if torch.accelerator.is_available() else None


@contextmanager
def _torch_threads_kept() -> Iterator[int]:
    """Give the number of torch's threads, and set it back afterwards.

    Setting it in any thread sets it for threads to come, and for the main thread unless that has
    looked at its own before. So: look, let the workers set theirs, set it back; one start at a time,
    or one would look at what another has set.
    """
    known: int | None = getattr(_local, "torch_threads", None)
    if known is not None:  # in a worker, whose own number is 1 and shall stay so
        try:
            yield known
        finally:
            setter = threading.Thread(target=torch.set_num_threads, args=(known,))
            setter.start()
            setter.join()
        return
    with window_module.starting:
        known = torch.get_num_threads()
        try:
            yield known
        finally:
            torch.set_num_threads(known)


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
