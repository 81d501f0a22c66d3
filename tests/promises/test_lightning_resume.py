"""Promises:
- Lightning's checkpoints hold the exact position of the loader. A training that is resumed from any of them gives the
  batches and random numbers of one that is not interrupted, on one and two devices.
- That holds within epochs and at their ends, for streams, for several loaders at once, and with limits.
- With `RankSampler`, a checkpoint resumes on another number of devices with the same global batch.
- A checkpoint that is saved when a step fails, or after a run, does not count batches that were not trained on.
- Nothing has to be set: Lightning finds the plug-in of the installed package.
"""

from __future__ import annotations

import importlib.metadata
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import covertable
import pytest

pytest.importorskip("lightning")

import fastload
from fastload.errors import StateError
from tests.promises import lightning_cases as cases
from tests.promises.lightning_cases import fit, run

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, of versions and of workers

TRAININGS: dict[str, dict[str, Any]] = {
    "seed": {"train": {"shuffle": True}},
    "no workers": {"train": {"shuffle": True, "num_workers": 0}},
    "rank sampler": {"train": {"order": "rank"}},
    "generator": {"train": {"shuffle": True, "seed": None, "generator": 4}},
    "processes": {"train": {"shuffle": True, "worker_method": "process"}, "step": 5},
    "persistent": {"train": {"shuffle": True, "persistent_workers": True}},
    "stream": {"train": {"dataset": "stream"}},
    "stream with a place": {"train": {"dataset": "counted", "num_workers": 1}},
    "validation": {"train": {"shuffle": True}, "validate": {"shuffle": True, "length": 5}},
    "val_check_interval": {
        "train": {"shuffle": True},
        "validate": {"shuffle": True, "length": 5},
        "trainer": {"val_check_interval": 2},
    },
    "limit_train_batches": {"train": {"shuffle": True}, "trainer": {"limit_train_batches": 3}},
    "limit, stream": {"train": {"dataset": "stream"}, "trainer": {"limit_train_batches": 3}},
    "max_steps": {"train": {"shuffle": True}, "trainer": {"max_epochs": None, "max_steps": 12}},
    "reload": {
        "train": {"shuffle": True},
        "trainer": {"reload_dataloaders_every_n_epochs": 1},
    },
    "two": {"train": {"each": [{"shuffle": True}, {"shuffle": True, "length": 8}]}},
    "two, max_size": {
        "train": {"each": [{"shuffle": True}, {"shuffle": True, "length": 8}], "mode": "max_size"}
    },
    "two streams, max_size": {
        "train": {
            "each": [{"dataset": "stream"}, {"dataset": "stream", "length": 8}],
            "mode": "max_size",
        }
    },
    "rows beside a stream, max_size": {
        "train": {
            "each": [{"dataset": "stream"}, {"shuffle": True, "length": 8}],
            "mode": "max_size",
        }
    },
}
ON_RANKS = ["seed", "rank sampler", "stream", "limit, stream", "two", "max_steps"]


QUICK = ["seed", "max_steps"]


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TRAININGS],
)
def test_every_checkpoint_resumes_exactly(name: str, tmp_path: Path) -> None:
    """Saved after a batch, a validation and an epoch."""
    (answers,) = run(1, cases.resumed_each, {name: TRAININGS[name]}, str(tmp_path))
    check(name, answers[name])
    assert len(answers[name]) >= 3


@pytest.mark.slow
def test_every_checkpoint_resumes_exactly_on_two_devices(tmp_path: Path) -> None:
    specs = {name: TRAININGS[name] for name in ON_RANKS}
    ranks = run(2, cases.resumed_each, specs, str(tmp_path))
    for name in specs:
        for rank in ranks:
            check(name, rank[name])
        first, second = ([answer[1] for answer in rank[name]] for rank in ranks)
        assert first != second or name == "stream", "each rank has its own samples"


def check(name: str, answers: list[Any]) -> None:
    for at, rest, again, validated, validated_again in answers:
        assert again == rest, (name, at)
        # Lightning leaves out a validation after some checkpoints, and repeats one after others.
        if rest and validated_again:
            assert validated_again[-2:] == validated[-2:], (name, at)
        ids = [index for _, batch in validated_again for index in batch[0]]
        passes = [sorted(ids[k : k + 5]) for k in range(0, len(ids), 5)]
        assert all(one == [0, 1, 2, 3, 4] for one in passes), (name, at)


@pytest.mark.parametrize(
    ("name", "fails", "event"),
    covertable.make([["seed", "two streams, max_size"], [5, 7], ["on_exception", None]]),
)
def test_a_checkpoint_of_a_failed_step_does_not_count_its_batch(
    name: str, fails: int, event: str | None, tmp_path: Path
) -> None:
    """It is saved as the step fails, or after that. The sixth step is the last of an epoch of streams."""
    spec = TRAININGS[name]
    whole, _ = fit(spec, tmp_path)
    saver = cases.Saver(tmp_path, [event] if event else [])
    model = cases.Model(spec["train"], None, fails)
    with pytest.raises(OSError, match="the step fails"):
        (trainer := cases.trainer(spec, tmp_path, saver)).fit(model)
    if event is None:
        trainer.save_checkpoint(path := str(tmp_path / "after.ckpt"))
    else:
        ((path, _),) = saver.saved
    assert len(model.trained) == fails
    assert fit(spec, tmp_path, resume=path)[0].trained == whole.trained[fails:]


