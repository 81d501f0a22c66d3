"""Promises:
- Over sockets the servers give the same results as in one process. Every tensor is aligned to 64 bytes, and TLS is
  supported.
- Calls without the token are refused. Other machines are served only with a token.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.errors import ParametersError, UsageError
from fastload.parameters import Optimizer, PSClient, Server, connect, wire
from fastload.parameters.flight import FlightStub, ParameterServer
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
            accepted, version, fresh = client.push_gradients(
                *gradients, 0.1, [0] * number, fresh=True
            )
            values = client.pull_variable()
            tensors = [*values.values(), rows, *fresh["t"]]
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


@pytest.mark.parametrize(
    ("token", "said"), [("", "requires a token. Give token="), ("other", "requires another token")]
)
def test_a_caller_without_the_token_is_refused(token: str, said: str) -> None:
    with served(token="right") as addresses:
        with (
            client_of(addresses, token=token) as client,
            pytest.raises(ParametersError, match=said),
        ):
            client.pull_variable()
        with client_of(addresses, token="right") as client:
            assert client.pull_variable() == {}


def test_the_token_comes_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("right\n")
    monkeypatch.setenv("FASTLOAD_TOKEN_FILE", str(tmp_path / "token"))
    with served(token="right") as addresses, client_of(addresses) as client:
        assert client.pull_variable() == {}


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "node7"])
def test_other_machines_are_not_served_without_a_token(host: str) -> None:
    with pytest.raises(UsageError, match=f"host {host} lets other machines change"):
        ParameterServer(Server(), host)


def test_with_a_token_other_machines_are_served() -> None:
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


def test_tls_with_a_certificate_that_the_client_knows(certificate: tuple[bytes, bytes]) -> None:
    with served(token="right", certificate=certificate) as addresses:
        assert addresses[0].startswith("grpc+tls://")
        with client_of(addresses, token="right", authority=certificate[0]) as client:
            assert client.push_dense_parameters({"w": torch.ones(2)}, 0, 0)
            assert client.pull_variable()["w"].tolist() == [1, 1]


def test_tls_with_a_certificate_that_the_client_does_not_know(
    certificate: tuple[bytes, bytes],
) -> None:
    with served(certificate=certificate) as addresses:
        client = PSClient(connect(addresses), patience_s=0.1)
        with pytest.raises(
            ParametersError, match=r"grpc\+tls://localhost:\d+ has not answered for 0.1 s"
        ):
            client.pull_variable()
        client.close()


def test_what_is_no_call_of_clients_is_refused() -> None:
    with served() as (address,):
        stub = FlightStub(lambda: address)
        for method in ("close", "answer", "__init__"):
            with pytest.raises(ParametersError, match=f"servers have no method '{method}'"):
                stub.start(method, {})()
        with pytest.raises(ParametersError, match="TypeError"):
            stub.start("hello", {"name": "w"})()
        assert stub.start("hello", {"worker": "w"})()["of"] == 1
        stub.close()


def test_a_tensor_that_cannot_be_sent_is_named() -> None:
    with served() as addresses, client_of(addresses) as client:
        with pytest.raises(TypeError, match=r"but got torch.sparse_coo"):
            client.push_dense_parameters({"w": torch.eye(3).to_sparse()}, 0, 0)
        assert client.pull_variable() == {}


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


def test_a_process_that_is_forked_after_the_first_call_says_so() -> None:
    with served() as addresses, client_of(addresses) as client:
        client.pull_variable()
        pid = os.fork()
        if pid == 0:
            try:
                connect(addresses)[0].start("hello", {"worker": "w"})
            except ParametersError as error:
                os._exit(3 if "was forked" in str(error) else 4)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3


def test_more_bytes_than_announced_are_refused() -> None:
    gathered = wire.Gathered(3)
    with pytest.raises(ValueError, match="more bytes came"):
        gathered.add(wire.batch_of(torch.zeros(4, dtype=torch.uint8).numpy()))
