"""Who reads a loader's batches: the loop itself, threads, or processes. What each owns, and its random streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from fastload._kit.torch_private import make_worker_info, show_worker_info_in_threads
from fastload._kit.will_read import will_read_of
from fastload.engine.choice import Chosen
from fastload.engine.crew import Crew
from fastload.engine.pinning import pin_batch, pins
from fastload.engine.team import Team, join
from fastload.engine.threads import (
    become_worker,
    current_device,
    one_torch_thread,
    torch_threads_kept,
)
from fastload.engine.window import Window
from fastload.memory.batch import Batch
from fastload.processes.pausing import busy
from fastload.processes.segments import Segments
from fastload.processes.starting import start_children
from fastload.random.global_states import random_states_kept
from fastload.random.streams import entered
from fastload.reading.ahead import LookAhead
from fastload.reading.fetch import Fetcher, WorkerContext, finish, read_run
from fastload.reading.modes import Modes, modes_of_thread
from fastload.safety import WorkerCopies


class Readers(ABC):
    """Workers, or the loop itself, and the window through which they get batches. All epochs of an iterator have these.

    Args:
        what: what they read.
        who: their kind and number.

    Raises `DatasetCopyError` if an object of the dataset can neither be copied nor shared.
    """

    in_turn = False
    """Whether each worker reads whole batches, in turn, rather than all of them the runs of one."""

    def __init__(self, what: Fetcher, who: Chosen) -> None:
        settings, source = what.settings, what.source
        self.what, self.who, self._pins = what, who, pins(settings)
        self._survey = settings.survey if self._owns_copies() else None
        if self._survey is not None and settings.num_workers:
            self._survey.check()
            if settings.persistent_workers:
                self._survey.graph.keep_lists()
        parallel = source.batches_in_parallel or self.in_turn
        hears = self.in_turn and will_read_of(settings.dataset) is not None
        self.window: Window[Batch] = Window(
            settings.depth(who.number, batches_in_parallel=parallel, hears=hears),
            in_order=settings.in_order,
            collected=self._pins and who.number > 0,
            lanes=0 if self.in_turn else settings.lanes,
            max_bytes=settings.prefetch_bytes,
            run_seconds=source.run_seconds,
        )
        # A process tells its own copy of the dataset.
        dataset = None if self.in_turn else settings.dataset
        self.ahead = LookAhead(dataset, source, self.window.telling)
        self._segments = Segments()
        self.pools = what.pool, self._segments
        for pool in self.pools:
            pool.limit = self.window.depth + 1

    def _owns_copies(self) -> bool:
        """Return whether readers need copies of the dataset, or a list of its generators, in this process."""
        return True

    @cached_property
    def may_begin_early(self) -> bool:
        """Whether workers may read the next epoch before the loop begins it.

        Processes may not: they have the dataset of `iter()`. Threads may unless the loop can change what samples are,
        as through a `multiprocessing.Value`.
        """
        return not (self.in_turn or self._survey is None or self._survey.hears_messages())

    def forget_at_end(self, team: Team) -> None:
        """Let a thread wait for the end: a finalizer may close the window, and must call no user code."""
        if self.ahead.listens:
            team.launch("fastload-look-ahead", forget_at_end, self.window, self.ahead)

    @abstractmethod
    def start(self, seed: int) -> Team:
        """Start the workers. Return once all of them are set up. `get_worker_info().seed` of worker i is `seed + i`.

        Raises what `worker_init_fn`, the start of a process or a user's copy method raised. Then none is left.
        """


class Loop(Readers):
    """The loop itself, which reads a batch as it asks for it."""

    def _owns_copies(self) -> bool:
        return self.what.keyed and not self.what.source.copies

    def start(self, seed: int) -> Team:
        """Prepare to read in this thread, by the loader's own objects. In the place of workers, by copies of them."""
        settings, n, info = self.what.settings, self.what.settings.num_workers, None
        # The loop reads in the place of workers as one of them would: torch's sums over several threads have other
        # last bits.
        self._alone = n > 0 and not self.what.source.copies
        if self._survey is None:
            own = WorkerCopies(settings.dataset, settings.collate_fn, None)
        else:
            own = self._survey.own() if self._alone else self._survey.originals()
        if n:
            show_worker_info_in_threads()
            info = make_worker_info(0, n, seed, own.dataset)
        modes = modes_of_thread()
        if settings.persistent_workers:
            modes = modes.shared()
        wait = self.window.changes.wait
        self._context = WorkerContext(own, info, self.what, wait, modes, alone=not n)
        team = Team(self.window)
        self.forget_at_end(team)
        return team

    def read(self, batch: Batch) -> None:
        """Read a batch in this thread, in the modes of `iter()`."""
        context = self._context
        drawing = nullcontext() if self.what.source.copies else entered(context.stream)
        alone = one_torch_thread() if self._alone else nullcontext()
        with context.modes.entered(), drawing, alone:
            read_run(batch, 0, batch.units, context)
            finish(batch, context)
        if self._pins:
            pin_batch(batch)


