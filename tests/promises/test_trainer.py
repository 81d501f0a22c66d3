"""Promises:
- A Hugging Face Trainer with fastload's mixin trains, evaluates and predicts through fastload's loaders. Predictions
  come once for each sample and in order, on one process and on two.
- Every `dataloader_*` argument reaches the loader. `remove_unused_columns` and sampling by length work as before.
- A training that resumes in the middle of an epoch gives the batches and random numbers of an undisturbed one. It
  reads no sample that it has had, unless the dataset is iterable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.promises import trainer_cases as cases
from tests.promises.accelerate_cases import run as run_with

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*(pin_memory|OMP_NUM_THREADS|will create 3 worker)"),
]
worlds = pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])


def run(world: int, function: Any, *arguments: Any) -> list[Any]:
    return run_with(world, function, *arguments, modules="accelerate transformers")


@worlds
def test_training_evaluation_and_prediction_have_each_sample_once(
    world: int, tmp_path: Path
) -> None:
    options: list[Any] = [
        {"dataloader_persistent_workers": True},
        {"kind": cases.Seq2Seq, "dataloader_num_workers": 1, "dataloader_drop_last": True},
        {**cases.GROUPED, "gradient_accumulation_steps": 2},
    ]
    found = run(world, cases.trained, str(tmp_path), options)
    for number, given in enumerate(options):
        ranks = [answers[number] for answers in found]
        dropped = given.get("dataloader_drop_last", False)
        per_epoch = 26 // (4 * world) if dropped else -(-26 // (4 * world))
        for batches, threads, predicted, labels, ours, losses in ranks:
            assert len(batches) == 3 * per_epoch
            assert threads - {"MainThread"} == {"fastload-worker"}
            assert len(threads) == 1 or given.keys() >= cases.GROUPED.keys()  # it reads the lengths
            assert labels[: len(predicted)] == predicted
            by_length = given.keys() >= cases.GROUPED.keys()  # evaluations too
            assert (sorted(predicted) if by_length else predicted) == list(
                range(8 if dropped else 11)
            )
            assert ours == [True, True]
            assert losses == ["eval_loss"]
        for epoch in range(3):
            part = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            seen = [k for batches, *_ in ranks for labels, _, _ in batches[part] for k in labels]
            if dropped:
                assert len(seen) == len(set(seen)) == 24
            else:
                assert set(seen) == set(range(26))
                assert len(seen) == {1: 26, 2: 32}[world]
        first, second = (
            ranks[0][0][part][0] for part in (slice(per_epoch), slice(per_epoch, None))
        )
        assert first != second


@pytest.mark.parametrize(
    "world",
    [
        1,
        pytest.param(
            2,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    "train_sampling_strategy" not in cases.ARGUMENTS,
                    reason="before 5.0, the Trainer's own torch.load() of the optimizer fails on two CPU processes",
                ),
            ],
        ),
    ],
)
def test_a_training_that_resumes_gives_the_batches_and_numbers_of_one_that_does_not(
    world: int, tmp_path: Path
) -> None:
    """In the first epoch, in later ones, and at the end of one. The Trainer knows no epochs of an endless stream."""
    given: list[Any] = [
        ({}, 2),
        ({"dataloader_persistent_workers": True}, 9),
        ({"dataloader_num_workers": 0, "seed": 8, "data_seed": 9}, 5),
        ({**cases.GROUPED, "gradient_accumulation_steps": 2}, 1),
        ({"gradient_accumulation_steps": 3}, 4),
        ({"train": "stream", "max_steps": 11, "dataloader_num_workers": 1}, 2),
        ({"train": "known stream", "dataloader_num_workers": 1}, 9),
        ({"kind": cases.Seq2Seq}, 4),
        ({**cases.IN_ORDER}, 6),
    ]
    for answers in run(world, cases.resumed, str(tmp_path), given):
        for (options, step), (whole, rest, read) in zip(given, answers, strict=True):
            assert rest == whole, (options, step)
            assert rest
            asks = options.keys() & {"dataloader_persistent_workers", *cases.GROUPED}
            if read is not None and not asks:  # these read the next epoch early, or the lengths
                assert read == sum(len(labels) for labels, _, _ in rest), (options, step)


def test_every_argument_of_the_loader_reaches_it(tmp_path: Path) -> None:
    [[train, evaluation]] = run(1, cases.loader_arguments, str(tmp_path))
    in_order = "dataloader_in_order" not in cases.ARGUMENTS
    assert train == {
        "num_workers": 3,
        "pin_memory": True,
        "persistent_workers": True,
        "prefetch_factor": 5,
        "in_order": in_order,
        "drop_last": True,
    }
    assert {**evaluation, "drop_last": True} == train


def test_the_mixin_must_come_first() -> None:
    with pytest.raises(TypeError, match="put TrainerMixin before the Trainer"):
        type("Mine", (cases.transformers.Trainer, cases.TrainerMixin), {})
