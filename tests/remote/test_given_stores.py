"""Promises:
- `store=` of `ImageFolder`, `ImageFileList` and `Shards` reads all that they name: a store, a file system of fsspec, or
  an object with `read(url)`. Samples are those of local files, in threads and in processes.
- A store that cannot list, or lists what it was not asked for, raises an error that says so.
"""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import fastload
from fastload.datasets import ImageFileList, ImageFolder
from fastload.errors import UsageError
from fastload.image import RandomResizedCrop
from fastload.remote import Store, open_store
from fastload.remote.files import StoredPath, open_binary
from fastload.streams import Shards
from tests.image_files import listed_images

PLAN = RandomResizedCrop(16)
WORKERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2, "worker_method": "thread"},
    {"num_workers": 2, "worker_method": "process"},
]


class Files:
    """Reads files of a folder by names that are no URLs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, url: str) -> bytes:
        return (self.folder / url.removeprefix("mine://")).read_bytes()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Any]:
    """A file system of fsspec with what is in `tmp_path`. Put it there first, and call this."""
    system = fsspec.filesystem("memory")

    def filled() -> Any:
        for path in tmp_path.rglob("*.*"):
            system.pipe_file(f"/bucket/{path.relative_to(tmp_path)}", path.read_bytes())
        return system

    yield filled
    system.store.clear()


def read(dataset: Any, **options: Any) -> list[Any]:
    """Return what a loader gives."""
    options = {"batch_size": 5, "seed": 3, **options}
    with fastload.DataLoader(dataset, **options) as loader:
        return [*loader]


def check_images(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other) > 0
    for batch, expected in zip(one, other, strict=True):
        for x, y in zip(batch, expected, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("options", WORKERS, ids=["none", "threads", "processes"])
def test_a_folder_in_a_given_store(
    options: dict[str, Any], tmp_path: Path, memory: Callable[[], Any]
) -> None:
    listed_images(tmp_path / "train", 12)
    expected = read(ImageFolder(tmp_path / "train", transform=PLAN))
    top = open_store(f"file://{tmp_path}")
    for root, store in [
        ("train", top),
        (f"file://{tmp_path}/train/", top),
        ("", open_store(f"file://{tmp_path}/train")),
        ("bucket/train", memory()),
        ("memory://bucket/train", open_store(memory())),
        (str(tmp_path / "train"), fsspec.filesystem("file")),
    ]:
        images = ImageFolder(root, transform=PLAN, store=store)
        assert images.classes == ["class0", "class1"]
        check_images(read(images, **options), expected)


@pytest.mark.parametrize("options", WORKERS, ids=["none", "threads", "processes"])
def test_a_list_in_a_given_store(
    options: dict[str, Any], tmp_path: Path, memory: Callable[[], Any]
) -> None:
    listed_images(tmp_path / "train", 12)
    local = tmp_path / "train" / "list.txt"
    expected = read(ImageFileList(local, transform=PLAN))
    top, files = open_store(f"file://{tmp_path}"), Files(tmp_path / "train")
    cases: list[tuple[Any, str | None, Any]] = [
        (f"file://{local}", None, top),
        (local, "train", top),
        (local, "bucket/train", memory()),
        (local, None, open_store(f"file://{tmp_path}/train")),
        (local, None, files),
        (local, "mine://", files),
    ]
    for name, base, store in cases:
        images = ImageFileList(name, base_dir=base, transform=PLAN, store=store)
        check_images(read(images, **options), expected)
        check_images(read(pickle.loads(pickle.dumps(images))), expected)


@pytest.mark.parametrize("options", WORKERS, ids=["none", "threads", "processes"])
@pytest.mark.parametrize("form", ["jsonl", "tar"])
def test_shards_in_a_given_store(
    form: str, options: dict[str, Any], tmp_path: Path, memory: Callable[[], Any]
) -> None:
    names = [f"{k}.{form}" for k in range(3)]
    for k, name in enumerate(names):
        if form == "jsonl":
            (tmp_path / name).write_text("".join(f"[{k}, {n}]\n" for n in range(20)))
        else:
            with tarfile.open(tmp_path / name, "w") as tar:
                for n in range(20):
                    member = tarfile.TarInfo(f"{k}-{n}.txt")
                    member.size = 3
                    tar.addfile(member, io.BytesIO(b"%03d" % n))
    options = {**options, "collate_fn": list}
    expected = read(Shards([tmp_path / name for name in names], seed=1), **options)

    def without_urls(batches: list[Any]) -> list[Any]:
        return [
            [{**x, "__url__": ""} if isinstance(x, dict) else x for x in batch] for batch in batches
        ]

    cases: list[tuple[list[Any], Any]] = [
        (names, open_store(f"file://{tmp_path}")),
        ([Path(name) for name in names], f"file://{tmp_path}"),
        ([f"/bucket/{name}" for name in names], memory()),
        (names, Files(tmp_path)),
    ]
    for paths, store in cases:
        found = read(Shards(paths, seed=1, store=store), **options)
        assert without_urls(found) == without_urls(expected)
        if form == "tar":
            assert type(found[0][0]["__url__"]) is str


def test_a_function_gets_a_path_that_knows_its_store(tmp_path: Path) -> None:
    def lines(path: Any) -> Iterator[Any]:
        assert isinstance(path.store, Store)
        with path.store.open(path) as file, open_binary(path) as same:
            for line in file:
                assert next(same) == line
                yield json.loads(line)

    (tmp_path / "a").write_text("1\n2\n")
    assert [*Shards(["a"], lines, store=f"file://{tmp_path}")] == [1, 2]


def test_a_path_keeps_its_store_through_a_pickle(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    path = pickle.loads(pickle.dumps(StoredPath("a", open_store(f"file://{tmp_path}"))))
    assert path == "a"
    with open_binary(path) as file:
        assert file.read() == b"abc"


class ListsMore:
    """Lists by whole names what it is asked for by a part."""

    def cat_file(self, path: str) -> bytes:
        return b""

    def find(self, path: str, **_: Any) -> dict[str, Any]:
        return {f"home/{path}a.jpg": {"size": 0}}


def test_stores_that_cannot_list_are_errors(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Files has no way to list"):
        ImageFolder("train", store=Files(tmp_path))
    with pytest.raises(UsageError, match=r"train/: the store lists home/train/a.jpg below it"):
        ImageFolder("train", store=ListsMore())
