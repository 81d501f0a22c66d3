"""`fastload tensorboard`: show the runs under a folder in a browser, which may be on another machine."""

from __future__ import annotations

import atexit
import getpass
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import click

from fastload._kit.options import ExistingFolder, Option, Port, options
from fastload.cli._command import Command
from fastload.cli._common import Terminated, require, sigterm_raises, wait_for_a_signal


@options
class Server:
    """What to show, and to whom."""

    logdir: Annotated[ExistingFolder, Option("[LOGDIR]")] = Path("logdir")
    port: Port | None = None
    """Port to listen on. If it is taken, any free port is used. [default: 6006, or the next free port]"""
    bind_all: bool = False
    """Let other machines connect too."""


@Command
def tensorboard(options: Server) -> None:
    """Show the runs under LOGDIR in TensorBoard, until Ctrl-C.

    Prints the address, and the ssh command that forwards it from a login node to your own machine. Profiles of
    `fastload train --profile` are in the tab PYTORCH_PROFILER. That tab loads its charts from the web. If the browser
    is offline, open the profile in chrome://tracing instead. Needs pip install '.[tensorboard]' in the
    clone.

    \b
    Examples:
        fastload tensorboard
        fastload tensorboard logdir --port 6007
    """
    require("tensorboard", tensorboard="TensorBoard")
    try:
        with sigterm_raises():
            url = _serve(options)
            click.echo(_directions(options, url))
            wait_for_a_signal()
    except KeyboardInterrupt as ended_by:
        # Another signal would interrupt the plugins while they end their processes, and the processes would stay.
        for number in (signal.SIGINT, signal.SIGTERM):
            atexit.register(signal.signal, number, signal.SIG_IGN)
        if isinstance(ended_by, Terminated):
            raise
    click.echo("TensorBoard has ended.")


def _serve(options: Server) -> str:
    """Start TensorBoard in threads of this process, and return its address."""
    from tensorboard import default, program

    # They warn of a missing TensorFlow, which is not needed, and log each file that the plugin reads.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_PROFILER_LOG_LEVEL", "WARNING")
    where = ["--bind_all"] if options.bind_all else ["--host", "localhost"]

    def launch(*ports: str) -> Any:
        server = program.TensorBoard(default.get_plugins())
        server.configure(["tensorboard", "--logdir", str(options.logdir), *where, *ports])
        return server.launch()

    try:
        return str(launch(*([] if options.port is None else ["--port", str(options.port)])))
    except program.TensorBoardPortInUseError:
        return str(launch("--port", "0"))
    except program.TensorBoardServerException as error:
        raise click.ClickException(f"TensorBoard cannot start: {error}") from error


def _directions(options: Server, url: str) -> str:
    port, asked, logdir = urlsplit(url).port, options.port, options.logdir
    host = socket.gethostname()
    lines = [f"TensorBoard shows {logdir} ({_content(logdir)}) at {url}"]
    if asked and asked != port:
        lines.append(f"Port {asked} is taken, so port {port} is used.")
    if options.bind_all:
        lines.append("Every machine that can reach this machine can open TensorBoard.")
    lines += [
        "If this is a login node, run on your own machine",
        f"    ssh -N -L {port}:localhost:{port} {getpass.getuser()}@{host}",
        f"and open http://localhost:{port}/ there. If your machine cannot reach {host} directly,",
        f"insert -J and the name of the login machine before {getpass.getuser()}@{host}.",
        "Press Ctrl-C to end TensorBoard.",
    ]
    return "\n".join(lines)


def _content(logdir: Path) -> str:
    """Return the numbers of runs and profiles as text, or the folder that `fastload train` writes if there are none."""
    events = list(logdir.rglob("*tfevents*"))
    traces = [*logdir.rglob("*.pt.trace.json"), *logdir.rglob("*.pt.trace.json.gz")]
    runs = {path.parent for path in (*events, *traces)}
    if not runs:
        return f"no runs yet; `fastload train` writes each run into {logdir / 'DATE-TIME-workersN-ranksN'}"
    return f"runs: {len(runs)}, profiles: {len(traces)}"
