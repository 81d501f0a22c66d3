"""Promises:
- Kernels write only into rows that fit the plan, and read no pixel that was not decoded.
- Datasets and tensors that are replaced between batches are noticed.
- Ctrl-C without workers leaves no random stream open.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

from fastload import DataLoader, iterator, randomness
from fastload.collate import SlotBuilder
from fastload.datasets import ImageFolder
from fastload.image import RandomResizedCrop, Resize, kernels, plans, render
from fastload.isolation import python_random
from fastload.randomness import current_stream
from fastload.rows import Run, positions
from tests.children import run_python

PLAN = RandomResizedCrop(8, scale=(0.08, 0.2))
KEYS = np.arange(3, dtype=np.uint64)


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        (Resize((9, 8)), torch.zeros(3, 3, 8, 8, dtype=torch.uint8)),
        (Resize((8, 8)), torch.zeros(3, 3, 8, 8)),
        (Resize((8, 8)), torch.zeros(2, 3, 8, 8, dtype=torch.uint8)),
        (Resize((8, 8)), torch.zeros(3, 3, 8, 8, dtype=torch.uint8, device="meta")),
    ],
    ids=["larger", "floats", "fewer", "another device"],
)
def test_a_plan_writes_only_into_rows_that_it_fits(plan: Any, rows: torch.Tensor) -> None:
    assert render.make_render(plan, rows, KEYS) is None


@pytest.mark.skipif(not kernels.wait(), reason=kernels.state())
def test_an_image_with_fewer_pixels_than_its_header_says_is_not_read_beyond_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.BytesIO()
    Image.fromarray(np.full((512, 512, 3), 200, np.uint8)).save(file, "JPEG")
    encoded = file.getvalue()
    monkeypatch.setattr(
        plans, "pixels_at_least", lambda *_, **__: np.full((1, 1, 3), 200, np.uint8)
    )
    keys = np.arange(64, dtype=np.uint64)
    rows = torch.full((64, 3, 8, 8), 77, dtype=torch.uint8)
    made = render.make_render(PLAN, rows, keys)
    assert made is not None
    missing = made.encoded(lambda _: encoded, lambda _: None)
    done = sorted(set(range(64)) - set(missing))
    assert missing
    assert (rows[done] == 200).all()


@pytest.mark.parametrize("limit", [0, -5, 0.25])
def test_a_limit_that_refuses_every_image_is_kept(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    assert render.make_render(PLAN, rows, KEYS) is not None
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    assert render.make_render(PLAN, rows, KEYS) is None


def folder_of(tmp_path: Path, count: int) -> ImageFolder:
    """Return a folder of pictures of one class, whose pixels are their numbers."""
    (tmp_path / "a").mkdir()
    for k in range(count):
        Image.fromarray(np.full((20, 20, 3), k, np.uint8)).save(tmp_path / f"a/{k}.png")
    return ImageFolder(tmp_path, transform=Resize((8, 8)))


def test_a_default_device_changes_nothing(tmp_path: Path) -> None:
    dataset = folder_of(tmp_path, 2)
    with torch.device("meta"):
        images, labels = list(DataLoader(dataset, seed=1))[1]
    assert images.is_cpu
    assert (images == 1).all()
    assert labels.tolist() == [0]


@pytest.mark.parametrize("kind", ["tensors", "subset", "part"])
def test_tensors_and_datasets_that_are_replaced_are_seen_at_once(kind: str) -> None:
    zeros, ones = (TensorDataset(torch.full((8,), float(value))) for value in (0, 1))
    dataset: Any = {
        "tensors": zeros,
        "subset": Subset(zeros, range(8)),
        "part": ConcatDataset([TensorDataset(torch.zeros(4)), zeros]),
    }[kind]
    batches = iter(DataLoader(dataset, batch_size=4))
    next(batches)
    if kind == "tensors":
        dataset.tensors = ones.tensors
    elif kind == "subset":
        dataset.dataset = ones
    else:
        dataset.datasets[1] = ones
    (second,) = next(batches)
    assert second.tolist() == [1] * 4


def test_a_target_transform_and_a_method_that_come_later_are_seen_at_once(tmp_path: Path) -> None:
    dataset = folder_of(tmp_path, 4)
    batches = iter(DataLoader(dataset))
    assert next(batches)[1].tolist() == [0]
    dataset.target_transform = lambda target: target + 100
    assert next(batches)[1].tolist() == [100]
    dataset.target_transform = None
    assert next(batches)[1].tolist() == [0]
    dataset.load_image = lambda index: (torch.zeros(3, 8, 8), 7)  # type: ignore[method-assign]
    assert next(batches)[1].tolist() == [7]


@pytest.mark.parametrize(
    "change", [(slice(None), slice(2)), (slice(None), None)], ids=["fewer", "more axes"]
)
def test_tensors_that_change_their_shape_are_read_as_by_torch(change: Any) -> None:
    tensors = [torch.arange(32.0).reshape(8, 4), torch.arange(32.0, 64.0).reshape(8, 4)]
    dataset = ConcatDataset([TensorDataset(tensor) for tensor in tensors])
    batches = iter(DataLoader(dataset, batch_size=16))
    for tensor in tensors:
        tensor.set_(tensor[change].clone())  # type: ignore[no-untyped-call]
    (batch,) = next(batches)
    assert torch.equal(batch, torch.cat(tensors))


class Windows(Dataset[Any]):
    """Samples of `length` numbers."""

    length = 4

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(index, index + self.length)

    def empty_sample(self) -> torch.Tensor:
        return torch.empty(self.length, dtype=torch.int64)

    def fill_rows(self, run: Run) -> list[int]:
        for row, index in zip(run.rows, run.indices, strict=True):
            row[:] = self[index]
        return []


def test_what_worker_init_fn_makes_of_the_samples_is_what_comes() -> None:
    def shorten(_: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.length = 1  # type: ignore[attr-defined]

    loader = DataLoader(Windows(), batch_size=4, num_workers=2, worker_init_fn=shorten)
    assert [batch.tolist() for batch in loader] == [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_for_which_there_is_no_memory_are_read_one_by_one(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, failures = SlotBuilder.rows, [MemoryError("no room")]

    def fails(builder: SlotBuilder, start: int, stop: int) -> Any:
        if failures:
            raise failures.pop()
        return rows(builder, start, stop)

    monkeypatch.setattr(SlotBuilder, "rows", fails)
    with DataLoader(Windows(), batch_size=4, num_workers=workers) as loader:
        assert torch.equal(torch.cat([*loader]), torch.stack([Windows()[k] for k in range(8)]))
    assert not failures


class NoSample(Windows):
    fill_rows = Windows.fill_rows

    def empty_sample(self) -> torch.Tensor:
        raise KeyError("no sample yet")


def test_an_empty_sample_that_raises_is_warned_of_and_the_batches_are_right() -> None:
    with pytest.warns(RuntimeWarning, match="KeyError"):
        batches = [*DataLoader(NoSample(), batch_size=4)]
    assert torch.equal(torch.cat(batches), torch.stack([Windows()[k] for k in range(8)]))


def test_a_generator_s_own_error_is_not_taken_for_a_wrong_answer() -> None:
    def lazily() -> Iterator[int]:
        yield 1
        raise TypeError("of the user's")

    with pytest.raises(TypeError, match="of the user's"):
        positions(lazily(), 3)


def test_a_stream_that_ctrl_c_left_half_way_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The strike is after the first step of going back to no stream: the rest must still be done."""
    enter, entered = randomness.torch_random.enter, []

    def struck(stream: Any) -> None:
        enter(stream)
        entered.append(stream)
        if len(entered) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(randomness.torch_random, "enter", struck)
    batches = iter(DataLoader(Windows(), seed=1, collate_fn=torch.stack))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert current_stream() is None
    assert python_random._thread.own is None


