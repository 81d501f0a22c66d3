"""The sets of a root, as a table or as JSON: what `fastload set ls` prints."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from typing import Any

from fastload.datasets.manifest import INDEX
from fastload.datasets.packed.texts import counted, size_text
from fastload.store.inspecting import columns_of, ownership
from fastload.store.parts import is_here
from fastload.store.root import StoredSet, sets


@dataclass(frozen=True)
class Listing:
    """The sets of a root.

    Attributes:
        total, free: bytes of its file system; 0 if the root is not there.
        sets: each by its fields: `bytes` are those that lie here, `age_s` is in seconds, `columns` are name and dtype.
        passed_over: a sentence for each entry that cannot be read.
    """

    root: str
    total: int
    free: int
    sets: list[dict[str, Any]]
    passed_over: list[str]

    def as_json(self) -> str:
        """Return one JSON object, with all fields by their names."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        lines = [f"{self.root}: no sets"]
        if self.sets:
            rows = [("NAME", "ROWS", "PARTS", "SIZE", "AGE", "COLUMNS"), *map(_row, self.sets)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
            used = sum(one["bytes"] for one in self.sets)
            lines.append(f"{self.root}: {counted(len(self.sets), 'set')}, {size_text(used)}")
        if self.total:
            lines[-1] += f"; {size_text(self.free)} of {size_text(self.total)} are free"
        return "\n".join([*lines, *self.passed_over])


def listed(root: str) -> Listing:
    """Return the sets of a root, or none if the root does not exist."""
    if not os.path.isdir(root):
        return Listing(root, 0, 0, [], [])
    usage = shutil.disk_usage(root)
    bad: list[str] = []
    found = [_listed(one) for one in sets(root, say=bad.append)]
    return Listing(root, usage.total, usage.free, found, bad)


def _listed(found: StoredSet) -> dict[str, Any]:
    index, path = found.index, found.path
    age = time.time() - os.path.getmtime(os.path.join(path, INDEX))
    return {
        "name": found.name,
        "path": path,
        "id": index.id,
        "mode": index.mode,
        "rows": index.rows,
        "parts": len(index.shards),
        "parts_here": sum(is_here(path, shard) for shard in index.shards),
        "bytes": found.bytes,
        "age_s": round(max(0.0, age), 1),
        "temporary": bool(ownership(index)),
        "owner": ownership(index),
        "columns": columns_of(path, index),
    }


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    here, parts = one["parts_here"], one["parts"]
    shown = f"{parts:,}" + (f" ({here:,} here)" if here < parts else "")
    columns = ", ".join(f"{name} {kind}" for name, kind in one["columns"].items())
    owner = f"  temporary, {one['owner']}" if one["temporary"] else ""
    size, age = size_text(one["bytes"]), _age(one["age_s"])
    return one["name"], f"{one['rows']:,}", shown, size, age, columns + owner


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
