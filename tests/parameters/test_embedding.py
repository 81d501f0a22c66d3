"""Promises:
- 200 batches with prefetch leave the same table as 200 without, bit for bit: SGD with momentum and 0, 1 or 4 workers,
  Adagrad and Adam with 4. The quick tests have SGD with 4 workers, and 50 batches of Adam with one.
- An `Embedding` has the gradients of torch's. Several forward passes add up, one without a push keeps nothing, and
  evaluation only pulls.
- With `staleness=1` a forward pass lacks at most the newest push, and evaluation and checkpoints lack none. An error
  of a push is raised once.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, default_collate

import fastload
from fastload.errors import ParametersError
from fastload.parameters import Embedding, InProcess, Optimizer, PSClient, Server, connect
from fastload.parameters.transport import Answer
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
    assert table._client._servers._sequence == 0, "there was nothing to push"


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


# ---- staleness 1 ----


class Held(InProcess):
    """Answers one push for each permit. Records the calls."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.permits = threading.Semaphore(0)
        self.calls: list[str] = []
        self.error: ParametersError | None = None

    def start(self, method: str, arguments: Mapping[str, Any]) -> Callable[[], Answer]:
        if method == "push":
            assert self.permits.acquire(timeout=30)
            if self.error is not None:
                raise self.error
        self.calls.append(method)
        return super().start(method, arguments)


def held(tmp_path: Path | None = None) -> tuple[Held, Embedding]:
    stub = Held(Server(optimizer=Optimizer(lr=1.0), folder=tmp_path or ""))
    return stub, Embedding("t", 1, client=PSClient([stub]), initializer="zeros", staleness=1)


def step(table: Embedding) -> float:
    """Make a step; return the row that the forward pass had."""
    row = table(torch.tensor([1]))
    row.sum().backward()
    table.push()
    return float(row.detach())


def test_a_forward_pass_may_lack_the_newest_push_and_no_other() -> None:
    stub, table = held()
    collate = table.prefetching(0, default_collate)
    for _ in range(4):
        collate([(1,)])
    found: list[float] = []
    with table:
        found.append(step(table))
        assert "push" not in stub.calls, "a step does not wait for its push"
        thread = threading.Thread(target=lambda: found.append(step(table)))
        thread.start()  # it does not wait for push 1 before its forward pass, but before push 2
        stub.permits.release()
        thread.join()
        with torch.no_grad():
            found.append(float(table(torch.tensor([1]))))  # push 2 is under way
            stub.permits.release()
            table.flush()
            found.append(float(table(torch.tensor([1]))))
    assert found[0] == 0
    assert found[1] in (0, -1)
    assert found[2:] == [-1, -2]
    assert table.counts()["prefetched"] == 4


def test_evaluation_and_checkpoints_have_all_pushes(tmp_path: Path) -> None:
    stub, table = held(tmp_path)
    with table:
        for wait in (table.eval, table._client.checkpoint, table.flush):
            table.train()
            step(table)
            stub.calls.clear()
            thread = threading.Thread(target=wait)
            thread.start()
            stub.permits.release()
            thread.join()
            assert stub.calls[0] == "push", "all else comes after it"
            assert stub.calls.count("checkpoint") == (wait == table._client.checkpoint)


def test_an_error_of_a_push_is_raised_once_by_the_next_call() -> None:
    calls: list[Callable[[Embedding], object]] = [
        lambda table: table.push(), Embedding.flush, Embedding.eval, Embedding.close,
        lambda table: table(torch.tensor([2])),
    ]  # fmt: skip
    for call in calls:
        stub, table = held()
        stub.error = ParametersError("refused")
        for _ in range(2):
            stub.permits.release()
        step(table)
        assert table._running is not None
        table._running.exception(30)
        with pytest.raises(ParametersError, match="refused"):
            call(table)
        table.close()
