"""Promises:
- A push that a server answers with an error has changed nothing on it. Gradients that are NaN or infinite are refused.
- A push does not fail because a checkpoint cannot be written. The server says so, and saves later.
- No number that a client sends decides which checkpoint is the newest, or which pushes a server waits for.
"""

from __future__ import annotations

import copy
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastload.errors import ParametersError
from fastload.parameters import Optimizer, PSClient, Server, connect
from fastload.parameters.checkpoint import complete
from tests.parameters.running import servers

IDS, ROWS = torch.tensor([3, 5]), torch.ones(2, 2)


def begun(**options: Any) -> Server:
    """Return a server with dense parameters and a table."""
    made = Server(optimizer=Optimizer(name="adam", lr=0.5), **options)
    values = {"w": torch.zeros(3), "v": torch.zeros(3), "count": torch.zeros(3, dtype=torch.int64)}
    made.answer("initialise", {"values": values, "version": 0})
    made.answer("add_tables", {"infos": [{"name": "t", "dim": 2, "initializer": "zeros"}]})
    made.answer("set_rows", {"table": "t", "ids": IDS, "values": ROWS})
    return made


def state(of: Server) -> Any:
    """Return all that a server has, as plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return copy.deepcopy((plain(of._own.contents()), of.version, of._staged))


def push(**changes: Any) -> dict[str, Any]:
    """Return the arguments of a push of all that `begun` has."""
    gradients = {
        "version": 0,
        "lr": 1.0,
        "dense": {"w": torch.ones(3), "v": torch.ones(3)},
        "rows": {"t": (IDS, ROWS)},
    }
    return {"gradients": {**gradients, **changes}}


def dense(gradient: Any) -> dict[str, Any]:
    return push(dense={"w": torch.ones(3), "v": gradient})


def rows(ids: Any, values: Any = ROWS) -> dict[str, Any]:
    return push(rows={"t": (ids, values)})


NAN, INF = torch.nan, torch.inf
WRONG: list[dict[str, Any]] = [
    *map(dense, (torch.ones(4), torch.tensor([1, NAN, 1]), torch.tensor([1, 1, -INF]), [1.0, 1.0, 1.0])),
    dense(torch.full((3,), 1e300, dtype=torch.float64)),  # infinite as float32
    *(dense(torch.ones(3, dtype=kind)) for kind in (torch.complex64, torch.int64)),
    push(dense={"w": torch.ones(3), "count": torch.ones(3)}), push(dense={"w": torch.ones(3), "u": torch.ones(3)}),
    push(dense=[torch.ones(3)]),
    *map(rows, (IDS.int(), IDS[:, None], IDS[:1], [3, 5], *map(torch.tensor, ([1.5, 2], [NAN, 2], [3, 3])))),
    *(rows(IDS, each) for each in (ROWS * NAN, ROWS.long(), ROWS.to(torch.complex64), torch.ones(2, 3), torch.ones(2))),
    push(rows={"t": (IDS, ROWS), "u": (IDS, ROWS)}), push(rows={"t": IDS[:1]}),
    *(push(lr=rate) for rate in (NAN, -1.0, "1", 10**400)),
    *(push(version=version) for version in ("0", 2**63, 0.5)),
]  # fmt: skip


@pytest.mark.parametrize("grads_to_wait", [None, 1])
def test_a_push_with_one_fault_changes_nothing(
    grads_to_wait: int | None, subtests: pytest.Subtests
) -> None:
    for number, wrong in enumerate(WRONG):
        with subtests.test(f"{number}"):
            made = begun(grads_to_wait=grads_to_wait)
            before = state(made)
            with pytest.raises((ParametersError, TypeError)):
                made.answer("push", {**wrong, "fresh": True})
            assert state(made) == before
            made.answer("push", push())
            assert made.version == 1


def named(ids: Any, *values: Any, table: Any = "t", **more: Any) -> dict[str, Any]:
    return {"table": table, "ids": ids, **({"values": values[0]} if values else {}), **more}


TWO = torch.tensor([8, 9])
VALUES = {"w": torch.ones(1)}
FAULTY: list[tuple[Any, Any]] = [
    ("set_rows", named(IDS.int(), ROWS)), ("set_rows", named(torch.tensor([8, 8]), ROWS)),
    *(("set_rows", named(TWO, values)) for values in (torch.ones(2), ROWS[:1], ROWS.long())),
    ("rows", named(TWO.int())), ("rows", named(torch.tensor([1.5]))), ("rows", named(IDS, table=["t"])),
    ("rows", {"table": "t"}), ("rows", named(IDS, more=1)),
    ("add_tables", {"infos": [{"name": "t", "dim": 3}]}), ("add_tables", {"infos": [{"name": "u"}]}),
    *(("add_tables", {"infos": [{"name": "u", "dim": dim}]}) for dim in (2**40, 2.0)),
    ("add_tables", {"infos": [{"name": ["u"], "dim": 2}]}),
    ("add_tables", {"infos": [{"name": "u", "dim": 2, "initializer": "constant(1e999)"}]}),
    ("pull", {"version": "x"}), ("__init__", {}), ("hello", {"more": 1}), (["hello"], {}),
    *(("initialise", {"values": VALUES, "version": version}) for version in ("0", 10**30)),
    *(("initialise", {"values": each, "version": 0}) for each in ({**VALUES, "v": 1.0}, [torch.ones(1)])),
]  # fmt: skip


def test_a_call_with_one_fault_changes_nothing(subtests: pytest.Subtests) -> None:
    for method, arguments in FAULTY:
        with subtests.test(f"{method} {arguments}"):
            made = Server() if method == "initialise" else begun()
            before = state(made)
            with pytest.raises((AttributeError, ParametersError, TypeError, ValueError)):
                made.answer(method, arguments)
            assert state(made) == before
            taken = made.answer("initialise", {"values": VALUES, "version": 0})["taken"]
            assert taken == (method == "initialise")


@pytest.mark.parametrize("number", [1, 2])
def test_no_server_takes_its_part_of_gradients_that_are_not_finite(number: int) -> None:
    made = servers(number, optimizer=Optimizer(lr=1.0))
    client = PSClient(connect(made))
    names = "abcdefgh"
    for i in range(number):
        client.push_dense_parameters({name: torch.zeros(1) for name in names}, i, 0)
    for wrong in (torch.nan, torch.inf):
        gradients = {name: torch.ones(1) for name in names} | {"c": torch.tensor([wrong])}
        with pytest.raises(ParametersError, match="the gradient of 'c' has NaN or infinite"):
            client.push_gradients(gradients, {}, None, [0] * number)
    assert not any(value.any() for value in client.pull_variable().values())


# ---- a disk that is full ----


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def pushes(client: PSClient, value: float = 1.0) -> tuple[bool, int]:
    versions = [-1] * client.ps_num
    client.pull_dense_parameters(range(client.ps_num), versions)
    return client.push_gradients({"w": torch.full((2,), value)}, {}, None, versions)


@pytest.mark.parametrize("grads_to_wait", [None, 1])
def test_a_push_does_not_fail_with_its_checkpoint(
    grads_to_wait: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"folder": tmp_path, "grads_to_wait": grads_to_wait}
    made = servers(2, optimizer=Optimizer(lr=1.0), checkpoint_every=2, **options)
    client = PSClient(connect(made))
    for i in range(2):
        client.push_dense_parameters({"w": torch.zeros(2)}, i, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert [pushes(client) for _ in range(3)] == [(True, 1), (True, 2), (True, 3)]
        with pytest.raises(OSError, match="No space left"):
            client.checkpoint()
    first, _ = caplog.records
    assert "server 0 of 2 has not saved version 2: " in first.getMessage()
    assert "No space left" in first.getMessage()
    assert not list(complete(tmp_path))
    pushes(client)
    assert list(complete(tmp_path)) == [(4, 2)]
    again = PSClient(connect(servers(2, optimizer=Optimizer(lr=1.0), **options)))
    assert again.pull_variable()["w"].tolist() == [-4.0, -4.0]


# ---- numbers from a peer that decide what is kept ----


def forge(of: Server, method: str, **arguments: Any) -> dict[str, Any]:
    """Make a call that no client of fastload makes. Return its answer, or {} if it is refused."""
    with suppress(ParametersError, TypeError):
        return of.answer(method, arguments)
    return {}


def test_a_forged_checkpoint_does_not_outrank_real_ones(tmp_path: Path) -> None:
    made = Server(optimizer=Optimizer(lr=1.0), folder=tmp_path, checkpoint_every=1, keep=2)
    client = PSClient(connect(made))
    client.push_dense_parameters({"w": torch.zeros(2)}, 0, 0)
    for step in range(40):
        pushes(client)
        if step == 2:
            for method in ("save", "checkpoint"):
                forge(made, method, version=10**12, step=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-39", "version-40"]
    again = Server(optimizer=Optimizer(lr=1.0), folder=tmp_path)
    assert again.version == 40
    assert PSClient(connect(again)).pull_variable()["w"].tolist() == [-40.0, -40.0]


@pytest.mark.parametrize("step", [-1, 0, 2**40, "x"])
def test_a_step_that_server_0_did_not_choose_is_refused(step: Any) -> None:
    made = servers(2, optimizer=Optimizer(lr=1.0), grads_to_wait=1)
    client = PSClient(connect(made))
    for i in range(2):
        client.push_dense_parameters({name: torch.zeros(2) for name in "wv"}, i, 0)
    pushes(client)
    before = state(made[1])
    ghost = {**push(dense={}, rows={}), "step": step}
    assert forge(made[1], "push", **ghost) == {}
    assert state(made[1]) == before
    assert [pushes(client) for _ in range(2)] == [(True, 2), (True, 3)]
