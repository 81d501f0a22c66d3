"""Promises of the servers of parameters and of sets, and of their clients:
- A server answers callers with its token only. Clients read the token from a file that no other user can read.
- TLS is supported. A client whose TLS does not fit that of the server raises.
- An error that a caller gets has no traceback and no path.
- A client refuses an answer whose memory does not hold what it says.
- A call to a server that has ended raises an error that names its address.
- A call in a forked process raises an error, too.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
import torch
from pyarrow import flight

from fastload import store
from fastload.datasets.manifest import Shard
from fastload.errors import PackedDataError, ParametersError, UsageError
from fastload.parameters import PSClient, Server, connect
from fastload.parameters.flight import FlightStub, ParameterServer
from fastload.store.flight import ServerSource, StoreServer
from tests.forged import BYTES, Liar, batch_of_too_many_rows

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")

PART = "shard-00000.arrow"
ROWS = 2**20 + 12_345


class Kind(NamedTuple):
    """A kind of server: how a test starts it, and what its client calls."""

    server: Callable[..., Any]
    ask: Callable[..., Any]
    error: type[Exception]
    damage: Callable[[Path, str], None]
    """Damages what the server reads, and makes a call whose error is raised."""


def sets(folder: Path, **guards: Any) -> StoreServer:
    store.put({"x": torch.arange(3)}, folder / "s")
    return StoreServer(str(folder), **guards)


def read(address: str, **access: Any) -> list[memoryview]:
    return list(ServerSource(address, **access).read("s", Shard(PART, 3, 2**20, None)))


def damaged_set(folder: Path, address: str) -> None:
    part = folder / "s" / PART
    part.write_bytes(part.read_bytes()[:-9])
    with flight.FlightClient(address) as client:
        client.do_get(flight.Ticket(f"columns/s/{PART}")).read_all()


def parameters(folder: Path, **guards: Any) -> ParameterServer:
    return ParameterServer(Server(folder=folder / "saved"), **guards)


def pull(address: str, **access: Any) -> None:
    with closing(PSClient(connect(address, **access), patience_s=0.1)) as client:
        client.pull_variable()


def damaged_folder(folder: Path, address: str) -> None:
    (folder / "saved").rmdir()
    (folder / "saved").write_text("a file is in the place of the folder")
    with closing(FlightStub(address)) as stub:
        stub.start("checkpoint", {"version": -1, "step": -1})()


@pytest.fixture(params=["parameters", "sets"])
def kind(request: pytest.FixtureRequest) -> Kind:
    if request.param == "sets":
        return Kind(sets, read, PackedDataError, damaged_set)
    return Kind(parameters, pull, ParametersError, damaged_folder)


def refused(kind: Kind, said: str, address: str, **access: Any) -> None:
    """Expect an error at once: the client of parameters does not try again."""
    with pytest.raises(kind.error, match=rf"cannot be (called|read from): .*{said}"):
        kind.ask(address, **access)


def test_a_token_is_needed_and_compared(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "token"
    file.write_text("right\n")
    file.chmod(0o600)
    with kind.server(tmp_path, token="right") as server:
        address = server.address("localhost")
        refused(kind, r"server needs a token. Set \$FASTLOAD_TOKEN_FILE to", address)
        refused(kind, "the token is wrong for this server", address, token="other")
        kind.ask(address, token="right")
        monkeypatch.setenv("FASTLOAD_TOKEN_FILE", str(file))
        kind.ask(address)
        file.chmod(0o640)
        with pytest.raises(UsageError, match="other users can read the token. Run chmod 600"):
            kind.ask(address)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a certificate for localhost that has signed itself: the folder of chain and key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return folder


def test_tls(
    kind: Kind, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tuple((certificate / name).read_bytes() for name in ("cert.pem", "key.pem"))
    with kind.server(tmp_path, certificate=pair) as server:
        secure = server.address("localhost")
        assert secure.startswith("grpc+tls://")
        kind.ask(secure, authority=pair[0])
        with pytest.raises(kind.error, match="FASTLOAD_TLS_CA names the certificate"):
            kind.ask(secure)
        with pytest.raises(kind.error):
            kind.ask(secure.replace("+tls", ""))
        monkeypatch.setenv("FASTLOAD_TLS_CA", str(certificate / "cert.pem"))
        kind.ask(secure)


def test_an_error_of_a_server_shows_no_traceback_and_no_path(kind: Kind, tmp_path: Path) -> None:
    x = flight.FlightDescriptor.for_path("x")
    with (
        kind.server(tmp_path) as server,
        flight.FlightClient(server.address("localhost")) as client,
    ):
        address = server.address("localhost")
        calls: list[Callable[[], object]] = [
            lambda: list(client.do_action(flight.Action("x", b""))),
            lambda: client.do_get(flight.Ticket(b"x")).read_chunk(),
            lambda: client.do_get(flight.Ticket(b"\xff/" * 100_000)).read_chunk(),
            lambda: client.get_flight_info(x),
            lambda: client.get_flight_info(flight.FlightDescriptor.for_command(b"x")),
            lambda: kind.damage(tmp_path, address),
        ]
        if kind.server is parameters:
            calls += [lambda: list(client.list_flights()), lambda: list(client.list_actions())]
        assert not client.get_schema(x).schema.names
        for call in calls:
            assert not re.search(r"Traceback|\.py|" + str(tmp_path), said_by(call))


def said_by(call: Callable[[], object]) -> str:
    """Return the error of a call to a server. It is kept by no traceback, which would keep the connection open."""
    try:
        call()
    except (flight.FlightServerError, ParametersError) as error:
        return str(error)
    raise AssertionError("the server refuses nothing")


LIES: list[Any] = [
    batch_of_too_many_rows(ROWS),
    pa.record_batch({"bytes": [1, 2]}),
    pa.record_batch({"other": pa.array([1], pa.uint8())}),
    pa.RecordBatch.from_arrays([pa.array([1, None], pa.uint8())], schema=BYTES),
    pa.RecordBatch.from_arrays([pa.array(bytes(2**20 + 1), pa.uint8())], schema=BYTES),
]


def test_a_client_refuses_an_answer_that_lies(kind: Kind) -> None:
    for lie in LIES:
        with Liar(lie) as server:
            said = "the answer cannot be read: ValueError: .*. Use the same version of fastload"
            refused(kind, said, f"grpc://127.0.0.1:{server.port}")


def test_the_wrong_server_is_an_error_at_once(kind: Kind, tmp_path: Path) -> None:
    wrong = parameters if kind.server is sets else sets
    with wrong(tmp_path) as server:
        refused(kind, "this server has no such call", server.address("localhost"))


def test_a_client_of_another_version_is_told(kind: Kind, tmp_path: Path) -> None:
    said = "the client has another version. Use the same version of fastload on clients and servers"
    with (
        kind.server(tmp_path) as server,
        flight.FlightClient(server.address("localhost")) as client,
        pytest.raises(flight.FlightServerError, match=said),
    ):
        if kind.server is sets:
            list(client.do_action(flight.Action("set", b"s")))
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"call"))
        writer.begin(BYTES)
        reader.read_chunk()


def test_a_server_that_has_ended_is_an_error(kind: Kind, tmp_path: Path) -> None:
    with kind.server(tmp_path) as server:
        address = server.address("localhost")
        kind.ask(address)
    with pytest.raises(kind.error, match=f"{address}:? (does not answer|cannot be read)"):
        kind.ask(address)


def test_a_call_in_a_fork_of_a_process_that_called_raises(kind: Kind, tmp_path: Path) -> None:
    with kind.server(tmp_path) as server:
        address = server.address("localhost")
        kind.ask(address)
        pid = os.fork()
        if pid == 0:
            try:
                kind.ask(address)
            except kind.error as error:
                os._exit(3 if "was forked" in str(error) else 4)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
