"""Promises:
- `fastload submit` runs what `--dry-run` shows, under both MPIs too.
- Signals reach the whole process group, and the exit code is the job's.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastload.cli import main
from fastload.distributed.execute import execute, signal_options
from fastload.errors import LaunchError

STAND_INS = Path(__file__).parent / "stand_ins"
HERE = socket.gethostname()


def submit(*arguments: str | int | Path, **environ: str | None) -> Result:
    return CliRunner().invoke(main, ["submit", *map(str, arguments)], env=environ)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that says its rank and arguments, or does what its first argument says."""
    path = tmp_path / "a script.py"
    path.write_text(
        "import os, signal, sys\n"
        "if sys.argv[1:2] == ['exit']: sys.exit(int(sys.argv[2]))\n"
        "if sys.argv[1:2] == ['signal']: os.kill(os.getpid(), int(sys.argv[2]))\n"
        "print(os.environ.get('PMI_RANK', '-'), os.environ.get('PMI_SIZE', '-'), sys.argv[1:])\n"
    )
    return path


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb:2\n")
    return path


@pytest.fixture
def pals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in mpiexec on the PATH, and the file of its notes."""
    monkeypatch.setenv("PATH", f"{STAND_INS}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    return tmp_path / "notes"


# ---- what is run ----


def test_a_dry_run_prints_the_command_and_runs_nothing(
    script: Path, hosts: Path, pals: Path
) -> None:
    asked = ["--script", script, "--parallelism", 3, "--hostfile", hosts, "--dry-run"]
    result = submit(*asked, "--", "-x", "a b")
    assert result.exit_code == 0
    expected = (
        f"mpiexec -n 3 --ppn 2 --hosts a,b --cpu-bind none {sys.executable} '{script}' -x 'a b'\n"
    )
    assert result.output == expected
    assert not pals.exists()


def test_what_is_run_is_what_a_dry_run_shows(
    script: Path, hosts: Path, pals: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--script", script, "--parallelism", "4", "--hostfile", hosts]
    shown = submit(*arguments, "--dry-run", "--", "x").output
    assert submit(*arguments, "--", "x").exit_code == 0
    assert pals.read_text() == shown.replace("'", "")
    assert capfd.readouterr().out.splitlines() == [f"{rank} 4 ['x']" for rank in range(4)]


def test_auto_needs_no_launcher_for_one_rank_and_torchrun_where_there_is_no_mpiexec(
    script: Path, tmp_path: Path
) -> None:
    asked = ["--script", script, "--dry-run"]
    path = str(tmp_path / "nothing here")
    assert submit(*asked, PATH=path).output == f"{sys.executable} '{script}'\n"
    four = submit(*asked, "--parallelism", "4", PATH=path).output
    assert "torch.distributed.run --standalone --nproc-per-node 4" in four
    (tmp_path / "hosts").write_text(f"{HERE} slots=4\n")
    here = submit(*asked, "--parallelism", "4", "--hostfile", tmp_path / "hosts", PATH=path)
    assert here.output == four
    (tmp_path / "hosts").write_text("elsewhere slots=4\n")
    there = submit(*asked, "--parallelism", "4", "--hostfile", tmp_path / "hosts", PATH=path)
    assert there.exit_code == 1
    assert "mpiexec is not on PATH, and the ranks must run on elsewhere" in there.output


@pytest.mark.parametrize("family", ["mpich", "openmpi"])
def test_a_real_mpi_starts_the_ranks_of_a_host_file(
    script: Path, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    place = Path(sys.prefix) / "mpi" / family / "bin"
    if not (place / "mpiexec").exists():
        pytest.skip(f"{family} is not installed: scripts/test does that")
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    script.write_text(
        "import os\n"
        "rank = os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK']\n"
        "print(f'rank {rank}\\n', end='', flush=True)\n"
    )
    (tmp_path / "hosts").write_text("localhost slots=2\n127.0.0.1\n")
    status = submit("--script", script, "--parallelism", "3", "--hostfile", tmp_path / "hosts")
    out, err = capfd.readouterr()
    assert status.exit_code == 0, err
    assert sorted(out.splitlines()) == ["rank 0", "rank 1", "rank 2"]


# ---- how it ends ----


@pytest.mark.parametrize(
    ("arguments", "status"), [(["exit", "7"], 7), (["signal", "15"], 143), (["signal", "9"], 137)]
)
def test_the_exit_code_is_the_jobs(script: Path, arguments: list[str], status: int) -> None:
    assert submit("--script", script, "--", *arguments).exit_code == status


TREE = """
import os, signal, subprocess, sys
signum = int(sys.argv[1])
if len(sys.argv) > 2:
    signal.signal(signum, lambda *_: sys.exit("child"))
    os.write(1, b"ready\\n")
    signal.pause()
