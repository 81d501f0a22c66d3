"""Promises of the servers of parameters, and of their clients:
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
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from fastload.distributed.flight import GuardedServer
from fastload.errors import ParametersError, UsageError
from fastload.parameters import PSClient, Server, connect
from fastload.parameters.flight import FlightStub, ParameterServer
from tests.forged import BYTES, Liar, batch_of_too_many_rows

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")

ROWS = 2**20 + 12_345


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


def refused(said: str, address: str, **access: Any) -> None:
    """Expect an error at once: the client of parameters does not try again."""
    with pytest.raises(ParametersError, match=f"cannot be called: .*{said}"):
        pull(address, **access)


def test_a_token_is_needed_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("right\n")
    file.chmod(0o600)
    with parameters(tmp_path, token="right") as server:
        address = server.address("localhost")
        refused(r"server needs a token. Set \$FASTLOAD_TOKEN_FILE to", address)
        refused("the token is wrong for this server", address, token="other")
        pull(address, token="right")
        monkeypatch.setenv("FASTLOAD_TOKEN_FILE", str(file))
        pull(address)
        file.chmod(0o640)
        with pytest.raises(UsageError, match="other users can read the token. Run chmod 600"):
            pull(address)


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


def test_tls(certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = tuple((certificate / name).read_bytes() for name in ("cert.pem", "key.pem"))
    with parameters(tmp_path, certificate=pair) as server:
        secure = server.address("localhost")
        assert secure.startswith("grpc+tls://")
        pull(secure, authority=pair[0])
        with pytest.raises(ParametersError, match="FASTLOAD_TLS_CA names the certificate"):
            pull(secure)
        with pytest.raises(ParametersError):
            pull(secure.replace("+tls", ""))
        monkeypatch.setenv("FASTLOAD_TLS_CA", str(certificate / "cert.pem"))
        pull(secure)


def test_an_error_of_a_server_shows_no_traceback_and_no_path(tmp_path: Path) -> None:
    x = flight.FlightDescriptor.for_path("x")
    with (
        parameters(tmp_path) as server,
        flight.FlightClient(server.address("localhost")) as client,
    ):
        address = server.address("localhost")
        calls: list[Callable[[], object]] = [
            lambda: list(client.do_action(flight.Action("x", b""))),
            lambda: client.do_get(flight.Ticket(b"x")).read_chunk(),
            lambda: client.do_get(flight.Ticket(b"\xff/" * 100_000)).read_chunk(),
            lambda: client.get_flight_info(x),
            lambda: client.get_flight_info(flight.FlightDescriptor.for_command(b"x")),
            lambda: damaged_folder(tmp_path, address),
        ]
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


def test_a_client_refuses_an_answer_that_lies() -> None:
    for lie in LIES:
        with Liar(lie) as server:
            said = "the answer cannot be read: ValueError: .*. Use the same version of fastload"
            refused(said, f"grpc://127.0.0.1:{server.port}")


def test_the_wrong_server_is_an_error_at_once() -> None:
    with GuardedServer("127.0.0.1", 0) as server:
        refused("this server has no such call", server.address("localhost"))


def test_a_client_of_another_version_is_told(tmp_path: Path) -> None:
    said = "the client has another version. Use the same version of fastload on clients and servers"
    with (
        parameters(tmp_path) as server,
        flight.FlightClient(server.address("localhost")) as client,
        pytest.raises(flight.FlightServerError, match=said),
    ):
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"call"))
        writer.begin(BYTES)
        reader.read_chunk()


def test_a_server_that_has_ended_is_an_error(tmp_path: Path) -> None:
    with parameters(tmp_path) as server:
        address = server.address("localhost")
        pull(address)
    with pytest.raises(ParametersError, match=f"{address}:? does not answer"):
        pull(address)


def test_a_call_in_a_fork_of_a_process_that_called_raises(tmp_path: Path) -> None:
    with parameters(tmp_path) as server:
        address = server.address("localhost")
        pull(address)
        pid = os.fork()
        if pid == 0:
            try:
                pull(address)
            except ParametersError as error:
                os._exit(3 if "was forked" in str(error) else 4)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
