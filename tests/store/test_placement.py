"""Promises:
- The parts of a set may lie on several nodes. Here several roots on one machine stand for nodes.
- A rank opens only the parts of its node, as an audit hook shows.
- "drop", "pad" and "fetch" give all ranks of a placement the same number of steps from the index alone, also for 19
  parts beside 1.
- A state is refused under another placement.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload import DataLoader, RankSampler, store
from fastload.datasets.manifest import INDEX, dump_index, read_index
from fastload.errors import PackedDataError, StateError
from tests.children import run_python

PARTS, ROWS = 20, 30
ALL = set(range(PARTS * ROWS))


def nodes_with(root: Path, counts: dict[str, int]) -> dict[str, Path]:
    """Make a root for each node, with one set "x" whose parts lie on them: `counts` of 20 parts of 30 rows."""
    numbers = torch.arange(PARTS * ROWS)
    store.put(({"y": part} for part in numbers.split(ROWS)), "x", root=root / "whole")
    whole = root / "whole" / "x"
    index = read_index(os.fspath(whole))
    owners = np.repeat(list(counts), list(counts.values()))
    shards = [replace(s, node=str(node)) for s, node in zip(index.shards, owners, strict=True)]
    for node in counts:
        folder = root / node / "x"
        folder.mkdir(parents=True)
        (folder / INDEX).write_bytes(dump_index(replace(index, shards=tuple(shards))))
        for shard in shards:
            if shard.node == node:
                shutil.copy(whole / shard.name, folder)
    return {node: root / node for node in counts}


def rows_on(monkeypatch: pytest.MonkeyPatch, node: str, root: Path, **how: Any) -> store.SetDataset:
    monkeypatch.setenv("FASTLOAD_NODE", node)
    return store.get("x", data="y", root=root, **how)


def test_each_node_reads_its_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"a": 1, "b": 2, "c": 17}
    seen: list[int] = []
    for node, root in nodes_with(tmp_path, counts).items():
        dataset = rows_on(monkeypatch, node, root)
        assert len(dataset) == counts[node] * ROWS
        seen += [int(row) for batch in DataLoader(dataset, 64, num_workers=2) for row in batch]
    assert sorted(seen) == sorted(ALL)


@pytest.mark.parametrize(
    ("counts", "balance"),
    [
        ({"a": 10, "b": 10}, "drop"),
        ({"a": 19, "b": 1}, "drop"),
        ({"a": 19, "b": 1}, "pad"),
        ({"a": 1, "b": 2, "c": 17}, "pad"),
    ],
)
def test_all_ranks_of_all_nodes_make_the_same_number_of_steps(
    balance: Any, counts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, seen = set(), set()
    for node, root in nodes_with(tmp_path, counts).items():
        dataset = rows_on(monkeypatch, node, root, balance=balance)
        for rank in range(2):
            sampler = RankSampler(dataset, rank=rank, world_size=2)
            batches = [batch.tolist() for batch in DataLoader(dataset, 16, sampler=sampler, seed=0)]
            steps.add(len(batches))
            seen |= {row for batch in batches for row in batch}
    assert len(steps) == 1
    assert len(seen) == (
        len(ALL) if balance == "pad" else len(counts) * min(counts.values()) * ROWS
    )


@pytest.mark.parametrize("counts", [{"a": 19, "b": 1}, {"a": 1, "b": 2, "c": 17}])
def test_fetch_reads_every_row_once_and_gives_all_nodes_the_same_number(
    counts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    lengths = set()
    for node, root in nodes_with(tmp_path, counts).items():
        for part in (tmp_path / "whole" / "x").glob("*.arrow"):  # as if they had been fetched
            shutil.copy(part, root / "x")
        dataset = rows_on(monkeypatch, node, root, balance="fetch")
        lengths.add(len(dataset))
        seen += [int(dataset[k]) for k in range(len(dataset))]
    assert set(seen) == ALL
    assert len(lengths) == 1
    assert len(seen) - len(ALL) < len(counts)


def test_a_node_reads_its_own_rows_first_when_rows_are_fetched() -> None:
    from fastload.store.placement import balanced

    found = balanced({"a": np.arange(7), "b": np.arange(7, 9), "c": np.arange(9, 10)}, "fetch")
    assert {node: rows.tolist() for node, rows in found.items()} == {
        "a": [0, 1, 2, 3],
        "b": [7, 8, 4, 7],
        "c": [9, 5, 6, 9],
    }


def test_a_rank_opens_its_node_s_parts_only(tmp_path: Path) -> None:
    roots = nodes_with(tmp_path, {"a": 19, "b": 1})
    program = """
