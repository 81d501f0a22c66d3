"""`get`: open a set as a dataset."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fastload._kit.hashing import hash64
from fastload.datasets.manifest import Index, Shard, read_index
from fastload.errors import PackedDataError
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
    """Return the set `name` as a map-style dataset; see `SetDataset` for its samples.

    Args:
        name: name of the set, or its path.
        data, label, transform: see `SetDataset`.
        parts: the rows to read, if the parts of the set are in the memories of several nodes. "local": those of this
            node. Sample them with `RankSampler(dataset, rank=local_rank, world_size=local_world_size)`. "all": all
            rows.
        balance: with `parts="local"`, give all nodes the same number of rows, so that all ranks make the same number of
            steps. The index has the counts, so no rank waits for another. "drop": each node reads as many of its rows
            as the node with the fewest has, and never the rest. "pad": each node reads as many rows as the node with
            the most has, and repeats some of its own. "fetch": rows are copied from nodes with many to nodes with few.
            None: each node reads its own rows.
        root: the folder of the sets, if `name` is not a path. None: $FASTLOAD_STORE, or a folder in shared memory.
        source: source of needed parts that are not here: the path of a set or of a root, the URL of a `fastload set
            serve`, or a list of these. Parts are copied once for all processes of this node, and stay here. The token
            of a server is read from the file $FASTLOAD_TOKEN_FILE. The certificate of the authority that signed the
            server's own is read from $FASTLOAD_TLS_CA. None: missing parts are an error.

    Raises:
        FileNotFoundError: the set does not exist. The message has the existing names.
        KeyError: a column is unknown. The message has the existing ones.
        PackedDataError: parts are missing or damaged, or a source cannot be read.
        StoreFullError: there is no room for copies.
        ValueError: this node has no part, or the rows cannot be balanced.

    Examples:
        >>> _ = fastload.store.put({"x": torch.zeros(10, 3)}, "numbers")
        >>> len(fastload.store.get("numbers"))
        10
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
    # If all parts are of one node, they are here, even if the node has a new name.
    if parts == "all" or len({shard.node for shard in index.shards}) == 1:
        if balance is not None:
            raise ValueError(
                f"{path}: balance={balance!r} is for parts on several nodes, but this dataset has all rows. Remove "
                "balance=, and let RankSampler divide the rows among all ranks"
            )
        return None, ""
    nodes = rows_of_nodes(index.shards)
    rows = balanced(nodes, balance).get(this_node())
    if rows is None:
        raise ValueError(
            f"{path}: the set has no part on this node, {this_node()!r}. Its parts are on the nodes "
            f"{', '.join(nodes)}. Pass parts='all'. If this node is listed under another name, set $FASTLOAD_NODE to "
            "that name"
        )
    placement = hash64(repr([(shard.node, shard.rows) for shard in index.shards]))
    return rows, f"{balance}-{placement:016x}"


def _absent(absent: Sequence[Shard], needed: int) -> str:
    nodes = sorted({shard.node for shard in absent} - {""})
    where = f" and are on {', '.join(nodes)}" if nodes else ""
    return f"{len(absent)} of {needed} parts are missing here{where}. Pass source=, the path or URL to copy them from"
