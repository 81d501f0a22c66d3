"""Promises:
- What a store writes is what is read afterwards, small or in parts, also if a part has to be sent again.
- An object appears whole or not at all: a writer that is killed leaves the one before.
- A checkpoint of `fastload.train` is saved at a URL and resumed from there, and the loop's process forks workers.
- A place that cannot be written is an error before the training.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.distributed import Control, Rank
from fastload.errors import RemoteError, UsageError
from fastload.remote import files, open_store
from fastload.train.checkpoint import NAME, Checkpoint, CheckpointError
from fastload.train.loop import begin
from fastload.train.recipe import Recipe
from tests.children import Python
from tests.remote.conftest import use
from tests.remote.proxy import Fault, Proxy, Request
from tests.remote.servers import Bucket, Server, content

sys.path.insert(0, str(Path(__file__).parents[1] / "train" / "programs"))
from counting import SAMPLES, counting_learner, counts, train_counting

MIB = 1 << 20
LARGE = 20 * MIB  # three parts
ALONE = Rank(rank=0, world_size=1, local_rank=0, local_size=1, launcher="none")


@pytest.fixture(autouse=True)
def _stores_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store keeps the endpoint that its first read found, and each test has another."""
    monkeypatch.setattr(files, "_store", cache(open_store))


# ---- Store.write ----


@pytest.mark.parametrize("size", [0, 1000, LARGE])
def test_what_is_written_is_read(
    size: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, server.url)
    store = open_store("s3://data/written")
    for version in range(2):
        body = content("some", size, version)
        store.write("some", memoryview(body) if version else body)
        assert store.read("some") == body  # no change that the store did not make itself
    assert open_store("s3://data").read("written/some") == body


def test_files_and_file_systems_are_written(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for store in (open_store(f"file://{tmp_path}"), open_store(memory)):
        store.write("in/a folder/one", b"first")
        assert store.read("in/a folder/one") == b"first"
        store.write("in/a folder/one", memoryview(b"second"))
        assert store.read("in/a folder/one") == b"second"
    assert os.listdir(tmp_path / "in" / "a folder") == ["one"]


class ReadsOnly:
    def read(self, url: str) -> bytes:
        return b""


def test_a_source_that_only_reads_says_so() -> None:
    with pytest.raises(UsageError, match="ReadsOnly has no way to write objects"):
        open_store(ReadsOnly()).write("a", b"")


@pytest.mark.parametrize("size", [1000, LARGE])
def test_a_part_that_fails_is_sent_again(size: int, bucket: Bucket, proxy: Proxy) -> None:
    failed: Counter[str] = Counter()

    def plan(request: Request) -> Fault | None:
        failed[request.query] += request.method == "PUT"
        return Fault("slow_down") if failed[request.query] == 1 else None

    proxy.plan = plan
    body = content("again", size)
    store = open_store("s3://data")
    store.write("again", body)
    assert proxy.faults["slow_down"] == (1 if size < LARGE else 3)
    assert store.read("again") == body


def test_a_write_that_fails_names_its_url(proxy: Proxy) -> None:
    proxy.plan = lambda request: Fault("refuse") if request.method == "PUT" else None
    with pytest.raises(RemoteError, match=r"^s3://data/never, written: .*\(2 attempts\)"):
        open_store("s3://data", retries=1).write("never", b"body")
    with pytest.raises(FileNotFoundError):
        open_store("s3://data").read("never")


WRITER = f"""
from fastload.remote import open_store
open_store("s3://data").write("killed", b"x" * {LARGE})
"""


def test_a_writer_that_is_killed_leaves_the_object_before(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("killed", content("killed", 1000))
    started, sent, writers = threading.Event(), threading.Event(), list[Any]()

    def plan(request: Request) -> Fault | None:
        if "partNumber=2" in request.query:
            assert started.wait(10)
            writers[0].kill()
            sent.set()
        return None

    proxy.plan = plan
    with Python(["-c", WRITER]) as process:
        writers.append(process)
        started.set()
        assert process.wait(100) == -signal.SIGKILL
    assert sent.is_set()
    assert open_store("s3://data").read("killed") == body


# ---- checkpoints ----


def train(url: str, **options: Any) -> list[str]:
    said: list[str] = []
    options = {"batch_size": 8, "every": 1, "rank": ALONE, "say": said.append, **options}
    train_counting(url, **options)
    return said


class Killed(BaseException):
    """Stands in for a kill."""


def test_a_training_resumes_from_a_url(bucket: Bucket, proxy: Proxy) -> None:
    url = "s3://data/run"
    bucket.delete(f"run/{NAME}")

    def die(step: int, _: torch.Tensor) -> None:
        if step == 4:
            raise Killed

    with pytest.raises(Killed):
        train(url, on_step=die, workers=2)
    assert train(url)[0] == "Resumed after step 3 of a run with 1 rank"
    assert counts(url, global_batch=8) == [1] * SAMPLES
    with pytest.raises(CheckpointError, match=f"{url}/{NAME} exists already. Give --resume"):
        recipe = Recipe(file_list=Path("none"), checkpoint=url)
        begin(recipe, None, counting_learner(ALONE), Control(ALONE))  # type: ignore[arg-type]


def test_the_loops_process_stays_fit_to_fork(bucket: Bucket, proxy: Proxy) -> None:
    """A write in this process would start obstore's threads, which this test's process has: so it asks another."""
    program = (
        "import os\nfrom fastload.train.checkpoint import Checkpoint, exists\n"
        "parts = dict(about={}, model={}, optimizer={}, loader={}, randomness=[])\n"
        "Checkpoint(step=5, **parts).save('s3://data/forks')\n"
        "assert exists('s3://data/forks') and not exists('s3://data/none')\n"
        "assert Checkpoint.load('s3://data/forks').step == 5\n"
        "assert Checkpoint.load('s3://data/none') is None\n"
        "from fastload.remote import files\n"
        "assert not files._obstore_runs()\n"
    )
    with Python(["-c", program]) as process:
        assert process.wait(100) == 0


def test_a_damaged_checkpoint_names_its_url(bucket: Bucket, proxy: Proxy) -> None:
    bucket.put(f"damaged/{NAME}", b"hello")
    with pytest.raises(CheckpointError, match=rf"s3://data/damaged/{NAME} is not a checkpoint"):
        Checkpoint.load("s3://data/damaged")


def test_a_place_that_cannot_be_written_is_told_before_the_training(
    weed: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, weed.url, "another")
    with pytest.raises(
        CheckpointError, match=r"s3://data/run/.*: status 403.*another --checkpoint"
    ):
        train("s3://data/run", on_step=lambda *_: pytest.fail("it trained"))
