"""Promises:
- A training that is killed at any step, or during a save, and resumed learns each sample of an epoch once. The
  model's weights show it, and random numbers continue.
- Two ranks resume from the checkpoint of one rank at the same global batch, and one rank from theirs.
- A rank that is killed ends the other with an error.
- A checkpoint that does not fit, or is cut off, is an error that names the field and both values.
- A run that does not resume overwrites no checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL")

from fastload.distributed import Rank
from fastload.errors import StateError
from fastload.train.checkpoint import NAME, Checkpoint, CheckpointError
from fastload.train.recipe import Recipe

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from counting import SAMPLES, counting_learner, counts, train_counting
from starting import ranks_started

from tests.fakes import limited_files

PROGRAM = Path(__file__).parent / "programs" / "counting.py"
ALONE = Rank(rank=0, world_size=1, local_rank=0, local_size=1, launcher="none")


class Killed(BaseException):
    """Stands in for a kill: nothing in the training may catch it."""


def plain_checkpoint(**fields: Any) -> Checkpoint:
    values = {"about": {}, "model": {}, "optimizer": {}, "loader": {}, "randomness": []}
    return Checkpoint(step=1, **values | fields)


def train(folder: Path, *, die_at: int | None = None, **options: Any) -> list[str]:
    """Train the counting model; die behind a step where one is named. What was said."""
    said: list[str] = []

    def on_step(step: int, _: torch.Tensor) -> None:
        if step == die_at:
            raise Killed

    options = {"batch_size": 8, "every": 1, **options}
    try:
        train_counting(folder, rank=ALONE, on_step=on_step, say=said.append, **options)
    except Killed:
        assert die_at is not None
    return said


@given(
    deaths=st.lists(st.integers(1, 12), max_size=4),
    every=st.integers(1, 7),
    workers=st.integers(0, 2),
)
def test_wherever_it_dies_the_model_has_learned_from_each_sample_once(
    deaths: list[int], every: int, workers: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    for death in sorted(deaths):
        train(folder, die_at=death, every=every, workers=workers, batch_size=4)
        if (folder / NAME).exists():
            trained = counts(folder, global_batch=4)
            assert set(trained) <= {0, 1}
            found = Checkpoint.load(folder)
            assert found is not None
            assert sum(trained) == 4 * found.step
    train(folder, every=every, workers=workers, batch_size=4)
    assert counts(folder, global_batch=4) == [1] * SAMPLES


def test_a_resumed_training_says_where_it_goes_on_and_a_finished_one_trains_no_more(
    tmp_path: Path,
) -> None:
    before = os.umask(0o027)
    try:
        train(tmp_path / "two", die_at=7, every=6, epochs=2)
    finally:
        os.umask(before)
    assert (tmp_path / "two" / NAME).stat().st_mode & 0o777 == 0o640, "as the umask has it"
    assert counts(tmp_path / "two", global_batch=8) == [1] * SAMPLES
    train(tmp_path / "two", every=6, epochs=2)
    assert counts(tmp_path / "two", global_batch=8) == [2] * SAMPLES
    assert [path.name for path in (tmp_path / "two").iterdir()] == [NAME]
    tmp_path /= "one"
    assert "starts from the beginning" in train(tmp_path, die_at=3)[0]
    assert "Resumed after step 2" in train(tmp_path)[0]
    said = train(tmp_path)
    assert said == ["Resumed after step 6 of a run with 1 rank"]
    assert counts(tmp_path, global_batch=8) == [1] * SAMPLES


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def drawn(die_at: int | None, folder: Path) -> list[float]:
        numbers: list[float] = []

        def on_step(step: int, _: torch.Tensor) -> None:
            if step == die_at:
                raise Killed
            numbers.extend((float(torch.rand(())), random.random(), float(np.random.rand())))

        try:
            train_counting(
                folder, batch_size=8, every=1, rank=ALONE, on_step=on_step, say=lambda _: None
            )
        except Killed:
            assert die_at is not None
        return numbers

    def seed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    whole = drawn(None, tmp_path / "whole")
    seed()
    before = drawn(4, tmp_path / "parts")
    torch.manual_seed(2), random.seed(2), np.random.seed(2)
    assert before + drawn(None, tmp_path / "parts") == whole


# ---- real ranks, a real kill ----


@pytest.mark.slow
def test_a_rank_killed_in_a_save_ends_the_others_and_one_rank_completes_what_two_began(
    tmp_path: Path,
) -> None:
    train(tmp_path, die_at=2)  # alone, with the batch of both
    arguments = [str(PROGRAM), str(tmp_path), "4", "1", "3"]
    with ranks_started(2, arguments) as processes:
        said = [process.communicate(timeout=100)[0] for process in processes]
        dead, other = [process.returncode for process in processes]
    assert dead == -signal.SIGKILL
    assert other > 0, "a rank whose partner died ends with an error, and does not wait for ever"
    assert "Resumed after step 1 of a run with 1 rank" in said[0]
    assert sum(counts(tmp_path, global_batch=8)) == 3 * 8, "step 1, and two saves that were whole"
    train(tmp_path)
    assert counts(tmp_path, global_batch=8) == [1] * SAMPLES


# ---- what does not fit ----


def test_a_checkpoint_of_another_run_names_the_field_and_both_values(tmp_path: Path) -> None:
    train(tmp_path, die_at=3)
    saved = Checkpoint.load(tmp_path)
    assert saved is not None
    model = counting_learner(ALONE).model.state_dict()
    with pytest.raises(
        CheckpointError, match=r"lr: the checkpoint has None, but this run has 0\.5"
    ):
        saved.check(tmp_path, about={"lr": 0.5}, model=model)
    with pytest.raises(
        CheckpointError, match=r"weight: the file has \(1, 48\).*model has \(2, 48\)"
    ):
        saved.check(tmp_path, about={}, model={"weight": torch.zeros(2, 48)})
    with pytest.raises(StateError, match=r"global_batch: the state has 8, this loader 6"):
        train(tmp_path, batch_size=6)


def test_a_file_that_is_cut_off_or_of_another_kind_is_no_checkpoint(tmp_path: Path) -> None:
    path = plain_checkpoint().save(tmp_path)
    for content in (path.read_bytes()[:-100], b"", b"hello\n", b"\x80\x02"):
        path.write_bytes(content)
        with pytest.raises(
            CheckpointError, match=r"checkpoint\.pt is not a checkpoint, or is damaged"
        ):
            Checkpoint.load(tmp_path)


def test_a_number_that_changed_on_the_disk_is_not_trained_on(tmp_path: Path) -> None:
    weights = torch.full((1000,), 1.5)
    path = plain_checkpoint(model={"a": weights}).save(tmp_path)
    content = path.read_bytes()
    at = content.index(weights.numpy().tobytes())
    path.write_bytes(content[: at + 3] + b"\xbf" + content[at + 4 :])  # -1.5
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is .* damaged: the checksum of"):
        Checkpoint.load(tmp_path)


def test_a_full_disk_is_named_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    path = plain_checkpoint().save(tmp_path)
    before = path.read_bytes()
    large = plain_checkpoint(model={"a": torch.zeros(100_000)})
    with limited_files(10_000), pytest.raises(OSError, match=r"File too large: .*checkpoint\.pt"):
        large.save(tmp_path)
    assert [left.name for left in tmp_path.iterdir()] == [NAME]
    assert path.read_bytes() == before


def test_what_a_kill_in_a_save_left_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.partial").write_bytes(b"half")
    plain_checkpoint().save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_folder_that_cannot_be_made_is_told_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    steps: list[int] = []
    with pytest.raises(CheckpointError, match=r"checkpoint.pt: Not a directory.*--checkpoint"):
        train_counting(
            tmp_path / "file" / "checkpoints",
            rank=ALONE,
            on_step=lambda step, _: steps.append(step),
            say=lambda _: None,
            batch_size=8,
            every=1,
        )
    assert not steps


def test_a_checkpoint_is_not_written_over_by_a_run_that_does_not_resume(tmp_path: Path) -> None:
    from fastload.distributed import Control
    from fastload.train.loop import begin

    train(tmp_path)
    recipe = Recipe(file_list=tmp_path, checkpoint=tmp_path)
    with pytest.raises(CheckpointError, match="Give --resume"):
        begin(recipe, None, counting_learner(ALONE), Control(ALONE))  # type: ignore[arg-type]
