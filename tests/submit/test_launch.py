"""Promises:
- Host files are read in all forms, as the launcher reads them, and each launcher gets its own options.
- More ranks than slots are refused. `mpiexec` is recognised.
- A PBS job asks for `--depth` cores for each rank, and for one core without `--depth`.
"""

from __future__ import annotations

import shlex

import pytest

from fastload.distributed.launch import (
    Host,
    Job,
    Launcher,
    classify,
    command_line,
    job_script,
    parse_hosts,
    place,
)
from fastload.errors import LaunchError

HOSTS = """
# a comment
node1 slots=2   # two
node2:3

node3
node1
  node3
"""
TWO = (Host("a", 2), Host("b", 2))
BOUND = {"hosts": (), "depth": 8, "options": ("--mine", "1")}


def line(launcher: Launcher, **job: object) -> str:
    """The command line of four ranks of `python train.py 'x y'`."""
    asked = {"program": ("python", "train.py", "x y"), "ranks": 4, "hosts": TWO, **job}
    return shlex.join(command_line(Job(**asked), launcher, python="py"))  # type: ignore[arg-type]


def test_a_host_file_is_read_in_all_its_forms() -> None:
    hosts = parse_hosts(HOSTS, path="hosts")
    assert hosts == (Host("node1", 3), Host("node2", 3), Host("node3", 2))


@pytest.mark.parametrize(
    "entry",
    [
        "node slots=0",
        "node:-1",
        "node slots = 2",
        "node:2 slots=2",
        "-x",
        "node;reboot",
        "a,b",
        "nöde",
    ],
)
def test_a_line_that_is_no_host_is_named(entry: str) -> None:
    with pytest.raises(LaunchError, match="^hosts, line 2: expected `host`, .* got ") as caught:
        parse_hosts(f"good\n{entry}\n", path="hosts")
    assert repr(entry) in str(caught.value)
    with pytest.raises(LaunchError, match="^hosts lists no hosts"):
        parse_hosts("# nothing\n\n", path="hosts")


@pytest.mark.parametrize(
    ("ranks", "ppn", "used"),
    [
        (5, None, [("a", 4), ("b", 1)]),
        (7, None, [("a", 4), ("b", 2), ("c", 1)]),
        (3, 1, [("a", 1), ("b", 1), ("c", 1)]),
        (5, 2, [("a", 2), ("b", 2), ("c", 1)]),
    ],
)
def test_hosts_are_filled_in_their_order(
    ranks: int, ppn: int | None, used: list[tuple[str, int]]
) -> None:
    hosts = (Host("a", 4), Host("b", 2), Host("c", 1))
    placed = place(hosts, ranks, path="hosts", ppn=ppn)
    assert [(host.name, host.slots) for host in placed] == used


def test_more_ranks_than_slots_are_refused_in_a_sentence() -> None:
    with pytest.raises(
        LaunchError, match="^5 ranks are too many: hosts has 4 slots on 2 hosts. Start fewer"
    ):
        place(TWO, 5, path="hosts")
    with pytest.raises(
        LaunchError, match="^5 ranks are too many: hosts has 2 slots on 2 hosts.*--ppn"
    ):
        place(TWO, 5, path="hosts", ppn=1)


@pytest.mark.parametrize(
    ("launcher", "job", "expected"),
    [
        ("openmpi", {}, "mpiexec -n 4 --host a:2,b:2 --map-by slot --bind-to none"),
        ("hydra", {}, "mpiexec -n 4 -hosts a:2,b:2"),
        ("pals", {}, "mpiexec -n 4 --ppn 2 --hosts a,b --cpu-bind none"),
        (
            "srun",
            {},
            "srun --disable-status --ntasks 4 --nodes 2 --nodelist a,b --ntasks-per-node 2 --cpu-bind none",
        ),
        ("openmpi", BOUND, "mpiexec -n 4 --map-by slot:PE=8 --bind-to core --mine 1"),
        ("hydra", BOUND, "mpiexec -n 4 -bind-to core:8 --mine 1"),
        ("pals", BOUND, "mpiexec -n 4 --depth 8 --cpu-bind depth --mine 1"),
        (
            "srun",
            BOUND,
            "srun --disable-status --ntasks 4 --cpus-per-task 8 --cpu-bind cores --mine 1",
        ),
        (
            "torchrun",
            BOUND,
            "py -m torch.distributed.run --standalone --nproc-per-node 4 --mine 1 --no-python",
        ),
        (
            "openmpi",
            {"hosts": (), "export": ("PATH", "A")},
            "mpiexec -n 4 --map-by slot --bind-to none -x PATH -x A",
        ),
    ],
)
def test_hosts_depth_and_options_are_given_as_each_launcher_takes_them(
    launcher: Launcher, job: dict[str, object], expected: str
) -> None:
    assert line(launcher, **job) == f"{expected} python train.py 'x y'"


