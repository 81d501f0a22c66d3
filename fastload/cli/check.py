"""`fastload check`: a dataset read serially and in threads, compared."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import traceback
import weakref
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import click

from fastload.cli._common import made_at, sigterm_raises
from fastload.errors import FastloadError, in_one_line


@click.command()
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--samples",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Samples to compare; of a map-style dataset, spread over its length.",
)
@click.option(
    "--workers",
    default=4,
    show_default=True,
    type=click.IntRange(1, 1024),
    help="Threads that read at once.",
)
def check(dataset: str, samples: int, workers: int) -> None:
    """Read some samples serially and in threads, and compare them.

    DATASET is where Python finds the dataset: MODULE:NAME, or MODULE:FUNCTION for a function or a class that makes it
    without arguments. Modules are looked for in the current folder too.

    Says whether threads give what a serial loop gives, how much of the time is under the GIL, and what to do: a shared
    file position, draws from global random state, an iterable dataset that is not sharded. It reads in a child
    process, and reports a dataset that ends it. The exit code is 1 if threads would give other samples, or samples
    raise, or there are none.

    \b
    Example:
        fastload check my_project.data:make_train_set
    """
    said, ok = _read_in_child(dataset, samples, workers)
    click.echo(said)
    if not ok:
        raise SystemExit(1)


def _read_in_child(path: str, samples: int, workers: int) -> tuple[str, bool]:
    """Check the dataset at `path` in a process of its own: its code may end that. Return the report, and if it is ok.

    Raise UsageError if there is nothing to check, ClickException if importing or reading fails.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_check_here, args=(path, samples, workers, sender))
    how = "as it was imported"
    try:
        with sigterm_raises():
            child.start()
            sender.close()  # so that the end of the child is the end of the pipe
            # A process that the child has forked may hold the pipe open, and the sentinel, which is another one.
            ended = _pidfd(child) or child.sentinel
            while True:
                wait([receiver, ended])
                if not receiver.poll():
                    raise EOFError
                what, value, *ok = receiver.recv()
                if what == "reads":
                    how = f"as it was read {value}"
                elif what == "usage":
                    raise click.UsageError(value)
                elif what == "error":
                    raise click.ClickException(value)
                else:
                    child.join(_EXIT_S)  # it may have something to tidy up
                    return value, *ok
    except EOFError:
        child.join()
        return _of_death(child.exitcode or 0, how), False
    finally:
        receiver.close()
        if child.pid is not None:
            child.kill()
            child.join()


def _pidfd(child: BaseProcess) -> int | None:
    """Return a descriptor that is ready once `child` has ended, and is closed with `child`; None if not on Linux."""
    if not hasattr(os, "pidfd_open") or child.pid is None:
        return None
    descriptor = os.pidfd_open(child.pid)
    weakref.finalize(child, os.close, descriptor)
    return descriptor


_EXIT_S = 5.0
"""How long a child that has reported may take to exit; then it is killed."""


def _of_death(code: int, how: str) -> str:
    """Return the report on a dataset that ended the process that read it, with an exit code or (negative) a signal."""
    from fastload.check import Finding

    by = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    advice = (
        'A library that it calls is not safe in threads: use worker_method="process", or call it under a lock.'
        if "threads" in how
        else "It would end a training loop as well: look for the call in the stacks above, if there are any."
    )
    fault = Finding("fault", f"it ended the process {how}: {by}", advice)
    return f"{fault}\nDo not read this dataset with threads as it is."


def _check_here(path: str, samples: int, workers: int, parent: Any) -> None:
    """Check the dataset at `path`, and send what is to be said."""
    from fastload.check import check as compare

    faulthandler.enable()  # the stacks say which call ended the process
    try:
        report = compare(
            _dataset(path),
            samples=samples,
            workers=workers,
            say=lambda how: parent.send(("reads", how)),
        )
    except KeyboardInterrupt:
        raise SystemExit from None  # the parent has it too, and says so
    except click.UsageError as error:
        parent.send(("usage", error.message))
    except (FastloadError, OSError) as error:
        parent.send(("error", in_one_line(error)))
    except Exception:
        parent.send(("error", traceback.format_exc()))
    else:
        parent.send(("report", str(report), report.ok))


def _dataset(path: str) -> Any:
    """Return the dataset at MODULE:NAME. Raises click.UsageError if there is none."""
    from fastload.check import require_dataset

    found = made_at(path)

    try:
        require_dataset(found)
    except TypeError as error:
        raise click.UsageError(f"{path}: {error}") from error
    return found
