"""The `fastload` command. Each command imports what it needs, and only when it is called."""

from __future__ import annotations

import importlib.util
import pkgutil
import signal
import sys
from contextlib import contextmanager
from inspect import isclass, isroutine
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

import fastload
from fastload.errors import FastloadError
from fastload.inspection import require_data_set

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastload.harness.figures import Outcome
    from fastload.harness.plan import LoaderKind, Run

_INTERRUPTED, _TERMINATED = 130, 143  # 128 + SIGINT, + SIGTERM, as shells report them.


class _Terminated(KeyboardInterrupt):
    """SIGTERM, taken as Ctrl-C is."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM raise `_Terminated` in the block: what is under way is ended, and what was done is not lost."""

    def stop(signum: int, frame: Any) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Commands(click.Group):
    """A group whose commands end in one line on a user's error, and with exit code 130 on Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except _Terminated:
            click.echo("Terminated.", err=True)
            ctx.exit(_TERMINATED)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(_INTERRUPTED)
        except FastloadError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:  # Whoever read our output stopped reading; click ends quietly.
            raise
        except OSError as error:
            named = error.filename is not None and error.strerror is not None
            text = f"{error.filename}: {error.strerror}" if named else str(error)
            raise click.ClickException(text) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fastload.__version__, prog_name="fastload")
def main() -> None:
    """A data loader for PyTorch that loads with threads.

    In your own training loop change one import and keep every argument:

    \b
        from fastload import DataLoader

    To see what it does on this machine, make sample images and race serial loading, fastload's threads and torch's
    processes on them:

    \b
        fastload images samples
        fastload bench --file-list samples/filelist.txt --plot bench.png
    """


@main.command()
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--count",
    default=2048,
    show_default=True,
    type=click.IntRange(1, 2**30),
    help="Images to make.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Same seed, same images.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    help="Threads that make them; by default one for each core. 0: none beside the main one.",
)
def images(out: Path, count: int, seed: int, workers: int | None) -> None:
    """Make sample images to measure with, in the folder OUT.

    Photo-like JPEGs in ImageNet's layout, 80 to 110 KB on average, and a list of them. They are synthetic. A run that
    was stopped is completed by running it again.
    """
    _require("images", PIL="Pillow")
    from fastload.datasets.synthetic import generate_images

    file_list = generate_images(out, count=count, seed=seed, workers=workers, progress=True)
    click.echo(f"{count} images, listed in {file_list}")
    click.echo(f"Next: fastload bench --file-list {file_list}")


def _worker_counts(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    """Turn "1,2,4" into [1, 2, 4]: each once, in the order given."""
    counts: dict[int, None] = {}
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            hint = ": no workers is the serial loader, see --loaders" if word.strip() == "0" else ""
            raise click.BadParameter(
                f"{word.strip()!r} is not a number of workers{hint}; give counts of 1 or more, such as 1,2,4"
            )
        counts[int(word)] = None
    return list(counts)


def _loader_kinds(_: click.Context, __: click.Parameter, text: str) -> list[LoaderKind]:
    """Turn "serial,thread" into ["serial", "thread"]: each once, in the order given."""
    from fastload.harness.plan import LOADERS

    by_name = {str(kind): kind for kind in LOADERS}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in by_name:
            raise click.BadParameter(f"{word!r} is not a loader; choose from {', '.join(LOADERS)}")
    return [by_name[word] for word in dict.fromkeys(words)]


@main.command()
@click.option(
    "--file-list",
    required=True,
    type=click.Path(exists=True, dir_okay=False),
    help="Text file with the path of one image a line; an image's class is the name of its folder.",
)
@click.option(
    "--base-dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder that relative paths in the list start from; by default the list's own folder.",
)
@click.option(
    "--workers",
    default="1,2,4",
    show_default=True,
    callback=_worker_counts,
    metavar="N,N,...",
    help="Numbers of workers to measure, for each parallel loader.",
)
@click.option(
    "--loaders",
    default="serial,thread,torch",
    show_default=True,
    callback=_loader_kinds,
    metavar="NAME,NAME,...",
    help="serial: no workers. thread: fastload's threads. torch: torch's DataLoader with processes.",
)
@click.option(
    "-b",
    "--nbatch",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Samples in a batch.",
)
@click.option(
    "-s",
    "--nsteps",
    default=20,
    show_default=True,
    type=click.IntRange(min=6),
    help="Batches that each run takes. The first 5 are warm-up and counted in no rate.",
)
@click.option(
    "--status-print-interval",
    default=5,
    show_default=True,
    type=click.IntRange(min=1),
    help="Steps between two lines of a run's rate.",
)
@click.option(
    "--step-ms",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0, max=3_600_000),
    help="Simulated training step: milliseconds that the loop waits after each batch, as for an accelerator.",
)
@click.option(
    "--transform",
    default="resize",
    show_default=True,
    type=click.Choice(["resize", "rrc"]),
    help="resize: Resize((256, 256)) + ToTensor. rrc: RandomResizedCrop(224) + flip + ToTensor + Normalize.",
)
@click.option(
    "--cache",
    default="warm",
    show_default=True,
    type=click.Choice(["warm", "cold"]),
    help="The page cache before each run. warm: read the files. cold: have the kernel drop them.",
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(min=1),
    help="Runs of each configuration, interleaved; the table shows medians.",
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Seed of the samples' order.",
)
@click.option(
    "-q",
    "--quiet",
    is_flag=True,
    help="One line a run, in place of the lines that it prints itself.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures here.",
)
@click.option(
    "--plot", "plot_path", type=click.Path(dir_okay=False, path_type=Path), help="Draw a PNG here."
)
def bench(
    loaders: list[LoaderKind],
    workers: list[int],
    repeats: int,
    json_path: Path | None,
    plot_path: Path | None,
    nbatch: int,
    nsteps: int,
    quiet: bool,
    **options: Any,
) -> None:
    """Race serial loading, threads and processes on images.

    serial and thread are fastload's DataLoader, torch is torch's own with worker processes. Every run takes the same
    samples in the same order, and differs from the others in the loader alone. Each is a fresh process; they run one
    after another, so leave the machine to them. Stopped by Ctrl-C or SIGTERM, it reports the runs that were completed,
    marked as partial.

    \b
    Examples:
        fastload bench --file-list samples/filelist.txt --workers 1,2,4 --json bench.json --plot bench.png
        fastload bench --file-list train.txt --base-dir /data/imagenet --cache cold --transform rrc
        fastload bench --file-list train.txt --loaders thread,torch --workers 8 --step-ms 150
    """
    _require("images", PIL="Pillow", torchvision="torchvision")
    if plot_path is not None:
        _require("bench", matplotlib="matplotlib")
    from fastload.harness import report
    from fastload.harness.bench import files_of
    from fastload.harness.plan import Workload, plan_runs

    origin = report.provenance(["fastload", *sys.argv[1:]])
    workload = Workload(batch_size=nbatch, steps=nsteps, **options)
    runs = plan_runs(workload, loaders=loaders, workers=workers, repeats=repeats)
    listed, files = files_of(runs)
    for line in report.preamble(workload, origin, runs=len(runs), listed=listed):
        click.echo(line)

    outcomes: list[Outcome] = []
    stopped: KeyboardInterrupt | None = None
    with _sigterm_raises():
        try:
            _race(runs, files, outcomes, quiet=quiet)
        except KeyboardInterrupt as stop:
            stopped = stop
    rows = report.summarise(outcomes)
    partial = report.partial(len(outcomes), len(runs))
    if partial:
        click.echo(f"\n{partial}")
    if rows:
        click.echo("\n" + report.table(rows, workload))
        if best := report.verdict(rows):
            click.echo("\n" + best)
    if json_path is not None:
        content = report.document(outcomes, rows, origin, planned=len(runs))
        report.write_json(json_path, content)
        click.echo(f"Figures: {json_path}")
    if plot_path is not None and rows:
        from fastload.harness.plot import save_plot

        save_plot(
            plot_path, rows, workload, caption=" ".join([partial, report.caption(origin)]).strip()
        )
        click.echo(f"Plot: {plot_path}")
    if stopped is not None:
        raise stopped
    failed = sum(outcome.error is not None for outcome in outcomes)
    if failed:
        raise click.ClickException(
            f"{failed} of {len(runs)} runs failed; the table has only the others."
        )


def _race(
    runs: Sequence[Run], files: Sequence[str], outcomes: list[Outcome], *, quiet: bool
) -> None:
    """Execute the runs one after another: their lines, or one, on standard output, a bar of all steps on a terminal.

    `outcomes` gets what came of each as it ends: also what a signal cuts short leaves those that were completed.
    """
    from fastload.harness.bench import execute

    work = runs[0].workload
    began = perf_counter()
    steps = len(runs) * work.steps
    with tqdm(total=steps, unit="step", leave=False, file=sys.stderr, disable=None) as bar:

        def say(line: str) -> None:
            if not quiet:
                bar.write(line, file=sys.stdout)
                sys.stdout.flush()
            if line.startswith("step_img_rate"):
                bar.update(work.status_print_interval)

        for number, run in enumerate(runs, start=1):
            bar.set_description(run.name)
            say(f"\n[{number}/{len(runs)}] {run.name}{_left(began, number - 1, len(runs))}")
            outcome = execute(run, files=files, say=say)
            if outcome.messages not in {"", *(earlier.messages for earlier in outcomes)}:
                bar.write(outcome.messages, file=sys.stderr)
            if outcome.error:
                bar.write(f"Error: {run.name}: {outcome.error}", file=sys.stderr)
            outcomes.append(outcome)
            if quiet and outcome.figures:
                line = f"[{number}/{len(runs)}] {run.name}: {outcome.figures.rate:.1f} img/s"
                line += _left(began, number, len(runs))
                bar.write(line, file=sys.stdout)
                sys.stdout.flush()
            bar.update(number * work.steps - bar.n)


def _left(began: float, done: int, planned: int) -> str:
    """About how long the runs that are left will take, if they are like those that are done."""
    if not 0 < done < planned:
        return ""
    left_s = (perf_counter() - began) / done * (planned - done)
    return f", about {f'{left_s:.0f} s' if left_s < 100 else f'{left_s / 60:.0f} min'} left"


@main.command()
@click.argument("dataset", metavar="DATASET")
@click.option(
    "--samples",
    default=64,
    show_default=True,
    type=click.IntRange(min=1),
    help="Samples to compare; of a map-style data set, spread over its length.",
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

    DATASET is where Python finds the data set: MODULE:NAME, or MODULE:FUNCTION for a function or a class that makes it
    without arguments. Modules are looked for in the current folder too.

    Says whether threads give what a serial loop gives, how much of the time is under the GIL, and what to do: a shared
    file position, draws from global random state, an iterable data set that is not sharded. The exit code is 1 if
    threads would give other samples, or samples raise, or there are none.

    \b
    Example:
        fastload check my_project.data:make_train_set
    """
    report = fastload.check(_import(dataset), samples=samples, workers=workers)
    click.echo(str(report))
    if not report.ok:
        raise SystemExit(1)


