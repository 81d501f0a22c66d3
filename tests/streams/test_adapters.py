"""Promises:
- A stream of a Hugging Face dataset has what its `map`, in batches too, and `filter` make, and resumes twice exactly.
- A stream of a WebDataset pipeline has the samples that the pipeline gives.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fastload
from fastload.streams.adapters import from_hub, from_webdataset
from tests.streams.chains import write


def numbers(files: list[int]) -> Iterator[dict[str, int]]:
    for file in files:
        yield from ({"id": 1000 * file + k} for k in range(100))


def doubled(batch: dict[str, list[int]]) -> dict[str, list[int]]:
    return {"id": [2 * n for n in batch["id"]]}


def by_three(sample: dict[str, int]) -> bool:
    return sample["id"] % 3 == 0


def ids(batches: Any) -> list[int]:
    return [int(n) for batch in batches for n in batch["id"]]


@pytest.mark.filterwarnings("ignore:fastload. 3 of 8 workers have nothing to read")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2, 8])
def test_hub(workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    of = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"files": [*range(5)]})
    of = of.map(doubled, batched=True, batch_size=16).filter(by_three)

    def loader(n: int = workers) -> Any:
        return fastload.DataLoader(from_hub(of).shuffle(40), batch_size=8, num_workers=n)

    with loader() as whole:
        first, second = ids(whole), ids(whole)
    assert Counter(first) == Counter(sample["id"] for sample in of)
    found, state = [], None
    for steps in (7, 5):
        with loader() as stopped:
            if state is not None:
                stopped.load_state_dict(state)
            found += ids(itertools.islice(stopped, steps))
            state = json.loads(json.dumps(stopped.state_dict()))
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert [*found, *ids(resumed)] == first
        assert ids(resumed) == second != first
    with loader(3) as others:
        others.load_state_dict(state)
        assert Counter([*found, *ids(others)]) == Counter(first)


def test_hub_refuses_a_buffer_of_its_own_and_what_is_no_stream() -> None:
    datasets = pytest.importorskip("datasets")
    of = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"files": [1, 2]})
    with pytest.raises(ValueError, match=r"from_hub\(dataset\)\.shuffle"):
        from_hub(of.shuffle(seed=1, buffer_size=10))
    with pytest.raises(TypeError, match="to_iterable_dataset"):
        from_hub(datasets.Dataset.from_dict({"id": [1]}))


def test_hub_refuses_steps_that_must_see_all_shards() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    of = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"files": [1, 2]})
    from_hub(of.map(lambda x: x, batched=True).filter(bool))
    for refused in (
        of.take(5),
        of.skip(5).map(lambda x: x),
        of.repeat(2),
        of.map(lambda x, k: x, with_indices=True).filter(bool),
        of.filter(lambda x, k: True, with_indices=True),
        datasets.interleave_datasets([of, of], [0.8, 0.2], seed=0),
    ):
        with pytest.raises(ValueError, match="reads each shard by itself"):
            from_hub(refused)
    with pytest.raises(ValueError, match="split_dataset_by_node"):
        from_hub(split_dataset_by_node(of, 0, 2))


def odd_upper(pair: tuple[str, int]) -> tuple[str, int]:
    return f"n{pair[0]}", pair[1] + 1


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_webdataset(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    paths = [str(tmp_path / f"{k}.tar") for k in range(4)]
    for k, path in enumerate(paths):
        write("tar", Path(path), [100 * k + n for n in range(30)])
    pipeline = wds.WebDataset(paths, shardshuffle=False).shuffle(20).decode()
    pipeline = pipeline.to_tuple("id", "cls").map(odd_upper)
    expected = Counter((str(a), int(b)) for a, b in pipeline)
    stream = from_webdataset(pipeline)
    for how in ({}, {"num_workers": 2, "worker_method": "process"}):
        with fastload.DataLoader(stream, batch_size=None, **how) as loader:
            assert Counter((str(a), int(b)) for a, b in loader) == expected
    with pytest.raises(ValueError, match="'batched': it holds samples"):
        from_webdataset(pipeline.batched(4))
    for refused in (
        pipeline.with_epoch(5),
        wds.WebDataset(paths, shardshuffle=False).repeat(2),
        wds.WebDataset(paths, resampled=True, shardshuffle=False),
        wds.WebDataset(paths, shardshuffle=False, select_files=lambda name: True),
    ):
        with pytest.raises(ValueError, match="each sample of its shards once an epoch"):
            from_webdataset(refused)


def test_a_stage_of_ones_own_sees_all_samples(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    write("tar", tmp_path / "0.tar", [*range(30)])
    pipeline = wds.WebDataset([str(tmp_path / "0.tar")], shardshuffle=False).to_tuple("id")
    every_other = pipeline.compose(lambda samples: (s for k, s in enumerate(samples) if k % 2))
    with fastload.DataLoader(from_webdataset(every_other), batch_size=None) as loader:
        assert [int(n) for (n,) in loader] == [*range(1, 30, 2)]
