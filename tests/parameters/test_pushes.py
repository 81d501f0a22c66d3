"""Promises:
- One asynchronous worker equals `torch.optim` in one process, within 1e-6 after 50 steps.
- Two synchronous workers equal one process with twice the batch, within 1e-5 after 20 steps.
- 8 threads with 100 pushes each end at version 800 with exact sums.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastload.errors import ParametersError
from fastload.parameters import Optimizer, PSClient, TableInfo, connect
from tests.parameters.running import OPTIMIZERS, of_torch, servers


class Model(nn.Module):
    """An embedding of 20 rows and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(20, 6, sparse=False)
        self.dense = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss(self, ids: Tensor, wanted: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.dense(self.user(ids)).squeeze(-1), wanted)


class Worker:
    """A worker that trains `Model` on servers."""

    def __init__(self, client: PSClient) -> None:
        self.client, self.model = client, Model()
        self.versions = [-1] * client.ps_num
        client.push_embedding_table_infos([TableInfo("user", 6)])

    def initialise(self, model: Model) -> None:
        """Push the dense parameters, and copy the table's new rows into `model`."""
        for i in range(self.client.ps_num):
            self.client.push_dense_parameters(model.dense.named_parameters(), i, 0)
        with torch.no_grad():
            model.user.weight.copy_(self.client.pull_embedding_vectors("user", torch.arange(20)))

    def pull(self) -> None:
        values, uninitialised = self.client.pull_dense_parameters(
            range(self.client.ps_num), self.versions
        )
        assert not uninitialised
        self.model.dense.load_state_dict({**self.model.dense.state_dict(), **values})
        with torch.no_grad():
            self.model.user.weight.copy_(
                self.client.pull_embedding_vectors("user", torch.arange(20))
            )

    def push(self, ids: Tensor, wanted: Tensor) -> bool:
        self.model.zero_grad()
        self.model.loss(ids, wanted).backward()
        dense = {name: p.grad for name, p in self.model.dense.named_parameters()}
        gradient = self.model.user.weight.grad
        assert gradient is not None
        # Duplicates: half of each row's gradient, twice.
        rows = ids.unique()
        table = {"user": (rows.repeat(2), (gradient[rows] / 2).repeat(2, 1))}
        return self.client.push_gradients(dense, table, None, self.versions)[0]


def batches(steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randint(0, 20, (size,)), torch.randn(size)) for _ in range(steps)]


def local_step(
    model: Model, dense: Any, rows: list[Tensor], each: list[Any], ids: Tensor, y: Tensor
) -> None:
    """One step of torch: each row is a parameter, so that rows without a gradient keep their state."""
    with torch.no_grad():
        model.user.weight.copy_(torch.stack(rows))
    model.zero_grad()
    model.loss(ids, y).backward()
    assert model.user.weight.grad is not None
    dense.step()
    for i in ids.unique().tolist():
        rows[i].grad = model.user.weight.grad[i].clone()
        each[i].step()


def assert_same(worker: Worker, model: Model, rows: list[Tensor], tolerance: float) -> None:
    worker.pull()
    for name, value in model.dense.state_dict().items():
        found = worker.model.dense.state_dict()[name]
        torch.testing.assert_close(found, value, rtol=0, atol=tolerance)
    found = worker.model.user.weight.detach()
    torch.testing.assert_close(found, torch.stack(rows).detach(), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("optimizer", "number"), [*zip(OPTIMIZERS, (1, 3, 3), strict=True)], ids=str
)
def test_one_asynchronous_worker_is_torch_in_one_process(optimizer: Optimizer, number: int) -> None:
    worker, model = Worker(PSClient(connect(servers(number, optimizer=optimizer)))), Model()
    worker.initialise(model)
    rows = [row.clone().requires_grad_() for row in model.user.weight.detach()]
    dense, each = (
        of_torch(optimizer, model.dense.parameters()),
        [of_torch(optimizer, [row]) for row in rows],
    )
    for ids, y in batches(50, 16):
        worker.pull()
        assert worker.push(ids, y)
        local_step(model, dense, rows, each, ids, y)
    assert_same(worker, model, rows, 1e-6)
    assert worker.versions == [50] * number


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda each: each.name)
def test_two_synchronous_workers_are_one_process_with_twice_the_batch(optimizer: Optimizer) -> None:
    stubs = connect(servers(2, optimizer=optimizer, grads_to_wait=2))
    workers, model = [Worker(PSClient(stubs)), Worker(PSClient(stubs))], Model()
    for worker in workers:
        worker.initialise(model)
    rows = [row.clone().requires_grad_() for row in model.user.weight.detach()]
    dense, each = (
        of_torch(optimizer, model.dense.parameters()),
        [of_torch(optimizer, [row]) for row in rows],
    )
    for ids, y in batches(20, 16):
        for worker, half in zip(workers, (slice(0, 8), slice(8, 16)), strict=True):
            worker.pull()
            assert worker.push(ids[half], y[half])
        local_step(model, dense, rows, each, ids, y)
    assert_same(workers[0], model, rows, 1e-5)
    assert workers[0].versions == [20, 20]