@main.command()
@click.argument("source", type=click.Path(exists=True), metavar="FILE_LIST|FOLDER|PARQUET")
@click.argument("out", type=click.Path(file_okay=False))
@click.option(
    "--mode",
    default="jpeg",
    show_default=True,
    type=click.Choice(["encoded", "jpeg", "raw"]),
    help="encoded: the files as they are. jpeg: pictures of --max-size, as JPEGs. raw: their pixels.",
)
@click.option(
    "--max-size",
    type=click.IntRange(1, 65535),
    help="Pixels of the longer side, at most; for jpeg and raw.  [default: 256]",
)
@click.option(
    "--quality", type=click.IntRange(1, 95), help="libjpeg's quality, for jpeg.  [default: 90]"
)
@click.option(
    "--shard-mb",
    default=256.0,
    show_default=True,
    type=click.FloatRange(min=0.001, max=1_000_000),
    help="A shard ends with the record that makes its payloads so many million bytes.",
)
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    help="Threads that read, decode and encode; by default one for each core. 0: none beside the main one.",
)
@click.option(
    "--on-error",
    default="raise",
    show_default=True,
    type=click.Choice(["raise", "skip"]),
    help="An input that cannot be read or decoded. raise: ends the run. skip: is left out, and listed in rejected.txt.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="With --mode encoded: decode each picture to see whether it can be. Without, any bytes are packed.",
)
@click.option(
    "--base-dir",
    type=click.Path(exists=True, file_okay=False),
    help="Folder that relative paths in the list start from; by default the list's own folder.",
)
@click.option(
    "--image-column",
    default="image",
    show_default=True,
    help="Of PARQUET: the column with the files' bytes, or with structs of bytes and path.",
)
@click.option(
    "--label-column",
    default="label",
    show_default=True,
    help="Of PARQUET: the column with class numbers or names.",
)
@click.option(
    "--columns",
    default="",
    metavar="NAME,NAME,...",
    help="Of PARQUET: columns to keep beside these.",
)
def pack(source: str, out: str, columns: str, **options: Any) -> None:
    """Pack pictures into few large files, in the folder OUT.

    FILE_LIST has one path a line; FOLDER has one folder for each class, or Parquet files. OUT gets Arrow files and an
    index; any Arrow tool reads them, fastload.datasets.PackedDataset trains on them. A run that was stopped is
    completed by running it again; until then OUT does not open as a set.

    \b
    Examples:
        fastload pack train.txt packed --mode jpeg --max-size 256 --quality 90
        fastload pack /data/imagenet/train packed --mode raw --on-error skip
    """
    _require("arrow", pyarrow="pyarrow")
    _require("images", PIL="Pillow")
    from fastload.datasets.packed.packing import pack as run_pack

    names = [name.strip() for name in columns.split(",") if name.strip()]
    try:
        click.echo(str(run_pack(source, out, columns=names, progress=True, **options)))
    except FastloadError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error


