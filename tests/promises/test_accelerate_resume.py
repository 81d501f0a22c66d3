"""Promises:
- Accelerate's `save_state` and `load_state` hold the position of prepared loaders, unregistered. A training
  that is interrupted in any epoch, also twice, gives the batches and random numbers of one that is not.
- `accelerator.skip_first_batches` skips by the loader's own state, before and after `set_epoch` and `load_state`. It
  reads no sample of a map-style dataset.
- A checkpoint without the loader's state warns, and the epoch starts from its first batch.

See also `tests/promises/test_accelerate.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from tests.promises import accelerate_resuming as cases
from tests.promises.accelerate_cases import EpochStream, KnownStream, Stream, begin, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Accelerate's own
    pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS"),
]
worlds = pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])

EPOCHS = {"dataset": EpochStream, "persistent_workers": True, "seed": 3}
TRAININGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "seed": ({"shuffle": True, "seed": 3, "num_workers": 2}, {}),
    "no seed": ({"shuffle": True, "num_workers": 2}, {}),
    "no workers": ({"shuffle": True}, {}),
    "seedable": ({"shuffle": True, "num_workers": 1}, {"config": {"use_seedable_sampler": True}}),
    "in order": ({"num_workers": 2}, {}),
    "subset": ({"order": "subset", "num_workers": 2}, {}),
    "own batches": ({"order": "ragged", "num_workers": 1}, {"config": {"even_batches": False}}),
    "stream": ({"dataset": Stream, "num_workers": 1}, {}),
    "stream, seed": ({"dataset": Stream, "seed": 3}, {}),
    "known stream": ({"dataset": KnownStream, "num_workers": 1}, {}),
    "persistent stream": ({**EPOCHS, "num_workers": 1}, {}),
    "two workers": ({"dataset": Stream, "num_workers": 2}, {}),
    "processes": ({"shuffle": True, "num_workers": 2, "worker_method": "process"}, {}),
    "persistent": ({"shuffle": True, "num_workers": 2, "persistent_workers": True}, {}),
    "split": ({"shuffle": True, "batch_size": 4}, {"config": {"split_batches": True}}),
    "uneven": ({"shuffle": True, "length": 13}, {"config": {"even_batches": False}}),
    "drop_last": ({"shuffle": True, "num_workers": 2, "drop_last": True}, {}),
}


@worlds
def test_save_state_and_load_state_resume_in_the_middle_of_an_epoch(
    world: int, tmp_path: Path
) -> None:
    """In the first epoch and in the second, and again in an epoch that was resumed."""
    for found in run(world, cases.resumed_all, list(TRAININGS.values()), str(tmp_path)):
        for name, answers in zip(TRAININGS, found, strict=True):
            for stop, (whole, rest) in zip(cases.STOPS, answers, strict=True):
                assert whole == rest, (name, stop)
                assert len(whole) >= 2, (name, stop)


@worlds
@pytest.mark.parametrize("seed", [3, None])
def test_skip_first_batches_moves_the_loader_s_own_position(
    world: int, seed: int | None, tmp_path: Path
) -> None:
    spec = {"shuffle": True, "num_workers": 2, "seed": seed, "length": 30}
    spec["worker_method"] = "thread"  # so that this process sees what is read
    if seed is None and world == 1:  # only the checkpoint knows what torch would have drawn
        spec["order"], spec["shuffle"] = None, False
    for answers in run(world, cases.skipped, spec, str(tmp_path)):
        for way, (whole, rest, read_no_more, following, then) in answers.items():
            if seed is None and not way.startswith("loaded"):
                whole, rest = ([batch[0] for batch in batches] for batches in (whole, rest))
                following, then = None, None
            assert rest == whole, way
            assert read_no_more, way
            assert following == then, way


@worlds
@pytest.mark.parametrize("method", ["thread", "process"])
def test_persistent_workers_are_told_each_epoch(world: int, method: str) -> None:
    """Their copies stayed at the epoch of the first pass."""
    spec = {**EPOCHS, "num_workers": 1, "worker_method": method, "length": 12}
    for epochs in run(world, cases.firsts, spec):
        assert epochs == [0, 1, 2] if world == 1 else epochs[1:] == [epochs[0] + 1, epochs[0] + 2]


def test_a_checkpoint_without_the_loader_s_state_says_so(tmp_path: Path) -> None:
    def resume() -> Any:
        accelerator, _ = begin("theirs", {}, {})
        accelerator.save_state(str(tmp_path))
        accelerator, loader = begin("ours", {"seed": 1}, {})
        with pytest.warns(UserWarning, match="has no state of DataLoader.*starts anew"):
            accelerator.load_state(str(tmp_path))
        return len(list(loader))

    assert run(1, resume) == [7]


def test_a_loader_s_state_of_one_process_fits_two_if_the_global_batch_does(tmp_path: Path) -> None:
    spec = {"shuffle": True, "seed": 3, "length": 24}
    [whole] = run(1, cases.saved_after_two, {**spec, "batch_size": 6}, str(tmp_path))
    parts = run(2, cases.loaded, {**spec, "batch_size": 3}, str(tmp_path))
    assert [[*first, *second] for first, second in zip(*parts, strict=True)] == whole


@worlds
@pytest.mark.parametrize("dataset", [Stream, KnownStream, None])
def test_a_state_leaves_out_a_batch_that_the_loop_holds(world: int, dataset: Any) -> None:
    """Also if the loader has read one more, to know which is the last."""
    spec = {"num_workers": 1} | ({"dataset": dataset} if dataset else {"shuffle": True, "seed": 3})
    for whole, rest in run(world, cases.held, spec):
        assert rest == whole
        assert len(rest) > 1