import os, sys
opened = set()
sys.addaudithook(lambda event, about: opened.add(str(about[0])) if event == "open" else None)
from fastload import DataLoader, store
dataset = store.get("x", data="y", root=sys.argv[1])
for batch in DataLoader(dataset, 8, num_workers=2, worker_method="thread"):  # the hook sees this process only
    pass
print(*sorted(os.path.basename(name) for name in opened if name.endswith(".arrow")))
"""
    # All parts can be seen from each root, so that only the index tells which ones are whose.
    for node, root in roots.items():
        for part in (tmp_path / "whole" / "x").glob("*.arrow"):
            if not (root / "x" / part.name).exists():
                shutil.copy(part, root / "x")
        environment = {**os.environ, "FASTLOAD_NODE": node}
        found = run_python("-c", program, root, env=environment, check=True).stdout.split()
        numbers = range(19) if node == "a" else range(19, 20)
        assert found == [f"shard-{number:05d}.arrow" for number in numbers]


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = nodes_with(tmp_path, {"a": 19, "b": 1})
    with pytest.raises(
        ValueError,
        match="no part on this node, 'c'. Its parts are on the nodes a, b. Pass parts='all'",
    ):
        rows_on(monkeypatch, "c", roots["a"])
    with pytest.raises(PackedDataError, match="1 of 20 parts are missing here and are on b"):
        rows_on(monkeypatch, "a", roots["a"], parts="all")
    shutil.copytree(roots["b"] / "x", roots["a"] / "x", dirs_exist_ok=True)  # as rsync does
    assert len(rows_on(monkeypatch, "a", roots["a"], parts="all")) == len(ALL)
    assert len(rows_on(monkeypatch, "a", roots["a"])) == 19 * ROWS
    with pytest.raises(PackedDataError, match="9 of 10 parts are missing here and are on a"):
        rows_on(monkeypatch, "b", roots["b"], balance="fetch")
    for wrong in ({"parts": "some"}, {"balance": "equal"}, {"parts": "all", "balance": "pad"}):
        with pytest.raises(ValueError, match=r"must be|is for parts on several"):
            rows_on(monkeypatch, "a", roots["a"], **wrong)


def test_a_set_of_one_node_is_read_whatever_its_name_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root,) = nodes_with(tmp_path, {"a": 20}).values()
    assert len(rows_on(monkeypatch, "renamed", root)) == len(ALL)
    with pytest.raises(ValueError, match="is for parts on several nodes"):
        rows_on(monkeypatch, "renamed", root, balance="pad")


def test_a_state_wants_the_same_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    even = nodes_with(tmp_path / "even", {"a": 10, "b": 10})
    other = nodes_with(tmp_path / "other", {"b": 10, "a": 10})
    loader = DataLoader(rows_on(monkeypatch, "a", even["a"]), 16, seed=0)
    next(iter(loader))
    state = loader.state_dict()
    for node in even:  # the nodes have states alike
        DataLoader(rows_on(monkeypatch, node, even[node]), 16, seed=0).load_state_dict(state)
    with pytest.raises(StateError, match="set"):
        DataLoader(rows_on(monkeypatch, "a", other["a"]), 16, seed=0).load_state_dict(state)
    with pytest.raises(StateError):
        dataset = rows_on(monkeypatch, "a", even["a"], balance="pad")
        DataLoader(dataset, 16, seed=0).load_state_dict(state)
