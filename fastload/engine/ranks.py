"""What this rank tells the others of its loaders, and hears of theirs, through the store of the process group.

One thread beside the loop speaks and listens, so a store that does not answer stops no training. It makes no collective
call, and uses no stream of a device. While an epoch runs, the rank speaks every two seconds; then it is still.

Clocks of nodes are not compared. Each time that a rank speaks, it adds 1 to a counter in the store. A reader speaks
too, and knows when the counter had which value: so it tells by its own clock when another rank was heard.
"""

from __future__ import annotations

import atexit
import json
import os
import weakref
from bisect import bisect_left
from collections import Counter, deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import torch.distributed as dist

from fastload._kit.torch_private import default_store
from fastload.engine.threads import started, wait
from fastload.telemetry.ranks import Latest, Ranks, RankStats, loader_name, rank_stats

BEAT_S = 2.0
ANSWER_S = 2.0
"""How long a caller waits for the store."""

_PREFIX = "fastload/ranks/1"
"""Of the keys in the store. The number is the version of what ranks say."""

_ERRORS = (RuntimeError, OSError)
"""Torch's errors of stores, and those of files."""


_Answer = Future[list[tuple[Any, float]]]
"""Of each rank that has spoken, what it said of its loaders, and how long ago at least."""


class Watch:
    """This rank of a process group, for the others, and the others for it.

    Args:
        group: the default process group.
    """

    def __init__(self, group: Any) -> None:
        self.group = weakref.ref(group)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._store: Any = default_store()
        self._loaders: dict[str, tuple[weakref.ref[Any], Latest]] = {}
        self._names: Counter[str] = Counter()
        self._beats: deque[tuple[int, float]] = deque(maxlen=4096)  # the counter, and when
        self._orders: SimpleQueue[_Answer | None] = SimpleQueue()
        self._late: _Answer | None = None
        self._born = 0  # the counter, as this rank first spoke
        self._problem = ""
        self._closed = False
        self._speaks = True
        self.thread = started("fastload-ranks", self._work)
        # Else it would speak to a store that goes with the group.
        weakref.finalize(group, self.close).atexit = False

    def name_of(self, loader: Any) -> str:
        """Return the name of a loader, which is that of the same loader on other ranks, and follow it from now on."""
        for name, (ref, _) in self._loaders.items():
            if ref() is loader:
                return name
        name = loader_name(loader, self._names)
        # A new one: the thread may read the other.
        kept = {name: one for name, one in self._loaders.items() if one[0]() is not None}
        self._loaders = {**kept, name: (weakref.ref(loader), Latest())}
        return name

    def wake(self) -> None:
        """Speak again: an epoch has begun."""
        if not self._speaks:
            self._orders.put(None)

    def ask(self, loader: Any) -> Ranks:
        """Return what all ranks said last of a loader. Wait two seconds at most, and for no other rank."""
        name, answer = self.name_of(loader), _Answer()
        if not self._problem and (self._late is None or self._late.done()):
            self._orders.put(answer)
            try:
                heard = [(said[name], age) for said, age in answer.result(ANSWER_S) if name in said]
            except TimeoutError:
                self._late = answer
            else:
                ranks = (RankStats(**{**said, "heard_s": age}) for said, age in heard)
                return Ranks(name, self._world_size, tuple(ranks))
        why = self._problem or f"no answer in {ANSWER_S:g} s"
        note = f"Only this rank is known: the store of the {self._world_size} ranks is gone or stuck ({why})."
        return _only(loader, name, self._rank, self._world_size, note)

    def close(self) -> None:
        """Let the thread end after its current call."""
        self._closed = True
        self._orders.put(None)

    def _work(self) -> None:
        due, answer = 0.0, None
        with suppress(*_ERRORS):
            self._store = self._store.clone()  # the program's connection may be busy with a wait
        while True:
            with suppress(Empty):
                left = max(0.0, due - perf_counter()) if self._speaks else None
                answer = self._orders.get(timeout=left)
            if self._closed:
                return
            if answer is None and perf_counter() < due:
                self._speaks = True
                continue
            try:
                self._speaks = False  # an epoch that begins from now on wakes this thread
                self._speaks = self._speak()
                if answer is not None:
                    answer.set_result(self._listen())
            except _ERRORS as error:
                self._problem = str(error).partition("\n")[0]
                return
            due, answer = perf_counter() + BEAT_S, None

    def _speak(self) -> bool:
        """Say how the loaders are, and return whether one is in an epoch."""
        at, clock = self._store.add(f"{_PREFIX}/clock", 1), perf_counter()
        self._beats.append((at, clock))
        self._born = self._born or at
        said = {}
        for name, (ref, latest) in self._loaders.items():
            if (loader := ref()) is not None and (now := loader.stats()).epoch >= 0:
                said[name] = latest.look(self._rank, now, loader.stats(total=True), clock)
            del loader
        values = {"at": at, "loaders": {name: asdict(one) for name, one in said.items()}}
        self._store.set(f"{_PREFIX}/{self._rank}", json.dumps(values))
        return not all(one.ended for one in said.values())

    def _listen(self) -> list[tuple[Any, float]]:
        """Return what each rank said last of its loaders since this one speaks, and how long ago at least."""
        keys = [f"{_PREFIX}/{rank}" for rank in range(self._world_size)]
        if not self._store.check(keys):
            keys = [key for key in keys if self._store.check([key])]
        texts = map(json.loads, self._store.multi_get(keys))
        # What was said before may be of a job that was restarted, in the same store.
        return [
            (one["loaders"], self._age_s(one["at"])) for one in texts if one["at"] >= self._born
        ]

    def _age_s(self, at: int) -> float:
        """Return how long ago the counter in the store passed a value, at least."""
        place = bisect_left(self._beats, (at, 0.0))
        return perf_counter() - self._beats[place][1] if place < len(self._beats) else 0.0