@main.command()
@click.argument("packed_set", type=click.Path(exists=True, file_okay=False), metavar="SET")
@click.option(
    "--workers",
    type=click.IntRange(0, 1024),
    help="Threads that read; by default one for each core. 0: none beside the main one.",
)
def verify(packed_set: str, workers: int | None) -> None:
    """Read every record of a packed SET and name the bad ones.

    Everything is held against its checksum. The exit code is 1 if something is wrong.
    """
    _require("arrow", pyarrow="pyarrow")
    from fastload.datasets.packed.packing import verify as run_verify

    found = run_verify(packed_set, workers=workers, progress=True, say=click.echo)
    rate = found.bytes / 1e6 / max(found.seconds, 1e-9)
    click.echo(f"{found.records:,} records read in {found.seconds:.1f} s, {rate:,.0f} MB/s")
    if found.bad:
        raise click.ClickException(f"{len(found.bad)} shards or records are bad")
    click.echo("All of them are right.")


@main.command()
@click.argument("packed_set", type=click.Path(exists=True, file_okay=False), metavar="SET")
@click.option(
    "--records",
    default=5,
    show_default=True,
    type=click.IntRange(min=0),
    help="How many records to show.",
)
def inspect(packed_set: str, records: int) -> None:
    """Say what a packed SET is: schema, counts, sizes, how it was made, its first records."""
    _require("arrow", pyarrow="pyarrow")
    from fastload.datasets.packed.packing import inspect as run_inspect

    click.echo(run_inspect(packed_set, records=records))


def _import(path: str) -> Any:
    """The object at "package.module:name", called if it is a class or a function."""
    if not all(path.partition(":")):
        raise click.UsageError(
            f"expected MODULE:NAME, such as my_project.data:train_set, got {path!r}"
        )
    sys.path.insert(0, "")
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.UsageError(f"cannot import {path}: {error}") from error
    if isclass(found) or isroutine(found):
        try:
            found = found()
        except TypeError as error:
            raise click.UsageError(f"cannot call {path} without arguments: {error}") from error
    try:
        require_data_set(found)
    except TypeError as error:
        raise click.UsageError(f"{path}: {error}") from error
    return found


def _require(extra: str, **modules: str) -> None:
    """Say which extra to install where a module is missing. `modules`: import name -> name for people."""
    missing = [name for module, name in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise click.ClickException(
            f"this needs {' and '.join(missing)}, which is not installed: pip install 'fastload[{extra}]'"
        )
