"""`python -m benchmarks`: run benchmarks, each case in a new process, and print one table."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import click

from benchmarks._report import Row, table
from benchmarks._run import Case, Outcome, execute, load
from fastload.bench.report import write_json
from fastload.measure.provenance import busy, caption, provenance, version
from fastload.measure.repeats import turns

LOADERS = "images latency engine tensor_dataset small memory collate thread_cost processes"
NAMES = (*LOADERS.split(), "store")
ASKED_FOR = ("device", "kinds", "peers", "sequences")
"""Benchmarks that run only if they are named: they take long, or need further packages."""
FORMAT = "fastload-benchmarks/1"
INTERRUPTED, TERMINATED = 130, 143


@dataclass(frozen=True, slots=True)
class Section:
    """A benchmark that was run: of each case, by its name, the outcome of each repeat."""

    title: str
    cases: Sequence[Case]
    outcomes: dict[str, list[Outcome]]
    rows: list[Row]
    versions: dict[str, str | None]
    """Of the packages that this benchmark alone measures, None for one that is not installed; and its `machine()`."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice((*NAMES, *ASKED_FOR)), metavar="[NAME]...")
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help="Number of runs of each case.  [default: depends on the benchmark]",
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
def main(names: Sequence[str], repeats: int | None, smoke: bool, json_path: Path | None) -> None:
    """Compare fastload with torch's DataLoader.

    Without NAME, all benchmarks run except those that take long: kinds, device, and peers and
    sequences, which compare fastload with other loaders.
    benchmarks/README.md describes each of them.

    Every case is a new process, and cases take turns. Keep the machine otherwise idle. A missed aim is reported, but
    is not a failure. If a case fails, the exit code is 1. Ctrl-C ends the run with the table of the completed
    benchmarks.

    \b
    Examples:
        python -m benchmarks images latency
        python -m benchmarks --smoke
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # SystemExit ends the case first
    names = tuple(dict.fromkeys(names)) or NAMES
    origin = provenance(["python -m benchmarks", *sys.argv[1:]])
    click.echo(caption(origin))
    if warning := busy(origin):
        click.echo(warning)

    sections: dict[str, Section] = {}
    status = 0
    try:
        for name in names:
            began = time.monotonic()
            sections[name] = run(name, repeats=repeats, smoke=smoke)
            click.echo(f"{name} took {time.monotonic() - began:.0f} s", err=True)
    except KeyboardInterrupt:
        status = INTERRUPTED

    rows = {section.title: section.rows for section in sections.values()}
    click.echo(f"\n{table(rows, judged=not smoke)}\n")
    click.echo("\n".join(notes(sections, smoke=smoke)))
    if json_path is not None:
        write_json(json_path, document(origin, sections, smoke=smoke))
        click.echo(f"Figures: {json_path}")
    runs = chain.from_iterable(chain(*section.outcomes.values()) for section in sections.values())
    failed = sum(outcome.failed for outcome in runs)
    if failed:
        click.echo(f"Error: {failed} runs failed. The table shows only the others.", err=True)
        status = status or 1
    sys.exit(status)


def run(name: str, *, repeats: int | None, smoke: bool) -> Section:
    """Run the cases of a benchmark in turns."""
    try:
        benchmark = load(name)
    except ImportError as exc:
        raise click.ClickException(
            f"{name} needs {exc.name}, which is not installed. Run pip install '.[images,arrow]' here"
        ) from exc
    if hasattr(benchmark, "prepare"):
        benchmark.prepare(smoke=smoke)
    cases = benchmark.cases(smoke=smoke)
    count = 1 if smoke else repeats or benchmark.REPEATS
    outcomes: dict[str, list[Outcome]] = {case.name: [] for case in cases}
    for _, case in turns(cases, count):
        click.echo(f"{name}: {case.name}", err=True)
        outcome = execute(name, case)
        outcomes[case.name].append(outcome)
        if outcome.failed:
            click.echo(f"{name}: {case.name}: {outcome.error}", err=True)
    results = {case: [outcome.figures for outcome in runs] for case, runs in outcomes.items()}
    versions = {package: version(package) for package in getattr(benchmark, "PACKAGES", ())}
    versions |= getattr(benchmark, "machine", dict)()
    return Section(benchmark.TITLE, cases, outcomes, benchmark.rows(results), versions)


def notes(sections: dict[str, Section], *, smoke: bool) -> list[str]:
    """Return the notes below the table."""
    counts = ", ".join(
        f"{name} {len(section.outcomes[section.cases[0].name])}"
        for name, section in sections.items()
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


def document(origin: Any, sections: dict[str, Section], *, smoke: bool) -> dict[str, Any]:
    """Return everything as JSON values: provenance, rows, and the figures of each run."""
    return {
        "format": FORMAT,
        "provenance": origin,
        "smoke": smoke,
        "benchmarks": {
            name: {
                "title": section.title,
                "versions": section.versions,
                "rows": [asdict(row) for row in section.rows],
                "runs": [
                    {"case": case.name, "options": case.options, "repeat": repeat} | asdict(outcome)
                    for case in section.cases
                    for repeat, outcome in enumerate(section.outcomes[case.name])
                ],
            }
            for name, section in sections.items()
        },
    }


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
