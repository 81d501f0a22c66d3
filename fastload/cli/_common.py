"""Options, argument types and errors that several commands share."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import re
import signal
import sys
from contextlib import ExitStack, contextmanager, suppress
from inspect import isclass, isroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fastload.cli import options as opt
from fastload.errors import FastloadError, RankError, RendezvousError, UsageError, in_one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F = TypeVar("F", bound="Callable[..., Any]")

_MEET_S = 60.0
"""Seconds that a rank with a user error waits for the others."""
INTERRUPTED, TERMINATED = 130, 143  # 128 + SIGINT, + SIGTERM, as shells report them.


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, so that it ends a command as Ctrl-C does."""


class EndsInOneLine(click.Command):
    """A command that reports a user error in one line. Its exit code is 130 after Ctrl-C, and 143 after SIGTERM."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the arguments of the command."""
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            raise _without_usage(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except Terminated:
            click.echo("Terminated.", err=True)
            ctx.exit(TERMINATED)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(INTERRUPTED)
        except click.UsageError as error:
            raise _without_usage(error) from None
        except UsageError as error:
            raise click.UsageError(in_one_line(error)) from error
        except BrokenPipeError:  # The reader of our output stopped reading. Click ends quietly.
            raise
        except (FastloadError, OSError) as error:
            if isinstance(error.__cause__, BrokenPipeError):  # the flush at exit would fail again
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            raise click.ClickException(in_one_line(error)) from error


def _without_usage(error: click.UsageError) -> click.UsageError:
    """Return the error without its context, so that click prints no usage lines."""
    if not isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.ctx = None
    return error


class OnRanks(EndsInOneLine):
    """A command that runs on several ranks. One of them prints a user error, and all end with its exit code."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse the arguments of the command."""
        with _one_rank_reports():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _one_rank_reports():
            return super().invoke(ctx)


@contextmanager
def _one_rank_reports() -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        from fastload import distributed

        # A rank that exits may end the whole job before the error is printed, so the ranks meet first.
        with suppress(RankError, RendezvousError):
            alone = distributed.detect_rank().rank.world_size == 1
            if not alone and not isinstance(error.__cause__, RankError | RendezvousError):
                distributed.init("gloo", timeout_s=_MEET_S)
                line = f"Error: {error.format_message()}"
                distributed.end_job(error, line=line, code=error.exit_code)
        raise


def walltime(_: click.Context, __: click.Parameter, text: str) -> str:
    """Return the text if PBS or Slurm accepts it as a duration. Raise a usage error if not."""
    if not re.fullmatch(r"(\d+-)?\d+(:[0-5]?\d){0,2}", text, re.ASCII):
        raise click.BadParameter(f"{text!r} is not a duration. Give H:MM:SS, such as 1:30:00.")
    return text


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise `Terminated` in the block, so that the command can clean up and keep its results.

    A signal that repeats the request raises nothing, also while the command reports after the block.
    """
    from fastload.distributed.guard import asked_to_end

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


def loader_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that are given and are arguments of a loader."""
    names = ("batch_size", "num_workers")
    return {name: options[name] for name in names if options[name] is not None}


def guards_out_of(options: dict[str, Any]) -> dict[str, Any]:
    """Take those of `serving_options` that guard a server out of options. Return them as `GuardedServer` takes them."""
    from fastload.distributed.flight_access import read_token

    chain, key = (options.pop(name) for name in ("tls_cert", "tls_key"))
    if bool(chain) != bool(key):
        raise click.UsageError("give both --tls-cert and --tls-key, or neither")
    certificate = (chain.read_bytes(), key.read_bytes()) if chain else None
    guards = {"token": read_token(options.pop("token_file")), "certificate": certificate}
    return guards | {"max_calls": options.pop("max_calls")}


@contextmanager
def bad_values_are_usage_errors(
    kinds: tuple[type[Exception], ...] = (ValueError,),
) -> Iterator[None]:
    """Turn an error of these kinds into a usage error, unless it is fastload's own."""
    try:
        yield
    except FastloadError:
        raise
    except kinds as error:
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


root_option = opt.folder(
    "--root",
    help="Folder of the sets.  [default: $FASTLOAD_STORE, or a folder of this user in shared memory]",
)
base_option = opt.folder(
    "--base-dir",
    exists=True,
    help="Folder that relative paths in the list start from.  [default: folder of the list]",
)
device_option = click.option(
    "--device",
    default="auto",
    help="Device of the model: auto, cpu, cuda or cuda:1. auto: an accelerator for each rank if there are any, else "
    "cpu.",
)


def threads_option(work: str) -> Callable[[F], F]:
    """Return the option for the number of threads that do this work."""
    return opt.count(
        "--workers",
        within=(0, 1024),
        help=f"Number of threads that {work}. 0: only the main thread.  [default: one per core]",
    )


def names_option(help: str) -> Callable[[F], F]:
    """Return the option `--columns`, a list of names."""
    return click.option(
        "--columns",
        default="",
        show_default=False,
        metavar="NAME,NAME,...",
        callback=lambda _, __, text: [name.strip() for name in text.split(",") if name.strip()],
        help=help,
    )


def serving_options(command: F) -> F:
    """Add the options of a server: its address, token and certificate."""
    file = click.Path(exists=True, dir_okay=False, path_type=Path)
    for option in (
        click.option("--tls-key", type=file, help="PEM file with the private key of --tls-cert."),
        click.option(
            "--tls-cert",
            type=file,
            help="PEM file with the certificate chain. Needs --tls-key.  [default: no TLS]",
        ),
        opt.count(
            "--max-calls",
            default=1024,
            help="Maximum number of open calls. Each holds a thread, which takes about 0.6 MiB.",
        ),
        click.option(
            "--token-file",
            type=file,
            help="File with the token that clients must send.  [default: no token]",
        ),
        opt.count(
            "--port", within=(0, 65535), default=0, help="Port to listen on. 0: any free port."
        ),
        click.option("--host", default="127.0.0.1", help="Address to listen on."),
    ):
        command = option(command)
    return command


def list_options(command: F) -> F:
    """Add the options that name a list of images."""
    listed = opt.file(
        "--file-list-path --file-list file_list",
        help="Text file with the path of one image per line. The class of an image is the name of its folder. A "
        "relative path is searched in the current folder, then in --base-dir.",
    )
    return listed(base_option(command))


def require(extra: str, **modules: str) -> None:
    """Raise ClickException with the extra to install if a module is missing. `modules`: import name -> display name."""
    missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise click.ClickException(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed. "
            f"Run pip install '.[{extra}]' in the clone of fastload."
        )


def is_set_of_columns(path: str) -> bool:
    """Return True if the set at `path` is a set of columns (`fastload.store`). Needs pyarrow."""
    from fastload.datasets.manifest import read_index

    return read_index(path).mode == "columns"


def described_set(path: str, records: int) -> str:
    """Return the description of a set of either kind, with its first records. Needs pyarrow."""
    if is_set_of_columns(path):
        from fastload.store.inspecting import inspect
    else:
        from fastload.datasets.packed.inspecting import inspect
    return inspect(path, records=records)
