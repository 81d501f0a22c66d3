"""Promises:
- The number of threads of a rank is its share of the cores that its launcher gave it.
- A rank that has one core of many gives a warning that names the launcher's option. See also
  `tests/distributed/test_env.py`.
- The device of a rank is that of its local rank.
"""

from __future__ import annotations

import os

import pytest

from fastload import distributed
from fastload.distributed import Rank
from fastload.distributed.affinity import one_core_warning, share
from fastload.distributed.detect import Launcher
from fastload.distributed.group import device_of
from fastload.errors import RankError


@pytest.mark.parametrize(
    ("on_node", "cores"),
    [
        ([range(16)], [16]),
        ([range(16)] * 4, [4] * 4),  # nobody is bound
        ([range(0, 4), range(4, 8), range(8, 12), range(12, 16)], [4] * 4),
        ([range(3)] * 2, [1, 1]),  # one and a half each
        ([range(4), range(2, 6)], [3, 3]),
        ([range(8), [0], [0]], [7, 1, 1]),
        ([[0]] * 4, [1] * 4),
    ],
    ids=str,
)
def test_a_core_is_shared_by_those_that_may_use_it(on_node: list[range], cores: list[int]) -> None:
    assert [share(own, on_node) for own in on_node] == cores


@pytest.mark.parametrize(
    ("launcher", "own", "machine", "ranks", "remedy"),
    [
        ("pals", [3], 32, 4, "--depth THREADS --cpu-bind depth"),
        ("openmpi", [3], 32, 4, "--bind-to none"),
        ("mpich", [3], 32, 4, "-bind-to none"),
        ("slurm", [3], 32, 4, "--cpus-per-task"),
        ("torchrun", [3], 32, 4, "taskset"),
        ("none", [0], 8, 1, None),
        ("mpich", [0, 1], 8, 4, None),
        ("mpich", [0], 4, 4, None),
    ],
)
def test_one_core_of_many_is_warned_of_with_the_launchers_remedy(
    launcher: Launcher, own: list[int], machine: int, ranks: int, remedy: str | None
) -> None:
    warning = one_core_warning(launcher, own, machine, ranks)
    assert (warning is None) == (remedy is None)
    if warning is not None and remedy is not None:
        assert "only on core 3, although the node has 32 cores for 4 ranks" in warning
        assert remedy in warning


def test_without_a_launcher_a_process_has_the_cores_that_it_may_run_on() -> None:
    assert distributed.cores() == len(os.sched_getaffinity(0))


def test_a_rank_has_the_device_of_its_local_rank_or_the_only_one_it_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ranks = [Rank(4 + local, 8, local, 4, "pals") for local in range(4)]
    assert [device_of(rank, 4) for rank in ranks] == [0, 1, 2, 3]
    for count in (1, 2):
        with pytest.raises(RankError, match=f"Local rank 3 of 4 has no .* torch finds {count} "):
            device_of(ranks[3], count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-this-rank")
    assert [device_of(rank, 1) for rank in ranks] == [0] * 4
