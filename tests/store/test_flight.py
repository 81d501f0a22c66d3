"""Promises:
- `get(source=...)` fetches missing parts byte by byte from a shared folder or from `fastload set serve`, whole and
  checked. Several roots stand for nodes.
- A part is fetched once for all processes of a node. A node fetches the parts that it lacks, and no more.
- A fetch that meets damage, another set, too little room or a server that ends leaves nothing.
- A ticket of `fastload set serve` cannot lead out of the root.
- Any client of Arrow Flight lists and reads the sets of `fastload set serve`.
- Signals end `fastload set serve`.

See `tests/distributed/test_flight.py` for what the server of parameters promises, too.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import flight

from fastload import DataLoader, store
from fastload.datasets.manifest import INDEX, Shard, dump_index, read_index
from fastload.errors import PackedDataError, StoreFullError
from fastload.store.flight import ServerSource, StoreServer
from tests.children import Python, run_python
from tests.files import arrow_files

ROWS, PARTS = 20, 10
VALUES = torch.arange(ROWS * PARTS * 3, dtype=torch.float32).view(-1, 3)
LABELS = torch.arange(ROWS * PARTS)
WAIT_S = 60.0

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")


def parts() -> Iterator[dict[str, torch.Tensor]]:
    for x, y in zip(VALUES.split(ROWS), LABELS.split(ROWS), strict=True):
        yield {"x": x, "y": y}


def two_nodes(folder: Path, *, rich: int = 9) -> dict[str, Path]:
    """Make roots for the nodes "a" and "b" with one set "s": the first `rich` of 10 parts lie on "a"."""
    store.put(parts(), folder / "whole" / "s", checksums=True)
    whole = folder / "whole" / "s"
    index = read_index(str(whole))
    shards = tuple(
        replace(shard, node="a" if number < rich else "b")
        for number, shard in enumerate(index.shards)
    )
    for node in "ab":
        path = folder / node / "s"
        path.mkdir(parents=True)
        for shard in shards:
            if shard.node == node:
                shutil.copy(whole / shard.name, path)
        (path / INDEX).write_bytes(dump_index(replace(index, shards=shards)))
    return {node: folder / node for node in "ab"}


@contextmanager
def served(root: Path, **options: Any) -> Iterator[str]:
    with StoreServer(str(root), **options) as server:
        yield server.address("localhost")


@contextmanager
def serving(root: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `fastload set serve`; yield its process and its URL."""
    command = ["-m", "fastload", "set", "serve", "--no-token", "--root", root, *options]
    process = Python(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "served at" in line, process.communicate()[1]
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.communicate()


def numbers(dataset: Any) -> list[int]:
    return [int(label) for batch in DataLoader(dataset, 7) for label in batch["y"]]


@pytest.mark.parametrize("kind", ["root", "set", "server"])
def test_a_set_that_is_not_here_comes_byte_by_byte(kind: str, tmp_path: Path) -> None:
    store.put(parts(), tmp_path / "there" / "s")
    with served(tmp_path / "there") as url:
        source = {"root": tmp_path / "there", "set": tmp_path / "there" / "s", "server": url}[kind]
        dataset = store.get(tmp_path / "here" / "s", parts="all", source=source)
    assert numbers(dataset) == LABELS.tolist()
    assert dataset.set_id == store.get(tmp_path / "there" / "s").set_id
    assert arrow_files(tmp_path / "here" / "s") == arrow_files(tmp_path / "there" / "s")
    assert all(column.data_ptr() % 8 == 0 for name in "xy" for column in dataset.column(name))
    assert numbers(store.get(tmp_path / "here" / "s")) == LABELS.tolist(), "without the source"


def test_a_poor_node_fetches_what_it_lacks_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = two_nodes(tmp_path)
    seen: list[int] = []
    lengths = []
    with served(roots["a"]) as a, served(roots["b"]) as b:
        for node, root in roots.items():
            monkeypatch.setenv("FASTLOAD_NODE", node)
            dataset = store.get("s", root=root, balance="fetch", source=[a, b])
            lengths.append(len(dataset))
            seen += numbers(dataset)
    assert sorted(seen) == LABELS.tolist()
    assert lengths == [100, 100]
    assert [len(arrow_files(root / "s")) for root in roots.values()] == [9, 5]


def test_without_a_source_the_error_names_the_nodes_and_the_argument(tmp_path: Path) -> None:
    roots = two_nodes(tmp_path)
    with pytest.raises(PackedDataError, match=r"9 of 10 parts .* and are on a. Pass source="):
        store.get("s", root=roots["b"], parts="all")


def test_a_part_that_nobody_has_is_named(tmp_path: Path) -> None:
    roots = two_nodes(tmp_path)
    (roots["a"] / "s" / "shard-00003.arrow").unlink()
    with (
        served(roots["a"]) as url,
        pytest.raises(PackedDataError, match=r"shard-00003.*node a is not at grpc://localhost"),
    ):
        store.get("s", root=roots["b"], parts="all", source=url)


def test_another_set_of_the_name_is_refused(tmp_path: Path) -> None:
    roots = two_nodes(tmp_path)
    store.put({"x": VALUES + 1, "y": LABELS}, tmp_path / "other" / "s")
    with pytest.raises(PackedDataError, match="a different set with this name"):
        store.get("s", root=roots["b"], parts="all", source=tmp_path / "other")
    with pytest.raises(FileNotFoundError, match="the set 't' is neither here nor at"):
        store.get("t", root=roots["b"], source=tmp_path / "other")


@pytest.mark.parametrize("damage", ["flipped", "cut off"])
def test_a_copy_that_is_wrong_is_refused_and_leaves_nothing(damage: str, tmp_path: Path) -> None:
    roots = two_nodes(tmp_path)
    part = roots["a"] / "s" / "shard-00000.arrow"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content if damage == "flipped" else content[:-9])
    with pytest.raises(PackedDataError, match="shard-00000"):
        store.get("s", root=roots["b"], parts="all", source=roots["a"])
    assert list(arrow_files(roots["b"] / "s")) == ["shard-00009.arrow"]
    assert not list((roots["b"] / "s").glob("*.partial"))


