"""`fastload tensorboard`: the runs under a folder, in a browser that may be elsewhere."""

from __future__ import annotations

import getpass
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from fastload.cli._common import Terminated, require

_ENDS = {signal.SIGINT, signal.SIGTERM}


@click.command()
@click.argument(
    "logdir", type=click.Path(exists=True, file_okay=False, path_type=Path), default="logdir"
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="By default 6006 or the next free one; where the port named is taken, any free one.",
)
@click.option("--bind-all", is_flag=True, help="Let other machines connect, not this one alone.")
def tensorboard(logdir: Path, port: int | None, bind_all: bool) -> None:
    """Show the runs under LOGDIR in TensorBoard, until Ctrl-C.

    Prints the address, and the line that brings it from a login node to your own machine. A profile (`fastload
    train --profile`) is under PYTORCH_PROFILER; its charts come from the web, so where the browser has none, open the
    file at ui.perfetto.dev or in chrome://tracing.
    """
    require("tensorboard", tensorboard="TensorBoard")
    with _ends() as wait:
        url = _serve(logdir, port, bind_all)
        click.echo(_directions(logdir, url, port, bind_all))
        ended_by = wait()
    if ended_by == signal.SIGTERM:
        raise Terminated
    click.echo("TensorBoard has ended.")


@contextmanager
def _ends() -> Iterator[Callable[[], int]]:
    """Gives a function that waits for Ctrl-C or SIGTERM, counted from here, and returns which it was.

    In the threads of this process and its plugins any thread may be the one that the signal comes to, so it is
    Python's wake-up descriptor that is waited at. Afterwards Ctrl-C is ignored: a second one would strike as the
    plugins end their processes, which then stay. A signal that is ignored stays ignored.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    taken = {number for number in _ENDS if signal.getsignal(number) is not signal.SIG_IGN}
    before: dict[int, Any] = {number: signal.signal(number, lambda *_: None) for number in taken}
    descriptor = signal.set_wakeup_fd(writer)

    def wait() -> int:
        while (number := os.read(reader, 1)[0]) not in taken:
            pass
        before[signal.SIGINT] = signal.SIG_IGN
        return number

    try:
        yield wait
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


def _serve(logdir: Path, port: int | None, bind_all: bool) -> str:
    """Start TensorBoard in threads of this process; the address at which it answers."""
    from tensorboard import default, program

    # They tell of a TensorFlow that nobody needs, and of each file that the plugin reads.
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_PROFILER_LOG_LEVEL", "WARNING")
    where = ["--bind_all"] if bind_all else ["--host", "localhost"]

    def launch(*ports: str) -> Any:
        server = program.TensorBoard(default.get_plugins())
        server.configure(["tensorboard", "--logdir", str(logdir), *where, *ports])
        return server.launch()

    try:
        return str(launch(*([] if port is None else ["--port", str(port)])))
    except program.TensorBoardPortInUseError:
        return str(launch("--port", "0"))
    except program.TensorBoardServerException as error:
        raise click.ClickException(f"TensorBoard does not start: {error}") from error


def _directions(logdir: Path, url: str, asked: int | None, bind_all: bool) -> str:
    port = urlsplit(url).port
    host = socket.gethostname()
    lines = [f"TensorBoard shows {logdir} ({_content(logdir)}) at {url}"]
    if asked and asked != port:
        lines.append(f"Port {asked} is taken, so it is {port}.")
    if bind_all:
        lines.append("Whoever can reach this machine can see it.")
    lines += [
        "If this is a login node, run on your own machine",
        f"    ssh -N -L {port}:localhost:{port} {getpass.getuser()}@{host}",
        f"and open http://localhost:{port}/ there. Where {host} cannot be reached from outside, put -J and the machine",
        "that you log in by before the last word.",
        "Ctrl-C ends it.",
    ]
    return "\n".join(lines)


def _content(logdir: Path) -> str:
    """How many runs, and how many profiles; where they would be if there are none."""
    events = list(logdir.rglob("*tfevents*"))
    traces = [*logdir.rglob("*.pt.trace.json"), *logdir.rglob("*.pt.trace.json.gz")]
    runs = {path.parent for path in (*events, *traces)}
    if not runs:
        return f"which holds no run yet: `fastload train` writes each into {logdir / 'DATE-TIME-workersN-ranksN'}"
    return f"runs: {len(runs)}, profiles: {len(traces)}"
