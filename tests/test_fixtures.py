"""Promises:
- A test that leaks a thread or a descriptor fails, and a hang ends with all stacks.
- Tests of Ctrl-C pass in the background of a shell.

The suite's own conftest.py and settings run on a small test file, in a child process. It starts no warm server.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.children import Python, run_python

ROOT = Path(__file__).parent.parent

SAMPLE_TESTS = '''
import os, signal, subprocess, sys, threading, weakref
import pytest, torch

KEPT = []
FOREVER = threading.Event()

class Cycle:
    """Unreachable at the end of its test, but collected only by the garbage collector."""
    def __init__(self, pipe):
        self.itself = self
        for fd in pipe:
            weakref.finalize(self, os.close, fd)

def test_passes_collected_later():
    Cycle(os.pipe())

def test_passes_ending_by_itself():
    threading.Timer(0.1, int).start()
    threading.enumerate()[-1].name = "fastload-worker-0"

def test_passes_processes():
    assert len(list(torch.utils.data.DataLoader(torch.arange(8), num_workers=1, multiprocessing_context="fork"))) == 8

def test_passes_package():
    KEPT.append(open(pytest.__file__))

def test_passes_interrupt():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    code = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_leaks_thread():
    threading.Thread(target=FOREVER.wait, name="fastload-worker-1", daemon=True).start()

def test_leaks_pipe():
    KEPT.append(os.pipe())

def test_leaks_file():
    KEPT.append(open(__file__))

def test_fails_for_its_own_reason():
    KEPT.append(os.pipe())
    raise AssertionError("the reason")

@pytest.mark.timeout(0.5)
def test_hangs():
    FOREVER.wait()
'''


RUN = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in what a shell starts with `&`
import pytest
from tests import children
children.warm_server = lambda: None
# Tests before these may have loaded modules of pytest's plugins into the process that this one is forked from.
sys.exit(pytest.main(["-v", "-W", "ignore::pytest.PytestAssertRewriteWarning"]))
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what pytest prints about the sample tests."""
    folder = tmp_path_factory.mktemp("sample")
    conftest = (ROOT / "tests" / "conftest.py").read_text()
    short = re.sub(r"^GRACE_S = [\d.]+", "GRACE_S = 1.0", conftest, flags=re.MULTILINE)
    assert short != conftest
    (folder / "tests").mkdir()
    (folder / "tests" / "conftest.py").write_text(short)
    (folder / "tests" / "test_sample.py").write_text(SAMPLE_TESTS)
    shutil.copy(ROOT / "pyproject.toml", folder)
    # Unbuffered, or a hang's stacks come in the middle of a line.
    run = run_python("-u", "-c", RUN, cwd=folder)
    assert "passes_package" in run.stdout, run.stderr
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize(
    ("test", "verdicts"),
    [
        ("passes_collected_later", ["PASSED"]),
        ("passes_ending_by_itself", ["PASSED"]),
        ("passes_processes", ["PASSED"]),
        ("passes_package", ["PASSED"]),
        ("passes_interrupt", ["PASSED"]),  # in the background of a shell
        ("leaks_thread", ["PASSED", "ERROR"]),
        ("leaks_pipe", ["PASSED", "ERROR"]),
        ("leaks_file", ["PASSED", "ERROR"]),
        ("fails_for_its_own_reason", ["FAILED"]),
        ("hangs", ["FAILED"]),
    ],
)
def test_a_leak_fails_its_test_and_what_ends_in_time_is_none(
    output: str, test: str, verdicts: list[str]
) -> None:
    assert re.findall(rf"^tests/test_sample\.py::test_{test} (\w+)", output, re.M) == verdicts


def test_a_leaked_thread_and_a_hang_are_told_with_stacks(output: str) -> None:
    assert re.search(r"threads left behind:\n.*fastload-worker-1\n(.*\n)+?.*in wait", output)
    assert "Stack of fastload-worker-1" in output


def test_a_module_that_cannot_be_imported_fails_its_program_and_no_later_one() -> None:
    """The server imports modules for all programs of a worker of the tests."""
    options = {"modules": ["not_there"], "stderr": subprocess.PIPE, "text": True}
    with Python(["-c", "import not_there"], **options) as child:
        assert "No module named 'not_there'" in child.communicate()[1]
    assert run_python("-c", "print('here')").stdout == "here\n"
