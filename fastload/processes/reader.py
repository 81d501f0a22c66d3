"""What a worker of a process runs: it reads runs of the batches that the process was sent.

It reads with the same code as a loop without workers, in the same random streams. So the batches are the same.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch

from fastload._kit.torch_private import make_worker_info, name_thread
from fastload._kit.user_errors import annotate
from fastload.processes.jobs import Job, RaisedInLoop
from fastload.processes.observed import Looks
from fastload.processes.packing import unpack
from fastload.processes.pausing import busy
from fastload.processes.work import Work
from fastload.random.streams import entered
from fastload.reading.worker_context import WorkerContext, finish, read_run
from fastload.safety import WorkerCopies
from fastload.safety.modules import generators_of_modules

_reading = threading.local()
"""The reader of the calling thread."""


class ProcessReader:
    """One worker of the process, in the thread that makes it.

    Args:
        worker: its id.
        job: what the process is to do.
        own: the dataset and functions that it reads with.
        work: what it shares with the other readers.
    """

    def __init__(
        self,
        worker: int,
        job: Job,
        own: WorkerCopies,
        work: Work,
    ) -> None:
        _reading.by = self
        self._worker = worker
        self._work = work
        self._pid = os.getpid()
        name_thread(f"fastload-{worker}")
        torch.get_num_threads()  # or the first parallel operation would replace the 1 by the global number
        torch.set_num_threads(1)
        alone = len(job.workers) == 1
        method = "multiprocessing" if alone else "thread"
        info = make_worker_info(worker, job.num_workers, job.seed + worker, own.dataset, method)
        others = generators_of_modules if alone else tuple  # several readers would share these
        try:
            self._context = WorkerContext(
                own, info, work.fetcher, work.heard.wait, job.modes, others=others
            )
        except BaseException as exc:
            annotate(exc, f"worker {worker}; stage: worker_init_fn")
            raise
        self._looks = Looks(work.heard)

    def serve(self) -> None:
        """Read one run after another. Raise EOFError once the loop's process sends no more."""
        context = self._context
        with context.modes.entered(), entered(context.stream):
            self._end_if_forked()
            while True:
                batch, start, stop = self._work.claim(self._worker)
                with busy:
                    seconds = read_run(batch, start, stop, context)
                    self._end_if_forked()  # before `collate_fn` gets what it has of the batch
                    last = self._work.deliver(batch, stop - start, seconds)
                    if last:
                        finish(batch, context)
                self._end_if_forked()
                context.stream.move(None, None)  # so that it keeps no batch
                if last:
                    self._work.answer(batch, self._worker, self._looks)
                del batch

    def _end_if_forked(self) -> None:
        """End a process that user code has forked and that returned from it. Its answer would be taken for another."""
        if os.getpid() != self._pid:
            said = "a process that your code forked returned from it. End it by os._exit()"
            print(f"fastload: {said}", file=sys.stderr, flush=True)
            os._exit(1)

    def ask(self, index: Any, error: Exception) -> Any:
        """Let the loop's process call `on_error`, and return the sample that it chose."""
        stream = self._context.stream
        question = index, error, stream.drawn()
        sample, raised, drawn = self._work.ask(self._worker, question)
        stream.resume(drawn)
        if raised is None:
            return unpack(sample)
        raise RaisedInLoop(raised)


def ask(index: Any, error: Exception) -> Any:
    """Do the same for the reader of the calling thread: `on_error` of the settings in a worker process."""
    reader: ProcessReader = _reading.by
    return reader.ask(index, error)
