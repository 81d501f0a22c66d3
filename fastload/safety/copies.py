"""Each worker's copies of a graph."""

from __future__ import annotations

import copy
from typing import Any

from fastload.safety.graph import Graph
from fastload.safety.kinds import ATOM
from fastload.safety.memory import copy_block


def make_copies(graph: Graph) -> tuple[list[Any], list[tuple[str, Any]]]:
    """Return one worker's own roots, and its generators.

    An object that cannot be copied after all is shared from then on, and is added to `uncopyable`. A circle of very
    many objects raises RecursionError: raise `sys.setrecursionlimit()`.
    """
    copier = _Copier(graph)
    # What was found last first: then calls are as deep as a circle is long, not as objects are nested.
    for node in reversed(graph.nodes.values()):
        copier.copy(node.x)
    return [copier.copy(root) for root in graph.roots.values()], graph.generators(copier.memo)


class _Copier:
    """See `kinds.Copier`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.memo: dict[int, Any] = {i: graph.lists.get(i, graph.nodes[i].x) for i in graph.shared}
        self.memo[id(self.memo)] = []  # `copy.deepcopy` keeps alive here what it copies

    def copy(self, x: Any) -> Any:
        """See `kinds.Copier`."""
        memo = self.memo
        kind = self._graph.kinds[type(x)]
        if kind is ATOM or id(x) not in self._graph.nodes:  # an element of a long container
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
            # A kind may keep the error. Its frames would keep those of the caller.
            self._graph.share(x, error.with_traceback(None))
        return memo[id(x)]

    def memory(self, x: Any) -> Any:
        """See `kinds.Copier`."""
        block = self._graph.blocks.get(id(x))
        if block is None:  # it has no bytes, or more than bytes
            return copy.deepcopy(x, self.memo)
        self.memo.update(copy_block(block))
        return self.memo[id(x)]
