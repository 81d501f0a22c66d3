"""Promise: A checkpoint of the servers is taken whole or not at all. It loads on any number of servers, with the
optimizer's state.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import covertable
import pytest
import torch

from fastload.errors import ParametersError
from fastload.parameters import Optimizer, PSClient, connect
from tests.parameters.running import OPTIMIZERS, servers

NAMES = "abcdefgh"
RECORDED = Path(__file__).parent / "data"


def train(client: PSClient, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        dense = {name: torch.randn(3) for name in NAMES}
        rows = {"t": (torch.randint(-20, 20, (15,)), torch.randn(15, 4))}
        assert client.push_gradients(dense, rows, None, [step] * client.ps_num) == (True, step + 1)


def begin(client: PSClient) -> None:
    client.push_embedding_table_infos([("t", 4), ("unused", 2)])
    for i in range(client.ps_num):
        client.push_dense_parameters({name: torch.ones(3) for name in NAMES}, i, 0)


def parameters(client: PSClient) -> dict[str, list[Any]]:
    rows = client.pull_embedding_vectors("t", torch.arange(-20, 20))
    return {
        **{name: value.tolist() for name, value in client.pull_variable().items()},
        "t": rows.tolist(),
    }


@pytest.mark.parametrize(
    ("number", "grads_to_wait", "life"), covertable.make([[0, 1, 2], [None, 1], ["22", "23", "31"]])
)
def test_training_goes_on_as_if_nothing_had_been(
    number: int, grads_to_wait: int | None, life: str, tmp_path: Path
) -> None:
    """`life` is how many servers there are before and after the checkpoint."""
    optimizer, (before, after) = OPTIMIZERS[number], map(int, life)
    options: dict[str, Any] = {"optimizer": optimizer, "grads_to_wait": grads_to_wait}
    all_the_time = servers(2, folder=tmp_path / "steady", **options)
    steady = PSClient(connect(all_the_time))
    begin(steady)
    train(steady, range(12))

    old = servers(before, folder=tmp_path / "job", **options)
    client = PSClient(connect(old))
    begin(client)
    train(client, range(6))
    assert client.checkpoint() == 6
    saved = parameters(client)
    new = servers(after, folder=tmp_path / "job", **options)
    client = PSClient(connect(new))
    assert parameters(client) == saved
    assert [server.version for server in new] == [6] * after
    train(client, range(6, 12))
    assert parameters(client) == parameters(steady)
    assert client.checkpoint() == 12
    again = servers(2, folder=tmp_path / "job", **options)
    assert parameters(PSClient(connect(again))) == parameters(steady)


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_a_checkpoint_of_the_version_before_is_read(mode: str, number: int, tmp_path: Path) -> None:
    """Two servers of commit a6bf924f saved it after 5 steps, and made 4 more."""
    folder = Path(shutil.copytree(RECORDED / mode, tmp_path / "saved"))
    wait = None if mode == "asynchronous" else 1
    made = servers(
        number, folder=folder, optimizer=Optimizer(name="adam", lr=0.05), grads_to_wait=wait
    )
    client, expected = PSClient(connect(made)), json.loads((folder / "expected.json").read_text())

    def found() -> dict[str, Any]:
        dense = {name: value.tolist() for name, value in client.pull_variable().items()}
        return {**dense, "t": client.pull_embedding_vectors("t", torch.arange(-2, 9)).tolist()}

    assert found() == expected["saved"]
    for step in range(5, 9):
        gradients = {name: torch.arange(3.0) + step + k for k, name in enumerate("abcd")}
        rows = {"t": (torch.tensor([step, -1, 7, step]), torch.arange(8.0).view(4, 2) - step)}
        assert client.push_gradients(gradients, rows, None, [step] * number) == (True, step + 1)
    for name, values in found().items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(expected["trained"][name]))
    assert client.checkpoint() == 9


@pytest.mark.parametrize("missing", [0, 1])
def test_a_checkpoint_that_lacks_a_part_is_not_taken(missing: int, tmp_path: Path) -> None:
    client = PSClient(connect(servers(2, folder=tmp_path)))
    begin(client)
    train(client, range(1))
    client.checkpoint()
    saved = parameters(client)
    train(client, range(1, 4))
    client.checkpoint()
    (tmp_path / "version-4" / f"part-{missing}-of-2.arrow").unlink()
    for number in (2, 3):
        assert parameters(PSClient(connect(servers(number, folder=tmp_path)))) == saved


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    client = PSClient(connect(servers(2, folder=tmp_path)))
    begin(client)
    client.checkpoint()
    path = tmp_path / "version-0" / "part-1-of-2.arrow"
    content = path.read_bytes()
    footer = len(content) - 10 - int.from_bytes(content[-10:-6], "little")
    tensor, text = (
        content.rindex(torch.ones(3).numpy().tobytes()),
        content.rindex(b'0, "initialised"'),
    )
    for place in (tensor, text, footer):
        path.write_bytes(content[:place] + bytes([content[place] ^ 129]) + content[place + 1 :])
        with pytest.raises(ParametersError, match=r"part-1-of-2.arrow is not part of a valid"):
            servers(2, folder=tmp_path)
    path.write_bytes(content[:-20])
    with pytest.raises(ParametersError, match=r"part-1-of-2.arrow is not part of a valid"):
        servers(2, folder=tmp_path)


def test_servers_save_by_themselves_and_keep_the_newest(tmp_path: Path) -> None:
    client = PSClient(connect(servers(2, folder=tmp_path, checkpoint_every=2, keep=2)))
    begin(client)
    train(client, range(9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-6", "version-8"]
