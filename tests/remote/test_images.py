"""Promises:
- A folder of images at a URL has the samples of the same folder here, in torchvision's order, by one listing.
- A list of images may be at a URL, and so may what its lines name. Pixels are those of local files.
- Each image takes one request, which `will_read` begins. A missing one names its URL.
- A program that lists a bucket in the loop's process forks workers afterwards.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

import fastload
from fastload.datasets import ImageFileList, ImageFolder
from fastload.errors import FileListError
from fastload.image import RandomResizedCrop
from fastload.remote import files, open_store
from tests.image_files import listed_images
from tests.remote.proxy import Proxy
from tests.remote.servers import Bucket

PLAN = RandomResizedCrop(16)


@pytest.fixture(autouse=True)
def _stores_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store keeps the endpoint that its first read found, and each test has another."""
    monkeypatch.setattr(files, "_store", cache(open_store))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Twelve images in two classes, and `list.txt` beside these."""
    listed_images(tmp_path / "train", 12)
    return tmp_path / "train"


@pytest.fixture
def uploaded(tree: Path, bucket: Bucket, proxy: Proxy) -> str:
    """The URL of the same tree in the bucket."""
    for path in tree.rglob("*.*"):
        bucket.put(f"images/{path.relative_to(tree)}", path.read_bytes())
    proxy.forget()
    return "s3://data/images"


def read(dataset: Any, **options: Any) -> list[Any]:
    """Return what a loader gives."""
    with fastload.DataLoader(dataset, batch_size=5, seed=3, **options) as loader:
        return [*loader]


def equal(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x, y, strict=True)
    )


def check_folder(url: str, tree: Path) -> None:
    ours, theirs = ImageFolder(url), torchvision.datasets.ImageFolder(tree)
    assert ours.classes == theirs.classes
    below = len(str(tree))
    assert [(path[len(url.rstrip("/")) :], label) for path, label in ours.samples] == [
        (path[below:], label) for path, label in theirs.samples
    ]


def test_a_folder_in_a_bucket_is_torchvisions(tree: Path, uploaded: str, proxy: Proxy) -> None:
    check_folder(uploaded, tree)
    assert [(x.method, x.key) for x in proxy.requests] == [("GET", "")]  # one listing


def test_a_whole_bucket_is_a_folder(uploaded: str) -> None:
    assert "images" in {name.partition("/")[0] for name in files.list_below("s3://data")}


def test_names_are_in_torchvisions_order(tmp_path: Path) -> None:
    names = "b/1 b/sub/0 b/sub-a/0 b/sub/deep/0 a-b/1 a/1 a/10 a/2 a/x/1 B/1 b/\U0001f600 b/\uffee"
    for name in names.split():
        (path := tmp_path / f"{name}.JPG").parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / "a" / "notes.txt").write_bytes(b"")
    (tmp_path / "top.jpg").write_bytes(b"")
    check_folder(f"file://{tmp_path}", tmp_path)
    check_folder(f"file://{tmp_path}/", tmp_path)


def test_a_class_without_images_and_an_empty_folder_are_errors(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "notes.txt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"file://.*found no image of class cat"):
        ImageFolder(f"file://{tmp_path}")
    with pytest.raises(FileNotFoundError, match="found no class directory"):
        ImageFolder(f"file://{tmp_path}/cat")


@pytest.mark.parametrize("transform", [PLAN, torchvision.transforms.PILToTensor()])
@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_are_those_of_local_files(
    transform: Any, workers: int, tree: Path, uploaded: str, proxy: Proxy
) -> None:
    local = read(ImageFolder(str(tree), transform=transform))
    remote = ImageFolder(uploaded, transform=transform)
    proxy.forget()
    assert equal(read(remote, num_workers=workers, worker_method="thread"), local)
    assert len(proxy.requests) == len(proxy.objects()) == 12


def test_what_will_be_read_is_begun_together(uploaded: str, proxy: Proxy) -> None:
    images = ImageFolder(uploaded, transform=PLAN)
    proxy.forget()
    proxy.hold(6)
    assert images.will_read is not None
    images.will_read(range(6))
    assert [images[k][1] for k in range(6)] == [0] * 6
    assert not proxy.gave_up
    assert len(proxy.objects()) == 6
    images.will_read([])


class Noting:
    """A store that notes what is announced."""

    def __init__(self) -> None:
        self.announced: list[list[str]] = []
        self.owners: set[int] = set()

    def will_read(self, urls: list[str], *, owner: int) -> None:
        self.announced.append(urls)
        self.owners.add(owner)


def test_what_was_begun_in_another_bucket_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = {"s3://one/": Noting(), "s3://two/": Noting()}
    monkeypatch.setattr(files, "_store", stores.__getitem__)
    urls = ["s3://one/cat/1.jpg", "s3://two/cat/2.jpg"]
    (tmp_path / "list.txt").write_text("\n".join([*urls, "cat/local.jpg"]))
    images = ImageFileList(tmp_path / "list.txt")
    images.will_read([0, 2])
    images.will_read([1])
    images.will_read([])
    assert stores["s3://one/"].owners == {id(images)}
    assert [store.announced for store in stores.values()] == [[urls[:1], []], [urls[1:], []]]


def test_lists_and_bases_may_be_urls(tree: Path, tmp_path: Path, uploaded: str) -> None:
    expected = read(ImageFileList(tree / "list.txt", transform=PLAN))
    at_url = ImageFileList(f"{uploaded}/list.txt", transform=PLAN)
    assert at_url.image_paths[0] == f"{uploaded}/class0/0.jpg"
    assert equal(read(at_url), expected)
    assert ImageFileList(tree / "list.txt").will_read is None  # a loader asks local sets nothing
    assert equal(
        read(ImageFileList(tree / "list.txt", base_dir=uploaded, transform=PLAN)), expected
    )
    names = (tree / "list.txt").read_text().split()
    mixed = [f"{uploaded}/{name}" if k % 2 else f"{tree}/{name}" for k, name in enumerate(names)]
    (tmp_path / "mixed.txt").write_text("\n".join(mixed))
    assert equal(read(ImageFileList(tmp_path / "mixed.txt", transform=PLAN)), expected)


@pytest.mark.parametrize("transform", [PLAN, None])
def test_a_missing_image_names_its_url(
    transform: Any, tree: Path, tmp_path: Path, uploaded: str
) -> None:
    lines = [f"{uploaded}/class0/0.jpg", f"{uploaded}/class1/none.jpg"]
    (tmp_path / "list.txt").write_text("\n".join(lines))
    images = ImageFileList(tmp_path / "list.txt", transform=transform)
    with pytest.raises(FileNotFoundError) as caught:
        images[1]
    assert caught.value.filename == lines[1]
    with pytest.raises(FileNotFoundError, match=lines[1]):
        read(images, collate_fn=list)
    with pytest.raises(FileListError, match=f"{uploaded}/none.txt: the file list cannot be read"):
        ImageFileList(f"{uploaded}/none.txt")


PROGRAM = """
import sys
import fastload, torchvision
from fastload.datasets import ImageFileList, ImageFolder
url = sys.argv[1]
to_tensor = torchvision.transforms.PILToTensor()
for images in (ImageFolder(url, transform=to_tensor), ImageFileList(url + "/list.txt", transform=to_tensor)):
    with fastload.DataLoader(images, batch_size=4, num_workers=2, worker_method="process",
                             multiprocessing_context="fork") as loader:
        print(sum(len(labels) for _, labels in loader))
"""


def test_workers_fork_after_a_listing(uploaded: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, uploaded], capture_output=True, text=True, timeout=100
    )
    assert (done.stdout.split(), done.returncode) == (["12", "12"], 0), done.stderr
