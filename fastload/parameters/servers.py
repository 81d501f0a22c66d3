"""`Servers`: one client and all its servers: calls, pushes and checkpoints.

No call is repeated: if it has no answer, it may have been made. So a push is applied once, or the client raises.

A synchronous push takes two rounds, or one if there is one server. Server 0 rejects the push, or says which step it
belongs to. Then the client sends the other servers their parts of it. So all servers take the same pushes into a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastload.errors import ParametersError, ParametersLostError
from fastload.parameters.gradients import Gradients
from fastload.parameters.transport import RESUME, Answer, ServerGoneError, Stub

_NAP_S = 0.05
Call = tuple[int, str, Mapping[str, Any]]
"""The number of a server, a method and its arguments."""


class Servers:
    """All servers, as one client sees them. Several threads may make calls. Pushes are made one after another."""

    def __init__(self, stubs: Sequence[Stub], *, patience_s: float) -> None:
        self._stubs, self._patience_s = list(stubs), patience_s
        self._lock = threading.RLock()  # guards the attributes below
        self._runs: list[str] = []  # of all servers, once this client has met them
        self._grads_to_wait: int | None = None
        self._rejected = (-1, 0.0)  # the version of rejected pushes, and since when

    @property
    def grads_to_wait(self) -> int | None:
        """The number of pushes in a step, or None for asynchronous servers."""
        self._meet()
        return self._grads_to_wait

    def ask(self, calls: Iterable[Call]) -> list[Answer]:
        """Make calls in parallel, and return their answers. Raise the first error."""
        self._meet()
        return self._ask(calls)

    def _ask(self, calls: Iterable[Call]) -> list[Answer]:
        waiting, answers, errors = [], [], []
        for i, method, arguments in calls:
            try:
                sent = {**arguments, "run": self._runs[i] if self._runs else ""}
                waiting.append((i, self._stubs[i].start(method, sent)))
            except ParametersError as error:
                errors.append(error)
        for i, wait in waiting:
            try:
                answers.append(self._checked(i, wait()))
            except ParametersError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return answers

    def _checked(self, number: int, answer: Answer) -> Answer:
        if self._runs and answer["run"] != self._runs[number]:
            raise ParametersLostError(
                f"{self._name(number)} has restarted, and lacks the pushes since its checkpoint. {RESUME}"
            )
        if "refused" in answer:
            raise ParametersError(f"{self._name(number)}: {answer['refused']}")
        return answer

    def _name(self, number: int) -> str:
        return f"server {number} {self._stubs[number].name}"

    def _meet(self) -> None:
        """Learn what the servers are, before the first other call."""
        if self._runs:
            return
        with self._lock:
            hellos = self._hellos()
            for number, hello in enumerate(hellos):
                if (hello["number"], hello["of"]) != (number, len(hellos)):
                    raise ParametersError(
                        f"{self._name(number)} says it is server {hello['number']} of {hello['of']}, but this client's "
                        f"list has it as server {number} of {len(hellos)}. List all servers in the order of their "
                        "numbers"
                    )
                if hello["grads_to_wait"] != hellos[0]["grads_to_wait"]:
                    raise ParametersError(
                        f"{self._name(number)} has grads_to_wait={hello['grads_to_wait']}, but server 0 has "
                        f"grads_to_wait={hellos[0]['grads_to_wait']}. Start all servers with the same options"
                    )
            runs = [hello["run"] for hello in hellos]
            for met in self._ask((i, "meet", {"runs": runs}) for i in range(len(runs))):
                for number, before in enumerate(met["runs"]):
                    if before != runs[number]:
                        raise ParametersLostError(
                            f"{self._name(number)} has restarted, and others have not: it lacks pushes that they have. "
                            f"{RESUME}"
                        )
            self._grads_to_wait = hellos[0]["grads_to_wait"]
            self._runs = runs

    def _hellos(self) -> list[Answer]:
        """Return what the servers say they are. Wait for those that do not listen yet."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return self._ask((i, "hello", {}) for i in range(len(self._stubs)))
            except ServerGoneError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(_NAP_S)

    def push(self, gradients: Sequence[Gradients], *, fresh: bool) -> tuple[bool, list[Answer]]:
        """Push each server's gradients to it. Return whether it was accepted, and the answers."""
        with self._lock:
            calls = [
                (i, "push", {"gradients": vars(own), "fresh": fresh})
                for i, own in enumerate(gradients)
            ]
            if not self.grads_to_wait:
                return True, self.ask(calls)
            first, *others = calls
            (answer,) = self.ask([first])
            if not answer["accepted"]:
                self._expect_progress(gradients[0].version)
                return False, [answer]
            step = {"step": answer["step"]}
            return True, [answer, *self.ask((i, method, {**a, **step}) for i, method, a in others)]

    def _expect_progress(self, version: int) -> None:
        """Raise ParametersLostError if pushes of one version are rejected for too long."""
        rejected, since = self._rejected
        if rejected != version:
            self._rejected = version, time.monotonic()
        elif time.monotonic() - since > self._patience_s:
            raise ParametersLostError(
                f"for {self._patience_s:g} s the servers have rejected all pushes of version {version}. If that is the "
                f"oldest version of the last pull, a worker has ended in the middle of a push. {RESUME}"
            )

    def checkpoint(self) -> int:
        """Have all servers save, and return the version."""
        deadline = time.monotonic() + self._patience_s
        while True:
            (first,) = self.ask([(0, "checkpoint", {"version": -1, "step": -1})])
            asked = {name: first[name] for name in ("version", "step")}
            others = self.ask((i, "checkpoint", asked) for i in range(1, len(self._stubs)))
            if all(answer["saved"] for answer in others):
                return int(first["version"])
            if time.monotonic() > deadline:
                raise ParametersError(
                    f"no checkpoint: for {self._patience_s:g} s, the servers were at different steps. Call "
                    f"checkpoint() while no worker pushes. If a worker has ended in the middle of a push: {RESUME}"
                )
            time.sleep(_NAP_S)  # a worker has pushed to server 0, and not yet to the others
