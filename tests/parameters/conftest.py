"""What several files of these tests need before they begin."""

from __future__ import annotations

from contextlib import suppress

import pytest


@pytest.fixture(scope="session")
def descriptors_that_stay() -> None:
    """Let Arrow and gRPC open what they keep: the tests look for descriptors that are left open."""
    import pyarrow as pa
    from pyarrow import flight

    from fastload.parameters import PSClient, Server, connect
    from fastload.parameters.flight import ParameterServer

    with ParameterServer(Server()) as front:
        client = PSClient(connect(front.address("localhost")))
        client.pull_variable()
        client.close()
        with suppress(pa.ArrowException), flight.FlightClient(front.address("localhost")) as other:
            list(other.list_flights())
