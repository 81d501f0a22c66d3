"""Promises:
- Datasets of some forty libraries, written as their users write them, are read by threads under `worker_method="auto"`.
  Those for which threads are wrong or slow are named with the reason.
- Objects of libraries that end the interpreter in threads are read by processes. If these cannot start, iter() raises.
- A verdict reads no sample: a dataset gives its samples after it as before.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

from fastload import DataLoader
from fastload.errors import SharedStateError
from fastload.verdicts import libraries, verdict
from tests.verdicts.library_cases import CASES, Case, Made

os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")  # it asks the network for its newest version
os.environ.setdefault("HF_HUB_OFFLINE", "1")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

BATCH = 3


@pytest.fixture(autouse=True)
def _the_cases_are_a_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the code of the cases be read: the tests' own package is vouched for."""
    monkeypatch.setattr(libraries, "_vouched", set())


@pytest.fixture(scope="module", autouse=True)
def _what_libraries_start_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Let polars and zarr start their threads before the first test: these keep descriptors open."""
    for case in CASES:
        if case.module in ("polars_rows", "zarr_arrays"):
            with suppress(ImportError):
                batch_of(case.make(tmp_path_factory.mktemp(case.module)))


@pytest.fixture(autouse=True)
def _pillow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what ultralytics replaces."""
    with suppress(ImportError):
        from PIL import Image

        monkeypatch.setattr(Image, "open", Image.open)


def made_by(case: Case, folder: Path) -> Made:
    """Return the case's dataset, or skip the test if a library is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in case.libraries:
            pytest.importorskip(name)
        return case.make(folder)


def batch_of(made: Made) -> Any:
    """Return the first batch, read as a loader without workers reads it."""
    if isinstance(made.dataset, IterableDataset):
        samples = list(itertools.islice(made.dataset, BATCH))
    else:
        indices = itertools.islice(made.sampler or range(len(made.dataset)), BATCH)
        samples = [made.dataset[index] for index in indices]
    assert len(samples) == BATCH
    return (made.collate_fn or default_collate)(samples)


def values(batch: Any) -> Iterator[Any]:
    """Yield the arrays, numbers and texts that a batch holds."""
    if isinstance(batch, torch.Tensor | np.ndarray | int | float | str):
        yield batch
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from values(each)
    else:
        for name in batch.keys():  # noqa: SIM118 - a batch of graphs has keys, and iterates over graphs
            yield from values(batch[name])


CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.module}.{case.name}")


@CASE
def test_the_verdict(case: Case, tmp_path: Path) -> None:
    made = made_by(case, tmp_path)
    found = verdict(made.dataset, made.collate_fn)
    assert found.kind == case.expected, found.reason
    assert case.reason in found.reason
    tensors = [each for each in values(batch_of(made)) if isinstance(each, torch.Tensor)]
    assert any(each.numel() >= BATCH for each in tensors)


CRASHES = ("simpleitk_volumes", "soxr_streams", "netcdf_fields")


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.module in CRASHES and case.reason],
    ids=lambda case: f"{case.module}.{case.name}",
)
def test_what_ends_the_interpreter_is_never_read_by_threads(case: Case, tmp_path: Path) -> None:
    made = made_by(case, tmp_path)
    loader = DataLoader(made.dataset, num_workers=2, batch_size=BATCH)
    assert repr(list(loader)) == repr(list(DataLoader(made.dataset, batch_size=BATCH)))
    made.dataset.cannot_be_pickled = lambda: None
    loader = DataLoader(made.dataset, num_workers=2, multiprocessing_context="forkserver")
    with pytest.raises(SharedStateError, match="Worker processes would not, but"):
        iter(loader)


def test_at_least_34_cases_are_read_by_threads() -> None:
    assert sum(case.expected == "thread" for case in CASES) >= 34
