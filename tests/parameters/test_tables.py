"""Promise: A row of a table depends on seed, table and id alone, and changes as a parameter of its own does."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fastload._kit.hashing import GOLDEN
from fastload.parameters import Optimizer, PSClient, Server, TableInfo, connect
from fastload.parameters.row_index import Ids, RowIndex
from fastload.parameters.tables import Table
from tests.parameters.running import OPTIMIZERS, of_torch, servers

INITIALIZERS = ["uniform(0.1)", "normal(0.1)", "constant(0.5)", "zeros"]


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 40), max_size=40)))
def test_the_index_finds_what_was_added_and_nothing_else(groups: list[list[int]]) -> None:
    index, known = RowIndex(), {}
    for group in groups:
        new = [i for i in dict.fromkeys(group) if i not in known]
        known |= {i: len(known) + k for k, i in enumerate(new)}
        index.add(np.array(new, np.int64))
        asked = np.array([*known, *(i ^ 1 for i in known)], np.int64)
        assert index.find(asked).tolist() == [known.get(int(i), -1) for i in asked]
    assert index.ids.tolist() == list(known)


def test_ids_that_were_chosen_against_the_hash_are_as_fast_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a factor that everybody knows, they would all want one cell, and each would take a round of its own."""
    rounds, further = Counter[str](), RowIndex._next

    def counted(self: RowIndex, cells: Ids) -> Ids:
        rounds["all"] += 1
        return further(self, cells)

    monkeypatch.setattr(RowIndex, "_next", counted)
    back = pow(GOLDEN, -1, 1 << 64)
    chosen = np.array([k * back % (1 << 64) for k in range(5000)], np.uint64).view(np.int64)
    RowIndex().add(chosen)
    assert 0 < rounds["all"] < 1000


@pytest.mark.parametrize("initializer", INITIALIZERS)
@given(ids=st.lists(st.integers(-100, 100), min_size=1, max_size=30), number=st.integers(1, 4))
def test_rows_depend_neither_on_order_nor_on_the_number_of_servers(
    initializer: str, ids: list[int], number: int
) -> None:
    one = PSClient(connect(Server(seed=3)))
    many = PSClient(connect(servers(number, seed=3)))
    for client in (one, many):
        client.push_embedding_table_infos([("user", 5, initializer)])
    asked = torch.tensor(ids)
    rows = many.pull_embedding_vectors("user", asked)
    assert torch.equal(one.pull_embedding_vectors("user", asked.flip(0)).flip(0), rows)
    assert torch.equal(many.pull_embedding_vectors("user", asked), rows)


def test_rows_of_other_seeds_tables_and_ids_differ() -> None:
    found = {}
    for seed, name in ((3, "user"), (4, "user"), (3, "item")):
        table = Table(TableInfo(name, 5), Optimizer(lr=0.1), seed=seed)
        found[seed, name] = table.rows(torch.arange(9))
    assert len(torch.cat([*found.values()]).unique(dim=0)) == 27


@pytest.mark.parametrize("optimizer", [Optimizer(lr=0.1), *OPTIMIZERS], ids=str)
def test_each_row_changes_as_a_parameter_of_torch_of_its_own(optimizer: Optimizer) -> None:
    table = Table(TableInfo("t", 4), optimizer)
    rows = [row.clone().requires_grad_() for row in table.rows(torch.arange(10))]
    torchs = [of_torch(optimizer, [row]) for row in rows]
    for _ in range(50):
        ids = torch.randperm(10)[: int(torch.randint(1, 10, ()))]
        gradients = torch.randn(len(ids), 4)
        table.apply(table.places(ids), gradients.clone(), optimizer.lr)
        for i, gradient in zip(ids.tolist(), gradients, strict=True):
            rows[i].grad = gradient
            torchs[i].step()
    expected: Tensor = torch.stack(rows).detach()
    torch.testing.assert_close(table.rows(torch.arange(10)), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", [Optimizer(lr=0.1), *OPTIMIZERS], ids=str)
def test_dense_parameters_of_each_dtype_change_as_those_of_torch(optimizer: Optimizer) -> None:
    kinds = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    for kind, shape in [*((kind, (3, 2)) for kind in kinds), (torch.float32, ())]:
        value = torch.randn(shape, dtype=kind)
        local, state = value.clone().requires_grad_(), optimizer.state_of(value)
        torchs = of_torch(optimizer, [local])
        for _ in range(20):
            local.grad = torch.randn(shape, dtype=kind)
            optimizer.step(value, local.grad.clone(), state, optimizer.lr)
            torchs.step()
        close = {torch.float64: 1e-12, torch.bfloat16: 0.05, torch.float16: 0.005}.get(kind, 1e-6)
        torch.testing.assert_close(value, local.detach(), rtol=0, atol=close)
