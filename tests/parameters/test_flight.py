"""Promises:
- Over sockets the servers give the same results as in one process. Every tensor is aligned to 64 bytes.
- Other machines are served only with a token.
- A client opens one stream for all its calls, and another one after a call that failed.

See `tests/distributed/test_flight.py` for what all servers promise.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from fastload.errors import ParametersError, UsageError
from fastload.parameters import Optimizer, PSClient, Server, connect, wire
from fastload.parameters.flight import ParameterServer
from fastload.parameters.serve import reached_as
from tests.parameters.running import servers

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")


@contextmanager
def served(
    number: int = 1, host: str = "127.0.0.1", token: str = "", **options: Any
) -> Iterator[list[str]]:
    with ExitStack() as stack:
        fronts = [
            stack.enter_context(ParameterServer(server, host, token=token))
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


def test_calls_in_a_row_are_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, exchange = [], ParameterServer.do_exchange

    def counted(self: ParameterServer, *call: Any) -> None:
        streams.append("opened")
        exchange(self, *call)

    monkeypatch.setattr(ParameterServer, "do_exchange", counted)
    with served() as addresses, client_of(addresses) as client:
        for opened in (1, 2):
            for _ in range(3):
                assert client.pull_variable() == {}
            assert len(streams) == opened
            with pytest.raises(ParametersError, match="table 'none' does not exist"):
                client.pull_embedding_vectors("none", torch.tensor([1]))
            assert len(streams) == opened


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
