"""Promises:
- Of the ranks of a job, one lists a folder at a URL, and all have the same samples. If it fails, the others try.
- A listing that is kept, in a file or beside the data, is read instead, until `refresh=True`.
- A listing that is damaged, or one of another folder, is an error. A missing image's error says when it was listed.
"""

from __future__ import annotations

import gzip
import json
import sys
from functools import cache
from pathlib import Path

import pytest

from fastload.datasets import ImageFolder
from fastload.errors import FileListError, UsageError
from fastload.remote import files, listing, open_store
from tests.image_files import listed_images
from tests.remote.proxy import Fault, Proxy
from tests.remote.servers import Bucket

sys.path.insert(0, str(Path(__file__).parents[1] / "train" / "programs"))
from starting import ranks_started


@pytest.fixture(autouse=True)
def _stores_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store keeps the endpoint that its first read found, and each test has another."""
    monkeypatch.setattr(files, "_store", cache(open_store))


@pytest.fixture
def uploaded(tmp_path: Path, bucket: Bucket, proxy: Proxy) -> str:
    """The URL of twelve images in two classes, of this test alone."""
    listed_images(tmp_path / "train", 12)
    for path in (tmp_path / "train").rglob("*.jpg"):
        bucket.put(f"{tmp_path.name}/{path.parent.name}/{path.name}", path.read_bytes())
    proxy.forget()
    return f"s3://data/{tmp_path.name}"


def listings(proxy: Proxy) -> int:
    return sum("list-type" in request.query for request in proxy.requests)


# ---- kept ----


@pytest.mark.parametrize("beside", [True, False])
def test_a_kept_listing_is_not_listed_again(
    beside: bool, uploaded: str, tmp_path: Path, bucket: Bucket, proxy: Proxy
) -> None:
    kept = f"{uploaded}/listing.gz" if beside else str(tmp_path / "listing.gz")
    first = ImageFolder(uploaded, listing=kept)
    assert first.samples == ImageFolder(uploaded).samples
    proxy.forget()
    second = ImageFolder(f"{uploaded}/", listing=kept)
    assert (second.classes, second.samples, listings(proxy)) == (first.classes, first.samples, 0)
    bucket.put(f"{tmp_path.name}/later/1.jpg", b"")
    assert ImageFolder(uploaded, listing=kept).classes == first.classes
    assert "later" in ImageFolder(uploaded, listing=kept, refresh=True).classes
    assert "later" in ImageFolder(uploaded, listing=kept).classes
    assert listings(proxy) == 1


@pytest.mark.parametrize("with_file", [True, False])
def test_a_missing_image_says_when_it_was_listed(
    with_file: bool, uploaded: str, tmp_path: Path, bucket: Bucket
) -> None:
    kept = tmp_path / "listing.gz" if with_file else None
    images = ImageFolder(uploaded, listing=kept)
    bucket.delete(f"{tmp_path.name}/class0/0.jpg")
    at = images.samples.index((f"{uploaded}/class0/0.jpg", 0))
    with pytest.raises(
        FileNotFoundError, match=r"No such object. It was listed at 20\d\d-"
    ) as error:
        images[at]
    assert error.value.filename == f"{uploaded}/class0/0.jpg"
    assert (f" in {kept}. Give refresh=True" in str(error.value)) == with_file


def test_names_that_are_no_text_are_kept(tmp_path: Path) -> None:
    names = ["a/\udcff.jpg", "b/\U0001f600\n.jpg", "größe/名前.jpg"]
    made = listing.Listing("s3://data", "now", names)
    assert listing.Listing.unpacked(made.packed()) == made


def test_a_listing_that_does_not_fit_is_an_error(uploaded: str, tmp_path: Path) -> None:
    kept = tmp_path / "listing.gz"
    ImageFolder(uploaded, listing=kept)
    whole = kept.read_bytes()
    flipped = whole[:40] + bytes([whole[40] ^ 1]) + whole[41:]
    other = gzip.compress(json.dumps({"format": "other"}).encode())
    bare = gzip.compress(b"[]")
    for content in (whole[:-1], flipped, b"", b"text", other, bare):
        kept.write_bytes(content)
        with pytest.raises(FileListError, match=r"listing.gz: is no listing, or is damaged: "):
            ImageFolder(uploaded, listing=kept)
    kept.write_bytes(whole)
    with pytest.raises(
        FileListError, match=f"is a listing of {uploaded}, not of {uploaded}/class0"
    ):
        ImageFolder(f"{uploaded}/class0", listing=kept)
    assert len(ImageFolder(uploaded, listing=kept)) == 12


def test_a_folder_here_keeps_no_listing(tmp_path: Path) -> None:
    for options in ({"listing": "list"}, {"refresh": True}):
        with pytest.raises(UsageError, match="listing and refresh are for URLs"):
            ImageFolder(tmp_path, **options)  # type: ignore[arg-type]


# ---- ranks ----

RANK = """
import sys
import torch.distributed as dist
from fastload.datasets import ImageFolder
from fastload.remote import listing
listing.VALUE = 50
dist.init_process_group("gloo")
rank, url = dist.get_rank(), sys.argv[1]
try:
    for _ in range(2):
        images = ImageFolder(url)
    if rank == 1:
        ImageFolder(url, listing=sys.argv[2])  # the others need none
    print(sorted(images.samples))
except OSError as error:
    print(type(error).__name__)
dist.barrier()
"""


def said_by_ranks(*arguments: str) -> list[str]:
    with ranks_started(3, ["-c", RANK, *arguments]) as ranks:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0, 0], said
    return said


def test_one_rank_lists_for_all(uploaded: str, tmp_path: Path, proxy: Proxy) -> None:
    said = said_by_ranks(uploaded, str(tmp_path / "listing.gz"))
    assert said == [f"{[*ImageFolder(uploaded).samples]}\n"] * 3
    assert listings(proxy) == 2 + 1 + 1  # two datasets of all ranks, one of rank 1, and ours


def test_each_rank_says_why_it_could_not_list(uploaded: str, tmp_path: Path, proxy: Proxy) -> None:
    proxy.plan = lambda _: Fault("refuse")
    assert said_by_ranks(uploaded, str(tmp_path / "none")) == ["RemoteError\n"] * 3


def test_a_fork_of_a_rank_does_not_use_its_connection() -> None:
    program = (
        "import os, torch.distributed as dist\nfrom fastload.remote import listing\n"
        "dist.init_process_group('gloo')\n"
        "assert listing._store_of_ranks() is not None\n"
        "child = os.fork()\n"
        "if not child: os._exit(listing._store_of_ranks() is not None)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "dist.barrier()\n"
    )
    with ranks_started(2, ["-c", program]) as ranks:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], said
