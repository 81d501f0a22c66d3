"""A summary, for users, of what is copied for each worker and what all workers share."""

from __future__ import annotations

import sys
from typing import Any

from fastload.safety.graph import Graph
from fastload.safety.memory import MEMORY, nbytes_of
from fastload.safety.objects import own_dict


def summary(graph: Graph) -> str:
    """Return what `graph` copies, by the attributes of its roots, and what it shares, in two lines.

    Sizes are approximate: `sys.getsizeof` of each object, and the memory of arrays and tensors.
    """
    top: dict[int, int] = {}
    copied: dict[int, list[int]] = {}
    shared: list[str] = []
    for i, node in graph.nodes.items():
        above = node.parent
        # An attribute of a root represents all below it.
        alone = above is None or graph.nodes[above].parent is None
        top[i] = i if alone or above is None else top[above]
        if why := graph.shared.get(i):
            shared.append(_piece(graph, i, _size(node.x), "" if why == "data" else why))
        else:
            copied.setdefault(top[i], []).append(_size(node.x))
    pieces = [
        _piece(graph, i, sum(sizes), f"{len(sizes):,} objects" if len(sizes) > 1 else "")
        for i, sizes in copied.items()
    ]
    nbytes = sum(map(sum, copied.values()))
    return (
        f"copied for each worker ({_shown(nbytes)}): {_listed(pieces)}\n"
        f"shared by all workers: {_listed(shared)}"
    )


def _piece(graph: Graph, i: int, nbytes: int, more: str) -> str:
    x = graph.nodes[i].x
    said = [type(x).__name__, *[_shown(nbytes)] * (nbytes >= 1024), *[more] * bool(more)]
    return f"{graph.path(x)} ({', '.join(said)})"


def _size(x: Any) -> int:
    if isinstance(x, MEMORY):
        return nbytes_of(x)
    own = own_dict(x)
    return object.__sizeof__(x) + (sys.getsizeof(own) if own else 0)


def _shown(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 // 10 else f"{nbytes / 1024:,.1f} KiB"


def _listed(pieces: list[str], most: int = 12) -> str:
    more = f", and {len(pieces) - most} more" if len(pieces) > most else ""
    return ", ".join(pieces[:most]) + more or "nothing"
