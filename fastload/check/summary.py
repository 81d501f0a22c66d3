"""A summary, for users, of what is copied for each worker and what all workers share."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from fastload.safety.graph import Graph
from fastload.safety.memory import MEMORY, nbytes_of
from fastload.safety.objects import own_dict


@dataclass(slots=True)
class Piece:
    """A copied object with all copies below it, or a shared object."""

    path: str
    kind: str
    objects: int = 0
    nbytes: int = 0
    """Approximate size: `sys.getsizeof` of each object, and the memory of arrays and tensors."""
    why: str = ""
    """Why it is shared, or "" if it is copied."""

    def __str__(self) -> str:
        said = [self.kind]
        if not self.why and self.objects > 1:
            said.append(f"{self.objects:,} objects")
        if self.nbytes >= 1024:
            said.append(_shown(self.nbytes))
        if self.why and self.why != "data":
            said.append(self.why)
        return f"{self.path} ({', '.join(said)})"


@dataclass(frozen=True, slots=True)
class Summary:
    """The pieces of a graph, in the order of the walk."""

    copied: list[Piece] = field(default_factory=list)
    shared: list[Piece] = field(default_factory=list)

    def __str__(self) -> str:
        nbytes = _shown(sum(piece.nbytes for piece in self.copied))
        return "\n".join(
            f"{what}: {_listed(pieces) or 'nothing'}"
            for what, pieces in (
                (f"copied for each worker ({nbytes})", self.copied),
                ("shared by all workers", self.shared),
            )
        )


def summary(graph: Graph) -> Summary:
    """Return what `graph` copies, by the attributes of its roots, and what it shares."""
    top: dict[int, int] = {}
    copied: dict[int, Piece] = {}
    shared: list[Piece] = []
    for i, node in graph.nodes.items():
        above = node.parent
        # An attribute of a root represents all below it.
        alone = above is None or graph.nodes[above].parent is None
        top[i] = i if alone or above is None else top[above]
        if i in graph.shared:
            shared.append(
                Piece(graph.path(node.x), type(node.x).__name__, 1, _size(node.x), graph.shared[i])
            )
            continue
        head = graph.nodes[top[i]].x
        piece = copied.setdefault(top[i], Piece(graph.path(head), type(head).__name__))
        piece.objects += 1
        piece.nbytes += _size(node.x)
    return Summary(list(copied.values()), shared)


def _size(x: Any) -> int:
    if isinstance(x, MEMORY):
        return nbytes_of(x)
    own = own_dict(x)
    return object.__sizeof__(x) + (sys.getsizeof(own) if own else 0)


def _shown(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB" if nbytes >= 2**20 // 10 else f"{nbytes / 1024:,.1f} KiB"


def _listed(pieces: list[Piece], most: int = 12) -> str:
    more = f", and {len(pieces) - most} more" if len(pieces) > most else ""
    return ", ".join(map(str, pieces[:most])) + more
