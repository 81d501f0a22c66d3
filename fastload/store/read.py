"""`get`: a set becomes a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload.datasets.manifest import Index, Shard, read_index
from fastload.errors import PackedDataError
from fastload.hashing import hash64
from fastload.store.dataset import SetDataset
from fastload.store.fetch import Places, fetch_index, fetch_parts, open_sources
from fastload.store.parts import is_here
from fastload.store.placement import BALANCES, Balance, balanced, parts_of_rows, rows_of_nodes
from fastload.store.root import find, locate, this_node


def get(
    name: str | os.PathLike[str],
    *,
    data: str | Sequence[str] | None = None,
    label: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    parts: Literal["local", "all"] = "local",
    balance: Balance | None = None,
    root: str | os.PathLike[str] | None = None,
    source: Places | None = None,
) -> SetDataset:
    """Open the set `name` as a map-style dataset; see `SetDataset` for its samples.

    Args:
        name: of the set, or its path.
        data, label, transform: see `SetDataset`.
        parts: which rows, if the parts of the set lie in the memories of several nodes. "local": those of this node;
            sample them with `RankSampler(dataset, rank=local_rank, world_size=local_world_size)`. "all": all rows.
        balance: with `parts="local"`, gives all nodes the same number of rows, so that all ranks make the same number
            of steps. The index has the counts, so no rank waits for another. "drop": each node reads as many of its
            rows as the poorest one has, and never the rest. "pad": each node reads as many as the richest one has, some
            of its own several times. "fetch": rows of rich nodes are copied to poor nodes. None: each reads its own.
        root: the folder of the sets, if `name` is no path. None: $FASTLOAD_STORE, or a folder in shared memory.
        source: where to copy the parts from that are needed and not here: a path, the URL of a `fastload store serve`,
            or a list of these. They stay here, and each is copied once for all processes of this node. The path is that
            of a set or of a root. A server's token is read from the file $FASTLOAD_TOKEN_FILE, the certificate of the
            authority that has signed its own from $FASTLOAD_TLS_CA. None: parts that are missing are an error.

    Raises FileNotFoundError with the names that there are, KeyError with the columns, `PackedDataError` if parts are
    missing or damaged or a source cannot be read, StoreFullError if there is no room for copies, ValueError if this
    node has no part, or if there is nothing to balance.
    """
    sources = open_sources(source) if source else []
    root, name = locate(name, root, make=bool(sources))
    if sources:
        fetch_index(root, name, sources)
    path = find(root, name)
    index = read_index(path)
    rows, order = _rows(path, index, parts, balance)
    needed = index.shards if rows is None else parts_of_rows(index.shards, rows)
    absent = [shard for shard in needed if not is_here(path, shard)]
    if absent and sources:
        fetch_parts(path, index, absent, sources)
    elif absent:
        raise PackedDataError(path, _absent(absent, len(needed)), shard=absent[0].name)
    return SetDataset(
        path, data=data, label=label, transform=transform, rows=rows, order=order, index=index
    )


def _rows(
    path: str, index: Index, parts: str, balance: Balance | None
) -> tuple[NDArray[np.int64] | None, str]:
    """Return the rows to read, None for all, and what names them if not every node reads the same ones."""
    if parts not in ("local", "all"):
        raise ValueError(f'parts must be "local" or "all", got {parts!r}')
    if balance not in (None, *BALANCES):
        raise ValueError(f'balance must be "drop", "pad", "fetch" or None, got {balance!r}')
    # The parts of one node are all here, whatever the name of the node is now.
    if parts == "all" or len({shard.node for shard in index.shards}) == 1:
        if balance is not None:
            raise ValueError(
                f"{path}: balance={balance!r} shares out parts of several nodes, but this dataset has all rows: leave "
                "it out, and let RankSampler share the rows among all ranks"
            )
        return None, ""
    nodes = rows_of_nodes(index.shards)
    rows = balanced(nodes, balance).get(this_node())
    if rows is None:
        raise ValueError(
            f"{path}: the set has no part on the node {this_node()!r}, only on {', '.join(nodes)}: pass parts='all', "
            "or set $FASTLOAD_NODE if this node has another name there"
        )
    placement = hash64(repr([(shard.node, shard.rows) for shard in index.shards]))
    return rows, f"{balance}-{placement:016x}"


def _absent(absent: Sequence[Shard], needed: int) -> str:
    nodes = sorted({shard.node for shard in absent} - {""})
    where = f", which lie on {', '.join(nodes)}" if nodes else ""
    return f"{len(absent)} of {needed} parts are missing here{where}: pass source=, from where to copy them"
