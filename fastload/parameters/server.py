"""`Server`: some parameters of a model, and the calls of clients on them. An object without a socket."""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastload.errors import ParametersError, in_one_line
from fastload.parameters.checkpoint import Checkpoints
from fastload.parameters.gradients import Gradients, checked_version, mean
from fastload.parameters.optimizer import Optimizer
from fastload.parameters.parameters import Parameters
from fastload.parameters.tables import TableInfo

_CALLS = "hello meet initialise add_tables pull rows set_rows push checkpoint"
_AHEAD = 1000  # steps: how far server 0 may be ahead of another
_log = logging.getLogger("fastload")


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
            while a server saves. If a save fails, the server logs that, and saves at the next multiple.
        keep: number of checkpoints to keep.
        seed: seed of new rows, the same for all servers.
        number, of: number of this server, and of servers.

    `answer` may be called from several threads. It makes the calls one after another. Other methods take no lock.

    Examples:
        >>> server = fastload.parameters.Server(optimizer=fastload.parameters.Optimizer(lr=0.1))
        >>> client = fastload.parameters.PSClient(fastload.parameters.connect(server))
        >>> client.close()
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
        self.number, self.of, self.folder = number, of, os.fspath(folder)
        self.run = secrets.token_hex(8)
        self.lock = threading.Lock()  # guards all attributes below
        self.version = 0
        self.grads_to_wait = grads_to_wait
        self._tolerance, self._scales, self._every = tolerance, scale_by_staleness, checkpoint_every
        self._initialised = False
        # The runs of all servers, as the client has met them that made the first other call.
        self._runs: list[str] = []
        self._is_new = True
        # The number of synchronous steps, and the pushes of the next ones.
        self._steps = 0
        self._staged: dict[int, list[Gradients]] = {}
        self._own = Parameters(optimizer or Optimizer(), seed=seed)
        self._checkpoints = Checkpoints(self.folder, number, of, keep=keep)
        for contents in self._checkpoints.load():
            self._own.add_contents(contents["part"], number=number, of=of)
            self.version = max(self.version, contents["version"])
            self._initialised, self._steps = contents["initialised"], contents["steps"]

    # ---- calls of clients ----

    def answer(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a call, with the `run` of this server. A restarted server has a different one.

        A call that names another `run` is not made, because this server lacks earlier calls.
        """
        if method not in _CALLS.split():
            raise ParametersError(
                f"servers have no method {method!r}. Use the same version of fastload on workers and servers"
            )
        arguments = dict(arguments)
        if arguments.pop("run", "") not in ("", self.run):
            return {"run": self.run}
        with self.lock:
            self._is_new &= method in ("hello", "meet")
            return {"run": self.run, **getattr(self, method)(**arguments)}

    def hello(self) -> dict[str, Any]:
        """Return what a client has to know of this server."""
        return {"number": self.number, "of": self.of, "grads_to_wait": self.grads_to_wait}

    def meet(self, runs: Sequence[str]) -> dict[str, Any]:
        """Return the runs of all servers that the first client has met. `runs` are those that this client has met."""
        if self._is_new and len(runs) == self.of and runs[self.number] == self.run:
            self._runs = list(runs)
        return {"runs": self._runs}

    def initialise(self, values: Mapping[str, Tensor], version: int) -> dict[str, Any]:
        """Accept the first values of the dense parameters. Later calls change nothing. Return the answer."""
        taken = not self._initialised
        if taken:
            version = checked_version(version)
            self._own.add_dense(values)
            self._initialised = True
            self.version += version
        return {"taken": taken}

    def add_tables(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Create those tables that do not exist yet. Return the answer."""
        for info in [TableInfo(**info) for info in infos]:
            self._own.add_table(info)
        return {}

    def pull(self, version: int) -> dict[str, Any]:
        """Return the dense parameters, if they are newer than `version`."""
        newer = self._initialised and self.version > version
        dense = self._own.dense if newer else {}
        values = {name: value.clone() for name, value in dense.items()}
        return {"initialised": self._initialised, "version": self.version, "values": values}

    def rows(self, table: str, ids: Tensor) -> dict[str, Any]:
        """Return the rows of `ids`, in this order."""
        return {"rows": self._own.table(table).rows(ids)}

    def set_rows(self, table: str, ids: Tensor, values: Tensor) -> dict[str, Any]:
        """Set the rows of distinct `ids`. Return the answer."""
        self._own.table(table).set_rows(ids, values)
        return {}

    def push(
        self, gradients: Mapping[str, Any], fresh: bool = False, step: int = -1
    ) -> dict[str, Any]:
        """Take a push.

        An asynchronous server applies it. Server 0 of synchronous ones gives it a `step`, and the client tells the
        others. `fresh`: also return the new rows.

        Returns:
            The answer to the client.
        """
        take = self._stage if self.grads_to_wait else self._apply
        answer = take(gradients, step)
        named = gradients["rows"].items() if fresh else ()
        rows = {name: self._own.table(name).rows(ids) for name, (ids, _) in named}
        return {**answer, "fresh": rows}

    def checkpoint(self, version: int, step: int) -> dict[str, Any]:
        """Save, and return `saved`: False if this server is at another synchronous step than server 0 was.

        Server 0 chooses the version and the step. Clients give them to the others, which save only what server 0 has
        saved: a version of a client's choice could outrank all later checkpoints.
        """
        if not self.folder:
            raise ParametersError(
                f"server {self.number} has no checkpoint folder. Start it with --checkpoint FOLDER, or make it with "
                "Server(folder=...)"
            )
        if self.number == 0:
            version, step = max(self.version, self._checkpoints.newest), self._steps
        elif not self._checkpoints.has(checked_version(version), 0):
            raise ParametersError(f"server 0 has not saved a checkpoint of version {version}")
        is_newest = version >= self._checkpoints.newest
        if self._steps == step and (is_newest or not self._checkpoints.has(version, self.number)):
            self.save(version)
        return {"version": version, "step": step, "saved": self._steps == step}

    def save(self, version: int) -> None:
        """Write this server's part of a checkpoint, if it has a folder."""
        contents = {
            "version": self.version,
            "initialised": self._initialised,
            "steps": self._steps,
            "part": self._own.contents(),
        }
        self._checkpoints.save(version, contents)

    # ---- in calls ----

    def _apply(self, gradients: Mapping[str, Any], _: int) -> dict[str, Any]:
        """Apply an asynchronous push."""
        pushed = Gradients.read(gradients)
        self._own.check(pushed)
        age = self.version - pushed.version if self._scales else 1
        self._own.apply(pushed, divisor=max(1, age))
        self._stepped()
        return {"version": self.version}

    def _stage(self, gradients: Mapping[str, Any], step: int) -> dict[str, Any]:
        """Keep a synchronous push for its step, and make the step if it is complete."""
        assert self.grads_to_wait is not None
        answer: dict[str, Any] = {}
        try:
            pushed = Gradients.read(gradients)
            self._own.check(pushed)
        except ParametersError as error:
            if self.number == 0:
                raise
            # Server 0 has counted this push in, so the step must not wait for it here.
            pushed, answer = Gradients(), {"refused": str(error)}
        if self.number == 0:
            step = self._steps
            if pushed.version < self.version - self._tolerance:
                return {"version": self.version, "accepted": False}
        staged = self._staged.get(step, [])
        if not self._steps <= step <= self._steps + _AHEAD or len(staged) == self.grads_to_wait:
            raise ParametersError(
                f"server {self.number} is at step {self._steps}, and cannot take a push of step {step}"
            )
        # A caller in this process may change its gradients before the step is made.
        dense = {name: value.clone() for name, value in pushed.dense.items()}
        self._staged[step] = [*staged, replace(pushed, dense=dense)]
        while len(self._staged.get(self._steps, ())) == self.grads_to_wait:
            self._own.apply(mean(self._staged.pop(self._steps)))
            self._steps += 1
            self._stepped()
        return {"version": self.version, "accepted": True, "step": step, **answer}

    def _stepped(self) -> None:
        """Count a version. Save if it is due, and log an OSError: the push was applied, so it must not fail."""
        self.version += 1
        if not self._every or self.version % self._every:
            return
        try:
            self.save(self.version)
        except OSError as error:
            _log.warning(
                "server %d of %d has not saved version %d: %s. If it is killed, it loses the pushes since its last "
                "checkpoint",
                *(self.number, self.of, self.version, in_one_line(error)),
            )
