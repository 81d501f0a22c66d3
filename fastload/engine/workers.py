"""A loader's worker threads: how they start, are set up and get work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastload._kit.torch_private import make_worker_info, show_worker_info_in_threads
from fastload.engine.pinning import pin_batch
from fastload.engine.team import Team, join
from fastload.engine.threads import (
    become_worker,
    current_device,
    random_states_kept,
    torch_threads_kept,
)
from fastload.engine.window import Window
from fastload.memory.batch import Batch
from fastload.processes.pausing import busy
from fastload.random.streams import Streams, entered
from fastload.random.worker_rng import WorkerRng
from fastload.reading.fetch import Fetcher
from fastload.reading.modes import Modes, modes_of_thread
from fastload.reading.worker_context import WorkerContext, finish, initialise, read_run
from fastload.safety import Survey, WorkerCopies


def start(
    window: Window[Batch],
    fetcher: Fetcher,
    survey: Survey,
    streams: Streams,
    *,
    num_workers: int,
    base_seed: int,
) -> Team:
    """Start the worker threads of a window, and its collector if it has one. Return once all of them are set up.

    Args:
        window: hands out the work and takes the batches.
        fetcher: reads the samples and finishes the batches.
        survey: makes the copies of each worker, which starts as soon as it has them. Each worker calls its
            `init_fn` with its id, in its thread, one worker after another. The global random states of Python,
            NumPy and torch are restored afterwards.
        streams: makes the random stream of each worker, in its thread.
        num_workers: number of worker threads.
        base_seed: `get_worker_info().seed` of worker i is `base_seed + i`.

    Raises what `init_fn` or a user's copy method raised. Then no thread is left.
    """
    show_worker_info_in_threads()
    device, modes = current_device(), modes_of_thread().shared()
    team = Team(window)
    try:
        with torch_threads_kept() as torch_threads, random_states_kept(survey.initialises):
            for i in range(num_workers):
                with Modes().entered():  # inference mode would make inference tensors of copies
                    own = survey.own()
                if i == 0:
                    survey.warn_of_shared(stacklevel=7)
                    fetcher.notices.shared = survey.shared_state() if num_workers > 1 else ""
                info = make_worker_info(i, num_workers, base_seed + i, own.dataset, rng=WorkerRng())
                worker = window, fetcher, own, info, streams, modes, device, torch_threads
                team.launch(f"fastload-worker-{i}", _work, *worker)
                if survey.initialises:
                    team.wait_until_set_up()
            if window.collected:
                team.launch("fastload-collector", collect, window, device, torch_threads)
            team.wait_until_set_up()
    except BaseException:
        window.close()
        join([team])
        raise
    return team


# ---- what the threads run ----


def _work(
    window: Window[Batch],
    fetcher: Fetcher,
    own: WorkerCopies,
    info: Any,
    streams: Streams,
    modes: Modes,
    device: int | None,
    torch_threads: int,
    team: Team,
) -> None:
    """Prepare this thread for user code, call `worker_init_fn`, and serve a window until it is closed."""
    with team.serving():
        with team.setting_up(f"worker {info.id}; stage: worker_init_fn"):
            become_worker(device, torch_threads)
            initialise(own, info, modes)
            if own.init_fn is not None:
                own = replace(own, generators=own.current_generators())
        stream = streams.make(own.generators, initialised=own.init_fn is not None)
        with modes.entered(), entered(stream):
            lane = info.id if window.lanes > 1 else 0
            context = WorkerContext(
                info.id, own, info, stream, fetcher, window.changes.wait, modes, lane=lane
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
