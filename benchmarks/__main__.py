"""`python -m benchmarks`: runs benchmarks, each configuration in a fresh process, and prints one table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from benchmarks._report import Row, as_json, table
from benchmarks._run import Benchmark, Case, Outcome, execute, load
from fastload.harness.report import caption, provenance, write_json

NAMES = ("images", "latency", "engine", "tensor_dataset", "memory", "collate", "thread_cost")
FORMAT = "fastload-benchmarks/1"

Repeats = dict[str, list[Outcome]]
"""The outcomes of each case, by its name; one for each repeat."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    help="Runs of each case; a benchmark has its own default.",
)
@click.option(
    "--smoke", is_flag=True, help="Tiny sizes, once: shows that all of it runs, and judges nothing."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures here.",
)
def main(names: Sequence[str], repeats: int | None, smoke: bool, json_path: Path | None) -> None:
    """Measure fastload against torch's DataLoader: all benchmarks, or those named.

    Every case is a fresh process, and cases take turns, so leave the machine to them. An aim that is not met is
    reported and is no failure; a case that breaks is one (exit status 1).
    """
    origin = provenance(["python -m benchmarks", *sys.argv[1:]])
    machine = origin["machine"]
    cores, load_average = machine["cores_usable"] or machine["cores"], machine["load_average_1min"]
    click.echo(caption(origin))
    if load_average > cores / 2:
        click.echo(
            f"The machine is busy (load {load_average:.2f} on {cores} cores): the figures will be noisy."
        )
    benchmarks = {name: _loaded(name) for name in names or NAMES}
    plans = {name: benchmark.cases(smoke=smoke) for name, benchmark in benchmarks.items()}
    times = {
        name: 1 if smoke else repeats or benchmark.REPEATS for name, benchmark in benchmarks.items()
    }
    measured: dict[str, Repeats] = {}
    total = sum(len(plans[name]) * times[name] for name in plans)
    with tqdm(total=total, unit="case", leave=False, file=sys.stderr, disable=None) as bar:
        for name, cases in plans.items():
            measured[name] = run(name, cases, repeats=times[name], bar=bar)

    sections = {name: rows_of(benchmarks[name], measured[name]) for name in benchmarks}
    titles = {benchmarks[name].TITLE: rows for name, rows in sections.items()}
    click.echo("\n" + table(titles, judged=not smoke) + "\n")
    for line in notes(times, measured, smoke=smoke):
        click.echo(line)
    if json_path is not None:
        write_json(json_path, document(origin, plans, sections, measured, smoke=smoke))
        click.echo(f"Figures: {json_path}")
    faults = [
        outcome
        for repeats in measured.values()
        for runs in repeats.values()
        for outcome in runs
        if outcome.failed
    ]
    if faults:
        raise click.ClickException(
            f"{len(faults)} of {total} runs failed; the table has only the others."
        )


def _loaded(name: str) -> Benchmark:
    try:
        return load(name)
    except ImportError as exc:
        raise click.ClickException(
            f"{name} needs {exc.name}, which is not installed: pip install 'fastload[images]'"
        ) from exc


def run(name: str, cases: Sequence[Case], *, repeats: int, bar: Any) -> Repeats:
    """Run the cases of a benchmark, one after the other, then back again: what drifts favours none of them."""
    outcomes: Repeats = {case.name: [] for case in cases}
    for repeat in range(repeats):
        for case in cases if repeat % 2 == 0 else cases[::-1]:
            bar.set_description(f"{name}: {case.name}")
            outcome = execute(name, case)
            outcomes[case.name].append(outcome)
            if outcome.failed:
                bar.write(f"{name}: {case.name}: {outcome.error}", file=sys.stderr)
            bar.update()
    return outcomes


def rows_of(benchmark: Benchmark, repeats: Repeats) -> list[Row]:
    """The rows of a benchmark."""
    return benchmark.rows(
        {case: [outcome.figures for outcome in runs] for case, runs in repeats.items()}
    )


def notes(times: dict[str, int], measured: dict[str, Repeats], *, smoke: bool) -> list[str]:
    """What stands under the table."""
    lines = [
        "x: the figure over that of the row or ideal named beside it, within a repeat; medians and spread over "
        + ", ".join(f"{count} ({name})" for name, count in times.items())
        + " repeats. torch's best: its setting with the best median. Waits are simulated where it says so."
    ]
    if smoke:
        lines.append("A smoke run: the sizes are too small for the figures to mean anything.")
    reasons = {
        f"{name}: {case}: not measured: {outcome.error}"
        for name, repeats in measured.items()
        for case, runs in repeats.items()
        for outcome in runs
        if outcome.error and not outcome.failed
    }
    return lines + sorted(reasons)


def document(
    origin: dict[str, Any],
    plans: dict[str, list[Case]],
    sections: dict[str, list[Row]],
    measured: dict[str, Repeats],
    *,
    smoke: bool,
) -> dict[str, Any]:
    """All of it as JSON values: provenance, rows, and what each run measured."""
    return {
        "format": FORMAT,
        "provenance": origin,
        "smoke": smoke,
        "benchmarks": {
            name: {
                "rows": [as_json(row) for row in rows],
                "runs": [
                    {
                        "case": case.name,
                        "options": case.options,
                        "repeat": repeat,
                        "figures": outcome.figures,
                        "error": outcome.error,
                    }
                    for case in plans[name]
                    for repeat, outcome in enumerate(measured[name][case.name])
                ],
            }
            for name, rows in sections.items()
        },
    }


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
