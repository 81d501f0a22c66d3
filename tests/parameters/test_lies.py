"""Promise: No malformed message and no lie ends a server of parameters, or changes what other clients have.
`scripts/test --all` sends 20,000 of each, and a turn of the slow tests 5,000.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fastload.parameters import PSClient, Server, connect
from tests.children import Python
from tests.sizes_of_runs import in_full

pytest.importorskip("grpc")

pytestmark = pytest.mark.usefixtures("descriptors_that_stay")

ROUNDS = 4
WAIT_S = 60.0


@contextmanager
def serving(*arguments: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a server; yield its process and its address. It must live until the end."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    process = Python(["-m", "fastload", *arguments], **pipes)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        yield process, address
        assert process.poll() is None, f"the server has ended with {process.returncode}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143
    finally:
        process.kill()
        process.communicate()


@contextmanager
def liar(address: str) -> Iterator[Callable[[str, int, int], Counter[str]]]:
    """Yield a function that sends malformed messages or lies, and returns how often each status came."""
    program = Path(__file__).parent / "programs/liar.py"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Python([program, address], **pipes) as process:
        wanted, answers = process.stdin, process.stdout
        assert wanted is not None
        assert answers is not None

        def send(what: str, seed: int, count: int) -> Counter[str]:
            print(what, seed, count, file=wanted, flush=True)
            return Counter(json.loads(answers.readline()))

        yield send
        wanted.close()
        assert process.wait(WAIT_S) == 0


COUNTS = [
    100,
    pytest.param(in_full(20_000, 5_000), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
]


def is_answered(found: Counter[str], count: int) -> bool:
    """Return True if all messages had an answer of a server that lives."""
    return found.total() == count and not found.keys() & {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


@pytest.mark.parametrize(
    "mode",
    [pytest.param((), marks=pytest.mark.slow), ("--grads-to-wait", "1")],
    ids=["asynchronous", "synchronous"],
)
@pytest.mark.parametrize("count", COUNTS)
def test_lies_to_a_parameter_server(count: int, mode: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--lr", "1", "--checkpoint", str(tmp_path), "--number", "0", "--of", "1", *mode)
    with serving("parameters", "serve", *options) as (_, address):
        client = PSClient(connect(address), patience_s=WAIT_S)
        values = {"w": torch.zeros(3), "v": torch.zeros(3)}
        client.push_dense_parameters(values, 0, 0)
        client.push_embedding_table_infos([("t", 2, "zeros")])
        with liar(address) as send:
            for round_ in range(1, ROUNDS + 1):
                for what in ("malformed", "lies"):
                    assert is_answered(send(what, round_, count // ROUNDS), count // ROUNDS)
                gradients = {name: torch.ones(3) for name in values}
                rows = {"t": (torch.tensor([3, 5]), torch.ones(2, 2))}
                assert client.push_gradients(gradients, rows, None, [round_ - 1]) == (True, round_)
                found = client.pull_variable()
                found["t"] = client.pull_embedding_vectors("t", torch.tensor([3, 5]))
                assert {name: value.unique().tolist() for name, value in found.items()} == {
                    name: [-round_] for name in ("w", "v", "t")
                }
        client.close()
    made = Server(folder=tmp_path, grads_to_wait=1 if mode else None)
    assert made.version == ROUNDS, "no push of others, and no version of others"
    assert made._own.tables["t"]._index.ids.tolist() == [3, 5], "no rows of others"
    assert made._own.dense.keys() == values.keys()
