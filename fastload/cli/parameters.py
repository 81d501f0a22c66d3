"""`fastload parameters`: serve model parameters to workers."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from fastload.cli import options as opt
from fastload.cli._common import (
    INTERRUPTED,
    TERMINATED,
    Terminated,
    guards_out_of,
    require,
    serving_options,
    sigterm_raises,
    wait_for_a_signal,
)
from fastload.errors import in_one_line


@click.group()
def parameters() -> None:
    """Keep model parameters on servers: dense ones, and tables of rows that do not fit into one process.

    Use them for asynchronous training, for workers that come and go, and for large tables on nodes without GPUs. If
    the model fits on each GPU, DistributedDataParallel is faster. Needs pip install '.[arrow]' in the clone.
    """
    require("arrow", pyarrow="pyarrow")


@parameters.command()
@opt.option(
    "--store store_path",
    type=click.Path(file_okay=False),
    help="Folder that servers and workers share. Each server writes its address into it. Use a new folder for each "
    "job.  [default: torchrun's store]",
)
@opt.count("--number", within=(0, None), help="Index of this server, from 0.  [default: rank]")
@opt.count("--of", help="Number of servers.  [default: number of ranks]")
@opt.choice("--optimizer", ["sgd", "adagrad", "adam"], help="Optimizer that applies the gradients.")
@opt.number("--lr", default=0.01, help="Learning rate.")
@opt.number("--momentum", default=0.0, help="Momentum of sgd.")
@opt.count(
    "--grads-to-wait",
    help="Number of pushes that are averaged into one step.  [default: asynchronous, each push is a step]",
)
@opt.count(
    "--tolerance",
    within=(0, None),
    default=0,
    help="Maximum age of the gradients of a synchronous push, in versions.",
)
@opt.flag(
    "--scale-by-staleness",
    help="Divide the learning rate of an asynchronous push by the age of its gradients, in versions.",
)
@opt.option(
    "--checkpoint folder",
    type=click.Path(file_okay=False),
    help="Folder of checkpoints, shared by all servers. Without one, the parameters of a killed server are lost.",
)
@opt.count(
    "--checkpoint-every",
    within=(0, None),
    default=0,
    help="Number of versions between checkpoints. 0: only when a worker asks, and at the end.",
)
@opt.count("--keep", default=3, help="Number of checkpoints to keep.")
@click.option("--seed", type=int, default=0, help="Seed of new rows.")
@serving_options
@click.option(
    "--name",
    help="Host name or address that workers use to connect to this machine.  [default: --host, or "
    "this machine's address if --host is 0.0.0.0 or ::]",
)
def serve(
    store_path: str | None,
    number: int | None,
    of: int | None,
    optimizer: Any,
    lr: float,
    momentum: float,
    folder: str | None,
    host: str,
    port: int,
    name: str | None,
    **options: Any,
) -> None:
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
    from pyarrow import ArrowException

    from fastload.distributed import detect_rank
    from fastload.parameters import Optimizer, Server
    from fastload.parameters.flight import ParameterServer
    from fastload.parameters.serve import end, job_store, reached_as
    from fastload.parameters.transport import publish

    guards = guards_out_of(options)
    if (number is None) != (of is None):
        raise click.UsageError("give both --number and --of, or neither")
    if number is None or of is None:
        rank = detect_rank().rank
        number, of = rank.rank, rank.world_size
    if number >= of:
        raise click.UsageError(
            f"--number {number} is too large for --of {of}. Servers are counted from 0: give at most {of - 1}."
        )
    store = job_store(store_path)
    try:
        server = Server(
            number,
            of,
            optimizer=Optimizer(name=optimizer, lr=lr, momentum=momentum),
            folder=folder or "",
            **options,
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    try:
        front = ParameterServer(server, host, port, **guards)
    except (OSError, ArrowException) as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error}") from error
    with sigterm_raises():
        try:
            address = front.address(name or reached_as(host))
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