def test_a_loader_without_a_state_begins_anew(tmp_path: Path) -> None:
    spec = {"train": {"worker_method": "torch", "num_workers": 0}}
    whole, saved = fit(spec, tmp_path, events=["on_train_batch_end", "on_train_epoch_end"])
    again = [batch[0] for batch in fit(spec, tmp_path, resume=saved[5][0])[0].trained]
    assert again == [batch[0] for batch in whole.trained[5:]]


@pytest.mark.parametrize("dataset", ["rows", "stream"])
def test_a_checkpoint_after_a_run_does_not_count_what_was_read_ahead(
    dataset: str, tmp_path: Path
) -> None:
    spec = {"train": {"dataset": dataset}}
    whole, _ = fit(spec, tmp_path)
    part = cases.trainer({"trainer": {"max_steps": 8, "max_epochs": -1}}, tmp_path)
    part.fit(model := cases.Model(spec["train"], None, None))
    part.save_checkpoint(path := str(tmp_path / "after.ckpt"))
    assert model.trained == whole.trained[:8]
    again = fit(
        {**spec, "trainer": {"max_steps": len(whole.trained), "max_epochs": -1}},
        tmp_path,
        resume=path,
    )
    assert again[0].trained == whole.trained[8:]


def test_another_number_of_devices_resumes_a_rank_sampler(tmp_path: Path) -> None:
    two = {"train": {"order": "rank", "length": 24, "batch_size": 3}}
    one = {"train": {"order": "rank", "length": 24, "batch_size": 6}}
    (whole, saved), (other, _) = run(2, cases.whole_and_saved, two, str(tmp_path))
    path, trained = saved[5]
    assert trained % 4 > 0, "in the middle of the second epoch"
    (again,) = run(1, cases.resumed, one, str(tmp_path), path)
    joined = [
        sorted(a + b) for (a, _), (b, _) in zip(whole[trained:], other[trained:], strict=True)
    ]
    assert [sorted(batch[0]) for batch in again] == joined
    path, trained = run(1, cases.whole_and_saved, one, str(tmp_path / "one"))[0][1][5]
    ranks = run(2, cases.resumed, two, str(tmp_path), path)
    assert [sorted(a[0] + b[0]) for a, b in zip(*ranks, strict=True)] == joined


@pytest.mark.parametrize(
    "train", [{"dataset": "stream"}, pytest.param({"shuffle": True}, marks=pytest.mark.slow)]
)
def test_another_number_of_devices_is_refused_otherwise(
    train: dict[str, Any], tmp_path: Path
) -> None:
    (_, saved), _ = run(2, cases.whole_and_saved, {"train": train}, str(tmp_path))
    (said,) = run(1, cases.resumed, {"train": train}, str(tmp_path), saved[3][0])
    assert isinstance(said, str), "an error"
    assert "world_size" in said or "sampler" in said


def test_other_loaders_than_those_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    _, saved = fit(TRAININGS["two"], tmp_path, events=["on_train_batch_end"])
    with pytest.raises(StateError, match="states of 2 fastload loaders.*this run has 1"):
        fit(TRAININGS["seed"], tmp_path, resume=saved[1][0])


def test_the_trainer_of_pytorch_lightning_resumes_too(tmp_path: Path) -> None:
    """It is the same code under another name, with classes of its own."""
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    found = [type(one) for one in trainer.callbacks if type(one).__name__ == "LoaderPositions"]
    assert len(found) == 1
    assert issubclass(found[0], other.Callback)
    spawned = [type(one) for one in pickle.loads(pickle.dumps(trainer.callbacks))]
    assert [one.__name__ for one in spawned] == [type(one).__name__ for one in trainer.callbacks]


def test_a_program_without_our_loaders_is_left_alone(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    trainer = cases.trainer({"trainer": {"max_epochs": 1}}, tmp_path)
    trainer.fit(cases.Model({}, None, None), DataLoader(cases.Draws(6), 3))
    trainer.save_checkpoint(path := tmp_path / "theirs.ckpt")
    import torch

    assert "fastload" not in torch.load(path, weights_only=True)
    names = {
        point.name
        for point in importlib.metadata.entry_points(group="lightning.pytorch.callbacks_factory")
    }
    assert fastload.__name__ in names


@pytest.mark.filterwarnings("error:fastload")
@pytest.mark.parametrize("steps", [3, 5])
def test_a_checkpoint_of_torch_s_loader_begins_its_epoch_anew(steps: int, tmp_path: Path) -> None:
    """With a warning if it is of the middle of an epoch, here after 3 of 5 batches."""
    from torch.utils.data import DataLoader

    first = cases.trainer({"trainer": {"max_steps": steps}}, tmp_path)
    first.fit(cases.Model({}, None, None), DataLoader(cases.Draws(14), 3))
    first.save_checkpoint(path := tmp_path / "theirs.ckpt")
    again = cases.trainer({"trainer": {"max_steps": 9}}, tmp_path)
    model, spec = cases.Model({}, None, None), {"shuffle": False}
    with (
        pytest.warns(UserWarning, match="no position of a loader") if steps == 3 else nullcontext()
    ):
        again.fit(model, cases.loader(spec), ckpt_path=path)
    assert model.trained[0][0] == [0, 1, 2]
