"""Turn outcomes into rows, rows into a table, and all of it into JSON with its provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastload._kit.disk import write_file
from fastload.bench.figures import Figures, Outcome
from fastload.bench.plan import LoaderKind, Workload
from fastload.measure import WARMUP_STEPS
from fastload.measure.provenance import busy, caption
from fastload.measure.tables import Spread, columns

FORMAT = "fastload-bench/2"
QUIET_SHARE = 0.05
"""Share of the cores that other processes may use before the report warns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One loader with one number of workers and ranks, over all repeats that succeeded (at least one)."""

    loader: LoaderKind
    workers: int
    ranks: int
    name: str
    runs: int
    rate: Spread
    """Samples per second of all ranks together, in the steady time."""
    rank_rate: Spread
    """Samples per second of one rank, over the ranks of all runs."""
    ratio: Spread | None
    """Rate divided by that of the serial loader with the same number of ranks, in the same repeat. None without one."""
    first_batch_s: Spread
    cpu_s_per_1000: Spread | None
    peak_bytes: Spread | None
    wait_share: Spread
    occupancy: Spread | None
    """Share (0 to 1) of the batches in flight that were ready when the loop asked. None for loaders without threads."""
    samples: int
    unique_samples: int
    cached_share: Spread | None
    others_share: Spread | None


def summarise(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return one row for each loader, number of workers and number of ranks with figures, in order of first runs."""
    measured = [(outcome, outcome.figures) for outcome in outcomes if outcome.figures is not None]
    serial_rates = {
        (outcome.run.repeat, outcome.run.ranks): figures.rate
        for outcome, figures in measured
        if outcome.run.loader == "serial"
    }
    names = dict.fromkeys(outcome.run.name for outcome, _ in measured)
    return [
        _row([each for each in measured if each[0].run.name == name], serial_rates)
        for name in names
    ]


def _row(
    measured: Sequence[tuple[Outcome, Figures]], serial_rates: dict[tuple[int, int], float]
) -> Row:
    run, first = measured[0][0].run, measured[0][1]
    bases = [serial_rates.get((outcome.run.repeat, run.ranks)) for outcome, _ in measured]
    stats = [figures.loader_stats if run.workers else None for _, figures in measured]
    values: dict[str, Iterable[float | None]] = {
        "rank_rate": [rate for _, figures in measured for rate in figures.rank_rates],
        "ratio": [
            base and each.rate / base for base, (_, each) in zip(bases, measured, strict=True)
        ],
        "occupancy": [each["occupancy"] if each else None for each in stats],
    }
    for name in ("rate", "first_batch_s", "cpu_s_per_1000", "wait_share"):
        values[name] = [getattr(figures, name) for _, figures in measured]
    for name in ("peak_bytes", "cached_share", "others_share"):
        values[name] = [getattr(outcome, name) for outcome, _ in measured]
    about = {name: getattr(run, name) for name in ("loader", "workers", "ranks", "name")}
    spreads: dict[str, Any] = {name: Spread.of(found) for name, found in values.items()}
    return Row(
        **about,
        runs=len(measured),
        samples=first.samples,
        unique_samples=first.unique_samples,
        **spreads,
    )


