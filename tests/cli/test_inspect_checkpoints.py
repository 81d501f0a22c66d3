"""Promise: `fastload set inspect` reads the position of each loader out of a checkpoint of `torch.save`, DCP,
torchtitan, Accelerate, Lightning or JSON, at any depth. It runs no code of the checkpoint, and reads no tensor.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import fastload
from fastload.cli import main
from tests.promises.checkpoint_cases import AsJson, Rows, Stream, of_stream, of_titan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def inspect(path: Path) -> str:
    result = CliRunner().invoke(main, ["inspect", str(path)])
    assert result.exit_code == 0, result.output
    return result.output


def refused(path: Path) -> str:
    result = CliRunner().invoke(main, ["inspect", str(path)])
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return result.output


def stopped(loader: Any, batches: int = 3) -> Any:
    """Return a loader in the middle of an epoch."""
    list(islice(iter(loader), batches))
    return loader


def of_rank() -> Any:
    sampler = fastload.RankSampler(Rows(), rank=1, world_size=2, seed=5)
    return stopped(fastload.DataLoader(Rows(), 4, sampler=sampler, num_workers=1, seed=3))


POSITION = """\
  epoch: 0
  batches: 3
  position: 24 of 52 samples, in the order of all ranks
  ended: False
  seed: 3
  sampler: RankSampler
  world size: 2
  global batch: 8
"""
OF_STREAM = """\
  epoch: 0
  ended: False
  seed: 3
  world size: 1
  global batch: 2
  rank 0, worker 0: 4 samples
  rank 0, worker 1: 2 samples
"""


def by_dcp(folder: Path, **held: Any) -> Path:
    dcp.save({"model": torch.nn.Linear(2, 2).state_dict(), **held}, checkpoint_id=folder)
    return folder


def by_torch(folder: Path, value: Any) -> Path:
    torch.save(value, folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def as_json(folder: Path, value: Any) -> Path:
    (folder / "state.json").write_text(json.dumps(value))
    return folder / "state.json"


class Args:
    """What a training saves beside the model: an object of a class."""

    def __init__(self) -> None:
        self.rate = 0.1


CHECKPOINTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "torch": (lambda f: by_torch(f, of_rank().state_dict()), f"the state\n{POSITION}"),
    "nested": (
        lambda f: by_torch(
            f, {"args": Args(), "all": [OrderedDict(train=of_rank().state_dict()), torch.zeros(3)]}
        ),
        f"all.0.train\n{POSITION}",
    ),
    "JSON": (lambda f: as_json(f, [of_rank().state_dict()]), f"0\n{POSITION}"),
    "JSON in torch": (
        lambda f: by_torch(f, {"loader": json.dumps(of_rank().state_dict())}),
        f"loader\n{POSITION}",
    ),
    "DCP": (lambda f: by_dcp(f, loader=of_rank()), f"loader\n{POSITION}"),
    "DCP, a string": (lambda f: by_dcp(f, loader=AsJson(of_rank())), f"loader.json\n{POSITION}"),
    "stream": (
        lambda f: by_torch(f, stopped(of_stream(Stream, 0, 1)).state_dict()),
        f"the state\n{OF_STREAM}",
    ),
    "DCP, stream": (
        lambda f: by_dcp(
            f, a={"loader_0": stopped(of_stream(Stream, 0, 1)).state_dict()}, args=Args()
        ),
        f"a.loader_0\n{OF_STREAM}",
    ),
    "torchtitan": (
        lambda f: by_dcp(f, dataloader=stopped(of_titan(0, 1))),
        f"dataloader.dp_rank_0\n{OF_STREAM}",
    ),
}


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_the_positions_in_a_checkpoint_are_printed(kind: str, tmp_path: Path) -> None:
    write, printed = CHECKPOINTS[kind]
    assert inspect(write(tmp_path)) == printed


def test_an_epoch_that_has_ended_says_so(tmp_path: Path) -> None:
    loader = of_stream(Stream, 0, 1)
    list(loader)
    printed = inspect(by_torch(tmp_path, [loader.state_dict(), of_rank().state_dict()]))
    assert "ended: True" in printed
    assert "worker 1: 26 samples, ended" in printed
    assert printed.endswith(f"1\n{POSITION}"), "each loader has its lines"


def test_accelerate_s_folder_has_the_positions_of_all_ranks(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from tests.promises.accelerate_cases import begin

    accelerator, loader = begin("ours", {"shuffle": True, "seed": 3, "num_workers": 1}, {})
    stopped(loader)
    accelerator.save_state(str(tmp_path))
    loader.close()
    first = tmp_path / "fastload_loader_0_rank_0.json"
    (tmp_path / "fastload_loader_0_rank_1.json").write_bytes(first.read_bytes())
    printed = inspect(tmp_path)
    assert printed.startswith("fastload_loader_0_rank_0.json\n  epoch: 0\n  batches: 3\n")
    assert "\nfastload_loader_0_rank_1.json\n  epoch: 0\n" in printed


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning_s_checkpoint_has_a_position(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch")

    class Model(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.save_hyperparameters({"folder": tmp_path, "args": Args()})

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.linear(batch[1][:, None]).mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    saved = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, callbacks=[saved],
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Model(), fastload.DataLoader(Rows(), 8, shuffle=True, seed=3))
    [path] = tmp_path.glob("*.ckpt")
    one_rank = POSITION.replace("world size: 2", "world size: 1")
    assert f"loops.fit_loop.state_dict.combined_loader.0\n{one_rank}" in inspect(path)


# ---- what it does not do ----


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("kind", ["torch", "dcp", "bytes", "metadata"])
def test_code_in_a_checkpoint_is_not_run(kind: str, tmp_path: Path) -> None:
    ran, folder = tmp_path / "ran", tmp_path / "checkpoint"
    folder.mkdir()
    held = {"loader": of_rank().state_dict(), "other": Runs(ran)}
    if kind == "torch":
        path = by_torch(folder, held)
    elif kind == "dcp":
        path = by_dcp(folder, **held)
    elif kind == "bytes":
        path = by_torch(folder, {"loader": held["loader"], "other": pickle.dumps(held["other"])})
    else:
        path = by_dcp(folder, loader=of_rank())
        metadata = pickle.loads((path / ".metadata").read_bytes())
        vars(metadata)["storage_meta"] = Runs(ran)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert inspect(path) == f"loader\n{POSITION}"
    assert not ran.exists()


def test_no_tensor_is_read(tmp_path: Path) -> None:
    path = by_torch(tmp_path, {"loader": of_rank().state_dict(), "model": torch.zeros(1000)})
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut:
        for name in whole.namelist():
            if "/data/" not in name:
                cut.writestr(name, whole.read(name))
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "cut.pt")
    assert inspect(tmp_path / "cut.pt") == f"loader\n{POSITION}"


def test_what_holds_no_position_is_named_with_what_was_looked_for(tmp_path: Path) -> None:
    without = by_torch(tmp_path, {"epoch": 1, "version": 2, "kind": "other"})
    for path in (tmp_path, without, as_json(tmp_path, {"epoch": 1}), by_dcp(tmp_path / "dcp")):
        said = refused(path)
        assert f"{path}: no set (index.json), and no loader's state was found" in said
        for looked_for in ("torch.save", "JSON", ".metadata", "fastload_loader_*_rank_*.json"):
            assert looked_for in said
    (tmp_path / "cut.pt").write_bytes(without.read_bytes()[:200])
    assert "no loader's state was found" in refused(tmp_path / "cut.pt")