def end(*_):
    os.write(1, child.stderr.read() + b"parent\\n")
    sys.exit(40)
signal.signal(signum, end)
child = subprocess.Popen([*sys.orig_argv, "as a child"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
os.write(1, child.stdout.readline())
signal.pause()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_reaches_the_whole_group_and_the_jobs_exit_code_comes_back(
    signum: signal.Signals,
) -> None:
    """`execute` runs in a forked child, which gets the signal once the job and the job's own child are ready for it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(writing, 1)
        try:
            os._exit(execute([sys.executable, "-c", TREE, str(int(signum))]))
        finally:
            os._exit(99)
    os.close(writing)
    with open(reading) as output:
        assert output.readline() == "ready\n"
        os.kill(pid, signum)
        assert output.read() == "child\nparent\n"
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 40


@pytest.mark.slow
def test_no_rank_of_torchrun_outlives_a_signal_that_it_does_not_know_of_itself(
    tmp_path: Path,
) -> None:
    if not signal_options():
        pytest.skip("this torchrun cannot pass on SIGUSR1")
    program = tmp_path / "program.py"
    program.write_text("import os, signal\nos.write(1, b'ready\\n')\nsignal.pause()\n")
    command = [sys.executable, "-m", "fastload", "submit", "--launcher", "torchrun"]
    command += ["--parallelism", "2", "--script", str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.read() == b""  # to the end: nobody holds it open any more
    assert process.returncode != 0


def test_a_program_that_cannot_be_started_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError, match="cannot run /nowhere/mpiexec: "):
        execute(["/nowhere/mpiexec", "-n", "1"])
    (tmp_path / "program").touch(mode=0o755)
    assert execute([str(tmp_path / "program")]) == 126
    assert capfd.readouterr().err == f"Error: cannot run {tmp_path}/program: Exec format error\n"


# ---- batch jobs ----


def test_a_pbs_job_does_on_its_hosts_what_was_asked_for(
    script: Path, pals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script.parent / "home").mkdir()
    monkeypatch.chdir(script.parent)
    monkeypatch.setenv("HOME", str(script.parent / "home"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    asked = ["--script", script, "--parallelism", "4", "--ppn", "2", "--pbs", "--", "x y"]
    assert submit(*asked).exit_code == 0
    output = Path("job.o123").read_text()
    assert output.splitlines() == [f"{rank} 4 ['x y']" for rank in range(4)]
    assert " -n 4 --ppn 2 --hosts node1,node2 " in pals.read_text()


# ---- a user's errors ----


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "give either --script or --module"),
        (["--script", "/nowhere.py"], 2, "File '/nowhere.py' does not exist"),
        (["--module", "x", "--ppn", "2"], 2, "--ppn needs --hostfile"),
        (["--module", "x", "--env", "NOT_SET_HERE"], 2, "--env NOT_SET_HERE: the variable is not"),
        (["--module", "x", "--hostfile", __file__], 1, "test_submit.py, line 1: expected `host`"),
        (
            ["--module", "x", "--hostfile", "HOSTS", "--pbs"],
            2,
            "--hostfile cannot be used with --pbs",
        ),
        (
            ["--module", "x", "--hostfile", "HOSTS", "--parallelism", "5"],
            1,
            "has 4 slots on 2 hosts",
        ),
    ],
)
def test_a_users_error_is_one_sentence(
    hosts: Path, arguments: list[str], status: int, said: str
) -> None:
    result = submit(*(str(hosts) if word == "HOSTS" else word for word in arguments))
    assert result.exit_code == status
    assert said in result.output