def preamble(workload: Workload, origin: dict[str, Any], *, runs: int, listed: int) -> list[str]:
    """Return lines on what will be measured, and warnings of what will distort it."""
    lines = [
        caption(origin),
        f"{runs} runs of {workload.steps} steps of {workload.batch_size} samples, out of {listed} files.",
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
    """Return the rows (at least one) as a table of text, then what its columns mean. Unknown figures are n/a."""
    cells = [_cells(row, workload) for row in rows]
    if all(row.ranks == 1 for row in rows):
        for line in cells:
            del line["per rank"]
    lines = columns([[*cells[0]], *([*line.values()] for line in cells)])
    return "\n".join([*lines, "", *_notes(rows, workload)])


def _cells(row: Row, workload: Workload) -> dict[str, str]:
    def figure(spread: Spread | None, form: str, *, scale: float = 1.0) -> str:
        return "n/a" if spread is None else format(spread.median * scale, form)

    return {
        "loader": row.name,
        "img/s": figure(row.rate, ".1f"),
        "min-max": f"{row.rate.low:.1f}-{row.rate.high:.1f}",
        "per rank": figure(row.rank_rate, ".1f"),
        "x serial": figure(row.ratio, ".2f"),
        "1st batch s": figure(row.first_batch_s, ".3f"),
        "CPU s/1000": figure(row.cpu_s_per_1000, ".2f"),
        "peak MiB": figure(row.peak_bytes, ".0f", scale=2**-20),
        "waited": figure(row.wait_share, ".0%"),
        "unique": f"{row.unique_samples}/{row.samples}",
        "cache": f"{workload.cache} {figure(row.cached_share, '.0%')}",
    }


def _notes(rows: Sequence[Row], workload: Workload) -> list[str]:
    counts = " or ".join(str(count) for count in sorted({row.runs for row in rows}))
    cache = "read before" if workload.cache == "warm" else "dropped from the page cache before"
    meanings = {
        "img/s": "samples per second after the warm-up; CPU and waited cover the same time",
        "min-max": "smallest and largest img/s of the runs",
        "x serial": "img/s divided by that of the serial run in the same repeat",
        "1st batch": "seconds from iter(), with the start of threads or processes",
        "CPU": "seconds of user + system per 1000 samples, with child processes",
        "peak": "PSS of anonymous and shared memory, with child processes, without mapped libraries",
        "waited": "share of the time in which the loop waited for the loader",
        "unique": "number of different samples among those delivered",
        "cache": f"the files were {cache} each run; the percentage was in the page cache at its start",
        "step": workload.step,
    }
    if any(row.ranks > 1 for row in rows):
        meanings["ranks"] = (
            "processes on this node, started together, each with its part of the samples. img/s counts all "
            "together. x serial compares equal numbers of ranks"
        )
    if any(row.loader == "serial" for row in rows):
        meanings["serial"] = (
            "one thread, that of the loop: torch uses one thread within an operation, as in each worker"
        )
    if warning := noise(rows):
        meanings["noise"] = warning
    few = " Small differences between single runs mean nothing." if counts == "1" else ""
    return [
        f"Medians of {counts} runs of {workload.steps} steps of {workload.batch_size} samples in each rank. The first "
        f"{WARMUP_STEPS} steps are warm-up. Runs are new processes, interleaved.{few}",
        *(f"{name:<9}  {meaning}" for name, meaning in meanings.items()),
    ]


def noise(rows: Sequence[Row]) -> str | None:
    """Return a warning if other processes used more than QUIET_SHARE of the cores during the runs, else None."""
    worst = max((row.others_share.median for row in rows if row.others_share), default=0.0)
    if worst <= QUIET_SHARE:
        return None
    return f"other processes used up to {worst:.0%} of the cores: do not rely on these figures"


def verdict(rows: Sequence[Row]) -> str | None:
    """Compare the fastest rows of fastload's threads with that of torch's processes, for each number of ranks.

    Return the sentences, or None if no number of ranks has both.
    """
    sentences = []
    slowest_first = sorted(rows, key=lambda row: row.rate.median)
    for ranks in sorted({row.ranks for row in rows}):
        best = {row.loader: row for row in slowest_first if row.ranks == ranks}
        ours = [best[kind] for kind in ("thread", "plan") if kind in best]
        if ours and (theirs := best.get("torch")):
            rates = "; ".join(f"{row.name} {row.rate.median:.1f} img/s" for row in (*ours, theirs))
            base = theirs.rate.median
            ratios = ", ".join(f"{row.name} {row.rate.median / base:.2f} x" for row in ours)
            sentences.append(f"Best of each: {rates}. Beside torch's processes: {ratios}.")
    return "\n".join(sentences) or None


def partial(done: int, planned: int) -> str:
    """Return the line that says how many runs were completed, or "" if all were."""
    return f"Partial: stopped after {done} of {planned} runs." if done < planned else ""


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
        "rows": [asdict(row) for row in rows],
        "verdict": verdict(rows),
        "noise": noise(rows),
        "runs": [_raw(outcome) for outcome in outcomes],
    }


def _raw(outcome: Outcome) -> dict[str, Any]:
    raw = asdict(outcome)
    run = raw.pop("run") | {"name": outcome.run.name}
    del run["workload"], raw["messages"]
    return {**run, **raw}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the document whole or not at all, and make missing folders."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and make missing folders. Escape bytes of file names that are not UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, text.encode("utf-8", "backslashreplace"), durable=False)
