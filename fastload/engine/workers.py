"""What the threads of a loader run: its workers, and the collector that pins batches."""

from __future__ import annotations

from typing import Any

from fastload.engine.pinning import pin_batch
from fastload.engine.team import Team
from fastload.engine.threads import become_worker
from fastload.engine.window import Window
from fastload.memory.batch import Batch
from fastload.processes.pausing import busy
from fastload.random.streams import entered
from fastload.reading.fetch import Fetcher
from fastload.reading.modes import Modes
from fastload.reading.worker_context import WorkerContext, finish, read_run
from fastload.safety import WorkerCopies


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
