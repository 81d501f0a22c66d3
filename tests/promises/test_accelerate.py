"""Promises:
- `prepare(loader)` of fastload's Accelerator keeps a loader's workers, seed and state. Accelerate's own refuses the
  loader, and names the import.
- The batches, the mark of the last one and its padding are those of Accelerate's own loaders for the same arguments,
  on one and on two processes. So `accumulate`, `even_batches`, `split_batches` and `join_uneven_inputs` mean the same.
- `gather_for_metrics` gives each sample once, for every length and sampler, and for a stream of one worker. No rank
  hangs.
- What cannot be kept is refused, with the reason: `dispatch_batches=True`, a loader that is divided already, a dataset
  without batches on several ranks.

See also `tests/promises/test_accelerate_resume.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")

from fastload.integrations import prepared
from tests.promises import accelerate_cases as cases
from tests.promises.accelerate_cases import KnownStream, Stream, run

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Accelerate's own
    pytest.mark.filterwarnings("ignore:OMP_NUM_THREADS"),
]
worlds = pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
LENGTHS = (0, 1, 3, 5, 6, 7, 12, 13)  # around multiples of 3, 6 and 12
SPLIT = {"config": {"split_batches": True}}
UNEVEN = {"config": {"even_batches": False}}


@worlds
def test_a_prepared_loader_keeps_its_workers_and_seed(world: int) -> None:
    specs: list[Any] = [
        {"worker_method": method, "num_workers": workers, "seed": 4, "shuffle": True, **more}
        for method, workers in (("thread", 2), ("process", 2), ("thread", 0))
        for more in ({}, {"persistent_workers": bool(workers)})
    ]
    ours = {"thread": {"fastload-worker"}, "process": set(), "none": {"MainThread"}}
    for found in run(world, cases.kept, specs):
        for spec, (same, kinds, count, threads, seed, counted) in zip(specs, found, strict=True):
            assert same
            assert kinds == (True, True)
            assert count == counted == {1: 20, 2: 12}[world]
            assert threads == ours[spec["worker_method"] if spec["num_workers"] else "none"]
            assert seed == 4


@worlds
def test_batches_and_their_marks_are_those_of_accelerate_s_own_loaders(world: int) -> None:
    lengths: list[Any] = [{"length": length} for length in LENGTHS[1:]]
    fours = [{**spec, "batch_size": 4} for spec in lengths]
    given: list[Any] = [
        (lengths, {}, True),
        ([{**spec, "drop_last": True, "num_workers": 1} for spec in lengths], {}, True),
        (fours, SPLIT, True),
        ([{**spec, "drop_last": True} for spec in fours], SPLIT, True),
        ([{**spec, "order": "backwards"} for spec in lengths], {}, True),
        (lengths, UNEVEN, False),
        ([{**spec, "order": "ragged"} for spec in lengths], UNEVEN, False),
    ]
    for found in run(world, cases.walk_both, given):
        for (specs, options, _), (ours, theirs) in zip(given, found, strict=True):
            for spec, one, other in zip(specs, ours, theirs, strict=True):
                assert one == other, (spec, options)


@worlds
def test_gather_for_metrics_gives_each_sample_once(world: int) -> None:
    shuffled: list[Any] = [{"shuffle": True, "seed": 1}, {"shuffle": True}, {"order": "subset"}]
    streams: list[Any] = [{"dataset": Stream}, {"dataset": KnownStream}]
    given: list[Any] = [
        ([{"length": n, "num_workers": n % 2, **one} for n in lengths for one in kinds], opt)
        for lengths, kinds, opt in (
            (LENGTHS[1:], shuffled, {}),  # torch's RandomSampler refuses 0 samples
            (LENGTHS, [{}, *streams], {}),
            (LENGTHS, [{}, *streams], SPLIT),
        )
    ]
    given[2][0][:] = [{**spec, "batch_size": 4} for spec in given[2][0]]
    for found in run(world, cases.walk_ours, given):
        for (specs, _), answers in zip(given, found, strict=True):
            for spec, (_, epochs) in zip(specs, answers, strict=True):
                step = 2 if spec.get("order") == "subset" else 1
                for batches, gathered in epochs:
                    assert sorted(gathered) == list(range(0, spec["length"], step)), spec
                    assert [last for _, last, _ in batches] == [False] * (len(batches) - 1) + (
                        [True] if batches else []
                    )


@worlds
def test_accumulate_synchronizes_as_with_torch_s_loaders(world: int) -> None:
    """At every third batch and at the last. A stream reads one batch ahead for that."""
    specs: list[Any] = [{}, {"length": 14, "dataset": Stream}]
    for answers in run(world, cases.accumulated, specs):
        for ours, theirs in answers:
            assert ours == theirs
            assert ours[0][-1]
            assert ours[0].count(True) == 2 * -(-len(ours[0]) // 6)


@pytest.mark.slow
def test_join_uneven_inputs_asks_for_the_batches_that_it_needs() -> None:
    found = run(2, cases.joined_both)
    assert [len(ours) for ours, _ in found] == [3 + 3 + 3, 2 + 3 + 3]
    for ours, theirs in found:
        assert ours == theirs


@worlds
@pytest.mark.parametrize("kind", ["thread", "process", "stream"])
def test_an_error_stands_where_its_batch_would(world: int, kind: str) -> None:
    spec: Any = {
        "num_workers": 1,
        "length": 12,
        "dataset": cases.failing_rows,
        "worker_method": kind,
    }
    if kind == "stream":
        spec |= {"dataset": cases.FailingStream, "worker_method": "thread"}
    expected: Any = {
        1: [[([0, 1, 2], False), ("sample 4", 2), ([6, 7, 8], False), ([9, 10, 11], True)]],
        2: [
            [([0, 1, 2], False), ([6, 7, 8], True)],
            [("sample 4", 1), ([9, 10, 11], True)],
        ],
    }[world]
    if kind == "stream":  # all ranks read the sample, and go on after it
        before, first, rest = [([0, 1, 2], False)], [0, 1, 2], ([5, 6, 7], [8, 9, 10], [11])
        error = ("sample 4", None)
        expected = {
            1: [[*before, error, *((batch, batch == [11]) for batch in rest)]],
            2: [
                [error, (first, False), ([7, 8, 9], True)],
                [error, ([3, 5, 6], False), ([10, 11, 0], True)],
            ],
        }[world]
    assert run(world, cases.failing, spec) == expected


def test_what_cannot_be_kept_is_refused() -> None:
    [dispatched] = run(1, cases.refused, {"config": {"dispatch_batches": True}}, {})
    assert "dispatch_batches=True lets the first rank read for all" in dispatched
    [divided] = run(1, cases.ranks_of_their_own, 2)
    assert "RankSampler gives only the samples of its rank" in divided
    assert run(1, cases.ranks_of_their_own, 1) == [""]
    for options, spec, reason in (
        ({}, {"batch_size": None}, "without batches there is nothing to divide"),
        ({}, {"batch_size": None, "dataset": Stream}, "an iterable dataset is divided by batches"),
        (SPLIT, {"batch_size": 3}, "batch_size=3 is no multiple"),
        (SPLIT, {"batch_size": 3, "dataset": Stream}, "batch_size=3 is no multiple"),
    ):
        for said in run(2, cases.refused, options, spec):
            assert reason in said


def test_accelerate_s_own_accelerator_refuses_and_names_the_import() -> None:
    def refused() -> Any:
        import accelerate

        accelerator = accelerate.Accelerator(cpu=True)
        loader = cases.make("ours", {})
        with pytest.raises(RuntimeError, match="fastload.integrations.accelerate import Accel"):
            accelerator.prepare(loader)
        with pytest.MonkeyPatch.context() as patch:  # an Accelerate that asks another name
            patch.setattr(prepared.Prepared, "_is_accelerate_prepared", False)
            with pytest.raises(RuntimeError, match="made a DataLoaderShard out of a loader that"):
                cases.fresh().prepare(loader)

    run(1, refused)
