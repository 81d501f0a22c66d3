"""Promises:
- `prepare` under `mpiexec` gives the same bytes with both MPIs, by host file too, and on processes, threads and
  Parsl. Parsl 2026.10.26 was run by hand.
- A source that fails is named under MPI too. A rank that dies loses no complete part, and a second run makes the
  rest.
- The ranks of a communicator prepare a set too.
- All of 60,000 pairs come aligned, for 1, 2, 3, 4 and 32 ranks. The set was prepared by 4 MPI ranks, and is read by 3
  as well.
- `prepare` keeps complete parts when the tmpfs is full, and continues once there is room. Reading a set needs no room.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastload import DataLoader, RankSampler, store
from fastload.errors import StoreFullError
from fastload.store.root import sets
from tests.distributed.launching import LAUNCHERS, command, run
from tests.files import arrow_files
from tests.sizes_of_runs import in_full

MPIS = [launcher for launcher in LAUNCHERS if launcher != "torchrun"]
PARTS = 20
ROWS = 60_000

PROGRAM = """
import os, sys, signal
import numpy as np
from fastload import store

def rows_of(bad, number):
    if number == bad and sys.argv[-1] != "good":
        if sys.argv[-1] == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"no digits in {number}")
    y = np.arange(number * 3000, (number + 1) * 3000)
    return {"x": (y[:, None] * 31 + np.arange(8)).astype(np.uint8), "y": y}

if __name__ == "__main__":
    from functools import partial
    from mpi4py.futures import MPIPoolExecutor
    with MPIPoolExecutor() as pool:
        if pool is not None:
            print(store.prepare(partial(rows_of, 13), range(20), sys.argv[1], executor=pool,
                                version=sys.argv[2], checksums=True), flush=True)
"""


def rows_of(number: int) -> dict[str, Any]:
    y = np.arange(number * (ROWS // PARTS), (number + 1) * (ROWS // PARTS))
    return {"x": (y[:, None] * 31 + np.arange(8)).astype(np.uint8), "y": y}


def aligned(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x, (y[:, None] * 31 + torch.arange(8)).to(torch.uint8))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of 60,000 rows in 20 parts, prepared by one thread."""
    path = tmp_path_factory.mktemp("engines") / "set"
    store.prepare(rows_of, range(PARTS), path, workers=0, checksums=True)
    return path


def under_mpi(
    launcher: str, folder: Path, how: str, *options: str, ranks: int = 5
) -> tuple[int, str]:
    """Prepare the set `folder`/set under mpiexec: one rank submits, the others work."""
    (folder / "program.py").write_text(PROGRAM)
    if launcher == "openmpi":
        options = (*options, "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none")
    started = command(
        launcher,
        ranks,
        "-m",
        "mpi4py.futures",
        "program.py",
        str(folder / "set"),
        "1",
        how,
        options=options,
    )
    ended = run(started, folder)
    return ended.code, ended.text


