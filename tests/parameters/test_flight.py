"""Promises:
- Over sockets the servers give the same results as in one process. Every tensor is aligned to 64 bytes, and TLS is
  supported.
- Calls without the token are refused. Other machines are served only with a token.
- A client whose TLS does not fit that of the server says so at once.
- An error that a caller gets has no traceback and no path.
- The calls that are open at a time are limited, so callers that wait fill no memory.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import flight

from fastload.errors import ParametersError, UsageError
from fastload.parameters import Optimizer, PSClient, Server, connect, wire
from fastload.parameters.flight import FlightStub, ParameterServer
from fastload.parameters.serve import reached_as
from tests.children import run_python
from tests.parameters.running import servers

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")


@contextmanager
def served(
    number: int = 1,
    host: str = "127.0.0.1",
    token: str = "",
    certificate: Any = None,
    **options: Any,
) -> Iterator[list[str]]:
    with ExitStack() as stack:
        fronts = [
            stack.enter_context(ParameterServer(server, host, token=token, certificate=certificate))
            for server in servers(number, **options)
        ]
        yield [front.address("localhost") for front in fronts]


@contextmanager
def client_of(addresses: list[str], **options: Any) -> Iterator[PSClient]:
    client = PSClient(connect(addresses, **options), patience_s=5)
    try:
        yield client
    finally:
        client.close()


VALUES = {
    "w": torch.randn(7, 3),
    "scalar": torch.tensor(2.5),
    "bf16": torch.tensor([1.5, -2], dtype=torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "empty": torch.empty(0, 4),
    "slice": torch.arange(12.0).view(3, 4)[:, 1:3],
}


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("chunk", [wire.CHUNK, 64])
def test_all_is_as_in_process_and_aligned(
    number: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "CHUNK", chunk)
    monkeypatch.setattr(wire, "_LARGE", chunk)
    options: dict[str, Any] = {"optimizer": Optimizer(lr=0.5)}
    inside = PSClient(connect(servers(number, **options)))
    with served(number, **options) as addresses, client_of(addresses) as outside:
        found = []
        for client in (inside, outside):
            for i in range(number):
                client.push_dense_parameters(VALUES, i, 0)
            client.push_embedding_table_infos([("t", 5)])
            ids = torch.tensor([3, -1, 2**62, 3])
            rows = client.pull_embedding_vectors("t", ids)
            gradients = {"w": torch.ones(7, 3)}, {"t": (ids, rows)}
            accepted, version = client.push_gradients(*gradients, 0.1, [0] * number)
            fresh = client.push_rows("t", (ids, rows), 0.1)
            values = client.pull_variable()
            tensors = [*values.values(), rows, *fresh]
            assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
            for tensor in tensors:
                tensor.zero_() if tensor.numel() else None  # the caller's own
            again = client.pull_variable(), client.pull_embedding_vectors("t", ids)
            found.append((accepted, version, again))
    (*first, (dense, rows)), (*second, (others, other_rows)) = found
    assert first == second == [True, 1]
    assert dense.keys() == others.keys() == VALUES.keys()
    assert all(torch.equal(dense[name], others[name]) for name in VALUES)
    assert torch.equal(rows, other_rows)


def test_a_caller_without_the_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(token="right") as addresses:
        for token, said in (
            ("", "requires a token. Give token="),
            ("other", "requires another token"),
        ):
            with (
                client_of(addresses, token=token) as client,
                pytest.raises(ParametersError, match=said),
            ):
                client.pull_variable()
        with client_of(addresses, token="right") as client:
            assert client.pull_variable() == {}
        (tmp_path / "token").write_text("right\n")
        (tmp_path / "token").chmod(0o600)
        monkeypatch.setenv("FASTLOAD_TOKEN_FILE", str(tmp_path / "token"))
        with client_of(addresses) as client:
            assert client.pull_variable() == {}
        (tmp_path / "token").chmod(0o640)
        with pytest.raises(UsageError, match="other users can read the token. Run chmod 600"):
            connect(addresses)


def test_other_machines_are_served_only_with_a_token() -> None:
    for host in ("127.1", "::1", "[::1]", "localhost"):
        with (
            ParameterServer(Server(), host) as front,
            client_of([front.address(reached_as(host))]) as client,
        ):
            assert client.pull_variable() == {}
    for host in ("0.0.0.0", "::", "192.0.2.1", "192.513", "node7", "[::"):
        with pytest.raises(UsageError, match=re.escape(f"host {host} lets other machines change")):
            ParameterServer(Server(), host)
    with (
        served(host="0.0.0.0", token="right") as addresses,
        client_of(addresses, token="right") as client,
    ):
        assert client.pull_variable() == {}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """Make a certificate for localhost that has signed itself: chain and key."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip
    return (folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes()


def test_tls(certificate: tuple[bytes, bytes]) -> None:
    with served(token="right", certificate=certificate) as (address,):
        assert address.startswith("grpc+tls://")
        with client_of([address], token="right", authority=certificate[0]) as client:
            assert client.push_dense_parameters({"w": torch.ones(2)}, 0, 0)
            assert client.pull_variable()["w"].tolist() == [1, 1]
    with served(certificate=certificate) as (secure,), served() as (plain,):
        unknown = rf"{re.escape(secure)} cannot be called: the certificate of the server is not accepted: .*self"
        faults = {
            secure: unknown,
            secure.replace("+tls", ""): rf"the server uses TLS. Its address is {re.escape(secure)}",
            plain.replace("grpc", "grpc+tls"): "cannot be called: there is no TLS",
        }
        for address, said in faults.items():
            client = PSClient(connect(address), patience_s=1000)  # which it says at once
            with pytest.raises(ParametersError, match=said):
                client.pull_variable()
            client.close()


def test_a_server_that_is_not_there_is_waited_for() -> None:
    with served() as addresses:
        pass
    client = PSClient(connect(addresses), patience_s=0.1)
    with pytest.raises(
        ParametersError, match=r"server 0 at grpc://\S+ has not answered for 0.1 s: .*resume from"
    ):
        client.pull_variable()
    client.close()


def test_a_call_beyond_the_limit_is_refused_until_another_ends() -> None:
    with ParameterServer(Server(), max_calls=2) as front:
        address = front.address("localhost")
        waiting = [FlightStub(lambda: address) for _ in range(2)]
        for stub in waiting:
            stub.start("hello", {})()
        client = PSClient(connect(address), patience_s=0.1)
        with pytest.raises(ParametersError, match="the server has 2 open calls, and takes no more"):
            client.pull_variable()
        client.close()
        waiting[0].close()
        with client_of([address]) as client:
            assert client.pull_variable() == {}
        waiting[1].close()


def test_an_error_of_a_server_shows_no_traceback_and_no_path(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with (
        ParameterServer(Server(folder=folder)) as front,
        flight.FlightClient(front.address("localhost")) as client,
    ):
        calls: list[Callable[[], object]] = [
            lambda: list(client.list_flights()),
            lambda: list(client.list_actions()),
            lambda: list(client.do_action(flight.Action("x", b""))),
            lambda: client.do_get(flight.Ticket(b"x")).read_chunk(),
            lambda: client.get_flight_info(flight.FlightDescriptor.for_path("x")),
        ]
        assert not client.get_schema(flight.FlightDescriptor.for_path("x")).schema.names
        for call in calls:
            with pytest.raises(flight.FlightServerError, match=r"^((?!\.py|Traceback)[\s\S])*$"):
                call()
        folder.rmdir()
        folder.write_text("a file is in the place of the folder")
        with (
            closing(FlightStub(lambda: front.address("localhost"))) as stub,
            pytest.raises(ParametersError, match="(FileExists|NotADirectory)Error: [^/]*$"),
        ):
            stub.start("checkpoint", {"version": -1, "step": -1})()


def test_what_is_no_call_of_clients_is_refused() -> None:
    with served() as (address,):
        stub = FlightStub(lambda: address)
        for method in ("close", "answer", "__init__"):
            with pytest.raises(ParametersError, match=f"servers have no method '{method}'"):
                stub.start(method, {})()
        with pytest.raises(ParametersError, match="TypeError"):
            stub.start("hello", {"name": "w"})()
        assert stub.start("hello", {})()["of"] == 1
        stub.close()


def test_pandas_is_not_imported_by_what_travels() -> None:
    code = (
        "import sys, torch; from fastload.parameters import wire\n"
        "encoded = wire.Encoded({'a': torch.ones(3)})\n"
        "gathered = wire.Gathered(encoded.size)\n"
        "for batch in encoded.batches(): gathered.add(batch)\n"
        "assert wire.decode(encoded.text, gathered.content)['a'].tolist() == [1, 1, 1]\n"
        "assert 'pandas' not in sys.modules"
    )
    run_python("-c", code, check=True)


def test_what_cannot_be_sent_is_named() -> None:
    """A sparse tensor, and any call of a process that was forked after the first call."""
    with served() as addresses, client_of(addresses) as client:
        with pytest.raises(TypeError, match=r"but got torch.sparse_coo"):
            client.push_dense_parameters({"w": torch.eye(3).to_sparse()}, 0, 0)
        client.pull_variable()
        pid = os.fork()
        if pid == 0:
            try:
                connect(addresses)[0].start("hello", {})
            except ParametersError as error:
                os._exit(3 if "was forked" in str(error) else 4)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
