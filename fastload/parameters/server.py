"""`Server`: some parameters of a model, and the calls of clients on them. An object without a socket."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from fastload.errors import ParametersError
from fastload.parameters.calls import expect_call
from fastload.parameters.checkpoint import Last, Saves
from fastload.parameters.gradients import Gradients, mean
from fastload.parameters.journal import MARK, Entry, Journal
from fastload.parameters.optimizer import Optimizer
from fastload.parameters.parameters import Parameters
from fastload.parameters.synchronous import Steps
from fastload.parameters.tables import TableInfo


class Server:
    """Server `number` of `of`: the dense parameters and the rows that `fastload.parameters.partition` gives it.

    Args:
        optimizer: how gradients change parameters.
        grads_to_wait: None: asynchronous, each push is applied at once. A number: synchronous, the mean of this many
            pushes is one step, for dense parameters and for rows. So workers with equal batches train like one worker
            with all of their batches.
        tolerance: maximum age of the gradients of a synchronous push, in versions.
        scale_by_staleness: divide the learning rate of an asynchronous push by `max(1, version - gradients' version)`.
        folder: folder of checkpoints, the same for all servers. The newest complete one is loaded. "": no checkpoints.
        checkpoint_every: save whenever the version is a multiple of this. 0: save only if a client asks. Pushes wait
            while a server saves. If a save fails, the server logs that and continues. An asynchronous server tries
            again with a later push, a synchronous one at the next multiple.
        keep: number of checkpoints to keep.
        seed: seed of new rows, the same for all servers.
        rejoin: True: this server was killed, but the other servers and the workers still run. Server 0 then reads the
            order of synchronous pushes that it had decided. False: the whole job resumes from the checkpoint.

    `answer` may be called from several threads. It makes the calls one after another. Other methods take no lock.
    """

    def __init__(
        self,
        number: int = 0,
        of: int = 1,
        *,
        optimizer: Optimizer | None = None,
        grads_to_wait: int | None = None,
        tolerance: int = 0,
        scale_by_staleness: bool = False,
        folder: str | os.PathLike[str] = "",
        checkpoint_every: int = 0,
        keep: int = 3,
        seed: int = 0,
        rejoin: bool = False,
    ) -> None:
        if not 0 <= number < of:
            raise ValueError(f"servers are counted from 0, got server {number} of {of}")
        if (grads_to_wait is not None and grads_to_wait < 1) or tolerance < 0 or keep < 1:
            raise ValueError(
                "grads_to_wait and keep must be 1 or more and tolerance 0 or more, got "
                f"grads_to_wait={grads_to_wait}, keep={keep} and tolerance={tolerance}"
            )
        if not isinstance(optimizer, Optimizer | None):
            raise TypeError(f"optimizer must be an Optimizer, got {optimizer!r}")
        self.number, self.of = number, of
        self.incarnation = secrets.token_hex(8)
        self.lock = threading.Lock()  # guards all attributes below
        self._own = Parameters(optimizer or Optimizer(), seed=seed)
        self.version = 0
        self._initialised = False
        self._last: Last = {}
        self._grads_to_wait = grads_to_wait
        self.synchronous = grads_to_wait is not None  # a step waits for several pushes
        self._tolerance = tolerance
        self._scales = scale_by_staleness
        self.folder = os.fspath(folder)
        exact = self.synchronous
        self._saves = Saves(self.folder, number, of, keep=keep, every=checkpoint_every, exact=exact)
        self._steps_done = position = 0
        for contents in self._saves.load(rejoin=rejoin):
            self._own.add_contents(contents["part"], number=number, of=of)
            self.version = max(self.version, contents["version"])
            self._initialised = contents["initialised"]
            self._last = contents["last"]
            self._steps_done, position = contents["steps"], contents["position"]
        pushes = grads_to_wait or 1
        journal = None
        if number == 0 and grads_to_wait:
            decided = self._steps_done * pushes
            journal = Journal(self.folder, base=position, pushes=decided, resume=rejoin)
        self._steps = Steps(
            pushes,
            position=position,
            journal=journal,
            save=lambda: self._saves.try_to(self.save, self.version),
            apply=self._make_step,
            oldest=lambda: self.version - tolerance,
            may_lack=rejoin,
        )
        self._steps.advance()

    # ---- calls of clients ----

    def answer(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a call, with the `incarnation` of this server. A restarted server has a different one.

        A call that names another `incarnation` is not made, because this server may lack earlier calls.
        """
        arguments = dict(arguments)
        if arguments.pop("incarnation", self.incarnation) != self.incarnation:
            return {"incarnation": self.incarnation}
        expect_call(method, arguments, synchronous=self.synchronous)
        with self.lock:
            result: dict[str, Any] = getattr(self, method)(**arguments)
            return {"incarnation": self.incarnation, **result}

    def hello(self, worker: str) -> dict[str, Any]:
        """Return the state of this server, and the number of the last push that it has from this worker."""
        return {
            "number": self.number,
            "of": self.of,
            "grads_to_wait": self._grads_to_wait,
            "kept": bool(self.folder),
            "initialised": self._initialised,
            "version": self.version,
            "last": self._last.get(worker, (0, 0))[0],
            "next": self._steps.next,
        }

    def initialise(self, values: Mapping[str, Tensor], version: int) -> dict[str, Any]:
        """Accept the first values of the dense parameters. Later calls change nothing."""
        taken = not self._initialised
        if taken:
            self._own.add_dense(values)
            self._initialised = True
            self.version += version
        return {"taken": taken}

    def add_tables(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Create those tables that do not exist yet."""
        for info in infos:
            self._own.add_table(TableInfo(**info))
        return {}

    def pull(self, version: int) -> dict[str, Any]:
        """Return the dense parameters, if they are newer than `version`."""
        newer = self._initialised and self.version > version
        dense = self._own.dense if newer else {}
        values = {name: value.clone() for name, value in dense.items()}
        return {"initialised": self._initialised, "version": self.version, "values": values}

    def rows(self, table: str, ids: Tensor) -> dict[str, Any]:
        """Return the rows of `ids`, in this order. `incomplete`: decided steps are still to be made."""
        incomplete = bool(self._steps.missing())
        return {"rows": self._own.table(table).rows(ids), "incomplete": incomplete}

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> dict[str, Any]:
        """Set the rows of distinct `ids`."""
        self._own.table(table).set_rows(ids, values)
        return {}

    def push(
        self, worker: str, sequence: int, gradients: Mapping[str, Any], fresh: bool
    ) -> dict[str, Any]:
        """Apply an asynchronous push, once. A worker's pushes arrive in the order of their numbers, from 1 on.

        The answer has the `version`, and with `fresh` the new rows. If earlier pushes are missing, it has only
        `expected`.
        """
        last, version = self._last.get(worker, (0, 0))
        if sequence > last + 1:
            return {"expected": last + 1}
        pushed = Gradients.read(gradients)
        if sequence == last + 1:
            self._own.check(pushed)
            age = self.version - pushed.version if self._scales else 1
            self._own.apply(pushed, divisor=max(1, age))
            version = self.version = self.version + 1
            self._last[worker] = sequence, version
            self._saves.save_if_due(self.save, self.version)
        named = pushed.rows.items() if fresh else ()
        rows = {name: self._own.table(name).rows(ids) for name, (ids, _) in named}
        return {"version": version, "fresh": rows, "saved": self._saved_of(worker)}

    def stage(self, worker: str, sequence: int, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Keep this server's gradients of a synchronous push, without applying them."""
        pushed = Gradients.read(gradients)
        self._own.check(pushed)
        if sequence > self._last.get(worker, (0, 0))[0]:
            self._steps.stage((worker, sequence), pushed)
        return {}

    def decide(self, worker: str, sequence: int, version: int, since: int) -> dict[str, Any]:
        """Accept or reject a push that all servers have staged, as server 0, which makes its own step at once.

        The answer is that of `decisions`, and `accepted`.
        """
        push = (worker, sequence)
        accepted = self._steps.journal.has(push)
        if not accepted and self._steps.has_staged(push):
            accepted = version >= self._decided_version() - self._tolerance
            if accepted:
                self._steps.decide(push)
        return {"accepted": accepted, **self.decisions(since)}

    def decisions(self, since: int) -> dict[str, Any]:
        """Return the order from position `since` on, and the version to which it leads. Only server 0 can."""
        return {"version": self._decided_version(), **self._steps.since(since)}

    def mark(self, since: int) -> dict[str, Any]:
        """Have all servers save at this position of the order, as server 0. The answer is that of `decisions`.

        A later answer to `commit` says whether a server has `unsaved` parameters.
        """
        self._steps.decide(MARK)
        return self.decisions(since)

    def commit(
        self, worker: str, start: int, entries: Sequence[Sequence[Any]], discarded: int | None
    ) -> dict[str, Any]:
        """Learn the order from position `start` on, and make all steps that are possible. Server 0 knows the order."""
        known = [(each, number) for each, number in entries]
        self._steps.take(start, known, None if discarded is None else (worker, discarded))
        return {
            "next": self._steps.next,
            "version": self.version,
            "missing": self._steps.missing(),
            "saved": self._saved_of(worker),
            "unsaved": self._saves.unsaved,
        }

    def checkpoint(self, version: int) -> dict[str, Any]:
        """Save, as an asynchronous server, and return the version of the checkpoint.

        Server 0 chooses it. Clients give it to the others, which save only what server 0 has saved: a version of a
        client's choice could outrank all later checkpoints.
        """
        if self.number == 0:
            version = max(self.version, self._saves.newest)
        elif self.folder and not self._saves.has(version, 0):
            raise ParametersError(f"server 0 has not saved a checkpoint of version {version}")
        if version >= self._saves.newest or not self._saves.has(version, self.number):
            self.save(version)
        return {"version": version}

    def save(self, version: int) -> None:
        """Write this server's part of a checkpoint, if it has a folder."""
        contents = {
            "version": self.version,
            "initialised": self._initialised,
            "steps": self._steps_done,
            "position": self._steps.position,
            "last": self._last,
            "part": self._own.contents(),
        }
        self._saves.save(version, contents)

    def close(self) -> None:
        """Close the server's files."""
        self._steps.close()

    # ---- in calls ----

    def _decided_version(self) -> int:
        """Return the version after all decided steps."""
        return self.version - self._steps_done + self._steps.decided()

    def _make_step(self, pushes: list[Entry], gradients: list[Gradients]) -> None:
        self._own.apply(mean(gradients))
        self.version += 1
        self._steps_done += 1
        self._last |= {worker: (sequence, self.version) for worker, sequence in pushes}
        self._saves.save_if_due(self.save, self.version)

    def _saved_of(self, worker: str) -> int:
        """Return the last push of a worker that a complete checkpoint has. The worker never has to send it again."""
        with suppress(OSError):  # the worker then keeps its pushes for longer
            position = self._saves.completed()
            if position is not None:
                self._steps.forget(position)
        return self._saves.last.get(worker, (0, 0))[0]
