"""A loader's worker processes: how batches come to them and back.

The loop sends each batch as it issues it. So a process has work before it needs it, and no thread wakes to send. The
loop also receives, as it asks for the next batch: that costs it less than to be woken by a thread that did. A thread of
its own receives in the background if there is more to do: batches to pin, `on_error` to call, objects to unpickle.
"""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic, perf_counter

import torch

from fastload._kit.torch_private import modes_are_on
from fastload.engine.team import Team
from fastload.engine.threads import JOIN_SECONDS, become_worker
from fastload.engine.waiting import Bell
from fastload.engine.window import Window
from fastload.memory.batch import Batch
from fastload.processes.child import Child
from fastload.processes.remote import what_is_read
from fastload.reading.notices import Notices
from fastload.telemetry.recorder import cpu_seconds

Calls = SimpleQueue[Callable[[], None] | None]

IN_LOOP_SECONDS, MOST_SLOW = 1e-3, 3
"""How long the loop may take to receive a batch. After three in turn that took longer, a thread receives."""

_log = logging.getLogger("fastload")


class Crew:
    """The worker processes of a window.

    Args:
        window: has the batches, and hears of those that are read.
        children: the processes, all set up. Batch k is read by worker k modulo their number, as in torch: code that
            changes what its process holds then gives the same samples in each run.
        notices: collects warnings for the loop.
        background: whether the thread of the crew receives, rather than the loop.
    """

    def __init__(
        self,
        window: Window[Batch],
        children: list[Child],
        notices: Notices,
        *,
        background: bool,
    ) -> None:
        self._window = window
        self._children = children
        self._workers = sum(len(child.job.workers) for child in children)
        self._notices = notices
        self._owner = os.getpid()
        self._unended = [True]
        self._bell = Bell()
        self._background = background  # the loop sets it once, and receives no more
        # The thread that receives has these.
        self._slow = 0
        self._poll = select.poll()
        self._by_descriptor: dict[int, Child] = {}
        self._next_look = monotonic() + Child.IDLE_SECONDS
        self._calls: dict[Child, Calls] = {}  # of the threads that run them
        self._last_words: dict[Child, str] = {}  # what the workers of a dead process read
        self._seen: dict[Child, tuple[float, tuple[int, ...]]] = {}  # at the last look
        window.listener = self
        for child in children:
            child.remote.begin()
        self._register()
        if background:
            self._bell.ring()

    def on_drop(self, number: int) -> None:
        """See `Listener`."""
        for child in self._children:
            child.drop(number)

    def on_close(self) -> None:
        """See `Listener`."""
        if os.getpid() == self._owner:  # a fork of the loop's process closes its copy of the window
            for child in self._children:
                child.begin_end()
            self._bell.ring()

    def on_issue(self, ticket: Batch) -> None:
        """Send a batch to the process of its worker, or to the next one that lives.

        No other process can read a batch of an iterable dataset. If none can read it, the batch raises, so that the
        loop does not wait for it.
        """
        iterable = self._children[0].iterable
        worker = ticket.lane if iterable else ticket.ordinal % self._workers
        first = worker % len(self._children)
        heirs = self._children[first:] + self._children[:first]
        if iterable:
            del heirs[1:]
        ticket.claimed = ticket.units
        for child in heirs:
            try:
                if child.remote.send(ticket):
                    return
            except Exception as exc:
                ticket.where = f"{ticket}; stage: hand over to a worker process"
                child.remote.fail(ticket, None, exc)
                break
        else:
            ticket.lost, ticket.where = True, ""
            words = self._last_words[heirs[0]]
            doing = f"{words}, and no other was left to read {what_is_read(ticket)}"
            heirs[0].remote.fail(ticket, None, heirs[0].died(doing))
        self._window.complete(ticket)

    # ---- receiving ----

    def pull(self, seconds: float | None) -> bool:
        """See `Listener`. Only the thread that holds `taking` calls this."""
        if self._background:
            return False
        try:
            if not modes_are_on():  # else batches would be made in them
                self._receive_all(seconds)
        except BaseException:  # Ctrl-C: a batch may be lost, and none must wait for it
            self._window.close()
            raise
        self._background = self._slow >= MOST_SLOW or modes_are_on()
        if self._background:
            self._bell.ring()
        return not self._background

    def serve(self, device: int | None, torch_threads: int, team: Team) -> None:
        """Receive in the background if need be, until the window is closed. Then end the processes."""
        try:
            with team.serving():
                with team.setting_up("receiver of worker processes; stage: start"):
                    become_worker(device, torch_threads)
                self._team = team
                self._bell.wait()
                if self._background:
                    self._bell.hush()  # the loop does not wait for it any more
                while not self._window.closed:
                    self._receive_all(None)
        finally:
            self.end()
            self._window.listener = None  # no cycle, which would keep segments
            self._window.discard()

    def _register(self) -> None:
        self._poll.register(self._bell.descriptor, select.POLLIN)
        for child in self._children:
            # Poll looks at them in this order. If the first shows the death and the second nothing, all that the
            # process has sent was received.
            for descriptor in (child.watched, child.work.fileno()):
                if descriptor is not None:
                    self._by_descriptor[descriptor] = child
                    self._poll.register(descriptor, select.POLLIN)

    def _unregister(self, child: Child) -> None:
        for descriptor in [d for d, one in self._by_descriptor.items() if one is child]:
            self._poll.unregister(descriptor)
            del self._by_descriptor[descriptor]

    def _receive_all(self, seconds: float | None) -> None:
        """Wait until processes have sent something, the bell rings, or `seconds` have passed. Take what they sent."""
        if seconds != 0:
            until_look = max(0.0, self._next_look - monotonic())
            seconds = until_look if seconds is None else min(seconds, until_look)
        ready = [descriptor for descriptor, _ in self._poll.poll(1000 * seconds)]
        for descriptor in ready:
            if self._window.closed:  # another thread ends the processes
                return
            if descriptor not in self._by_descriptor:  # the bell, or a process that is buried
                continue
            child = self._by_descriptor[descriptor]
            work = child.work.fileno()
            if descriptor == work and self._receive(child):
                continue
            if descriptor == work or work not in ready:
                self._unregister(child)
                self._bury(child)
        if not ready and monotonic() >= self._next_look:
            self._next_look = monotonic() + Child.IDLE_SECONDS
            self._look_for_idle()

    def _receive(self, child: Child) -> bool:
        """Receive a message of a process. Return False if it is dead."""
        started = perf_counter()
        try:
            came = child.remote.receive()
        except (EOFError, OSError):
            return False
        if isinstance(came, Batch):
            self._window.complete(came)
            self._slow = self._slow + 1 if perf_counter() - started > IN_LOOP_SECONDS else 0
        else:
            self._call(child, came)
        return True

    def _bury(self, child: Child) -> None:
        """Let others read what a dead process had not begun. What it had begun raises: any of it may be the cause."""
        child.died("it read")  # so that nothing asks it any more
        lost = child.remote.close()
        begun = [f"worker {k} read {what_is_read(sent.batch)}" for k, sent in lost.begun.items()]
        self._last_words[child] = ", and ".join(begun) or "it waited"
        for worker, sent in lost.begun.items():
            batch = sent.batch
            batch.where = ""
            doing = f"it read {what_is_read(batch)}"
            if others := [str(one.batch) for one in lost.begun.values() if one.batch is not batch]:
                doing += f", and other threads of the process {', '.join(others)}"
            child.remote.fail(batch, sent.segment, child.died(doing, worker=worker))
            self._window.complete(batch)
        for sent in lost.others:
            if not sent.batch.dropped:
                self.on_issue(sent.batch)

    def _look_for_idle(self) -> None:
        for child in self._children:
            before = self._seen.get(child)
            now = self._seen[child] = cpu_seconds(child.pid), child.remote.state()
            if now == before and now[1] and not child.dead and "idle" not in self._notices.warned:
                self._notices.warned.add("idle")
                # Not a warning: the loop may be waiting for this very batch.
                _log.warning("fastload: %s", child.waits("read a batch"))

    def end(self) -> None:
        """End the processes, and the threads that run calls.

        If Ctrl-C struck while the thread of the crew started, two threads may call this. One of them does it.
        """
        try:
            self._unended.pop()
        except IndexError:
            return
        for calls in self._calls.values():
            calls.put(None)
        late = monotonic() + 2 * JOIN_SECONDS
        for child in self._children:
            child.begin_end()
        self._drain(late)
        for child in self._children:
            child.end(max(0.0, late - monotonic()))

    def _drain(self, late: float) -> None:
        """Receive and drop what processes still send until they end. A full socket would block them."""
        poll = select.poll()
        left = {child.work.fileno(): child.remote for child in self._children if not child.dead}
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while left and (ready := poll.poll(1000 * max(0.0, late - monotonic()))):
            for descriptor, _ in ready:
                try:
                    left[descriptor].discard()
                except (EOFError, OSError):
                    poll.unregister(descriptor)
                    del left[descriptor]

    def _call(self, child: Child, call: Callable[[], None]) -> None:
        """Run a call, which may take long, on a thread of its process. It starts now if need be."""
        if child not in self._calls:
            self._calls[child] = SimpleQueue()
            name = f"fastload-calls-{child.job.workers[0]}"
            self._team.launch(name, _run, self._calls[child])
        self._calls[child].put(call)


def _run(calls: Calls, team: Team) -> None:
    """Run calls, one after another, until None comes."""
    with team.serving():
        del team  # the traceback of an error that a user keeps holds this frame
        become_worker(None, torch.get_num_threads())
        while (call := calls.get()) is not None:
            call()
            del call  # not kept while waiting
