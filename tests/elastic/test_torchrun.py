"""Promises:
- Under torchrun, a DDP job whose rank was killed resumes at the next step, also with another number of ranks. It ends
  with the parameters of an undisturbed run.
- Leases resume from their checkpoint under torchrun too.
- If a rank fails on one of several nodes, the ranks of all nodes meet again at once.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launching import ROOT, run

STEPS, EPOCH_STEPS, SAMPLES = 40, 20, 480

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def torchrun(ranks: int, cwd: Path, example: str, *arguments: str) -> str:
    """Run an example under torchrun, and return what it printed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes=1"]
    options = [f"--nproc-per-node={ranks}", "--max-restarts=3"]
    ended = run([*launcher, *options, str(ROOT / "examples" / example), *arguments], cwd)
    assert ended.code == 0, ended.text
    return ended.text


def trained(folder: Path, world_size: int) -> dict[int, list[int]]:
    """Return the samples of each step, of the attempt that trained it last."""
    found: dict[int, tuple[int, list[int]]] = {}
    for path in sorted(folder.glob(f"log-{world_size}-*"), key=lambda p: p.name.split("-")[2]):
        attempt = int(path.name.split("-")[2])
        for line in path.read_text().splitlines():
            step, *indices = map(int, line.split())
            before = found.get(step, (attempt, []))
            found[step] = (attempt, (before[1] if before[0] == attempt else []) + indices)
    return {step: indices for step, (_, indices) in found.items()}


def check_epochs(steps: dict[int, list[int]]) -> None:
    assert sorted(steps) == list(range(1, STEPS + 1))
    for first in range(1, STEPS, EPOCH_STEPS):
        epoch = chain(*(steps[step] for step in range(first, first + EPOCH_STEPS)))
        assert sorted(epoch) == list(range(SAMPLES))


def final(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / f"{STEPS:04}.pt")["model"]
    return state


def test_a_synchronous_job_survives_a_rank_and_another_number_of_ranks(tmp_path: Path) -> None:
    undisturbed, disturbed, earlier = (tmp_path / name for name in ("one", "two", "three"))
    said = torchrun(1, tmp_path, "elastic_ddp.py", str(undisturbed))
    newest = undisturbed / f"{STEPS:04}.pt"
    assert f"trained {STEPS} steps, the last on 1 ranks; newest checkpoint: {newest}\n" in said
    check_epochs(trained(undisturbed, 1))

    said = torchrun(2, tmp_path, "elastic_ddp.py", str(disturbed), "--die-at", "13")
    assert "goes on after step" in said
    steps = trained(disturbed, 2)
    check_epochs(steps)

    earlier.mkdir()
    shutil.copy(disturbed / "0007.pt", earlier)
    said = torchrun(3, tmp_path, "elastic_ddp.py", str(earlier))
    assert said.count("of 3 goes on after step 7") == 3
    check_epochs({step: steps[step] for step in range(1, 8)} | trained(earlier, 3))

    for folder in (disturbed, earlier):
        torch.testing.assert_close(final(folder), final(undisturbed), rtol=1e-4, atol=1e-5)


def test_leases_go_on_from_a_checkpoint_after_a_worker_was_killed(tmp_path: Path) -> None:
    folder = tmp_path / "features"
    said = torchrun(3, tmp_path, "leases.py", str(folder), "--die")
    assert said.count("goes on, attempt 1") == 3, said
    assert said.count(f" batches of features into {folder}\n") >= 3, said
    # A worker of the first attempt that starts late finds a checkpoint too.
    read: dict[str, Counter[int]] = {"0": Counter(), "1": Counter()}
    for path in folder.glob("*.pt"):
        read[path.stem.split("-")[1]].update(torch.load(path)["indices"].tolist())
    assert all(count == 1 for attempt in read.values() for count in attempt.values())
    assert set(read["0"]) | set(read["1"]) == set(range(2_000))
    first = set(read["1"])
    assert len(first) < 2_000, "the second attempt has read again what the checkpoint had"
    state = json.loads((folder / "leases.json").read_text())
    assert state["epoch"] == 0


def test_ranks_of_two_nodes_meet_again_after_a_failure_on_one_of_them(tmp_path: Path) -> None:
    """The other node restarts its ranks without counting that."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--max-restarts=1"]
    options = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two"]
    program = str(ROOT / "tests" / "distributed" / "programs" / "restarted.py")
    nodes = [tmp_path / name for name in ("a", "b")]
    for node in nodes:
        node.mkdir()
    with ThreadPoolExecutor() as pool:
        ended = list(
            pool.map(lambda node: run([*launcher, *options, program, str(tmp_path)], node), nodes)
        )
    text = "".join(one.text for one in ended)
    assert [one.code for one in ended] == [0, 0], text
    assert text.count("met the others, attempt 0") == 3, text
    assert text.count("met the others, attempt 1") == 1, text
    assert "RendezvousError" not in text