def test_eight_threads_push_a_hundred_times_each_and_nothing_is_lost() -> None:
    stubs = connect(servers(2, optimizer=Optimizer(lr=1.0)))
    first = PSClient(stubs)
    first.push_embedding_table_infos([TableInfo("t", 2, "zeros")])
    for i in range(2):
        first.push_dense_parameters({"w": torch.zeros(3), "v": torch.zeros(())}, i, 0)

    def push(client: PSClient, number: int) -> None:
        ids = torch.tensor([number, 100, 100])
        for _ in range(100):
            dense = {"w": torch.full((3,), -1.0), "v": torch.tensor(-0.5)}
            client.push_gradients(dense, {"t": (ids, -torch.ones(3, 2))}, None, [0, 0])

    in_threads([lambda n=n: push(PSClient(stubs), n) for n in range(8)])  # type: ignore[misc]
    versions = [-1, -1]
    values, _ = first.pull_dense_parameters([0, 1], versions)
    assert versions == [800, 800]
    assert values["w"].tolist() == [800.0] * 3
    assert values["v"] == 400
    rows = first.pull_embedding_vectors("t", torch.tensor([*range(8), 100]))
    assert rows[:, 0].tolist() == [100.0] * 8 + [1600.0]


def in_threads(calls: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call) for call in calls]:
            future.result()


def test_gradients_that_are_too_old_are_rejected_by_all_servers() -> None:
    client = PSClient(
        connect(servers(2, optimizer=Optimizer(lr=1.0), grads_to_wait=1, tolerance=1))
    )
    client.push_embedding_table_infos([TableInfo("t", 1, "zeros")])
    gradients = {"t": (torch.tensor([0, 1]), -torch.ones(2, 1))}
    assert [
        client.push_gradients({}, gradients, None, v) for v in ([0, 0], [0, 0], [1, 0], [1, 1])
    ] == [(True, 1), (True, 2), (False, 2), (True, 3)]
    assert client.pull_embedding_vectors("t", torch.tensor([0, 1])).tolist() == [[3.0], [3.0]]


@pytest.mark.parametrize("grads_to_wait", [None, 1])
def test_a_push_that_is_refused_does_no_harm_to_later_ones(grads_to_wait: int | None) -> None:
    client = PSClient(connect(servers(2, optimizer=Optimizer(lr=1.0), grads_to_wait=grads_to_wait)))
    for i in range(2):
        client.push_dense_parameters({"w": torch.zeros(2)}, i, 0)
    with pytest.raises(ParametersError, match=r"the gradient of 'w' has the shape \(3,\)"):
        client.push_gradients({"w": torch.ones(3)}, {}, None, [0, 0])
    with pytest.raises(ParametersError, match="table 't' does not exist. The tables are none"):
        client.push_gradients({}, {"t": (torch.tensor([1]), torch.ones(1, 2))}, None, [0, 0])
    with pytest.raises(TypeError, match=r"the gradient of 'w' is torch\.sparse_coo"):
        client.push_gradients({"w": torch.ones(2).to_sparse()}, {}, None, [0, 0])
    versions = [-1, -1]
    client.pull_dense_parameters([0, 1], versions)
    assert client.push_gradients({"w": -torch.ones(2)}, {}, None, versions)[0]
    assert client.pull_variable()["w"].tolist() == [1.0, 1.0]
