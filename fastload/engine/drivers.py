"""A loader's worker processes: how they start, and the threads of the loop's process that drive their readers.

A driver claims a whole batch, sends it to its process and waits for the answer without the GIL. So order, window,
errors and state do not know who reads.
"""

from __future__ import annotations

from fastload.engine.team import Team, join
from fastload.engine.threads import JOIN_SECONDS, become_worker, current_device, torch_threads_kept
from fastload.engine.window import Window
from fastload.engine.workers import collect
from fastload.memory.batch import Batch
from fastload.processes.parent import Child
from fastload.processes.remote import Remote
from fastload.processes.segments import Segments
from fastload.processes.starting import start_children
from fastload.reading.notices import Notices
from fastload.settings import Settings


def start(
    window: Window[Batch],
    settings: Settings,
    segments: Segments,
    notices: Notices,
    *,
    num_workers: int,
    base_seed: int,
) -> Team:
    """Start the worker processes of a window, and its collector if it has one. Return once all of them are set up.

    Raises what `start_children` raises. Then neither thread nor process is left.
    """
    children = start_children(num_workers, base_seed, settings, segments, notices)
    team = Team(window, children)
    driven = [(child, remote) for child in children for remote in child.remotes]
    device = current_device()
    try:
        with torch_threads_kept() as torch_threads:
            for child, remote in driven:
                name = f"fastload-driver-{remote.worker}"
                team.launch(name, _drive, window, child, remote, device, torch_threads)
            if window.collected:
                team.launch("fastload-collector", collect, window, device, torch_threads)
            team.wait_until_set_up()
    except BaseException:
        window.close()
        for child, remote in driven[len(team.threads) :]:
            child.leave(remote, JOIN_SECONDS)
        join([team])
        raise
    return team


def _drive(
    window: Window[Batch],
    child: Child,
    remote: Remote,
    device: int | None,
    torch_threads: int,
    team: Team,
) -> None:
    """Let a reader of a worker process read one batch after another, until the window is closed.

    If the process has died, the next reader has its batches. If none can read, each batch raises, so that the loop
    waits for none of them.
    """
    with team.serving():
        try:
            with team.setting_up(f"worker {remote.worker}; stage: start"):
                become_worker(device, torch_threads)
            while (claim := window.claim(remote.worker)) is not None:
                batch = claim.ticket
                # A dead process has not begun this batch, so another may read it.
                lost = child.dead
                if lost and not child.iterable and window.merge(remote.worker, batch):
                    break
                seconds = remote.read(batch, lost=lost)
                if window.deliver(batch, claim.stop, seconds):
                    window.complete(batch)
                del batch, claim
        finally:
            child.leave(remote, 2 * JOIN_SECONDS)
            if window.closed:
                window.discard()