def test_no_byte_is_copied_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = two_nodes(tmp_path)
    monkeypatch.setattr("fastload.store.room.free_bytes", lambda path: 100)
    with pytest.raises(StoreFullError, match="100 are free"):
        store.get("s", root=roots["b"], parts="all", source=roots["a"])
    assert list(arrow_files(roots["b"] / "s")) == ["shard-00009.arrow"]


def test_a_server_that_ends_while_a_part_comes_leaves_whole_parts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = torch.arange(2**23, dtype=torch.int32).view(
        -1, 2**12
    )  # 16 MiB a part: more than a connection holds
    store.put(({"x": part} for part in big.chunk(2)), tmp_path / "there" / "s")
    here = tmp_path / "here" / "s"
    whole = ServerSource.read
    with serving(tmp_path / "there") as (process, url):

        def killed(self: ServerSource, name: str, part: Shard) -> Iterator[memoryview]:
            pieces = whole(self, name, part)
            yield next(pieces)
            if part.name == "shard-00001.arrow":
                process.kill()
                process.wait()
            yield from pieces

        monkeypatch.setattr(ServerSource, "read", killed)
        with pytest.raises(PackedDataError, match=f"{url}: cannot be read from"):
            store.get(here, source=url)
    assert list(arrow_files(here)) == ["shard-00000.arrow"]
    assert not list(here.glob("*.partial"))
    dataset = store.get(here, data="x", source=tmp_path / "there")
    assert torch.equal(torch.cat(dataset.column("x")), big)


