"""Promises:
- ignite, skorch, fastai, PyG and Composer take a fastload loader in place of torch's, and train on the same batches,
  read by fastload's workers.
- ignite and Composer resume in the middle of an epoch with the loader's state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, get_worker_info

import fastload

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of the frameworks
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
LOADERS: list[Any] = [TorchLoader, fastload.DataLoader]


class Pairs(Dataset[Any]):
    """A number and its double. Only workers read it."""

    def __init__(self, length: int = 64, *, in_workers: bool = True) -> None:
        self.length = length
        self.in_workers = in_workers

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        assert (get_worker_info() is not None) is self.in_workers
        if index >= self.length:
            raise IndexError(index)
        return torch.tensor([float(index)]), torch.tensor([2.0 * index])


class Model(torch.nn.Module):
    """Keeps the batches that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[float]] = []

    def forward(self, x: torch.Tensor) -> Any:
        if self.training:
            self.seen.append(x.flatten().tolist())
        return self.layer(x)


def loader_of(kind: Any, workers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    dataset = Pairs(in_workers=workers > 0)
    return kind(dataset, batch_size=8, shuffle=True, num_workers=workers, **options)


@contextmanager
def closed(loader: Any) -> Iterator[Any]:
    try:
        yield loader
    finally:
        if isinstance(loader, fastload.DataLoader):
            loader.close()


# ---- ignite ----


def test_ignite_trains_on_the_same_batches() -> None:
    engine = pytest.importorskip("ignite.engine")
    seen: list[list[Any]] = []
    for kind in LOADERS:
        seen.append([])
        with closed(loader_of(kind)) as loader:
            engine.Engine(lambda _, batch: seen[-1].append(batch[0].tolist())).run(loader, 3)
    assert len(seen[0]) == 24
    assert seen[0] == seen[1]


def test_ignite_resumes_in_the_middle_of_an_epoch() -> None:
    engine = pytest.importorskip("ignite.engine")
    whole: list[Any] = []
    states: dict[str, Any] = {}

    def runs(to: list[Any]) -> Any:
        return engine.Engine(lambda _, batch: to.append(batch[0].tolist()))

    with closed(loader_of(fastload.DataLoader, seed=5)) as loader:
        first = runs(whole)
        event = engine.Events.ITERATION_COMPLETED(once=11)
        first.add_event_handler(
            event, lambda e: states.update(engine=e.state_dict(), loader=loader.state_dict())
        )
        first.run(loader, max_epochs=3)
    rest: list[Any] = []
    with closed(loader_of(fastload.DataLoader, seed=5)) as loader:
        second = runs(rest)
        second.load_state_dict(states["engine"])
        loader.load_state_dict(states["loader"])
        second.run(loader, max_epochs=3)
    assert rest == whole[11:]


# ---- skorch ----


def test_skorch_trains_and_predicts_with_the_same_batches() -> None:
    skorch = pytest.importorskip("skorch")
    found: list[Any] = []
    for kind in LOADERS:
        torch.manual_seed(0)
        net = skorch.NeuralNetRegressor(
            Model,
            max_epochs=2,
            batch_size=8,
            iterator_train=kind,
            iterator_valid=kind,
            iterator_train__num_workers=2,
            iterator_train__shuffle=True,
            iterator_valid__num_workers=2,
            lr=1e-6,
            verbose=0,
            train_split=None,
        )
        net.fit(Pairs(), None)
        found.append((net.module_.seen, net.predict(Pairs()).tolist()))
    assert len(found[0][0]) == 16
    assert found[0] == found[1]


# ---- PyG ----


def test_the_graphs_of_pyg_are_collated_by_its_collater() -> None:
    """PyG's loader is a subclass of torch's, so its `Collater` goes into ours."""
    loading = pytest.importorskip("torch_geometric.loader")
    from torch_geometric.data import Data
    from torch_geometric.loader.dataloader import Collater

    graphs = [
        Data(x=torch.full((i % 4 + 1, 2), float(i)), edge_index=torch.tensor([[0], [i % 4]]))
        for i in range(30)
    ]
    torch.manual_seed(0)
    expected = list(loading.DataLoader(graphs, batch_size=4, shuffle=True, num_workers=2))
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2}
    with fastload.DataLoader(graphs, collate_fn=Collater(graphs), **options) as loader:  # type: ignore[arg-type]
        for ours, theirs in zip(loader, expected, strict=True):
            assert ours.x.equal(theirs.x)
            assert ours.edge_index.equal(theirs.edge_index)
            assert ours.batch.equal(theirs.batch)


# ---- fastai ----


def test_fastai_trains_on_the_same_batches() -> None:
    data = pytest.importorskip("fastai.data.core", exc_type=ImportError)
    from fastai.learner import Learner

    seen: list[Any] = []
    for kind in LOADERS:
        model = Model()
        loaders = data.DataLoaders(loader_of(kind), kind(Pairs(16), batch_size=8, num_workers=2))
        Learner(loaders, model, loss_func=torch.nn.MSELoss(), lr=1e-6).fit(2)
        seen.append(model.seen)
        if kind is fastload.DataLoader:
            for one in loaders.loaders:
                assert type(one) is kind
                one.close()
    assert len(seen[0]) == 16
    assert seen[0] == seen[1]


# ---- Composer ----


def test_composer_trains_on_the_same_batches_and_resumes(tmp_path: Path) -> None:
    composer = pytest.importorskip("composer", exc_type=ImportError)
    from composer.models import ComposerModel

    class Composed(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, batch: Any) -> Any:
            return self.model(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return ((outputs - batch[1]) ** 2).mean() * 1e-6

    def trained(kind: Any, load: Path | None = None, **options: Any) -> list[list[float]]:
        model = Composed()
        with closed(loader_of(kind, **options)) as loader:
            trainer = composer.Trainer(
                model=model,
                train_dataloader=loader,
                max_duration="2ep",
                device="cpu",
                progress_bar=False,
                save_folder=str(tmp_path),
                save_interval="5ba",
                save_overwrite=True,
                load_path=None if load is None else str(load),
                seed=1,
            )
            trainer.fit()
            trainer.close()
        return model.model.seen

    # Without torch's workers, whose last batch Composer keeps.
    assert trained(TorchLoader, workers=0) == trained(fastload.DataLoader)
    whole = trained(fastload.DataLoader, seed=4)
    assert len(whole) == 16
    saved = tmp_path / "ep0-ba5-rank0.pt"
    assert trained(fastload.DataLoader, saved, seed=4) == whole[5:]
