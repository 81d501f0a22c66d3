"""What a worker of a process runs: it reads one batch after another, as its tickets say, and answers.

It reads with the same code as a loop without workers, in the same random streams. So the batches are the same.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import replace
from typing import Any

import torch

from fastload._kit.torch_private import make_worker_info, name_thread, set_worker_info
from fastload._kit.user_errors import annotate, contained
from fastload.isolation import WorkerCopies
from fastload.isolation.in_modules import generators_of_modules
from fastload.memory.batch import Batch
from fastload.order.lanes import LaneBatch
from fastload.processes import jobs
from fastload.processes.beside import Beside
from fastload.processes.jobs import Answer, Job, Ticket
from fastload.processes.observed import Observed
from fastload.processes.packing import Packed, pack, pack_error, unpack
from fastload.processes.pausing import busy
from fastload.processes.segments import Segment, TicketMemory
from fastload.processes.wire import Wire
from fastload.random.keys import StreamKeys
from fastload.random.streams import entered
from fastload.random.worker_rng import WorkerRng
from fastload.reading.fetch import Fetcher
from fastload.reading.notices import Notices
from fastload.reading.worker_context import WorkerContext, finish, read_run, streams_of
from fastload.settings import Settings


class Reader:
    """Reads the batches of one worker of the process, in the thread that makes it."""

    def __init__(
        self,
        worker: int,
        job: Job,
        settings: Settings,
        own: WorkerCopies,
        wire: Wire,
        heard: Beside,
        notices: Notices,
        generators: list[tuple[str, Any]] | None = None,
    ) -> None:
        self._worker = worker
        self._modes = job.modes
        self._wire = wire
        self._heard = heard
        self._pid = os.getpid()
        self._who = f"worker {worker} (process {self._pid})"
        self._notices = notices
        name_thread(f"fastload-{worker}")
        torch.get_num_threads()  # or the first parallel operation would replace the 1 by the global number
        torch.set_num_threads(1)
        if job.asks:
            settings = replace(settings, on_error=self._ask)
        self._iterable = settings.iterable
        self._memory = TicketMemory(
            worker, channels_last=settings.memory_format is torch.channels_last
        )
        self._fetcher = Fetcher(settings, self._memory, self._notices)
        alone = len(job.workers) == 1
        method, rng = ("multiprocessing", None) if alone else ("thread", WorkerRng())
        info = make_worker_info(
            worker, job.num_workers, job.seed + worker, own.dataset, method, rng
        )
        with self._modes.entered():
            if own.init_fn is not None:
                set_worker_info(info)
                try:
                    own.init_fn(worker)
                except BaseException as exc:
                    annotate(exc, f"worker {worker}; stage: worker_init_fn")
                    raise
                finally:
                    set_worker_info(None)
        self._segments: dict[tuple[int, int], Segment] = {}
        self._keys = StreamKeys(0, 0)  # the first ticket brings others
        self._observed = Observed(of_process=worker == job.workers[0])
        streams = streams_of(settings, draws=not self._fetcher.source.copies)
        if streams.keyed and alone:
            found = generators if own.init_fn is None else None
            if found is None:
                found = [*own.current_generators(), *generators_of_modules()]
            own = replace(own, generators=found)
        elif own.init_fn is not None:
            own = replace(own, generators=own.current_generators())
        stream = streams.make(own.generators, initialised=own.init_fn is not None)
        wait = heard.wait
        self._context = WorkerContext(worker, own, info, stream, self._fetcher, wait, self._modes)

    def serve(self, *, ready: bool = False) -> None:
        """Answer one ticket after another, until the loop's process shuts the wire. Say first that all are `ready`."""
        with self._modes.entered(), entered(self._context.stream):
            self._end_if_forked()
            if ready:
                self._wire.send(pickle.dumps((jobs.READY, None)))
            while True:
                received = self._wire.receive()
                assert received is not None
                message, descriptors = received
                ticket: Ticket = pickle.loads(message)
                del message, received
                self._answer(ticket, descriptors)

    def _answer(self, ticket: Ticket, descriptors: list[int]) -> None:
        for key in ticket.forget:
            self._segments.pop(key, None)
        segment = None
        if ticket.segment is not None:
            if descriptors:
                segment = Segment(ticket.segment, descriptors.pop(), ticket.nbytes)
                segment.forget()
                self._segments[ticket.segment] = segment
            segment = self._segments[ticket.segment]
        self._memory.begin(segment)
        batch = self._batch(ticket)
        self._heard.begin(batch, ticket.number)
        with busy:
            read_run(batch, 0, batch.units, self._context)
            self._end_if_forked()  # before `collate_fn` gets what it has of the batch
            finish(batch, self._context)
        self._end_if_forked()
        self._context.stream.move(None, None)
        self._heard.over()
        data = self._packed(batch)
        used, created = [], []
        for segment, nbytes in self._memory.used:
            new = segment.descriptor >= 0
            used.append((segment.key, nbytes, segment.nbytes if new else 0))
            if new:
                created.append(segment)
        answer = self._described(batch, data, used)
        del batch, data
        answer = answer._replace(kept=self._memory.let_go())
        self._wire.send(
            pickle.dumps((jobs.BATCH, answer), 5), [segment.descriptor for segment in created]
        )
        for segment in created:
            segment.forget()
            self._segments[segment.key] = segment

    def _end_if_forked(self) -> None:
        """End a process that user code has forked and that returned from it. Its answer would be taken for another."""
        if os.getpid() != self._pid:
            said = "a process that your code forked returned from it. End it by os._exit()"
            print(f"fastload: {said}", file=sys.stderr, flush=True)
            os._exit(1)

    def _batch(self, ticket: Ticket) -> Batch:
        if ticket.keys is not None:
            self._keys = ticket.keys
        place: dict[str, Any] = {
            "keys": self._keys,
            "recorders": {self._worker: self._observed},
            "epoch": ticket.epoch,
            "ordinal": ticket.ordinal,
        }
        if self._iterable:
            size, saved = ticket.given
            return LaneBatch(self._worker, size, saved, **place)
        given = unpack(ticket.given) if isinstance(ticket.given, Packed) else ticket.given
        return self._fetcher.source.batch(given, position=ticket.position, **place)

    def _packed(self, batch: Batch) -> Packed | None:
        """Return the batch's data, packed. If that fails, the batch raises the error."""
        data, batch.data = batch.data, None
        if batch.error is not None or batch.left_out or batch.dropped:
            return None
        try:
            return pack(data, self._memory)
        except BaseException as exc:
            batch.error = contained(exc)
            batch.where = f"{batch}; stage: hand over from the worker process"
            return None

    def _described(self, batch: Batch, data: Packed | None, used: list[Any]) -> Answer:
        who, lane, said = self._who, None, self._notices.warnings
        if isinstance(batch, LaneBatch):
            state = batch.state
            if isinstance(state, Exception):
                state = pack_error(state, who)  # type: ignore[assignment]
            lane = batch.position, batch.size, batch.ended, state
        run, observed = self._observed.take()
        return Answer(
            data=data,
            used=used,
            kept=False,
            nbytes=batch.nbytes,
            error=None if batch.error is None else pack_error(batch.error, who),
            where=batch.where,
            hint=batch.hint,
            left_out=batch.left_out,
            handled={k: pack_error(error, who) for k, error in batch.handled.items()},
            skipped=batch.skipped,
            retries=[*batch.retries],
            lane=lane,
            run=run,
            observed=observed,
            waits=self._observed.waits(),
            warnings=[said.popleft() for _ in range(len(said))],
        )

    def _ask(self, index: Any, error: Exception) -> Any:
        """Let the loop's process call `on_error`, and return the sample that it chose."""
        stream = self._context.stream
        question = index, pack_error(error, self._who), stream.drawn()
        self._wire.send(pickle.dumps((jobs.FAILED_SAMPLE, question)))
        received = self._wire.receive()
        assert received is not None
        sample, raised, drawn = pickle.loads(received[0])
        stream.resume(drawn)
        if raised is None:
            return unpack(sample)
        raise RaisedInLoop(raised)


class RaisedInLoop(Exception):
    """Stands for what `on_error` raised, which the loop's process has stored under a number."""
