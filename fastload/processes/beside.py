"""The thread of a worker process that hears the loop's process while its readers read, and probes the GIL."""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Container, Sized
from contextlib import suppress
from functools import partial
from time import perf_counter, process_time
from types import CodeType, FrameType

from fastload.memory.batch import Batch
from fastload.processes import jobs
from fastload.processes.wire import can_be_read, with_core
from fastload.telemetry.recorder import gil_is_on, switches

LINGER_SECONDS = 10.0
"""How long a worker that has a core may still read a sample after its loader is closed. Then it ends itself."""

PROBE_SECONDS, IDLE_SECONDS, MOST_PROBES = 0.01, 0.1, 1_000
"""Seconds of a nap with and without work, and after how many probes a process with one worker makes no more."""

PROBES_TOLD = 40
"""After how many probes `on_share` is called again. In two of three cases the share is then at most 0.08 off."""


class GilProbe:
    """Sees how often a worker process's GIL is in use. Only the thread that hears the loop's process probes."""

    def __init__(self) -> None:
        self.probes = 0, 0
        """How often the GIL was probed while readers had work, and how often one of them held it."""
        self.on_share: Callable[[float], None] | None = None
        """Gets the share of the latest probes that found the GIL in use."""
        self._told = 0  # at which number of probes `on_share` was called
        self._held_before = 0

    def probe(self, hears: Callable[[float], bool], work: Sized) -> None:
        """Nap until the loop's process says something. After each nap, see whether another thread held the GIL.

        The nap blocks this thread once. If the GIL is in use, waiting for it blocks the thread again.
        """
        while self.on_share is not None or self.probes[0] < MOST_PROBES:
            before, began = switches(), perf_counter()
            if hears(PROBE_SECONDS if work else IDLE_SECONDS):
                return
            blocked = switches() - before
            if not work or not blocked:  # the system may not count
                continue
            probes, held = self.probes
            # A call of C may hold the GIL for a second: it counts as long as it takes.
            many = max(1, round((perf_counter() - began) / PROBE_SECONDS)) if blocked > 1 else 1
            probes, held = self.probes = probes + many, held + many * (blocked > 1)
            if self.on_share is not None and probes - self._told >= PROBES_TOLD:
                self.on_share((held - self._held_before) / (probes - self._told))
                self._told, self._held_before = probes, held


class Beside:
    """A thread that hears the loop's process while its readers read. If that process is gone, it ends this one."""

    def __init__(self, end: socket.socket, tops: Container[CodeType]) -> None:
        self._end = end
        self._tops = tops
        self._changed = threading.Condition()  # owns the four fields below
        self._readers = [threading.get_ident()]  # their threads
        self._dropped = -1
        self._batches: dict[int, Batch] = {}  # that came and are not answered, by number
        self._ends = False
        self._cpu_started = process_time()
        self.gil = GilProbe()
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._hear, name="fastload-beside", daemon=True).start()

    def _forked(self) -> None:
        """Read no further sample in a process that a sample forks: locks that other threads hold stay locked there."""
        for batch in self._batches.values():
            batch.dropped = True

    def join(self) -> None:
        """Note that the calling thread is the next reader."""
        with self._changed:
            self._readers.append(threading.get_ident())

    def begin(self, batch: Batch) -> None:
        """Note a batch that came. It may be dropped already."""
        with self._changed:
            batch.dropped = self._ends or batch.number <= self._dropped
            self._batches[batch.number] = batch

    def over(self, batch: Batch) -> None:
        """Forget a batch."""
        with self._changed:
            self._batches.pop(batch.number, None)

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process since it started this thread."""
        return process_time() - self._cpu_started

    def wait(self, until: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until `until()` is true or `seconds` have passed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ends or until(), seconds)

    def _hear(self) -> None:
        with suppress(OSError):
            hears = partial(can_be_read, self._end.fileno())
            while True:
                if gil_is_on():
                    self.gil.probe(hears, self._batches)
                if not (said := self._end.recv(1)):
                    break
                if said == jobs.STACK:
                    self._tell_stack()
                drops = said == jobs.DROP
                last = struct.unpack("=q", self._end.recv(8, socket.MSG_WAITALL)) if drops else ()
                with self._changed:
                    self._dropped = max((self._dropped, *last))
                    self._ends = self._ends or said == jobs.END
                    for batch in self._batches.values():
                        if self._ends or batch.number <= self._dropped:
                            batch.dropped = True
                    self._changed.notify_all()
                if self._ends and not with_core(hears, LINGER_SECONDS, [os.getpid()]):
                    break
        os._exit(1)  # the loop's process is gone, or a sample hangs

    def _tell_stack(self) -> None:
        frames = sys._current_frames()
        text = json.dumps([self._stack(frames.get(reader)) for reader in self._readers])
        self._end.sendall(struct.pack("=Q", len(text)) + text.encode())

    def _stack(self, frame: FrameType | None) -> str:
        """Return the stack of a reader below its first function. Above that, a fork has all that called `iter()`."""
        depth, inner = 0, frame
        while inner is not None and inner.f_code not in self._tops:
            depth, inner = depth + 1, inner.f_back
        return (
            "".join(traceback.format_list(traceback.extract_stack(frame, depth))) if depth else ""
        )
