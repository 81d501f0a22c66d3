"""`fastload store`: manage named sets of columns."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fastload.cli import options as opt
from fastload.cli._common import (
    bad_values_are_usage_errors,
    described_set,
    names_option,
    require,
    root_option,
    sigterm_raises,
)
from fastload.cli.serve import serve


@click.group()
def store() -> None:
    """Keep data as named sets that all processes of this node map into memory.

    A set has columns of tensors, numbers or strings, with one row per sample. The rows are divided into parts, of one
    file each. By default, sets are in shared memory, and no server is needed. A program opens a set by its name:
    fastload.store.get("mnist"). Needs pip install '.[arrow]' in the clone.

    \b
    Examples:
        fastload store put train.parquet --name train
        fastload store ls
        fastload store info train
        fastload store rm train

    `fastload verify`, `inspect` and `stage` take the path of a set.
    """
    require("arrow", pyarrow="pyarrow")


@store.command()
@root_option
@opt.flag("--json as_json", help="Print a JSON object, with sizes in bytes.")
def ls(root: Path | None, as_json: bool) -> None:
    """List the sets, and the free space.

    Prints the rows, parts, size and age of each set, and the dtype and shape of each column. Parts on other nodes are
    counted separately. What cannot be read is named and passed over.

    \b
    Examples:
        fastload store ls
        fastload store ls --root /project/sets
        fastload store ls --json | jq '.sets[].name'
    """
    from fastload.store.listing import listed
    from fastload.store.root import existing_root

    found = listed(existing_root(root))
    click.echo(found.as_json() if as_json else str(found))


@store.command()
@click.argument(
    "files",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILES...",
)
@click.option("--name", required=True, help="Name of the set, or its path.")
@root_option
@click.option(
    "--checksums/--no-checksums",
    default=None,
    help="Store a CRC-32 of each part, for `fastload verify` and `stage`.  [default: if the set is on a disk]",
)
@names_option("Columns to keep.  [default: all]")
def put(
    files: tuple[str, ...], name: str, root: Path | None, checksums: bool | None, columns: list[str]
) -> None:
    """Make a set of FILES.

    The set becomes visible only when it is complete. All files must have the same columns, and no value may be missing.

    \b
    Parquet      one part per row group
    Arrow IPC    one part per record batch
    .npz         one part, with its arrays as the columns
    .npy         all .npy files together make one part, with one column per file, named like the file

    \b
    Examples:
        fastload store put images.npy labels.npy --name mnist
        fastload store put part-*.parquet --name train --columns image,label
        fastload store put train.arrow --name train --root /project/sets
    """
    import fastload
    from fastload.store.files import parts_of_files
    from fastload.store.write import put as run_put

    made = {"fastload": fastload.__version__, "files": [os.path.abspath(file) for file in files]}
    parts = parts_of_files(files, columns)
    with sigterm_raises(), bad_values_are_usage_errors((TypeError, ValueError)):
        run_put(parts, name, root=root, checksums=checksums, made=made, progress=True)
    where, short = _place(name, root)
    click.echo(described_set(os.path.join(where, short), records=0))


@store.command()
@click.argument("name", metavar="NAME|PATH")
@root_option
@opt.count("--records", within=(0, None), default=5, help="Number of rows to show.")
def info(name: str, root: Path | None, records: int) -> None:
    """Describe a set: its columns, rows and parts, how it was made, and its first rows.

    With --records 0, no rows are shown.

    \b
    Examples:
        fastload store info mnist
        fastload store info /project/sets/mnist --records 0
    """
    from fastload.store.root import find

    place = _place(name, root)
    with bad_values_are_usage_errors():
        path = os.path.join(*place) if os.sep in name else find(*place)
    click.echo(described_set(path, records))


@store.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@root_option
def rm(names: tuple[str, ...], root: Path | None) -> None:
    """Remove sets without asking, and print the freed size.

    Programs that have opened a set can still read the parts that they have mapped. The memory of these parts is freed
    when the programs end. If a set of one of the names does not exist, none is removed.

    \b
    Examples:
        fastload store rm mnist
        fastload store rm train val --root /project/sets
    """
    from fastload.datasets.packed.inspecting import size_text
    from fastload.store.root import find, remove, size_of

    places = dict.fromkeys(_place(name, root) for name in names)
    with bad_values_are_usage_errors():
        paths = [find(*place) for place in places]
    for place, path in zip(places, paths, strict=True):
        freed = size_of(path)
        remove(*place)
        click.echo(f"removed {path}: {size_text(freed)}")


@store.command()
@root_option
@opt.flag("--dry-run", help="Print what would be removed. Remove nothing.")
def gc(root: Path | None, dry_run: bool) -> None:
    """Remove leftovers of processes that have ended, and print the freed size.

    Leftovers are temporary sets whose process has ended, and incomplete sets of `put`, `prepare` and `fastload stage`.
    An interrupted preparation or copy can resume until its leftovers are removed. After that, it starts from the
    beginning. Files that a running process writes are kept. What cannot be read is named and passed over.

    \b
    Examples:
        fastload store gc --dry-run
        fastload store gc
    """
    from fastload.datasets.packed.inspecting import size_text
    from fastload.store.root import collect, existing_root

    path = existing_root(root)
    removed = collect(path, delete=not dry_run, say=lambda text: click.echo(text, err=True))
    for name, size in removed:
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}: {size_text(size)}")
    total = size_text(sum(size for _, size in removed))
    click.echo(f"{path}: {total} {'would be freed' if dry_run else 'freed'}")


store.add_command(serve)


def _place(name: str, root: Path | None) -> tuple[str, str]:
    """Return the root and the name of a set, given by its name or its path. Make no folder."""
    from fastload.store.root import existing_root

    if os.sep not in name:
        return existing_root(root), name
    if root is not None:
        raise click.UsageError(
            f"{name} is a path, and --root {root} is given as well. Give either a path or --root."
        )
    folder, short = os.path.split(os.path.abspath(name))
    return folder, short
