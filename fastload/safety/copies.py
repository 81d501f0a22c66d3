"""Each worker's copies of a graph, by the graph's plan."""

from __future__ import annotations

import copy
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastload.errors import DatasetCopyError
from fastload.safety.kinds import ATOM
from fastload.safety.memory import copy_block
from fastload.safety.plan import Plan

DEPTH = 10_000
"""The recursion limit while copies are made: a copy of an object takes about four calls."""


def make_copies(plan: Plan) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return one worker's own roots by name, and its generators.

    An object that cannot be copied after all is shared from then on, and is added to `uncopyable`.
    """
    try:
        with _deep_calls():
            copier = _Copier(plan)
            roots = {name: copier.copy(root) for name, root in plan.roots.items()}
            return roots, plan.generators(copier.memo)
    except RecursionError as error:
        raise DatasetCopyError(
            "The dataset is nested too deeply to be copied for each worker. Raise sys.setrecursionlimit(), or "
            "pass copy_dataset=False if threads may share it."
        ) from error


# Owns `_limits` and the recursion limit. Reentrant, because a finalizer may begin a loader.
_lock = threading.RLock()
_limits: list[int] = []
"""For each thread in `_deep_calls`, the limit that the last of them restores."""


@contextmanager
def _deep_calls() -> Iterator[None]:
    """Let calls be `DEPTH` deep in the block, in all threads: Python has one limit."""
    with _lock:
        _limits.append(_limits[0] if _limits else sys.getrecursionlimit())
        sys.setrecursionlimit(max(_limits[0], DEPTH))
    try:
        yield
    finally:
        with _lock:
            limit = _limits.pop() if _limits else sys.getrecursionlimit()  # in a fork: none
            if not _limits:
                sys.setrecursionlimit(limit)


def _in_child() -> None:
    """Restore the limit in a forked process, which has none of the other threads that copied."""
    _lock.release()
    sys.setrecursionlimit(_limits[0] if _limits else sys.getrecursionlimit())
    _limits.clear()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_child)


class _Copier:
    """See `kinds.Copier`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.memo: dict[int, Any] = {i: plan.lists.get(i, plan.nodes[i].x) for i in plan.shared}
        self.memo[id(self.memo)] = []  # `copy.deepcopy` keeps alive here what it copies

    def copy(self, x: Any) -> Any:
        """See `kinds.Copier`."""
        memo = self.memo
        kind = self._plan.kinds[type(x)]
        if kind is ATOM or id(x) not in self._plan.nodes:  # an element of a long container
            return x
        if id(x) in memo:
            return memo[id(x)]
        try:
            # If a part of `x` holds `x`, it has been copied there already.
            memo.setdefault(id(x), kind.copy(x, self))
        except RecursionError:
            raise
        except Exception as error:
            memo[id(x)] = x
            self._plan.share(x, error)
        return memo[id(x)]

    def memory(self, x: Any) -> Any:
        """See `kinds.Copier`."""
        block = self._plan.blocks.get(id(x))
        if block is None:  # it has no bytes, or more than bytes
            return copy.deepcopy(x, self.memo)
        self.memo.update(copy_block(block, self._plan.weights))
        return self.memo[id(x)]
