"""Promises:
- `fastload tensorboard` answers at the address that it prints, on localhost alone, with the line for a login node.
- A port that is taken is no obstacle to `fastload tensorboard`. An empty folder is mentioned, and a missing one is
  named.
- Ctrl-C and SIGTERM end `fastload tensorboard` and all processes that it started.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from fastload.cli import main
from tests.conftest import settle
from tests.tensorboard_process import tensorboard


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)


def group_of(pid: int) -> list[str]:
    """The processes that a process started, and theirs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found += [entry.name, *group_of(int(entry.name))]
    return found


def test_it_answers_where_it_says_and_ends(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    logdir = tmp_path / "logdir"
    with SummaryWriter(str(logdir / "2026-11-21-18-30-05")) as scalars:
        scalars.add_scalar("train/loss", 1.0, 1)
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with tensorboard(logdir, "--port", str(port), errors=tmp_path / "errors") as running:
            mine = urlsplit(running.url).port
            assert mine != port
            assert f"Port {port} is taken, so port {mine} is used." in running.said
            assert (
                f"shows {logdir} (runs: 1, profiles: 0) at http://localhost:{mine}/" in running.said
            )
            assert f"\n    ssh -N -L {mine}:localhost:{mine} " in running.said
            assert f"@{socket.gethostname()}\n" in running.said
            assert f"open http://localhost:{mine}/ there" in running.said
            assert get(f"{running.url}data/environment")["version"]
            with pytest.raises(
                OSError, match="refused"
            ):  # of an address that is this machine's too
                socket.create_connection(("127.0.0.2", mine or 0), timeout=10)
            started = group_of(running.process.pid)
        assert running.process.returncode == 0
    assert started, "TensorBoard's own data server, at the least"
    assert not settle(lambda: [pid for pid in started if os.path.exists(f"/proc/{pid}")])
    assert "Traceback" not in (tmp_path / "errors").read_text()


@pytest.mark.slow
def test_an_empty_folder_is_said_to_be_and_sigterm_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "logdir").mkdir()
    with tensorboard(tmp_path / "logdir", errors=tmp_path / "errors") as running:
        where = tmp_path / "logdir" / "DATE-TIME-workersN-ranksN"
        assert f"(no runs yet; `fastload train` writes each run into {where})" in running.said
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(60)
    assert running.process.returncode == 143


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["tensorboard", str(tmp_path / "logs")])
    assert result.exit_code == 2
    assert f"'{tmp_path / 'logs'}' does not exist" in result.output
