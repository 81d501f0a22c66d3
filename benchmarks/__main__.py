"""`python -m benchmarks`: run benchmarks, each case in a new process, and print one table.

With `--all`, write the record of two cores and, from it, the figures of the pages and the plot.
"""

from __future__ import annotations

import math
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import click

from benchmarks import record
from benchmarks._report import table
from benchmarks._run import Case, Outcome, execute, load
from benchmarks.figures import write_pages
from benchmarks.record import Outcomes, Progress, Section, document
from fastload.bench.report import write_json
from fastload.measure.provenance import busy, caption, provenance

LOADERS = "images latency tensor_dataset small memory collate thread_cost processes step"
NAMES = (*LOADERS.split(), "store")
ASKED_FOR = ("device", "peers", "remote", "sequences", "streams")
"""Benchmarks that run only if they are named: they take long, or need further packages."""
INTERRUPTED, TERMINATED = 130, 143
Planned = tuple[int, str, Case]
"""A run: the number of the repeat, the benchmark, the case."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice((*NAMES, *ASKED_FOR)), metavar="[NAME]...")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help="Number of runs of each case.  [default: depends on the benchmark]",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    help="Begin no further repeat that would end later.  [default: no limit]",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help=f"Run what README and docs show, {record.ALL_REPEATS} times or for {record.ALL_MINUTES} minutes. Write the "
    "record, the figures of the pages, and the plot.",
)
@click.option(
    "--smoke", is_flag=True, help="Run each case once with tiny sizes, and check no aims."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File for all figures, as JSON.",
)
def main(
    names: Sequence[str],
    repeats: int | None,
    minutes: float | None,
    everything: bool,
    smoke: bool,
    json_path: Path | None,
) -> None:
    """Compare fastload with torch's DataLoader.

    Without NAME, all benchmarks run except those that take long: device, and peers, remote,
    sequences and streams, which compare fastload with other loaders.
    benchmarks/README.md describes each of them.

    Every case is a new process, and cases take turns. Keep the machine otherwise idle. A missed aim is reported, but
    is not a failure. If a case fails, the exit code is 1. Ctrl-C ends the run with the table of what ran. With --all,
    the next run at this commit then goes on.

    \b
    Examples:
        python -m benchmarks images latency
        python -m benchmarks --smoke
        python -m benchmarks --all --minutes 30
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # SystemExit ends the case first
    if everything and names:
        raise click.UsageError("--all runs what the pages show. Leave out the names.")
    patterns = record.ALL if everything else dict.fromkeys(names or NAMES, "")
    if everything:
        repeats, minutes = repeats or record.ALL_REPEATS, minutes or record.ALL_MINUTES
    origin = provenance(["python -m benchmarks", *sys.argv[1:]])
    click.echo(caption(origin))
    if warning := busy(origin):
        click.echo(warning)

    recorded = everything and not smoke
    if recorded:
        write_pages()  # if a page lacks a line, it fails now, and not after all runs
    outcomes = record.unfinished(origin) if recorded else {}
    benchmarks = {name: load(name) for name in patterns}
    cases = {
        name: [it for it in each.cases(smoke=smoke) if re.search(patterns[name], it.name)]
        for name, each in benchmarks.items()
    }
    counts = {name: 1 if smoke else repeats or each.REPEATS for name, each in benchmarks.items()}
    status = 0
    for benchmark in benchmarks.values():
        if hasattr(benchmark, "prepare"):
            benchmark.prepare(smoke=smoke)
    try:
        for _ in run(plan(cases, counts), outcomes, minutes):
            if recorded:
                so_far = document(origin, _sections(cases, outcomes), smoke=smoke)
                write_json(record.UNFINISHED, so_far)
    except KeyboardInterrupt:
        status = INTERRUPTED

    sections = _sections(cases, outcomes)
    click.echo(f"\n{table({it.title: it.rows for it in sections.values()}, judged=not smoke)}\n")
    for section in sections.values():
        click.echo(f"{section.text}\n" if section.text else "", nl=False)
    click.echo("\n".join(notes(sections, smoke=smoke)))
    if recorded and not status:
        json_path = json_path or record.RECORD
    if json_path is not None:
        write_json(json_path, document(origin, sections, smoke=smoke))
        click.echo(f"Figures: {json_path}")
    if recorded and json_path == record.RECORD:
        record.UNFINISHED.unlink(missing_ok=True)
        click.echo(f"Written: {', '.join(write_pages())}")
    runs = chain.from_iterable(chain(*section.outcomes.values()) for section in sections.values())
    failed = sum(outcome.failed for outcome in runs)
    if failed:
        click.echo(f"Error: {failed} runs failed. The table shows only the others.", err=True)
        status = status or 1
    sys.exit(status)


