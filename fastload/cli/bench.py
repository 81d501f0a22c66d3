"""`fastload bench`: compare serial loading, threads and processes on images."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
from tqdm import tqdm

from fastload.cli import options as opt
from fastload.cli._common import list_options, require, sigterm_raises

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastload.bench.figures import Outcome
    from fastload.bench.plan import LoaderKind, Run


def _counts(_: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    """Turn "1,2,4" into [1, 2, 4]: each once, in the order given."""
    counts: dict[int, None] = {}
    workers = parameter.name == "workers"
    for word in text.split(","):
        if not word.strip().isdecimal() or int(word) < 1:
            serial = workers and word.strip() == "0"
            hint = " For no workers, use --loaders serial." if serial else ""
            raise click.BadParameter(
                f"{word.strip()!r} is not a number of {parameter.name}. "
                f"Give counts of 1 or more, such as 1,2,4.{hint}"
            )
        counts[int(word)] = None
    return list(counts)


def _loader_kinds(_: click.Context, __: click.Parameter, text: str) -> list[LoaderKind]:
    """Turn "serial,thread" into ["serial", "thread"]: each once, in the order given."""
    from fastload.bench.plan import LOADERS

    by_name = {str(kind): kind for kind in LOADERS}
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in by_name:
            raise click.BadParameter(f"{word!r} is not a loader. Choose from {', '.join(LOADERS)}.")
    return [by_name[word] for word in dict.fromkeys(words)]


@click.command()
@list_options
@click.option(
    "--workers",
    default="1,2,4",
    callback=_counts,
    metavar="N,N,...",
    help="Numbers of workers per rank to measure with each parallel loader.",
)
@click.option(
    "--ranks",
    default="1",
    callback=_counts,
    metavar="N,N,...",
    help="Numbers of ranks to measure. Ranks are processes on this node that each load a part at the same time.",
)
@click.option(
    "--loaders",
    default="serial,thread,torch",
    callback=_loader_kinds,
    metavar="NAME,NAME,...",
    help="Loaders to measure. serial: fastload without workers. thread: fastload with threads. torch: torch's "
    "DataLoader with worker processes. plan: fastload with threads, and a plan of fastload.image in place of "
    "torchvision's transforms.",
)
@opt.count("-b --nbatch batch_size", default=64, help="Batch size per rank.")
@opt.count(
    "-s --nsteps steps",
    within=(6, None),
    default=20,
    help="Batches per run. The first 5 are warm-up, and no rate counts them.",
)
@opt.count(
    "--status-print-interval", default=5, help="Steps between two lines with the rate of a run."
)
@opt.number(
    "--step-ms",
    within=(0, 3_600_000),
    default=0.0,
    help="Simulated training step: milliseconds that the loop waits after each batch.",
)
@opt.choice(
    "--transform",
    ["resize", "rrc"],
    help="Transform of the images. resize: Resize((256, 256)) + ToTensor. rrc: RandomResizedCrop(224) + flip + "
    "ToTensor + Normalize.",
)
@opt.choice(
    "--cache",
    ["warm", "cold"],
    help="State of the page cache before each run. warm: the files are in it. cold: the kernel has dropped them.",
)
@opt.count(
    "--repeats", default=3, help="Runs of each configuration, interleaved. The table shows medians."
)
@opt.count("--seed", within=(0, None), default=0, help="Seed of the order of the samples.")
@opt.flag("-q --quiet", help="Print one line per run, without the lines of the run itself.")
@opt.file("--json json_path", help="File for all figures, as JSON.  [default: no file]")
@opt.file(
    "--html html_path",
    help="File for a report that opens offline. Needs pip install '.[bench]' in the clone.  [default: no file]",
)
@opt.file(
    "--plot plot_path",
    help="File for a plot of the rates, as PNG. Needs pip install '.[bench]' in the clone.  [default: no file]",
)
def bench(
    file_list: Path | None,
    base_dir: Path | None,
    loaders: list[LoaderKind],
    workers: list[int],
    ranks: list[int],
    repeats: int,
    json_path: Path | None,
    html_path: Path | None,
    plot_path: Path | None,
    quiet: bool,
    **options: Any,
) -> None:
    """Compare serial loading, threads and processes on images.

    All runs take the same samples in the same order; only the loader differs, or the plan. Each run is a new process,
    and the runs follow one another. Keep the machine otherwise idle. After Ctrl-C or SIGTERM the command reports the
    completed runs, marked as partial.

    \b
    Examples:
        fastload bench --file-list-path samples/filelist.txt --workers 1,2,4 --json bench.json
        fastload bench --file-list-path train.txt --workers 1,2,4,8 --ranks 1,2,4 -q --html report.html
        fastload bench --file-list-path train.txt --base-dir /data/imagenet --cache cold --transform rrc
        fastload bench --file-list-path train.txt --loaders thread,torch --workers 8 --step-ms 150
        fastload bench --file-list-path train.txt --loaders thread,plan,torch --transform rrc --plot bench.png
    """
    require("images", PIL="Pillow", torchvision="torchvision")
    if plot_path is not None or html_path is not None:
        require("bench", matplotlib="matplotlib")
    from fastload.bench import report
    from fastload.bench.plan import Workload, plan_runs
    from fastload.bench.run import files_of
    from fastload.measure.provenance import provenance
    from fastload.measure.samples import find_list

    origin = provenance(["fastload", *sys.argv[1:]])
    workload = Workload(
        file_list=str(find_list(file_list, base_dir)),
        base_dir=None if base_dir is None else str(base_dir),
        **options,
    )
    runs = plan_runs(workload, loaders=loaders, workers=workers, ranks=ranks, repeats=repeats)
    listed, files = files_of(runs)
    for line in report.preamble(workload, origin, runs=len(runs), listed=listed):
        click.echo(line)

    if "plan" in loaders:
        from fastload.image import kernels

        click.echo(f"image kernels: {kernels.state()}")

    outcomes: list[Outcome] = []
    stopped: KeyboardInterrupt | None = None
    with sigterm_raises():
        try:
            _race(runs, files, outcomes, quiet=quiet)
        except KeyboardInterrupt as stop:
            stopped = stop
    rows = report.summarise(outcomes)
    if partial := report.partial(len(outcomes), len(runs)):
        click.echo(f"\n{partial}")
    if rows:
        click.echo("\n" + report.table(rows, workload))
        if best := report.verdict(rows):
            click.echo("\n" + best)
    content = report.document(outcomes, rows, origin, planned=len(runs))
    if json_path is not None:
        report.write_json(json_path, content)
        click.echo(f"Figures: {json_path}")
    if html_path is not None:
        from fastload.bench.page import render

        report.write_text(html_path, render(content, rows))
        click.echo(f"Report: {html_path}")
    if plot_path is not None and rows:
        from fastload.bench.plot import draw

        plot_path.parent.mkdir(parents=True, exist_ok=True)
        draw(content, rows).savefig(plot_path)
        click.echo(f"Plot: {plot_path}")
    if stopped is not None:
        raise stopped
    failed = sum(outcome.error is not None for outcome in outcomes)
    if failed:
        raise click.ClickException(
            f"{failed} of {len(runs)} runs failed. The table shows only the others."
        )


def _race(
    runs: Sequence[Run], files: Sequence[str], outcomes: list[Outcome], *, quiet: bool
) -> None:
    """Execute the runs one after another, print their lines, and draw a progress bar on a terminal.

    Append the outcome of each run to `outcomes` as soon as it ends, so that a signal loses no completed run.
    """
    from fastload.bench.run import execute

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
    """Return the estimated time for the remaining runs as text, or "" if there is no estimate."""
    if not 0 < done < planned:
        return ""
    left_s = (perf_counter() - began) / done * (planned - done)
    return f", about {f'{left_s:.0f} s' if left_s < 100 else f'{left_s / 60:.0f} min'} left"
