"""`Session`: one client and all its servers: calls, pushes, and repeated pushes for a server that has restarted.

A synchronous push takes three rounds. The client stages each server's gradients. Server 0 rejects the push, or gives it
a position in the order. The client then sends the order to all servers, and each makes the steps for which it has all
gradients. A restarted server lacks the gradients of some decided pushes. Each client sends its own pushes again.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from fastload.errors import ParametersError, ParametersLostError
from fastload.parameters.gradients import Gradients
from fastload.parameters.link import Link, NoAnswerError
from fastload.parameters.transport import Answer, Stub

_NAP_S = 0.05
_NOTHING = Gradients()
_sessions: WeakSet[Session] = WeakSet()  # of this process, or of the one that forked it


class Session:
    """One client and its servers. Several threads may make calls. Pushes are made one after another.

    A server that was killed and restarted has a new incarnation. The first call that notices this sends again all
    pushes that the server's checkpoint lacks.
    """

    def __init__(
        self, stubs: Sequence[Stub], worker: str, *, patience_s: float, retained_bytes: int
    ) -> None:
        self.links = [
            Link(number, stub, patience_s=patience_s, retained_bytes=retained_bytes)
            for number, stub in enumerate(stubs)
        ]
        self._name = worker
        self._patience_s = patience_s
        self._infos: dict[str, Mapping[str, Any]] = {}
        self.begin()
        _sessions.add(self)

    def begin(self) -> None:
        """Begin as a new worker, as a restarted or forked one is. It counts its pushes from 1 again."""
        self.worker = f"{self._name}-{secrets.token_hex(6)}"
        # Guards all attributes below, the links' pushes, and what the links know of the servers. A push, a checkpoint
        # and a catch-up hold it from their first call to their last. So servers get pushes in the order of their
        # numbers, and no thread sends pushes again while another adds one. Re-entrant: a push may have to catch up.
        self._lock = threading.RLock()
        self._sequence = 0
        self._missing: dict[tuple[int, str, int], float] = {}
        self._unsaved = ""  # servers that could not save, with the reasons
        self._old_rows: object = None  # a new one after each answer of rows that lack decided steps
        self._seen = threading.local()  # `_old_rows` at each thread's last push
        self.grads_to_wait: int | None = None
        for link in self.links:
            link.forget()

    # ---- calls ----

    def connect(self) -> None:
        """Make the first contact with each server, if this client has not done so."""
        for link in self.links:
            if not link.incarnation:
                self._catch_up(link, "")

    def ask(self, link: Link, method: str, **arguments: Any) -> Answer:
        """Return the answer of a server that has all pushes of this client."""
        sent = _to(link, arguments)
        return self._checked(link, method, sent, link.call(method, sent))

    def ask_each(self, calls: Sequence[tuple[int, str, Mapping[str, Any]]]) -> list[Answer]:
        """Make calls (server, method, arguments) in parallel, and return their answers. Raise the first error."""
        return _without_errors(self._tried(calls))

    def _tried(
        self, calls: Sequence[tuple[int, str, Mapping[str, Any]]]
    ) -> list[Answer | ParametersError]:
        sent = [(self.links[i], method, _to(self.links[i], given)) for i, method, given in calls]
        waits = [link.start(method, arguments) for link, method, arguments in sent]
        answers: list[Answer | ParametersError] = []
        for (link, method, arguments), wait in zip(sent, waits, strict=True):
            try:
                answers.append(self._checked(link, method, arguments, wait()))
            except ParametersError as error:
                answers.append(error)
        return answers

    def _checked(self, link: Link, method: str, sent: Mapping[str, Any], answer: Answer) -> Answer:
        """Return the answer to a call with the arguments `sent`. Repeat the call until the server has made it."""
        # Only the incarnation that a call names makes it, so an answer counts if all three agree. The link's alone is
        # not enough: pulls hold no lock, and if another thread has caught up, it is that of a server that did nothing.
        while (
            not answer["incarnation"] == sent.get("incarnation") == link.incarnation
            or "expected" in answer
        ):
            self._catch_up(link, "" if "expected" in answer else answer["incarnation"])
            sent = _to(link, sent)
            answer = link.call(method, sent)
        if answer.get("incomplete"):
            # Without the lock: whichever thread writes last, it is another object than any push has seen.
            self._old_rows = object()
        return answer

    def add_tables(self, infos: Sequence[Mapping[str, Any]]) -> None:
        """Create tables on all servers."""
        with self._lock:
            self._infos |= {info["name"]: info for info in infos}
        self.ask_each([(link.number, "add_tables", {"infos": infos}) for link in self.links])

    # ---- a server that this client meets, or meets again ----

    def _catch_up(self, link: Link, incarnation: str) -> None:
        """Send a server all pushes that it lacks, unless another thread has done that for its `incarnation`."""
        # Each round is for one incarnation. If the server dies in it, a later answer has another, and the next round
        # sends all to that one. Servers apply a push once, so one that arrives twice does no harm. The link learns the
        # incarnation only after that. Until then, no other call takes the server for one that has all pushes.
        with self._lock:
            while not (incarnation and incarnation == link.incarnation):
                hello = link.call("hello", {"worker": self.worker})
                self._check(link, hello)
                incarnation = hello["incarnation"]
                if all(found == incarnation for found in self._sent_again(link, hello)):
                    # `next` only rises: `_commit` has to notice if server 0 comes back with a shorter order.
                    link.incarnation, link.next = incarnation, max(link.next, hello["next"])
                    link.kept, link.initialised = hello["kept"], hello["initialised"]
                else:
                    incarnation = ""

    def _check(self, link: Link, hello: Answer) -> None:
        if (hello["number"], hello["of"]) != (link.number, len(self.links)):
            raise ParametersError(
                f"{link.name} says it is server {hello['number']} of {hello['of']}, but this client's list has it as "
                f"server {link.number} of {len(self.links)}. List all servers in the order of their numbers"
            )
        if link.number and hello["grads_to_wait"] != self.grads_to_wait:
            raise ParametersError(
                f"{link.name} has grads_to_wait={hello['grads_to_wait']}, but server 0 has "
                f"grads_to_wait={self.grads_to_wait}. Start all servers with the same options"
            )
        self.grads_to_wait = hello["grads_to_wait"]
        # The server has all pushes up to `last`, and the link keeps all after `floor`. If `last` is not below `floor`,
        # there is no gap. A push that a complete checkpoint has lies below `floor`, and below `last` of each restart.
        restarted = link.incarnation not in ("", hello["incarnation"])
        forgotten = hello["last"] < link.floor or (link.initialised and not hello["initialised"])
        if forgotten or (restarted and not hello["kept"]):
            raise lost(
                link, hello["version"], f"pushes of worker {self.worker} that it does not keep"
            )

    def _sent_again(self, link: Link, hello: Answer) -> list[str]:
        """Send the tables and pushes that the server lacks. Return the incarnations that answered."""
        if not link.incarnation and not self._sequence:
            return []
        # In this order: a push names tables, and a step waits for the pushes of the order. All calls name the
        # incarnation of `hello`, so a server that has died since makes none of them.
        same = {"incarnation": hello["incarnation"]}
        answers = [link.call("add_tables", {"infos": list(self._infos.values()), **same})]
        pushes = link.after(hello["last"])
        method = "stage" if self.grads_to_wait else "push"
        more = same if self.grads_to_wait else {"fresh": False, **same}
        first = pushes[0][0] if pushes else self._sequence + 1
        if not self.grads_to_wait and first > hello["last"] + 1:
            raise lost(link, hello["version"], f"push {hello['last'] + 1} of {self.worker}")
        for sequence, gradients in pushes:
            about = {"worker": self.worker, "sequence": sequence, **more}
            answers.append(link.call(method, {**about, "gradients": vars(gradients)}))
        if self.grads_to_wait and link.number:
            # Server 0 has its own order. Another server may have been killed before any client told it the newest.
            order = self._order_from(link, hello)
            arguments = {"worker": self.worker, **order, "discarded": None, **same}
            answers.append(link.call("commit", arguments))
        return [answer["incarnation"] for answer in answers]

    def _order_from(self, link: Link, reached: Answer) -> dict[str, Any]:
        """Return the order of pushes from the position that a server needs next."""
        answer = self.ask(self.links[0], "decisions", since=reached["next"])
        if answer["start"] > reached["next"] or answer["end"] < reached["next"]:
            raise lost(
                link, reached["version"], "the order of pushes, which server 0 does not keep"
            )
        return {"start": answer["start"], "entries": answer["entries"]}

    # ---- pushes ----

    def push(
        self, gradients: Sequence[Gradients], *, fresh: bool
    ) -> tuple[bool, int, list[Mapping[str, Any]]]:
        """Push each server's gradients to it. Return (accepted, version, fresh rows)."""
        with self._lock:
            if getattr(self._seen, "old_rows", None) is not self._old_rows:
                # A server has restarted, and waits for pushes of other workers. Any thread may have its old rows, so
                # the next push of each is rejected, at worst one that has none.
                self._seen.old_rows = self._old_rows
                rows = self._rows_of(gradients) if fresh else []
                order = self.ask(self.links[0], "decisions", since=self._next())
                return False, max(self._commit(order, None)), rows
            # Kept before it is sent: if a call fails, or Ctrl-C ends it, a later call sends it again. A link keeps
            # `retained_bytes` of pushes, but always this one. `_check` raises if a server needs one that was dropped.
            self._sequence += 1
            for link, own in zip(self.links, gradients, strict=True):
                link.retain(self._sequence, own)
            if self.grads_to_wait:
                accepted, version = self._in_step(gradients)
                rows = self._rows_of(gradients) if fresh else []
            else:
                accepted = True
                version, rows = self._at_once(gradients, fresh)
            # All servers have it, and one without checkpoints cannot come back for it.
            _drop([link for link in self.links if not link.kept], self._sequence)
            return accepted, version, rows

    def _at_once(
        self, gradients: Sequence[Gradients], fresh: bool
    ) -> tuple[int, list[Mapping[str, Any]]]:
        about = {"worker": self.worker, "sequence": self._sequence, "fresh": fresh}
        calls = [(i, "push", {**about, "gradients": vars(own)}) for i, own in enumerate(gradients)]
        answers = self._tried(calls)
        # The server has to get this number, or the next push would find a gap. All are replaced before the first call:
        # if that fails, the next push sends the others again, and a server would refuse the old content forever.
        answered = zip(self.links, answers, strict=True)
        refused = [link for link, answer in answered if _is_refusal(answer)]
        for link in refused:
            link.replace(self._sequence, _NOTHING)
        for link in refused:
            self.ask(link, "push", **about, gradients=vars(_NOTHING))
        done = _without_errors(answers)
        for link, answer in zip(self.links, done, strict=True):
            link.saved(answer["saved"])
        return max(answer["version"] for answer in done), [answer["fresh"] for answer in done]

    def _in_step(self, gradients: Sequence[Gradients]) -> tuple[bool, int]:
        about = {"worker": self.worker, "sequence": self._sequence}
        staged = self._tried(
            [(i, "stage", {**about, "gradients": vars(own)}) for i, own in enumerate(gradients)]
        )
        if any(map(_is_refusal, staged)):
            _drop(self.links, self._sequence)
            self._commit({"start": 0, "entries": []}, self._sequence)
        # Server 0 decides only when all servers have the gradients. So each of them makes a decided push, unless it
        # restarts, and then this client sends it again. A push that is not decided is dropped once it is old.
        _without_errors(staged)
        version = min(own.version for own in gradients)
        answer = self.ask(self.links[0], "decide", **about, version=version, since=self._next())
        accepted = answer["accepted"]
        if not accepted:
            _drop(self.links, self._sequence)
        versions = self._commit(answer, None if accepted else self._sequence)
        return accepted, max(versions)

    def _next(self) -> int:
        """Return the first position in the order that any server needs, as far as this client knows."""
        return min(link.next for link in self.links)

    def _rows_of(self, gradients: Sequence[Gradients]) -> list[Mapping[str, Any]]:
        """Return each server's current rows of the ids in a push."""
        named = [
            (i, name, ids) for i, own in enumerate(gradients) for name, (ids, _) in own.rows.items()
        ]
        answers = self.ask_each(
            [(i, "rows", {"table": name, "ids": ids}) for i, name, ids in named]
        )
        found: list[dict[str, Any]] = [{} for _ in gradients]
        for (i, name, _), answer in zip(named, answers, strict=True):
            found[i][name] = answer["rows"]
        return list(found)

    def _commit(self, order: Mapping[str, Any], discarded: int | None) -> list[int]:
        """Send the order of pushes to all servers. Return their versions."""
        # The caller has asked for `order` under the lock, and each `next` was known before. As the order only grows, it
        # ends after all of them, unless server 0 came back without its journal.
        if "end" in order and order["end"] < max(link.next for link in self.links):
            raise lost(self.links[0], -1, "the order of pushes that others have followed")
        about = {"worker": self.worker, "discarded": discarded}
        told = {**about, "start": order["start"], "entries": order["entries"]}
        answers = self.ask_each([(link.number, "commit", told) for link in self.links])
        missing = set()
        for link, answer in zip(self.links, answers, strict=True):
            if answer["next"] < order["start"]:
                # It restarted after `_next`, and skipped entries that begin after a gap. It gets the order from there.
                answer = self.ask(link, "commit", **about, **self._order_from(link, answer))
            link.next = answer["next"]
            link.saved(answer["saved"])
            missing |= {(link.number, *push) for push in answer["missing"]}
        self._watch(missing, answers)
        self._unsaved = "; ".join(
            f"{link.name}: {answer['unsaved']}"
            for link, answer in zip(self.links, answers, strict=True)
            if answer["unsaved"]
        )
        return [answer["version"] for answer in answers]

    def _watch(self, missing: set[tuple[int, str, int]], answers: Sequence[Answer]) -> None:
        """Raise ParametersLostError if a server lacks a push for `patience_s`, because its worker has ended."""
        now = time.monotonic()
        self._missing = {push: self._missing.get(push, now) for push in missing}
        for (number, worker, sequence), since in self._missing.items():
            if now - since > self._patience_s:
                version = answers[number]["version"]
                what = f"push {sequence} of worker {worker}, which gives no sign of life"
                raise lost(self.links[number], version, what)

    # ---- checkpoints ----

    def checkpoint(self) -> int:
        """Have all servers save, and return the version."""
        with self._lock:
            calls = [(i, "hello", {"worker": ""}) for i in range(len(self.links))]
            found = self.ask_each(calls)
            for link, answer in zip(self.links, found, strict=True):
                if not answer["kept"]:
                    raise ParametersError(
                        f"{link.name} has no checkpoint folder. Start it with --checkpoint FOLDER, or make it with "
                        "Server(folder=...)"
                    )
            if not self.grads_to_wait:
                first, *others = self.links
                version = int(self.ask(first, "checkpoint", version=-1)["version"])
                asked = {"version": version}
                self.ask_each([(link.number, "checkpoint", asked) for link in others])
                return version
            order = self.ask(self.links[0], "mark", since=self._next())
            version = int(order["version"])
            deadline = time.monotonic() + self._patience_s
            while min(self._commit(order, None)) < version:
                if time.monotonic() > deadline:
                    raise NoAnswerError(
                        f"no checkpoint of version {version}: after {self._patience_s:g} s a server still waits for "
                        "pushes of another worker. Call checkpoint() again once all workers run"
                    )
                time.sleep(_NAP_S)  # the other worker has to notice that the server has restarted
                # Other workers push meanwhile, so servers may have followed an order that is longer than at the mark.
                order = self.ask(self.links[0], "decisions", since=self._next())
            if self._unsaved:
                raise ParametersError(f"no checkpoint of version {version}: {self._unsaved}")
            return version


