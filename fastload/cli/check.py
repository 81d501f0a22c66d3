"""`fastload check`: compare what a dataset gives serially and by workers."""

from __future__ import annotations

import faulthandler
import os
import signal
import traceback
from contextlib import ExitStack
from typing import Annotated, Any

import click

from fastload._kit.options import Count, Option, Threads, options
from fastload.cli._command import Command
from fastload.cli._common import made_at, sigterm_raises
from fastload.errors import FastloadError, in_one_line


@options
class Samples:
    """What to compare."""

    dataset: Annotated[str, Option("DATASET")]
    samples: Count = 64
    """Number of samples to compare, spread over the length of a map-style dataset."""
    workers: Annotated[Threads, Option(min=1)] = 4
    """Number of workers that read at the same time."""


@Command
def check(options: Samples) -> None:
    """Read some samples serially and by workers, and compare them.

    DATASET is MODULE:NAME, or MODULE:FUNCTION for a function or class that makes it without arguments. Modules in the
    current folder are found too.

    Threads read a dataset that is plainly thread-safe, and processes read any other. The report says which, and
    why. It says if they give the same samples, how much of the time holds the GIL, and what to change. It finds shared
    file positions, draws from global random state, and iterable datasets that are not sharded. The reading happens in a
    child process, so a dataset that crashes is reported as well. The exit code is 1 if the samples differ, if a sample
    raises, or if there are no samples.

    \b
    Example:
        fastload check my_project.data:make_train_set
    """
    said, ok = _read_in_child(options)
    click.echo(said)
    if not ok:
        raise SystemExit(1)


def _read_in_child(options: Samples) -> tuple[str, bool]:
    """Check a dataset in a child process, because its code may crash. Return the report, and True if ok.

    Raise UsageError if there is nothing to check, and ClickException if importing or reading fails.
    """
    import multiprocessing
    from multiprocessing.connection import wait

    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_check_here, args=(options, sender))
    how = "as it was imported"
    try:
        with sigterm_raises(), ExitStack() as stack:
            child.start()
            sender.close()  # so that the pipe ends with the child
            # A process that the child forked may keep the pipe and the sentinel open.
            ended = os.pidfd_open(child.pid or 0)
            stack.callback(os.close, ended)
            while True:
                wait([receiver, ended])
                if not receiver.poll():
                    raise EOFError
                what, value, *ok = receiver.recv()
                if what == "reads":
                    how = f"as it was read {value}"
                    click.echo(f"reading {value} ...", err=True)
                elif what == "usage":
                    raise click.UsageError(value)
                elif what == "error":
                    raise click.ClickException(value)
                else:
                    child.join(_EXIT_S)  # it may have to clean up
                    return value, *ok
    except EOFError:
        child.join()
        return _of_death(child.exitcode or 0, how), False
    finally:
        receiver.close()
        if child.pid is not None:
            child.kill()
            child.join()


_EXIT_S = 5.0
"""Seconds that a child may take to exit after its report. Then it is killed."""


def _of_death(code: int, how: str) -> str:
    """Return the report on a dataset that ended the process that read it. A negative `code` is a signal."""
    from fastload.check import Finding

    by = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    advice = (
        'A library that it calls is not thread-safe. Use worker_method="process", or call the library under a lock.'
        if "threads" in how
        else "The dataset would end a training loop as well. If stacks are printed above, look for the call in them."
    )
    fault = Finding("fault", f"the dataset ended the process {how}: {by}", advice)
    return f"{fault}\nDo not read this dataset with workers until this is fixed."


def _check_here(options: Samples, parent: Any) -> None:
    """Check a dataset, and send the report or the error to the parent."""
    import multiprocessing

    from fastload.check import check as compare

    faulthandler.enable()  # the stacks say which call ended the process
    # "spawn", from the parent, is not what a loader would use.
    multiprocessing.set_start_method(None, force=True)
    try:
        report = compare(
            _dataset(options.dataset),
            samples=options.samples,
            workers=options.workers,
            say=lambda how: parent.send(("reads", how)),
        )
    except KeyboardInterrupt:
        raise SystemExit from None  # the parent gets it too, and reports it
    except click.UsageError as error:
        parent.send(("usage", error.message))
    except (FastloadError, OSError) as error:
        parent.send(("error", in_one_line(error)))
    except Exception:
        parent.send(("error", traceback.format_exc()))
    else:
        parent.send(("report", str(report), report.ok))


def _dataset(path: str) -> Any:
    """Return the dataset at MODULE:NAME. Raise click.UsageError if the object there is not a dataset."""
    from fastload.check import require_dataset

    found = made_at(path)

    try:
        require_dataset(found)
    except TypeError as error:
        raise click.UsageError(f"{path}: {error}") from error
    return found