def test_a_server_that_stands_still_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload.store.flight._ANSWER_S", 1.0)
    store.put(parts(), tmp_path / "there" / "s")
    with serving(tmp_path / "there") as (process, url):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PackedDataError, match=f"{url}: cannot be read from.*Deadline"):
            store.get(tmp_path / "here" / "s", source=url)
        process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("http://localhost:1", ValueError, "a source must be a path, or the URL"),
        ("grpc://localhost:99999", PackedDataError, "cannot be read from"),
        ("grpc://localhost:1", PackedDataError, "cannot be read from"),
    ],
)
def test_a_source_that_is_none(
    source: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        store.get(tmp_path / "here" / "s", source=source)


def test_a_name_that_is_wrong_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the set 's' does not exist"):
        store.get(tmp_path / "deep" / "er" / "s")
    assert not list(tmp_path.iterdir())


def test_processes_that_want_the_same_parts_copy_each_once(tmp_path: Path) -> None:
    roots = two_nodes(tmp_path)
    program = """
import sys
from fastload import store
from fastload.store import fetch
copied = []
copy = fetch.copy_shards
fetch.copy_shards = lambda path, read, parts: (copied.extend(part.name for part in parts), copy(path, read, parts))
sys.stdin.read()
dataset = store.get("s", root=sys.argv[1], parts="all", source=sys.argv[2])
print(len(dataset), *copied)
"""
    command = ["-c", program, roots["b"], roots["a"]]
    processes = [
        Python(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()  # all begin now
        process.stdin = None
    answers = [process.communicate(timeout=WAIT_S)[0].split() for process in processes]
    assert [answer[0] for answer in answers] == ["200"] * 4
    copied = sorted(name for answer in answers for name in answer[1:])
    assert copied == [f"shard-{number:05d}.arrow" for number in range(9)]


# ---- the command ----


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_the_server(number: int, status: int, tmp_path: Path) -> None:
    with serving(tmp_path) as (process, _):
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == status
    assert "Traceback" not in errors


@pytest.mark.parametrize("host", ["::1", pytest.param("127.1", marks=pytest.mark.slow)])
def test_the_loopback_can_be_written_in_several_ways(host: str, tmp_path: Path) -> None:
    store.put(parts(), tmp_path / "there" / "s")
    with serving(tmp_path / "there", "--host", host) as (_, url):
        assert numbers(store.get(tmp_path / "here" / "s", source=url)) == LABELS.tolist()


# ---- any client of Flight ----


def test_any_client_lists_and_reads_sets(tmp_path: Path) -> None:
    store.put(parts(), tmp_path / "s")
    with served(tmp_path) as url, flight.FlightClient(url) as client:
        (info,) = client.list_flights()
        assert info.descriptor.path == [b"s"]
        assert info.total_records == 200
        assert client.get_flight_info(info.descriptor).schema.names == ["x", "y"]
        # Without this, what Flight receives lies anywhere, and torch takes it without a word.
        aligned = pa.ipc.IpcReadOptions(ensure_alignment=pa.ipc.Alignment.At64Byte)
        options = flight.FlightCallOptions(read_options=aligned)
        tables = [client.do_get(end.ticket, options).read_all() for end in info.endpoints]
        for batch in (batch for table in tables for batch in table.to_batches()):
            assert batch.column("x").storage.flatten().buffers()[1].address % 64 == 0
        table = pa.concat_tables(tables)
        assert table.column("y").to_pylist() == LABELS.tolist()
        assert table.column("x").to_pylist()[7] == VALUES[7].tolist()


TICKETS = {
    "columns/../s/shard-00000.arrow": "the set '..' does not exist",
    "file/s/../../secret": "no part",
    "file/s/index.json": "no part",
    "columns/nothing/shard-00000.arrow": "The sets here are s",
    "shard-00000.arrow": "the set '' does not exist",
    "": "the set '' does not exist",
    '{"set": "s", "part": "shard-00000.arrow"}': "the set '' does not exist",
}


def test_a_ticket_cannot_lead_out_of_the_root(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    store.put(parts(), tmp_path / "root" / "s")
    with served(tmp_path / "root") as url, flight.FlightClient(url) as client:
        for ticket, message in TICKETS.items():
            with pytest.raises(flight.FlightServerError, match=message):
                client.do_get(flight.Ticket(ticket)).read_all()
        assert not list(client.do_action(flight.Action("set 2", b"../secret")))


def test_importing_the_store_does_not_import_flight() -> None:
    program = "import sys, fastload.store; assert 'pyarrow._flight' not in sys.modules"
    run_python("-c", program, check=True)


def test_a_part_without_a_checksum_is_checked_by_its_form(tmp_path: Path) -> None:
    store.put(parts(), tmp_path / "there" / "s", checksums=False)
    index = read_index(str(tmp_path / "there" / "s"))
    assert all(isinstance(shard, Shard) and shard.checksum is None for shard in index.shards)
    part = tmp_path / "there" / "s" / "shard-00004.arrow"
    part.write_bytes(part.read_bytes()[:-3] + b"xyz")
    with pytest.raises(PackedDataError, match="shard-00004.*does not end like an Arrow file"):
        store.get(tmp_path / "here" / "s", source=tmp_path / "there")