_watch: Watch | None = None
_inherited: Any = None
"""Returns the group of the process that this one is a fork of. Its rank is not this process."""


def watch_of(loader: Any) -> Watch | None:
    """Return the watch of this rank, which follows the loader from now on, or None without other ranks."""
    global _watch
    group = dist.group.WORLD if dist.is_available() else None
    if group is None or dist.get_world_size() == 1:
        return None
    if (_inherited is not None and _inherited() is group) or default_store() is None:
        return None  # torch's backend "mpi" has no store
    if _watch is None or _watch.group() is not group:
        _watch = Watch(group)
    _watch.name_of(loader)
    return _watch


def of_ranks(loader: Any) -> Ranks:
    """Return what all ranks said last of a loader."""
    if (
        loader.stats().epoch < 0
    ):  # or it would have its name before others that begin first, as on other ranks
        return _only(
            loader, loader_name(loader, Counter()), 0, 1, "The loader has not begun an epoch."
        )
    if (watch := watch_of(loader)) is not None:
        return watch.ask(loader)
    note = "There are no other ranks: this process has no process group, is alone in it, or is a fork of a rank."
    return _only(loader, loader_name(loader, Counter()), 0, 1, note)


def _only(loader: Any, name: str, rank: int, world_size: int, note: str) -> Ranks:
    now, total = loader.stats(), loader.stats(total=True)
    return Ranks(name, world_size, (rank_stats(rank, now, total, now, now.elapsed_s),), note)


@atexit.register
def _end() -> None:
    # A thread in C++ code would abort the process while the interpreter shuts down.
    if _watch is not None:
        _watch.close()
        wait([_watch.thread], 1.0)


def _after_fork_in_child() -> None:
    global _watch, _inherited
    _watch = None
    if dist.is_available() and dist.is_initialized():
        _inherited = weakref.ref(dist.group.WORLD)


os.register_at_fork(after_in_child=_after_fork_in_child)
