"""Promise: Under ElasticDL's names, the record index service reads each record once in a plain loop. Shards end when
they are reported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from torch.distributed import HashStore

from fastload.compat.elasticdl import ElasticImageFolder, RecordIndexService
from fastload.elastic import Leases


@pytest.fixture
def leases() -> Iterator[Leases]:
    with Leases(10, shard=4, store=HashStore()) as made:
        yield made


def test_each_record_of_each_epoch_is_read_once(leases: Leases) -> None:
    service = RecordIndexService(leases, epochs=3)
    for _ in range(3):
        read = []
        for _ in range(5):
            read += [service.fetch_record_index(), service.fetch_record_index()]
            service.report_batch_done(2)
        assert sorted(read) == list(range(10))
    for _ in range(2):
        with pytest.raises(StopIteration):
            service.fetch_record_index()


def test_shards_are_acknowledged_when_all_their_records_are_reported(leases: Leases) -> None:
    service = RecordIndexService(leases, shuffle=False)
    assert [service.fetch_record_index() for _ in range(9)] == list(range(9))
    service.report_batch_done(3)
    assert (leases.state_dict()["done"], leases.state_dict()["partial"]) == ([], {"0": 3})
    service.report_batch_done(3)
    assert (leases.state_dict()["done"], leases.state_dict()["partial"]) == ([[0, 1]], {"1": 2})
    with pytest.raises(ValueError, match="4 records were reported, but only 3 were fetched"):
        service.report_batch_done(4)


def test_a_fetch_that_would_wait_for_its_own_report_says_so(leases: Leases) -> None:
    """The loop reports, and goes on: the data have not ended."""
    service = RecordIndexService(leases, epochs=2)
    for _ in range(10):
        service.fetch_record_index()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="this worker has not reported 10 records that it fetched"
        ):
            service.fetch_record_index()
    service.report_batch_done(10)
    assert 0 <= service.fetch_record_index() < 10


def test_another_thread_is_refused(leases: Leases) -> None:
    service = RecordIndexService(leases)
    said: list[str] = []

    def fetch() -> None:
        for call in (service.fetch_record_index, lambda: service.report_batch_done(0)):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    assert len(said) == 2
    assert all("from a thread that did not create it" in text for text in said)


def test_an_image_folder_asks_the_service(tmp_path: Path) -> None:
    for number in range(6):
        path = tmp_path / ("cat" if number < 3 else "dog") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (2, 2), (number, 0, 0)).save(path)
    plain = ElasticImageFolder(str(tmp_path), lambda image: image.getpixel((0, 0))[0])
    assert [plain[k] for k in range(6)] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    with Leases(len(plain), shard=2, store=HashStore()) as leases:
        service = RecordIndexService(leases)
        folder = ElasticImageFolder(str(tmp_path), plain.transform, data_shard_service=service)
        assert len(folder) == sys.maxsize
        read = []
        for _ in range(6):
            read.append(folder[0])
            service.report_batch_done(1)
        assert sorted(read) == [plain[k] for k in range(6)]
        with pytest.raises(StopIteration):
            folder[0]