class Wrong(Windows):
    """Returns a position that is none."""

    def fill_rows(self, run: Run) -> list[int]:
        run.rows.fill_(99)
        return [-1]


def test_a_part_that_returns_no_position_is_named() -> None:
    loader = DataLoader(ConcatDataset([Wrong(), Wrong()]), batch_size=4, sampler=[0, 8, 1, 9])
    with pytest.warns(RuntimeWarning, match="positions in the run"):
        (batch,) = loader
    assert batch[:, 0].tolist() == [0, 0, 1, 1]


def test_a_relative_cache_is_where_the_loop_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLOAD_CACHE", "mycache")
    assert kernels._environment()["FASTLOAD_CACHE"].endswith("/mycache")
    assert kernels._environment()["FASTLOAD_CACHE"].startswith("/")


def test_ctrl_c_as_a_stream_is_left_leaves_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = iterator.entered

    @contextmanager
    def struck(stream: Any) -> Iterator[None]:
        inner = entered(stream)
        inner.__enter__()
        yield
        raise KeyboardInterrupt  # before anything was put back

    monkeypatch.setattr(iterator, "entered", struck)
    batches = iter(DataLoader(Windows(), seed=1, collate_fn=torch.stack))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert current_stream() is None
    torch.manual_seed(5)
    expected = torch.rand(1, generator=torch.Generator().manual_seed(5))
    assert torch.equal(torch.rand(1), expected)


def test_ctrl_c_while_torch_s_operators_are_registered_leaves_the_next_attempt_free() -> None:
    script = """
import torch
from fastload import torch_private
from fastload.isolation import torch_random
library, calls = torch.library.Library, []
class Struck(library):
    def impl(self, *args, **options):
        calls.append(args)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return super().impl(*args, **options)
torch_private._Library = Struck
try:
    torch_random.install()
except KeyboardInterrupt as error:
    kept = error
torch_random.install()
print(len(calls) > 20, torch_random.unusable())
"""
    run = run_python("-c", script, check=True)
    assert run.stdout == "True None\n", run.stdout + run.stderr
