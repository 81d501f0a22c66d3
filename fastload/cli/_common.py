"""Options, argument types and errors that several commands share."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import signal
import sys
from contextlib import ExitStack, contextmanager
from inspect import isclass, isroutine
from typing import TYPE_CHECKING, Annotated, Any

import click

from fastload._kit.options import Count, ExistingFile, Folder, Option, Port, Threads, options
from fastload.errors import FastloadError, UsageError, in_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastload.distributed.launch import BatchSystem

INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, + SIGTERM, as shells report them.


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, so that it ends a command as Ctrl-C does."""


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the block, so that the command can clean up and keep its results.

    A signal that repeats the request raises nothing, also while the command reports after the block.
    """
    from fastload._kit.guard import asked_to_end

    def stop(number: int) -> None:
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    with ExitStack() as stack:
        request = stack.enter_context(asked_to_end(stop))
        try:
            yield
        finally:
            if request.number:
                click.get_current_context().find_root().with_resource(stack.pop_all())


def wait_for_a_signal() -> None:
    """Wait for a signal whose handler raises, such as Ctrl-C.

    Neither `signal.pause()` nor Flight's own `serve()` would do: a signal that comes just before them wakes neither.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    try:
        while True:
            os.read(read, 1)
    finally:
        signal.set_wakeup_fd(before)
        os.close(read)
        os.close(write)


def found_at(path: str) -> Any:
    """Return the object at "package.module:name". Raise click.UsageError if it cannot be imported."""
    if not all(path.partition(":")):
        raise click.UsageError(
            f"expected MODULE:NAME, such as my_project.data:train_set, got {path!r}"
        )
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.UsageError(f"cannot import {path}: {error}") from error


def made_at(path: str) -> Any:
    """Return the object at "package.module:name". If it is a class or a function, call it and return the result."""
    found = found_at(path)
    if not isclass(found) and not isroutine(found):
        return found
    try:
        return found()
    except TypeError as error:
        raise click.UsageError(f"cannot call {path} without arguments: {error}") from error


@contextmanager
def bad_values_are_usage_errors() -> Iterator[None]:
    """Turn a ValueError into a usage error, unless it is fastload's own."""
    try:
        yield
    except FastloadError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@contextmanager
def named_as_option(kind: type[Exception], argument: str, option: str) -> Iterator[None]:
    """Let an error of this kind that advises to give an argument of Python name the option instead."""
    try:
        yield
    except kind as error:
        text = in_one_line(error)
        if argument not in text:
            raise
        raise click.ClickException(text.replace(argument, option)) from error


@options
class Parallel:
    """Threads of a command."""

    workers: Threads | None = None
    """Number of threads. 0: only the main thread. [default: one per core]"""


@options
class Batches:
    """Batches that a loader reads for a model."""

    batch_size: Annotated[Count, Option("-b --batch-size")] = 64
    """Samples per batch."""
    num_workers: Annotated[Threads | None, Option("-w --num-workers")] = None
    """Threads per rank that load samples or decode messages. [default: one per core]"""

    @property
    def loader(self) -> dict[str, Any]:
        """The arguments of the loader."""
        given = {"batch_size": self.batch_size, "num_workers": self.num_workers}
        return {name: value for name, value in given.items() if value is not None}


@options
class Root:
    """Where sets are."""

    root: Folder | None = None
    """Folder of the sets. [default: $FASTLOAD_STORE, or a folder of this user in shared memory]"""


@options
class Serving:
    """The options of a server: its address, token and certificate."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on. 0: any free port."""
    token_file: ExistingFile | None = None
    """File with the token that clients must send. [default: no token]"""
    tls_cert: ExistingFile | None = None
    """PEM file with the certificate chain. Needs --tls-key. [default: no TLS]"""
    tls_key: ExistingFile | None = None
    """PEM file with the private key of --tls-cert."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise UsageError("give both --tls-cert and --tls-key, or neither")

    def server(self, kind: Callable[..., Any], *of: Any) -> Any:
        """Return a `GuardedServer` of this kind with these options."""
        from pyarrow import ArrowException

        from fastload.distributed.flight import read_token

        pair = [path.read_bytes() for path in (self.tls_cert, self.tls_key) if path]
        guards = {"token": read_token(self.token_file), "certificate": tuple(pair) or None}
        try:
            return kind(*of, self.host, self.port, **guards)
        except (OSError, ValueError, ArrowException) as error:
            raise click.ClickException(
                f"cannot listen on {self.host}:{self.port}: {error}"
            ) from error


@options
class Batch:
    """The batch system that a run is submitted to, if it is."""

    pbs: bool = False
    """Submit as a PBS job (qsub)."""
    slurm: bool = False
    """Submit as a Slurm job (sbatch)."""
    dry_run: bool = False
    """Print what would run. Run nothing."""

    @property
    def system(self) -> BatchSystem | None:
        """The batch system that is named."""
        if self.pbs and self.slurm:
            raise click.UsageError("give either --pbs or --slurm")
        return "pbs" if self.pbs else "slurm" if self.slurm else None


def require(extra: str, **modules: str) -> None:
    """Raise ClickException with the extra to install if a module is missing. `modules`: import name -> display name."""
    missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise click.ClickException(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed. "
            f"Run pip install 'torch-fastload[{extra}]'."
        )
