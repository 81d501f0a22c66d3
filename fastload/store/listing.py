"""The sets of a root as a table: what `fastload set ls` prints."""

from __future__ import annotations

import os
import shutil
import time

from fastload._kit.tables import columns
from fastload._kit.texts import counted, size_text
from fastload.datasets.manifest import INDEX
from fastload.store.inspecting import columns_of
from fastload.store.parts import is_here
from fastload.store.root import StoredSet, sets


def listed(root: str) -> str:
    """Return a line for each set of a root, one for the free space, and one for each entry that cannot be read."""
    bad: list[str] = []
    found = list(sets(root, say=bad.append))
    lines = [f"{root}: no sets"]
    if found:
        rows = [("NAME", "ROWS", "PARTS", "SIZE", "WRITTEN", "COLUMNS"), *map(_row, found)]
        lines = columns(rows, left=range(len(rows[0])), rule=False)
        used = sum(one.bytes for one in found)
        lines.append(f"{root}: {counted(len(found), 'set')}, {size_text(used)}")
    if os.path.isdir(root):
        usage = shutil.disk_usage(root)
        lines[-1] += f"; {size_text(usage.free)} of {size_text(usage.total)} are free"
    return "\n".join([*lines, *bad])


def _row(found: StoredSet) -> tuple[str, ...]:
    shards, written = found.index.shards, os.path.getmtime(os.path.join(found.path, INDEX))
    here = sum(is_here(found.path, shard) for shard in shards)
    parts = f"{len(shards):,}" + (f" ({here:,} here)" if here < len(shards) else "")
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(written))
    kinds = columns_of(found.path, found.index).items()
    described = ", ".join(f"{name} {kind}" for name, kind in kinds)
    return found.name, f"{found.index.rows:,}", parts, size_text(found.bytes), date, described