class Threads(Readers):
    """Threads of this process, with copies of their own. They share the runs of a batch."""

    def start(self, seed: int) -> Team:
        """See `Readers`. Each worker starts as soon as it has its copies, but one `worker_init_fn` runs at a time.

        The global random states of Python, NumPy and torch are restored afterwards.
        """
        survey, n, window = self._survey, self.who.number, self.window
        assert survey is not None
        initialises = self.what.settings.worker_init_fn is not None
        show_worker_info_in_threads()
        device, modes = current_device(), modes_of_thread().shared()
        team = Team(window)
        try:
            with torch_threads_kept() as torch_threads, random_states_kept(initialises):
                for i in range(n):
                    with Modes().entered():  # inference mode would make inference tensors of copies
                        own = survey.own()
                    if i == 0:
                        survey.warn_of_shared(stacklevel=6)
                    info = make_worker_info(i, n, seed + i, own.dataset)
                    given = window, self.what, own, info, modes
                    team.launch(f"fastload-worker-{i}", work, *given, device, torch_threads)
                    if initialises:
                        team.wait_until_set_up()
                if window.collected:
                    team.launch("fastload-collector", collect, window, device, torch_threads)
                team.wait_until_set_up()
                self.forget_at_end(team)
        except BaseException:
            window.close()
            join([team])
            raise
        return team


# ---- what threads run ----


def work(
    window: Window[Batch],
    fetcher: Fetcher,
    own: WorkerCopies,
    info: Any,
    modes: Modes,
    device: int | None,
    torch_threads: int,
    team: Team,
) -> None:
    """Prepare this thread for user code, call `worker_init_fn`, and serve a window until it is closed."""
    with team.serving():
        with team.setting_up(f"worker {info.id}; stage: worker_init_fn"):
            become_worker(device, torch_threads)
            lane = info.id if window.lanes > 1 else 0
            context = WorkerContext(own, info, fetcher, window.changes.wait, modes, lane=lane)
        with modes.entered(), entered(context.stream):
            while serve(window, context):
                pass
            window.discard()  # it is closed, and an error that a user keeps must not keep the batches


def serve(window: Window[Batch], context: WorkerContext) -> bool:
    """Claim one run of units, read them, and finish the batch if they were its last. Return False once closed."""
    claim = window.claim(context.lane)
    if claim is None:
        return False
    batch, start, stop = claim
    with busy:
        seconds = read_run(batch, start, stop, context)
        if window.deliver(batch, stop - start, seconds):
            finish(batch, context)
            window.complete(batch)
    context.stream.move(None, None)  # so that it keeps no batch
    batch.recorders[context.worker].probe()
    return True


def collect(window: Window[Batch], device: int | None, torch_threads: int, team: Team) -> None:
    """Pin the batches of a window that are complete, one after another, until it is closed."""
    with team.serving():
        with team.setting_up("collector; stage: start"):
            become_worker(device, torch_threads)
        while (batch := window.collect()) is not None:
            pin_batch(batch)
            window.publish(batch)
            del batch  # not kept while waiting


def forget_at_end(window: Window[Batch], ahead: LookAhead, team: Team) -> None:
    """Once a window is closed, let the dataset forget what is not read any more."""
    window.changes.wait(lambda: False)
    with busy:
        ahead.forget(over=True)


class Processes(Readers):
    """Processes, each of which reads whole batches, by one worker or by several that share its runs."""

    in_turn = True

    def _owns_copies(self) -> bool:
        # Several workers of a process do. Here, to see before a fork whether their objects can be copied.
        return self.who.processes < self.who.number

    def start(self, seed: int) -> Team:
        """See `Readers`. The collector starts if there is one, and the thread of the crew."""
        settings, notices, window = self.what.settings, self.what.notices, self.window
        children = start_children(settings, self.who.processes, seed, self._segments, notices)
        team, device = Team(window, children), current_device()
        # A process blocks once ten of its messages wait in the socket, which is the kernel's limit. So a thread
        # receives if a window is deeper than that.
        deep = window.depth > 8 * len(children)
        background = window.collected or callable(settings.on_error) or deep
        crew = Crew(window, children, notices, background=background)
        try:
            with torch_threads_kept() as torch_threads:
                team.launch("fastload-crew", crew.serve, device, torch_threads)
                if window.collected:
                    team.launch("fastload-collector", collect, window, device, torch_threads)
                team.wait_until_set_up()
        except BaseException:
            window.close()
            if not team.threads:
                crew.end()
            join([team])
            raise
        return team


READERS: dict[str, type[Readers]] = {"none": Loop, "thread": Threads, "process": Processes}
"""By the kind that `choose` returns."""
