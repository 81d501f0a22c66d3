"""Promises:
- 200 batches with prefetch leave the same table as 200 without, bit for bit: SGD with momentum and 0, 1 or 4 workers,
  Adagrad and Adam with 4. The quick tests have SGD with 4 workers, and 50 batches of Adam with one.
- An `Embedding` has the gradients of torch's. Several forward passes add up, one without a push keeps nothing, and
  evaluation only pulls.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, default_collate

import fastload
from fastload.parameters import Embedding, Optimizer, PSClient, connect
from tests.parameters.running import OPTIMIZERS, servers

ROWS = 2_000


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tables are small: torch's threads would only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Clicks(Dataset[dict[str, Tensor]]):
    """Samples with 4 ids each, most of them small: Zipf's law."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand(count, 4, generator=generator, dtype=torch.float64)
        self.ids = (ROWS**drawn).long() - 1
        self.wanted = torch.rand(count, generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"id": self.ids[index], "wanted": self.wanted[index]}


def client(number: int = 2, **options: Any) -> PSClient:
    return PSClient(connect(servers(number, **options)))


def trained(
    optimizer: Optimizer, batches: int, workers: int | None
) -> tuple[Tensor, dict[str, int]]:
    """Train; return the table, and what was prefetched. `workers` None: without prefetch."""
    with Embedding("t", 8, client=client(optimizer=optimizer)) as table:
        collate = default_collate if workers is None else table.prefetching("id", default_collate)
        loader = fastload.DataLoader(
            Clicks(batches * 32),
            32,
            num_workers=workers or 0,
            collate_fn=collate,
            prefetch_batches=8,
        )
        with loader:
            for batch in loader:
                loss = (table(batch["id"]).sum((1, 2)) - batch["wanted"]).square().mean()
                loss.backward()
                table.push()
        table.eval()
        return table(torch.arange(ROWS)), table.counts()


SGD, ADAGRAD, ADAM = OPTIMIZERS


@pytest.mark.parametrize(
    ("optimizer", "batches", "numbers"),
    [
        (SGD, 200, [4]),
        (ADAM, 50, [1]),
        pytest.param(SGD, 200, [0, 1], marks=pytest.mark.slow),
        pytest.param(ADAGRAD, 200, [4], marks=pytest.mark.slow),
        pytest.param(ADAM, 200, [4], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_batches_with_and_without_prefetch_leave_the_same_table(
    optimizer: Optimizer, batches: int, numbers: list[int]
) -> None:
    wanted, counts = trained(optimizer, batches, None)
    assert counts["prefetched"] == 0
    for workers in numbers:
        found, counts = trained(optimizer, batches, workers)
        assert torch.equal(found, wanted)
        assert counts["prefetched"] == batches
        if workers:
            assert counts["patched"] > batches, "rows were pushed while later batches waited"


def test_a_table_is_torchs_embedding_with_sparse_gradients() -> None:
    table = Embedding("t", 4, client=client(optimizer=Optimizer(lr=0.1)))
    local = nn.Embedding.from_pretrained(
        table(torch.arange(10)).detach(), freeze=False, sparse=True
    )
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
    for shape in ((6,), (2, 3), (), (0,), (2, 2, 2)):
        ids = torch.randint(0, 10, shape)
        weights = torch.randn(*shape, 4)
        for layer in (table, local):
            (layer(ids) * weights).sum().backward()
        table.push()
        optimizer.step()
        optimizer.zero_grad()
    table.eval()
    torch.testing.assert_close(table(torch.arange(10)), local.weight.detach())


def test_backward_passes_before_a_push_add_up() -> None:
    """Also of one graph twice, and of one that is computed anew."""
    table = Embedding("t", 2, client=client(), initializer="zeros")
    both = table(torch.tensor([1, 1])).sum() + table(torch.tensor([[1], [2]])).sum()
    both.backward(retain_graph=True)
    both.backward()
    checkpoint(table, torch.tensor([3]), use_reentrant=False).sum().backward()
    table.push(1.0)
    table.eval()
    assert table(torch.tensor([1, 2, 3]))[:, 0].tolist() == [-6, -2, -1]


def test_a_forward_pass_without_a_push_keeps_nothing() -> None:
    table = Embedding("t", 2)
    loss = table(torch.tensor([1])).sum()
    leaf = loss.grad_fn.next_functions[0][0].next_functions[0][0].variable  # type: ignore[union-attr]
    rows = weakref.ref(leaf)
    del leaf
    loss.backward()
    table(torch.tensor([2]))
    table.zero_grad()
    del loss
    gc.collect()
    assert rows() is None
    assert not table._gradients
    assert not table._pulls._pulls
    table.push(1.0)
    assert table._client._servers._stubs[0]._server.version == 0, "there was nothing to push"


def test_evaluation_only_pulls() -> None:
    table = Embedding("t", 2)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert not table(torch.tensor([1, 2])).requires_grad
    assert not table.eval()(torch.tensor([1, 2])).requires_grad
    assert not list(table.parameters())
    assert not table.state_dict()


def test_an_id_outside_the_table_is_an_error_in_its_place() -> None:
    table = Embedding("t", 2, rows=ROWS // 2)
    assert table(torch.tensor([0, ROWS // 2 - 1])).shape == (2, 2)
    for ids in (torch.tensor([-1]), torch.tensor([ROWS // 2])):
        with pytest.raises(IndexError, match=f"'t' has {ROWS // 2} rows"):
            table(ids)
    with pytest.raises(TypeError, match="whole numbers"):
        table(torch.tensor([0.5]))
    with (
        fastload.DataLoader(
            Clicks(6400), 512, num_workers=1, collate_fn=table.prefetching("id", default_collate)
        ) as loader,
        pytest.raises(IndexError, match="ids from 0 to"),
    ):
        list(loader)