def plan(cases: Mapping[str, Sequence[Case]], counts: Mapping[str, int]) -> list[Planned]:
    """Return all runs in their order: each repeat has all benchmarks, and every second one is backwards."""
    return [
        (repeat, name, case)
        for repeat in range(max(counts.values()))
        for name, each in cases.items()
        if repeat < counts[name]
        for case in each[:: -1 if repeat % 2 else 1]
    ]


def run(planned: Sequence[Planned], outcomes: Outcomes, minutes: float | None) -> Iterator[Outcome]:
    """Run what is planned and not among the outcomes yet. Add each outcome to them, and yield it.

    Begin no repeat that would take them beyond `minutes`.
    """
    limit_s = 60 * (minutes or math.inf)
    todo = [it for it in planned if len(outcomes.get(it[1], {}).get(it[2].name, ())) <= it[0]]
    begun = todo[0][0] if todo else 0
    click.echo(f"{len(todo)} runs; {len(planned) - len(todo)} more are there already.", err=True)
    progress = Progress((name, case.name) for _, name, case in todo)
    for repeat, name, case in todo:
        if repeat > begun:
            begun = repeat
            spent = sum(ran.seconds for each in outcomes.values() for ran in chain(*each.values()))
            if spent * (repeat + 1) / repeat > limit_s:
                click.echo(f"Ends after {repeat} repeats: another takes too long.", err=True)
                return
        click.echo(progress.line(name, case.name, limit_s), err=True)
        began = time.monotonic()
        outcome = execute(name, case)
        outcome = replace(outcome, seconds=round(time.monotonic() - began, 1))
        progress.ended(outcome.seconds)
        outcomes.setdefault(name, {}).setdefault(case.name, []).append(outcome)
        if outcome.failed:
            click.echo(f"{name}: {case.name}: {outcome.error}", err=True)
        yield outcome


def _sections(cases: Mapping[str, Sequence[Case]], outcomes: Outcomes) -> dict[str, Section]:
    return {
        name: Section.of(name, cases[name], outcomes[name]) for name in cases if name in outcomes
    }


def notes(sections: Mapping[str, Section], *, smoke: bool) -> list[str]:
    """Return the notes below the table."""
    counts = ", ".join(
        f"{name} {max(map(len, section.outcomes.values()))}" for name, section in sections.items()
    )
    lines = [
        "x: the figure divided by that of the named row, or by the named ideal, in the same repeat. torch's best: its "
        "setting with the largest median.",
        f"Medians of interleaved runs in new processes. Runs of each case: {counts}.",
    ]
    for name, section in sections.items():
        if section.versions:
            found = (f"{of} {its or 'not installed'}" for of, its in section.versions.items())
            lines.append(f"{name}: {', '.join(found)}.")
    if smoke:
        lines.append("This is a smoke run with tiny sizes, so its figures mean nothing.")
    left_out = {
        f"Not measured: {name}: {case}: {outcome.error}"
        for name, section in sections.items()
        for case, outcomes in section.outcomes.items()
        for outcome in outcomes
        if outcome.error and not outcome.failed
    }
    return lines + sorted(left_out)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