def _forked() -> None:
    # Here the child has one thread, so none can meet a session that is half the parent's. The new lock is free, even if
    # another thread of the parent held the old one.
    for session in list(_sessions):
        session.begin()


os.register_at_fork(after_in_child=_forked)


def _to(link: Link, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call, with the incarnation that this client knows. Only that one makes the call."""
    return {**arguments, "incarnation": link.incarnation} if link.incarnation else arguments


def _drop(links: Sequence[Link], sequence: int) -> None:
    for link in links:
        link.replace(sequence, None)


def _is_refusal(answer: Answer | ParametersError) -> bool:
    """Return True if a server has refused a push because of its content."""
    return type(answer) is ParametersError


def _without_errors(answers: Sequence[Answer | ParametersError]) -> list[Answer]:
    for answer in answers:
        if isinstance(answer, ParametersError):
            raise answer
    return list(answers)  # type: ignore[arg-type]  # no error is left


def lost(link: Link, version: int, what: str) -> ParametersLostError:
    """Return the error for a server that has restarted and lacks `what`."""
    return ParametersLostError(
        f"{link.name} has restarted at version {version}, and lacks {what}. End all servers and workers, and start "
        "them again with another store. They resume from the newest checkpoint. More frequent checkpoints, or a "
        "larger retained_bytes, make this rarer"
    )
