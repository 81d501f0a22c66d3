"""`fastload parameters`: serve model parameters to workers."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import Annotated, Literal

import click

from fastload._kit.options import Amount, Count, Index, Option, options
from fastload.cli._command import Command
from fastload.cli._common import (
    INTERRUPTED,
    TERMINATED,
    Serving,
    Terminated,
    require,
    sigterm_raises,
    wait_for_a_signal,
)
from fastload.errors import UsageError, in_one_line


@options
class Place(Serving):
    """Which server of how many this is, and how workers find it."""

    store: Annotated[str | None, Option(file_okay=False)] = None
    """Folder that servers and workers share. Each server writes its address into it. Use a new folder for each job.
    [default: torchrun's store]"""
    number: Index | None = None
    """Index of this server, from 0. [default: rank]"""
    of: Count | None = None
    """Number of servers. [default: number of ranks]"""
    name: str | None = None
    """Host name or address that workers use to connect to this machine. [default: --host, or this machine's address if
    --host is 0.0.0.0 or ::]"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.number is None) != (self.of is None):
            raise UsageError("give both --number and --of, or neither")


@options
class Steps:
    """The optimizer."""

    optimizer: Literal["sgd", "adagrad", "adam"] = "sgd"
    """Optimizer that applies the gradients."""
    lr: Amount = 0.01
    """Learning rate."""
    momentum: Amount = 0.0
    """Momentum of sgd."""


@options
class Saved:
    """What a server does with pushes, and what it saves."""

    grads_to_wait: Count | None = None
    """Number of pushes that are averaged into one step. [default: asynchronous, each push is a step]"""
    tolerance: Index = 0
    """Maximum age of the gradients of a synchronous push, in versions."""
    scale_by_staleness: bool = False
    """Divide the learning rate of an asynchronous push by the age of its gradients, in versions."""
    folder: Annotated[str, Option("--checkpoint", file_okay=False)] = ""
    """Folder of checkpoints, shared by all servers. Without one, the parameters of a killed server are lost."""
    checkpoint_every: Index = 0
    """Number of versions between checkpoints. 0: only when a worker asks, and at the end."""
    keep: Count = 3
    """Number of checkpoints to keep."""
    seed: int = 0
    """Seed of new rows."""


@Command
def serve(place: Place, steps: Steps, saved: Saved) -> None:
    """Run one server per rank of torchrun, mpiexec or srun.

    Workers connect with fastload.parameters.connect("file:///PATH OF THE STORE"). Each server resumes from the newest
    complete checkpoint, even if another number of servers saved it. After Ctrl-C or SIGTERM, it saves a checkpoint and
    ends.

    Give --number and --of to start each server by itself. If a server is killed, the calls of its workers raise. End
    all servers and workers, as launchers do, and start them again: they resume from the newest complete checkpoint.

    A server that other hosts reach needs a token. Without TLS, the token can be read on the network.

    \b
    Examples:
        fastload parameters serve --store /shared/run7 --number 0 --of 2 --checkpoint /shared/checkpoints ...
        fastload parameters serve --store /shared/run7 --number 1 --of 2 --checkpoint /shared/checkpoints ...
        mpiexec -n 2 fastload parameters serve --store /shared/run7 --optimizer adagrad --lr 0.05 \\
            --checkpoint /shared/checkpoints --checkpoint-every 1000
    """
    from fastload.distributed import detect_rank
    from fastload.parameters import Optimizer, Server
    from fastload.parameters.flight import ParameterServer
    from fastload.parameters.serve import end, job_store, reached_as
    from fastload.parameters.transport import publish

    number, of = place.number, place.of
    if number is None or of is None:
        rank = detect_rank().rank
        number, of = rank.rank, rank.world_size
    if number >= of:
        raise click.UsageError(
            f"--number {number} is too large for --of {of}. Servers are counted from 0: give at most {of - 1}."
        )
    store = job_store(place.store)
    try:
        server = Server(
            number,
            of,
            optimizer=Optimizer(name=steps.optimizer, lr=steps.lr, momentum=steps.momentum),
            **asdict(saved),
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    front = place.server(ParameterServer, server)
    with sigterm_raises():
        try:
            address = front.address(place.name or reached_as(place.host))
            if store is not None:
                publish(store, number, of, address)
            click.echo(
                f"server {number} of {of}: serving parameters of version {server.version} at {address}"
            )
            wait_for_a_signal()
        except KeyboardInterrupt as end_of_it:
            code = TERMINATED if isinstance(end_of_it, Terminated) else INTERRUPTED
            try:
                version = end(server, store)
                click.echo(f"server {number} of {of} has ended at version {version}", err=True)
            except (Exception, KeyboardInterrupt) as error:
                why = in_one_line(error) if isinstance(error, Exception) else "it was interrupted"
                click.echo(f"Error: server {number} of {of} has not saved: {why}", err=True)
                code = 1
            # Workers keep streams open, and the end of the interpreter would wait for them.
            sys.stdout.flush()
            os._exit(code)


@click.group(commands=[serve])
def parameters() -> None:
    """Keep model parameters on servers: dense ones, and tables of rows that do not fit into one process.

    Use them for asynchronous training, for workers that come and go, and for large tables on nodes without GPUs. If
    the model fits on each GPU, DistributedDataParallel is faster. Needs the extra `arrow`.
    """
    require("arrow", pyarrow="pyarrow")
