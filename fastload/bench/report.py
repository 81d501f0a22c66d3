"""Turn outcomes into rows, rows into a table, and all of it into JSON with its provenance."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fastload._kit.disk import write_file
from fastload._kit.tables import columns
from fastload._kit.texts import counted
from fastload.bench.figures import Outcome
from fastload.bench.plan import LoaderKind, Workload
from fastload.measure import WARMUP_STEPS
from fastload.measure.provenance import busy, caption
from fastload.measure.repeats import Spread, figure

FORMAT = "fastload-bench/4"
RATIOS: dict[str, LoaderKind] = {"ratio": "serial", "torch_ratio": "torch"}
"""Figures that are rates divided by those of another loader."""
QUIET_SHARE = 0.05
"""Share of the cores that other processes may use before the report warns."""


_TABLE = """
rate_global    | img/s       | .1f | samples per second after the warm-up; CPU and waited cover the same time
ratio          | x serial    | .2f | img/s divided by that of the serial run in the same repeat
torch_ratio    | x torch     | .2f | the same with that of torch, with the number of workers that is its fastest
first_batch_s  | 1st batch s | .3f | seconds from iter(), with the start of threads or processes
cpu_s_per_1000 | CPU s/1000  | .2f | seconds of user + system per 1000 samples, with child processes
peak_mib       | peak MiB    | .0f | PSS of anonymous and shared memory, with child processes, without mapped libraries
wait_share_max | waited      | .0% | share of the time in which the loop waited for the loader
cached_share   | cached      | .0% | share of the files that was in the page cache at the start of the run
"""
COLUMNS = {
    name: rest for name, *rest in (re.split(" +[|] ", line) for line in _TABLE.split("\n") if line)
}
"""The columns of the table: head, form and meaning by the name of the figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One loader with one number of workers, over all repeats that succeeded (at least one)."""

    loader: LoaderKind
    workers: int
    name: str
    runs: int
    samples: int
    unique_samples: int
    figures: dict[str, Spread | None]
    """By name. None: not known in any run."""

    @property
    def rate(self) -> Spread:
        """Samples per second in the steady time."""
        rate = self.figures["rate_global"]
        assert rate is not None
        return rate

    def shown(self, name: str, form: str) -> str:
        """Return the median of a figure as text, n/a if it is unknown."""
        spread = self.figures[name]
        return figure(None if spread is None else spread.median, form)


def summarise(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return one row for each loader and number of workers with figures, in order of first runs.

    Ratios are those to the serial loader in the same repeat, and to torch's with the number of workers that is fastest.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.figures is not None:
            groups.setdefault(outcome.run.name, []).append(outcome)
    bases = {name: _fastest(kind, groups.values()) for name, kind in RATIOS.items()}
    return [_row(of_name, bases) for of_name in groups.values()]


def _fastest(kind: LoaderKind, groups: Iterable[Sequence[Outcome]]) -> dict[int, float]:
    """Return the rates of a kind of loader by repeat, with the number of workers whose median is the largest."""
    of_kind = [
        {it.run.repeat: it.figures.rate for it in group if it.figures and it.figures.rate}
        for group in groups
        if group[0].run.loader == kind
    ]
    return max(filter(None, of_kind), key=lambda rates: median(rates.values()), default={})


def _row(outcomes: Sequence[Outcome], bases: Mapping[str, Mapping[int, float]]) -> Row:
    run, first = outcomes[0].run, outcomes[0].figures
    assert first is not None
    values = [_values(outcome, bases) for outcome in outcomes]
    return Row(
        loader=run.loader,
        workers=run.workers,
        name=run.name,
        runs=len(outcomes),
        samples=first.samples,
        unique_samples=first.unique_samples,
        figures={name: Spread.of(each[name] for each in values) for name in values[0]},
    )


def _values(outcome: Outcome, bases: Mapping[str, Mapping[int, float]]) -> dict[str, float | None]:
    assert outcome.figures is not None
    rate, repeat = outcome.figures.rate, outcome.run.repeat
    ratios = {
        name: rate and rate / of[repeat] if repeat in of else None for name, of in bases.items()
    }
    return (
        outcome.figures.values()
        | ratios
        | {
            "peak_mib": outcome.peak_bytes and outcome.peak_bytes / 2**20,
            "cached_share": outcome.cached_share,
            "others_share": outcome.others_share,
        }
    )


def preamble(workload: Workload, origin: dict[str, Any], *, runs: int, listed: int) -> list[str]:
    """Return lines on what will be measured, and warnings of what will distort it."""
    lines = [
        caption(origin),
        f"{counted(runs, 'run')} of {workload.steps} steps of {counted(workload.batch_size, 'sample')}, "
        f"out of {counted(listed, 'file')}.",
    ]
    if listed < workload.samples:
        lines.append(
            f"The list is shorter than a run, so it starts again after {listed} samples. From then on, the files "
            "come from the page cache."
        )
    if warning := busy(origin):
        lines.append(warning)
    return lines


def table(rows: Sequence[Row], workload: Workload) -> str:
    """Return the rows (at least one) as a table of text, then what its columns mean."""
    return "\n".join([*columns(cells(rows)), "", *notes(rows, workload)])


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """Return the lines of the table, its heads first. Unknown figures are n/a."""
    heads = ["loader", *(head for head, _, _ in COLUMNS.values()), "unique"]
    lines = [[*heads[:2], "min-max", *heads[2:]]]
    for row in rows:
        first, *others = [row.shown(name, form) for name, (_, form, _) in COLUMNS.items()]
        between = f"{row.rate.low:.1f}-{row.rate.high:.1f}"
        unique = f"{row.unique_samples}/{row.samples}"
        lines.append([row.name, first, between, *others, unique])
    return lines


def notes(rows: Sequence[Row], workload: Workload) -> list[str]:
    """Return lines that say how the figures of the table were measured, and what its columns mean."""
    counts = " or ".join(counted(runs, "run") for runs in sorted({row.runs for row in rows}))
    cache = "read before" if workload.cache == "warm" else "dropped from the page cache before"
    meanings = {
        "loader": "fastload's, unless torch is named",
        "unique": "number of different samples among those delivered",
        "min-max": "smallest and largest img/s of the runs",
        **{head: meaning for head, _, meaning in COLUMNS.values()},
        "step": workload.step,
        "files": f"{cache} each run",
    }
    if any(row.loader == "serial" for row in rows):
        meanings["serial"] = (
            "one thread, that of the loop: torch uses one thread within an operation, as in each worker"
        )
    if warning := noise(rows):
        meanings["noise"] = warning
    few = " Small differences between single runs mean nothing." if counts == "1 run" else ""
    return [
        f"Medians of {counts} of {workload.steps} steps of {counted(workload.batch_size, 'sample')}. "
        f"The first {WARMUP_STEPS} steps are warm-up. Runs are new processes, interleaved.{few}",
        *(f"{name:<11}  {meaning}" for name, meaning in meanings.items()),
    ]


def noise(rows: Sequence[Row]) -> str | None:
    """Return a warning if other processes used more than QUIET_SHARE of the cores during the runs, else None."""
    shares = [row.figures["others_share"] for row in rows]
    worst = max((share.median for share in shares if share), default=0.0)
    if worst <= QUIET_SHARE:
        return None
    return f"other processes used up to {worst:.0%} of the cores: do not rely on these figures"


def verdict(rows: Sequence[Row]) -> str | None:
    """Compare the fastest rows of fastload's loaders with that of torch's. Return None if there are not both."""
    best = {row.loader: row for row in sorted(rows, key=lambda row: row.rate.median)}
    theirs = best.pop("torch", None)
    best.pop("serial", None)
    if not best or theirs is None:
        return None
    ours = sorted(best.values(), key=lambda row: -row.rate.median)
    rates = "; ".join(f"{row.name} {row.rate.median:.1f} img/s" for row in (*ours, theirs))
    ratios = ", ".join(f"{row.name} {row.shown('torch_ratio', '.2f')} x" for row in ours)
    return f"Best of each: {rates}. Beside torch's: {ratios}."


def findings(outcomes: Sequence[Outcome]) -> str:
    """Return what bounds each loader, a line for each that measures itself."""
    found = {it.run.name: it.figures.finding for it in outcomes if it.figures}
    return "\n".join(f"{name}: {finding}" for name, finding in found.items() if finding)


def partial(done: int, planned: int) -> str:
    """Return the line that says how many runs were completed, or "" if all were."""
    return f"Partial: stopped after {done} of {counted(planned, 'run')}." if done < planned else ""


def conditions(document: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """Return lines on what was loaded, on which machine, and what makes the figures doubtful."""
    work = document["workload"] or {}
    loaded = (f"{name} {work[name]}" for name in work if name not in ("file_list", "base_dir"))
    runs = max((row.runs for row in rows), default=0)
    lines = [
        ", ".join(loaded),
        f"step {document['step']}; median and range of {counted(runs, 'run')}" if runs else "",
        partial(len(document["runs"]), document["planned_runs"]),
        caption(document["provenance"]),
        document["noise"],
    ]
    return list(filter(None, lines))


def document(
    outcomes: Sequence[Outcome],
    rows: Sequence[Row],
    origin: dict[str, Any],
    *,
    planned: int,
) -> dict[str, Any]:
    """Return everything as JSON values: provenance, workload, rows, and each run's raw figures.

    "partial" is true if it has fewer than the `planned` runs.
    """
    workload = outcomes[0].run.workload if outcomes else None
    return {
        "format": FORMAT,
        "partial": len(outcomes) < planned,
        "planned_runs": planned,
        "provenance": origin,
        "workload": workload and asdict(workload),
        "warmup_steps": WARMUP_STEPS,
        "step": workload and workload.step,
        "rows": [_flat(asdict(row), "figures") for row in rows],
        "verdict": verdict(rows),
        "noise": noise(rows),
        "runs": [_raw(outcome) for outcome in outcomes],
    }


def _raw(outcome: Outcome) -> dict[str, Any]:
    raw = _flat(asdict(outcome), "run") | {"name": outcome.run.name}
    del raw["workload"], raw["messages"]
    return raw


def _flat(values: dict[str, Any], name: str) -> dict[str, Any]:
    inner: dict[str, Any] = values.pop(name)
    return {**inner, **values}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the document, as `write_text` does."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and make missing folders. Escape bytes of file names that are not UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode("utf-8", "backslashreplace"), durable=False)