@pytest.mark.slow
@pytest.mark.parametrize("launcher", MPIS)
def test_under_mpi(launcher: str, tmp_path: Path, prepared: Path) -> None:
    """Four of five ranks make the set, by a host file. A second run finds it, and three ranks read it."""
    openmpi = launcher == "openmpi"
    (tmp_path / "hosts").write_text("localhost slots=5\n" if openmpi else "localhost:5\n")
    code, text = under_mpi(launcher, tmp_path, "good", "--hostfile" if openmpi else "-f", "hosts")
    assert code == 0, text
    assert "60,000 rows, 20 parts made" in text
    assert arrow_files(tmp_path / "set") == arrow_files(prepared)
    assert store.get(tmp_path / "set").set_id == store.get(prepared).set_id
    code, text = under_mpi(launcher, tmp_path, "good", ranks=3)
    assert "0 parts made, 20 reused" in text, text
    (tmp_path / "reader.py").write_text(READER)
    options = ("--map-by", ":OVERSUBSCRIBE") if openmpi else ()
    reader = command(launcher, 3, "reader.py", str(tmp_path / "set"), options=options)
    ended = run(reader, tmp_path)
    assert ended.code == 0, ended.text
    rows = [torch.load(tmp_path / f"rows-{rank}-of-3.pt") for rank in range(3)]
    assert torch.cat(rows).sort().values.tolist() == list(range(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("launcher", in_full(MPIS, MPIS[:1]))
def test_under_mpi_a_source_that_fails_is_named(launcher: str, tmp_path: Path) -> None:
    code, text = under_mpi(launcher, tmp_path, "fails")
    assert code != 0
    assert "PrepareError: the source 13: ValueError: no digits in 13" in text
    assert not (tmp_path / "set").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", in_full(MPIS, MPIS[1:]))
def test_under_mpi_a_rank_that_dies_loses_no_complete_part(
    launcher: str, tmp_path: Path, prepared: Path
) -> None:
    code, text = under_mpi(launcher, tmp_path, "dies", ranks=2)  # one worker, parts in order
    assert code != 0
    assert "PrepareError" not in text, "the rank was killed, and raised nothing"
    assert not (tmp_path / "set").exists()
    there = {file.name for file in (tmp_path / ".unsealed" / "set").glob("*.json")}
    assert len(there) >= 12
    code, text = under_mpi(launcher, tmp_path, "good", ranks=2)
    assert code == 0, text
    assert f"{PARTS - len(there)} parts made, {len(there)} reused" in text
    assert arrow_files(tmp_path / "set") == arrow_files(prepared)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", MPIS)
def test_on_the_ranks_of_a_communicator(launcher: str, tmp_path: Path, prepared: Path) -> None:
    program = PROGRAM.replace(
        "import MPIPoolExecutor", "import MPICommExecutor\n    from mpi4py import MPI"
    )
    program = program.replace("MPIPoolExecutor()", "MPICommExecutor(MPI.COMM_WORLD, root=0)")
    (tmp_path / "program.py").write_text(program)
    options = ("--map-by", ":OVERSUBSCRIBE") if launcher == "openmpi" else ()
    ended = run(
        command(launcher, 4, "program.py", str(tmp_path / "set"), "1", "good", options=options),
        tmp_path,
    )
    assert ended.code == 0, ended.text
    assert arrow_files(tmp_path / "set") == arrow_files(prepared)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_on_other_engines(engine: str, tmp_path: Path, prepared: Path) -> None:
    processes = partial(ProcessPoolExecutor, 2, mp_context=get_context("fork"))
    with processes() if engine == "processes" else ThreadPoolExecutor(4) as pool:
        store.prepare(rows_of, range(PARTS), tmp_path / "set", executor=pool, checksums=True)
    assert arrow_files(tmp_path / "set") == arrow_files(prepared)


def test_on_parsl(tmp_path: Path, prepared: Path) -> None:
    pytest.importorskip("parsl")
    program = PROGRAM.replace(
        "from mpi4py.futures import MPIPoolExecutor", "import parsl.concurrent"
    )
    program = program.replace(
        "MPIPoolExecutor()", "parsl.concurrent.ParslPoolExecutor(parsl.Config())"
    )
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "program.py", str(tmp_path / "set"), "1", "good"]
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run(command, cwd=tmp_path, check=True, env=environ)
    assert arrow_files(tmp_path / "set") == arrow_files(prepared)


# ---- worlds ----


@pytest.mark.parametrize(("world", "workers"), [(1, 2), (2, 0), (3, 2), (4, 0), (32, 0)])
def test_every_pair_is_read_once_and_aligned(world: int, workers: int, prepared: Path) -> None:
    dataset = store.get(prepared, data="x", label="y")
    seen = []
    for rank in range(world):
        sampler = RankSampler(dataset, rank=rank, world_size=world, ends="uneven")
        loader = DataLoader(dataset, 128, sampler=sampler, num_workers=workers, seed=5)
        for x, y in loader:
            assert aligned(x, y)
            seen.append(y)
    assert torch.cat(seen).sort().values.tolist() == list(range(ROWS))


READER = """
import sys, torch
from fastload import DataLoader, RankSampler, store
from fastload import distributed

rank = distributed.detect_rank().rank
dataset = store.get(sys.argv[1], data="x", label="y")
sampler = RankSampler(dataset, rank=rank.rank, world_size=rank.world_size)
rows = []
for x, y in DataLoader(dataset, 128, sampler=sampler, num_workers=2, seed=5):
    assert torch.equal(x, (y[:, None] * 31 + torch.arange(8)).to(torch.uint8))
    rows.append(y)
torch.save(torch.cat(rows), f"rows-{rank.rank}-of-{rank.world_size}.pt")
"""


# ---- a memory that is full, and what is opened ----


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_full_memory_keeps_complete_parts_and_nothing_else(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("fastload.store.preparing")
    monkeypatch.setattr(module, "get_context", lambda _: get_context("fork"))  # a spawn takes long
    mount = tmp_path / "memory"
    mount.mkdir()
    size = 3 * 2**18  # of 20 parts of 48 kB about 15
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", mount],
        check=False,
        capture_output=True,
    ).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        with pytest.raises(
            StoreFullError, match=r"needs [\d,]+ more bytes, but only [\d,]+ are free"
        ):
            store.prepare(rows_of, range(PARTS), mount / "set", workers=workers)
        assert list(sets(str(mount))) == []
        parts = list((mount / ".unsealed" / "set").glob("*.arrow"))
        assert 5 < len(parts) < PARTS
        subprocess.run(["mount", "-o", "remount,size=4m", mount], check=True)
        found = store.prepare(rows_of, range(PARTS), mount / "set", workers=workers)
        assert found.reused >= len(parts)
        dataset = store.get(mount / "set", data="x", label="y")
        with (
            (mount / "rest").open("wb", buffering=0) as rest,
            pytest.raises(OSError, match="No space left"),
        ):
            while True:
                rest.write(bytes(2**12))
        (x, y), *_ = DataLoader(dataset, ROWS)
        assert aligned(x, y), "reading needs no room"
        dataset._parts.clear()
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
