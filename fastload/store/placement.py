"""Which rows of a set the ranks of a node read, if its parts lie on several nodes. Known from the index alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fastload.datasets.manifest import Shard

Balance = Literal["drop", "pad", "fetch"]
BALANCES: tuple[Balance, ...] = ("drop", "pad", "fetch")


def rows_of_nodes(shards: Sequence[Shard]) -> dict[str, NDArray[np.int64]]:
    """Return the rows that each node has, by the order of the nodes' first parts."""
    ranges: dict[str, list[NDArray[np.int64]]] = {}
    begin = 0
    for shard in shards:
        ranges.setdefault(shard.node, []).append(np.arange(begin, begin + shard.rows))
        begin += shard.rows
    return {node: np.concatenate(found) for node, found in ranges.items()}


def balanced(
    rows: dict[str, NDArray[np.int64]], balance: Balance | None
) -> dict[str, NDArray[np.int64]]:
    """Return the rows that each node reads: the same number on each, or its own rows if `balance` is None.

    "drop": the first rows of each node, as many as the poorest one has. "pad": a node's own rows, again from the
    first one, as many as the richest one has. "fetch": every row once; rich nodes keep their first rows, and poor ones
    get the others in order. If the rows cannot be divided by the nodes, some nodes read one row twice.
    """
    counts = {node: len(own) for node, own in rows.items()}
    if balance == "drop":
        return {node: own[: min(counts.values())] for node, own in rows.items()}
    if balance == "pad":
        return {node: np.resize(own, max(counts.values())) for node, own in rows.items()}
    if balance == "fetch":
        return _shared_out(rows)
    return rows


def _shared_out(rows: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
    total, nodes = sum(map(len, rows.values())), len(rows)
    quotas = {node: (total + nodes - 1 - k) // nodes for k, node in enumerate(rows)}
    surplus = np.concatenate([own[quotas[node] :] for node, own in rows.items()])
    found, at = {}, 0
    for node, own in rows.items():
        kept = own[: quotas[node]]
        lacking = quotas[node] - len(kept)
        found[node] = np.resize(
            np.concatenate([kept, surplus[at : at + lacking]]), max(quotas.values())
        )
        at += lacking
    return found


def parts_of_rows(shards: Sequence[Shard], rows: NDArray[np.int64]) -> list[Shard]:
    """Return the parts that have `rows`."""
    ends = np.cumsum([shard.rows for shard in shards])
    return [shards[k] for k in np.unique(np.searchsorted(ends, rows, side="right"))]
