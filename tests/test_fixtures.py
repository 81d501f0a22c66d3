"""Promise: a test that leaks a thread or a descriptor fails, and a hang ends with all stacks.

The suite's own conftest.py and settings run on a small test file, in a child process.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert len(list(torch.utils.data.DataLoader(torch.arange(8), num_workers=1))) == 8

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
    run = subprocess.run(
        # As a shell starts it with `&`: SIGINT is ignored.
        ["sh", "-c", 'trap "" INT; exec "$0" -m pytest -v', sys.executable],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    return run.stdout


def verdicts(output: str, test: str) -> list[str]:
    """Return PASSED, FAILED or ERROR for the test's body and for what the fixtures found after."""
    return re.findall(rf"^tests/test_sample\.py::{test} (\w+)", output, flags=re.MULTILINE)


@pytest.mark.parametrize("test", ["collected_later", "ending_by_itself", "processes", "package"])
def test_what_ends_in_time_is_no_leak(output: str, test: str) -> None:
    assert verdicts(output, f"test_passes_{test}") == ["PASSED"]


def test_ctrl_c_arrives_in_the_background_of_a_shell(output: str) -> None:
    assert verdicts(output, "test_passes_interrupt") == ["PASSED"]


@pytest.mark.parametrize("test", ["thread", "pipe", "file"])
def test_a_leak_fails_the_test_that_made_it(output: str, test: str) -> None:
    assert verdicts(output, f"test_leaks_{test}") == ["PASSED", "ERROR"]


def test_a_leaked_thread_is_named_with_its_stack(output: str) -> None:
    assert re.search(r"threads left behind:\n.*fastload-worker-1\n(.*\n)+?.*in wait", output)


def test_a_failure_is_reported_once(output: str) -> None:
    assert verdicts(output, "test_fails_for_its_own_reason") == ["FAILED"]


def test_a_hang_ends_with_the_stacks_of_all_threads(output: str) -> None:
    assert verdicts(output, "test_hangs") == ["FAILED"]
    assert "Stack of fastload-worker-1" in output
