"""`fastload store`: the sets of columns that have names."""

from __future__ import annotations

import os
from typing import Any

import click

from fastload.cli._common import described_set, require, sigterm_raises
from fastload.cli.serve import serve
from fastload.errors import FastloadError

_root_option = click.option(
    "--root",
    type=click.Path(file_okay=False),
    help="Folder of the sets.  [default: $FASTLOAD_STORE, or else this user's folder in shared memory]",
)


@click.group()
def store() -> None:
    """Keep data as named sets, which every process of this node maps.

    A set has columns: tensors, numbers or texts, a row for each sample. By default sets lie in shared memory, and no
    server is needed. A program opens one by its name: fastload.store.get("mnist").

    \b
    Examples:
        fastload store put train.parquet --name train
        fastload store ls
        fastload store info train
        fastload store rm train

    `fastload verify`, `inspect` and `stage` take the path of a set.
    """
    require("arrow", pyarrow="pyarrow")


@click.command()
@_root_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with sizes in bytes.")
def ls(root: str | None, as_json: bool) -> None:
    """List the sets, and the room that is left.

    Of each set: rows, parts, size, age, and the dtype and shape of each column. Parts that lie on other nodes are
    counted apart.

    \b
    Examples:
        fastload store ls
        fastload store ls --root /project/sets
        fastload store ls --json | jq '.sets[].name'
    """
    from fastload.store.listing import listed

    found = listed(_opened(root))
    click.echo(found.as_json() if as_json else str(found))


@click.command()
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILES...",
)
@click.option("--name", required=True, help="Name of the set, or its path.")
@_root_option
@click.option(
    "--checksums/--no-checksums",
    default=None,
    help="Keep a CRC-32 of each part, which `fastload verify` and `stage` check.  [default: if the set lies on a disk]",
)
@click.option(
    "--columns", default="", metavar="NAME,NAME,...", help="Columns to keep; all by default."
)
def put(
    files: tuple[str, ...], name: str, root: str | None, checksums: bool | None, columns: str
) -> None:
    """Make a set of FILES, whole or not at all.

    \b
    Parquet      a part for each row group
    Arrow IPC    a part for each record batch
    .npz         a part; its arrays are the columns
    .npy         all of them together are one part, each a column named after its file

    All files must have the same columns, and no value may be missing.

    \b
    Examples:
        fastload store put images.npy labels.npy --name mnist
        fastload store put part-*.parquet --name train --columns image,label
        fastload store put train.arrow --name train --root /project/sets
    """
    import fastload
    from fastload.store.files import parts_of_files
    from fastload.store.write import put as run_put

    names = [part.strip() for part in columns.split(",") if part.strip()]
    made = {"fastload": fastload.__version__, "files": [os.path.abspath(file) for file in files]}
    with sigterm_raises():
        try:
            run_put(
                parts_of_files(files, names),
                name,
                root=root,
                checksums=checksums,
                made=made,
                progress=True,
            )
        except FastloadError:
            raise
        except (TypeError, ValueError) as error:
            raise click.UsageError(str(error)) from error
    where, short = _place(name, root)
    click.echo(described_set(os.path.join(where, short), records=0))


@click.command()
@click.argument("name", metavar="NAME|PATH")
@_root_option
@click.option(
    "--records",
    default=5,
    show_default=True,
    type=click.IntRange(min=0),
    help="How many rows to show.",
)
def info(name: str, root: str | None, records: int) -> None:
    """Say what a set is: columns, rows, parts, how it was made, its first rows.

    \b
    Examples:
        fastload store info mnist
        fastload store info /project/sets/mnist --records 0
    """
    from fastload.store.root import find

    place = _place(name, root)
    path = os.path.join(*place) if os.sep in name else _checked(find, *place)
    click.echo(described_set(path, records))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@_root_option
def rm(names: tuple[str, ...], root: str | None) -> None:
    """Remove sets, without asking, and say what that freed.

    Programs that have opened a set keep the parts that they have mapped; the memory of these is freed once they end. If
    one of the names is no set, none is removed.

    \b
    Examples:
        fastload store rm mnist
        fastload store rm train val --root /project/sets
    """
    from fastload.datasets.packed.packing import size_text
    from fastload.store.root import find, remove, size_of

    places = dict.fromkeys(_place(name, root) for name in names)
    paths = [_checked(find, *place) for place in places]
    for place, path in zip(places, paths, strict=True):
        freed = size_of(path)
        remove(*place)
        click.echo(f"removed {path}: {size_text(freed)}")


@click.command()
@_root_option
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def gc(root: str | None, dry_run: bool) -> None:
    """Remove what processes that ended have left, and say what that freed.

    That is temporary sets whose process ended, and what `put`, `prepare` and `fastload stage` left if they were killed.
    A preparation or copy that was stopped resumes until then, and begins anew afterwards. Whatever a living process
    writes stays.

    \b
    Examples:
        fastload store gc --dry-run
        fastload store gc
    """
    from fastload.datasets.packed.packing import size_text
    from fastload.store.root import collect

    path = _opened(root)
    removed = collect(path, delete=not dry_run)
    for name, size in removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}: {size_text(size)}")
    total = size_text(sum(size for _, size in removed))
    click.echo(f"{path}: {total} {'would be freed' if dry_run else 'freed'}")


for command in (ls, put, info, rm, gc, serve):
    store.add_command(command)


def _opened(root: str | None) -> str:
    """Return the path of a root, which need not be there."""
    from fastload.store.root import default_root, open_root

    path = default_root() if root is None else os.path.abspath(root)
    return open_root(root) if os.path.isdir(path) else path


def _place(name: str, root: str | None) -> tuple[str, str]:
    """Return the root and the name of a set, which may be given by its path. Makes no folder."""
    if os.sep not in name:
        return _opened(root), name
    if root is not None:
        raise click.UsageError(f"give a path or --root, not both: {name}, --root {root}")
    folder, short = os.path.split(os.path.abspath(name))
    return folder, short


def _checked(function: Any, *arguments: str) -> Any:
    """Return what the function does; a name that no set can have is a usage error."""
    try:
        return function(*arguments)
    except FastloadError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