def test_one_rank_needs_no_launcher() -> None:
    assert line("none", hosts=(), ranks=1) == "python train.py 'x y'"
    with pytest.raises(LaunchError, match="starts one rank .* but 4 ranks are requested"):
        line("none", hosts=())


@pytest.mark.parametrize(
    ("version", "path", "launcher"),
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs", "/usr/bin/mpiexec", "openmpi"),
        ("mpiexec (OpenRTE) 4.0.5", "/usr/bin/orterun", "openmpi"),
        ("HYDRA build details:\n    Version:   5.0.2", "/usr/bin/mpiexec.hydra", "hydra"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.10", "/opt/bin/mpiexec", "hydra"),
        ("mpiexec version 1.2.12 revision 5fcba3a", "/opt/cray/pals/1.2/bin/mpiexec", "pals"),
    ],
)
def test_an_mpiexec_is_recognised(version: str, path: str, launcher: Launcher) -> None:
    assert classify(version, path) == launcher
    with pytest.raises(
        LaunchError, match="'Mine 1'. Put .* choose with --launcher: openmpi, hydra"
    ):
        classify("\nMine 1\nmore", "/usr/bin/mpiexec")


@pytest.mark.parametrize("launcher", ["openmpi", "hydra", "pals", "srun"])
def test_an_argument_that_would_begin_another_program_is_refused(launcher: Launcher) -> None:
    """`mpiexec -n 2 python train.py a : b` runs the program b."""
    job = Job(program=("python", "train.py", "a", ":", "b"), ranks=2)
    with pytest.raises(LaunchError, match=f"an argument is ':', and {launcher} would"):
        command_line(job, launcher, python="py")
    assert command_line(job, "torchrun", python="py")[-5:] == list(job.program)


def test_a_job_script_asks_for_the_hosts_that_the_ranks_need() -> None:
    asked = {
        "name": "4th-train_it_now_and_here",
        "ranks": 6,
        "ppn": 4,
        "depth": 8,
        "walltime": "0:30:00",
        "directives": ("-A me",),
        "environ": {"PATH": "/a b:/c"},
    }
    command = ["py", "-m", "fastload", "submit", "--", "a $b"]
    assert job_script("pbs", command, **asked).splitlines() == [  # type: ignore[arg-type]
        "#!/bin/bash",
        "#PBS -N thtrainitnowand",
        "#PBS -l select=2:ncpus=32:mpiprocs=4",
        "#PBS -l walltime=0:30:00",
        "#PBS -k doe",
        "#PBS -A me",
        "set -euo pipefail",
        "export PATH='/a b:/c'",
        'cd "$PBS_O_WORKDIR"',
        "exec py -m fastload submit -- 'a $b'",
    ]
    slurm = job_script("slurm", command, **asked).splitlines()  # type: ignore[arg-type]
    assert slurm[2:7] == [
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks=6",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --time=0:30:00",
        "#SBATCH --cpus-per-task=8",
    ]
    unbound = job_script("pbs", command, **(asked | {"depth": None}))  # type: ignore[arg-type]
    assert "#PBS -l select=2:ncpus=4:mpiprocs=4" in unbound
    with pytest.raises(LaunchError, match="a directive must be one line"):
        job_script("pbs", command, **(asked | {"walltime": "1\n#PBS -x"}))  # type: ignore[arg-type]
