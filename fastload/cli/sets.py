"""`fastload set`: make, list, check and copy sets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import click

from fastload._kit.options import ExistingFolder, Folder, Option, options
from fastload._kit.texts import counted
from fastload.cli._command import Command
from fastload.cli._common import (
    Parallel,
    Root,
    Serving,
    sigterm_raises,
    wait_for_a_signal,
)
from fastload.cli.pack import pack
from fastload.errors import in_one_line


@options
class Verified(Parallel):
    """The set to read."""

    path: Annotated[str, Option("SET", exists=True, file_okay=False)]


@Command
def verify(options: Verified) -> None:
    """Read all of SET, and name the damaged records or parts.

    SET is the folder of a packed set (`fastload set pack`) or of a set of columns (`fastload set`). Every record of a
    packed set, and every part of a set of columns, is checked against its checksum. Of parts without checksums, only
    the form is checked, and the output says so. Parts on other nodes are listed, but do not count as damaged. The exit
    code is 1 if anything is damaged. Needs the extra `arrow`.

    \b
    Examples:
        fastload set verify packed
        fastload set verify /project/sets/mnist
    """
    from fastload.store.verifying import verify as run

    found = run(**asdict(options), progress=True, say=click.echo)
    click.echo(str(found))
    if found.bad:
        raise click.ClickException(
            f"{counted(len(found.bad), 'part or record is', 'parts or records are')} damaged"
        )
    click.echo("No damage was found." if found.unread else "All checked parts are valid.")


@options
class Staging(Parallel):
    """What to copy where."""

    source: Annotated[str, Option("SRC", exists=True, file_okay=False)]
    target: Annotated[Folder, Option("DST")]


@Command
def stage(options: Staging) -> None:
    """Copy the set SRC to DST, on this node's own disk or in its memory, and print DST.

    SRC is the folder of a packed set or of a set of columns. DST becomes such a folder. Every byte is checked
    against its checksum during the copy. A complete copy is used again. If the command is interrupted, there is no DST.
    Run it again to complete the copy. All ranks may run this at the same time: one rank per node copies, and the others
    wait. Needs the extra `arrow`.

    If DST is in /dev/shm/fastload-UID, `fastload set ls` lists a set of columns, and `fastload.store.get("mnist")`
    opens it by its name. Open any other copy by its path: `fastload.store.get(DST)`.

    \b
    Examples:
        fastload train --packed "$(fastload set stage /project/imagenet /local/scratch/imagenet)"
        fastload set stage /project/sets/mnist /dev/shm/fastload-$UID/mnist
    """
    from fastload.store.staging import stage as run

    with sigterm_raises():
        staged = run(**asdict(options), progress=True, say=_to_stderr)
    _to_stderr(str(staged))
    click.echo(staged.path)


@options
class Shown(Root):
    """What to describe."""

    path: Annotated[str, Option("PATH|NAME")]


@Command
def inspect(options: Shown) -> None:
    """Describe a set: its columns, counts and sizes, and how it was made.

    PATH is the folder of a set. If there is no such path, NAME is the name of a set in --root. Needs the
    extra `arrow`.

    \b
    Examples:
        fastload set inspect packed
        fastload set inspect mnist
    """
    from fastload.store.inspecting import inspect as inspect_set
    from fastload.store.root import find, locate

    path = options.path
    if options.root or (os.sep not in path and not os.path.exists(path)):
        try:
            path = find(*locate(path, options.root, make=False))
        except FileNotFoundError as error:
            said = f"{path} is no path here. In {in_one_line(error)}"
            raise click.ClickException(said) from error
    click.echo(inspect_set(path))


@Command
def ls(options: Root) -> None:
    """List the sets, and the free space.

    Prints the rows, parts, size and date of each set, and the dtype and shape of each column. Parts on other nodes are
    counted separately. What cannot be read is named and passed over.

    \b
    Examples:
        fastload set ls
        fastload set ls --root /project/sets
    """
    from fastload.store.listing import listed
    from fastload.store.root import existing_root

    click.echo(listed(existing_root(options.root)))


@options
class Removed(Root):
    """The sets to remove."""

    names: Annotated[Sequence[str], Option("NAME...")]


@Command
def rm(options: Removed) -> None:
    """Remove sets without asking, and print the freed size.

    Programs that have opened a set can still read the parts that they have mapped. The memory of these parts is freed
    when the programs end. If a set of one of the names does not exist, none is removed.

    \b
    Examples:
        fastload set rm mnist
        fastload set rm train val --root /project/sets
    """
    from fastload._kit.texts import size_text
    from fastload.store.root import find, locate, remove, size_of

    places = dict.fromkeys(locate(name, options.root, make=False) for name in options.names)
    paths = [find(*place) for place in places]
    for place, path in zip(places, paths, strict=True):
        freed = size_of(path)
        remove(*place)
        click.echo(f"removed {path}: {size_text(freed)}")


@Command
def gc(options: Root) -> None:
    """Remove leftovers of processes that have ended, and print the freed size.

    Leftovers are incomplete sets of `pack`, `stage`, `store.put` and `store.prepare`. An interrupted preparation or
    copy can resume until its leftovers are removed. After that, it starts from the beginning. Files that a running
    process writes are kept. What cannot be read is named and passed over.

    \b
    Example:
        fastload set gc
    """
    from fastload._kit.texts import size_text
    from fastload.store.root import collect, existing_root

    path = existing_root(options.root)
    removed = collect(path, say=_to_stderr)
    for name, size in removed:
        click.echo(f"removed {name}: {size_text(size)}")
    click.echo(f"{path}: {size_text(sum(size for _, size in removed))} freed")


@options
class Served(Serving):
    """What to serve, and to whom."""

    root: ExistingFolder | None = None
    """Folder of the sets. [default: $FASTLOAD_STORE, or a folder of this user in shared memory]"""
    no_token: bool = False
    """Serve all users of this host, and of others with --host."""


@Command
def serve(options: Served) -> None:
    """Serve the sets of this node to other nodes, read only, over Arrow Flight.

    Prints the URL, and runs until Ctrl-C or SIGTERM. A program on another node passes the URL as the source of the
    parts that it lacks: store.get("mnist", parts="all", source="grpc://node7:8815"). It reads the token from the file
    named in $FASTLOAD_TOKEN_FILE. With grpc+tls://, it reads the certificate of the authority from the file named in
    $FASTLOAD_TLS_CA. Any client of Arrow Flight can read the sets too.

    Callers need the token in --token-file, or else every user of this host could read all sets. By default, only this
    host is served. Without TLS, the token can be read on the network.

    \b
    Examples:
        fastload set serve --no-token
        head -c 24 /dev/urandom | base64 > token; chmod 600 token
        fastload set serve --host 0.0.0.0 --port 8815 --token-file token --tls-cert cert.pem --tls-key key.pem
    """
    from fastload.store.flight import StoreServer
    from fastload.store.root import existing_root

    if not options.token_file and not options.no_token:
        raise click.UsageError(
            "without a token, all users of this host could read all sets, even those in a folder that only you can "
            "open. Give --token-file, or --no-token to allow that."
        )
    path = existing_root(options.root)
    server = options.server(StoreServer, path)
    with sigterm_raises(), server:
        click.echo(f"{path}: served at {server.address(options.host)}")
        wait_for_a_signal()


@click.group("set", commands=[pack, verify, stage, inspect, ls, rm, gc, serve])
def sets() -> None:
    """Make, list, check, copy and serve sets.

    A packed set has many images in few files (see `pack`). A set of columns has tensors, numbers or strings, with one
    row per sample. Its rows are divided into parts, of one file each. By default, sets of columns are in shared memory.
    All processes of this node map them, without a server. A program opens one by its name:
    fastload.store.get("mnist"). Needs the extra `arrow`.

    \b
    Examples:
        fastload set ls
        fastload set inspect train
        fastload set rm train
    """


def _to_stderr(text: str) -> None:
    click.echo(text, err=True)
