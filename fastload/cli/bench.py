"""`fastload bench`: compare serial loading, threads and processes on images."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import click

from fastload._kit.options import File, Option, options
from fastload.bench.plan import Sweep, SweepRun, Workload, plan_runs
from fastload.cli._command import Command
from fastload.cli._common import require, sigterm_raises

if TYPE_CHECKING:
    from fastload.bench.figures import Outcome
    from fastload.bench.report import Row


@options
class Output:
    """What a comparison prints and writes."""

    quiet: Annotated[bool, Option("-q --quiet")] = False
    """Print one line per run, without the lines of the run itself."""
    json: File | None = None
    """File for all figures, as JSON. [default: no file]"""
    html: File | None = None
    """File for a page that opens offline. Needs the extra `bench`. [default: no file]"""
    plot: File | None = None
    """File for a plot of the rates, as PNG. Needs the extra `bench`. [default: no file]"""


@Command
def bench(workload: Workload, sweep: Sweep, output: Output) -> None:
    """Compare loaders on images: a serial loop, fastload by threads or processes, torch.

    All runs take the same samples in the same order; only the loader differs, or the plan. Each run is a new process,
    and the runs follow one another. Keep the machine otherwise idle. After Ctrl-C or SIGTERM the command reports the
    completed runs, marked as partial.

    \b
    Examples:
        fastload bench --file-list-path samples/filelist.txt --workers 1,2,4 --json bench.json
        fastload bench --file-list-path train.txt --workers 1,2,4,8 -q --html report.html
        fastload bench --file-list-path train.txt --base-dir /data/imagenet --cache cold --transform rrc
        fastload bench --file-list-path train.txt --loaders thread,torch --workers 8 --step-ms 150
        fastload bench --file-list-path train.txt --loaders thread,plan,torch --transform rrc --plot bench.png
    """
    require("images", PIL="Pillow", torchvision="torchvision")
    if output.plot or output.html:
        require("bench", matplotlib="matplotlib")
    from fastload.bench import report
    from fastload.bench.run import files_of
    from fastload.measure.provenance import provenance
    from fastload.measure.samples import find_list

    origin = provenance(["fastload", *sys.argv[1:]])
    workload = replace(workload, file_list=str(find_list(workload)))
    runs = plan_runs(workload, sweep)
    listed, files = files_of(runs)
    for line in report.preamble(workload, origin, runs=len(runs), listed=listed):
        click.echo(line)

    if "plan" in sweep.loaders:
        from fastload.image import kernels

        click.echo(f"image kernels: {kernels.state()}")

    outcomes: list[Outcome] = []
    stopped: KeyboardInterrupt | None = None
    with sigterm_raises():
        try:
            _race(runs, files, outcomes, quiet=output.quiet)
        except KeyboardInterrupt as stop:
            stopped = stop
    rows = report.summarise(outcomes)
    if partial := report.partial(len(outcomes), len(runs)):
        click.echo(f"\n{partial}")
    if rows:
        click.echo("\n" + report.table(rows, workload))
        for lines in (report.verdict(rows), report.findings(outcomes)):
            if lines:
                click.echo("\n" + lines)
    content = report.document(outcomes, rows, origin, planned=len(runs))
    _write(output, content, rows)
    if stopped is not None:
        raise stopped
    if failed := sum(outcome.error is not None for outcome in outcomes):
        raise click.ClickException(
            f"{failed} of {len(runs)} runs failed. The table shows only the others."
        )


def _race(
    runs: Sequence[SweepRun], files: Sequence[str], outcomes: list[Outcome], *, quiet: bool
) -> None:
    """Execute the runs one after another, and print their lines.

    Append the outcome of each run to `outcomes` as soon as it ends, so that a signal loses no completed run.
    """
    from fastload.bench.run import execute

    began = perf_counter()

    def say(line: str) -> None:
        if not quiet:
            click.echo(line)

    for number, run in enumerate(runs, start=1):
        place = f"[{number}/{len(runs)}] {run.name}"
        say(f"\n{place}{_left(began, number - 1, len(runs))}")
        outcome = execute(run, files=files, say=say)
        if outcome.messages not in {"", *(earlier.messages for earlier in outcomes)}:
            click.echo(outcome.messages, err=True)
        if outcome.error:
            click.echo(f"Error: {run.name}: {outcome.error}", err=True)
        outcomes.append(outcome)
        if quiet and outcome.figures:
            left = _left(began, number, len(runs))
            click.echo(f"{place}: {outcome.figures.rate:.1f} img/s{left}")


def _write(output: Output, content: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write the files that were asked for. Without a completed run, there is no plot."""
    from fastload.bench import report

    if output.json:
        report.write_json(output.json, content)
        click.echo(f"Figures: {output.json}")
    if output.html:
        from fastload.bench.page import render

        report.write_text(output.html, render(content, rows))
        click.echo(f"Page: {output.html}")
    if output.plot and rows:
        from fastload.bench.plot import draw

        output.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(content, rows).savefig(output.plot)
        click.echo(f"Plot: {output.plot}")


def _left(began: float, done: int, planned: int) -> str:
    """Return the estimated time for the remaining runs as text, or "" if there is no estimate."""
    if not 0 < done < planned:
        return ""
    left_s = (perf_counter() - began) / done * (planned - done)
    return f", about {f'{left_s:.0f} s' if left_s < 100 else f'{left_s / 60:.0f} min'} left"
