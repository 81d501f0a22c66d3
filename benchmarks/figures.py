"""`python -m benchmarks.figures`: write the figures of the record into README and docs, and draw docs/peers.png.

`pages.toml` has the lines of the pages that show figures, with names of figures in their place.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import click

from benchmarks._report import number
from benchmarks.record import RECORD, ROOT
from fastload.bench.report import write_text

PAGES = Path(__file__).with_name("pages.toml")
PLOT = ROOT / "docs" / "peers.png"
PLACE = re.compile(r"\{[^}]*\}")
BARS = ("plan", "plan_whole", "own_v2", "torch_v2", "torch_v1", "jpeg", "ffcv_jpeg")


class Figure:
    """A row of the record, as pages show it.

    The format "f" is the median of the figure, "x" that of the ratio, "yes" whether the figure is always 1. With "s",
    the least and the greatest follow.
    """

    def __init__(self, row: dict[str, Any] | None) -> None:
        self.row = row or {"name": "", "figure": None, "ratio": None}

    def __format__(self, how: str) -> str:
        found = self.row["ratio" if "x" in how else "figure"]
        if found is None:
            return "not measured"
        if how == "yes":
            return "yes" if found["low"] == 1 else "no"
        median, low, high = (number(found[key]) for key in ("median", "low", "high"))
        return f"{median} ({low} - {high})" if "s" in how else median


def names(record: dict[str, Any], texts: dict[str, Any]) -> dict[str, Any]:
    """Return what can stand in a line by its name: figures, and where the record comes from."""
    found: dict[str, Any] = {}
    for name, (benchmark, row, unit, *reference) in texts["names"].items():
        rows = [
            each
            for each in record["benchmarks"].get(benchmark, {"rows": ()})["rows"]
            if (each["name"], each["unit"], *[each["reference"]] * len(reference))
            == (row, unit, *reference)
        ]
        if len(rows) > 1:
            raise ValueError(f"the record has {len(rows)} rows for {name}")
        found[name] = Figure(rows[0] if rows else None)
    origin = record["provenance"]
    machine, versions = origin["machine"], origin["versions"]
    runs = max(run["repeat"] for each in record["benchmarks"].values() for run in each["runs"]) + 1
    cpu = re.sub(r"\(R\)|\(TM\)| Processor", "", machine["cpu"])
    return found | {
        "date": origin["date"][:10],
        "commit": re.sub(r"^(.{8})[^+]*", r"\1", origin["git_commit"] or "unknown"),
        "machine": f"{machine['cores_usable']} cores of an {cpu}",
        "memory": f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        "torch": versions["torch"],
        "versions": f"Python {versions['python']}, torch {versions['torch']}, torchvision {versions['torchvision']}",
        "runs": runs,
        "trial": "A trial, to be replaced. " * (runs == 1 or record["smoke"]),
    }


def lines(record: dict[str, Any], texts: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """Return the lines of each page: a pattern that finds the line in the page, and the line as it must be."""
    known = names(record, texts)
    return {
        page: [
            (".*?".join(map(re.escape, PLACE.split(line))), line.format_map(known))
            for line in templates
        ]
        for page, templates in texts["pages"].items()
    }


def filled(page: str, text: str, expected: list[tuple[str, str]]) -> str:
    """Return the text of a page with its figures. Raise ValueError if a line is not there, or is there twice."""
    for pattern, line in expected:
        text, count = re.subn(f"^{pattern}$", line.replace("\\", r"\\"), text, flags=re.M)
        if count != 1:
            raise ValueError(f"{page} has this line {count} times: {line}")
    return text


def content() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the record and `pages.toml`."""
    return json.loads(RECORD.read_text()), tomllib.loads(PAGES.read_text())


def write_pages() -> list[str]:
    """Write the figures of the record into the pages, draw the plot, and return what was written."""
    record, texts = content()
    for page, expected in lines(record, texts).items():
        path = ROOT / page
        write_text(path, filled(page, path.read_text(), expected))
    draw(names(record, texts))
    return [*texts["pages"], str(PLOT.relative_to(ROOT))]


def title(known: dict[str, Any]) -> str:
    """Return what the plot says."""
    said = f"fastload loads image files {known['plan']:x} x as fast as torch at its best"
    if known["ffcv_jpeg"].row["figure"]:
        said += f", packed JPEGs {known['jpeg']:x} x as fast as FFCV"
    return said


def draw(known: dict[str, Any]) -> None:
    """Draw the images per second of fastload and others as bars, with lines from the least to the greatest run."""
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing((9.0, 3.8), dpi=130, layout="constrained")
    axes = drawing.subplots()
    for row in (known[name].row for name in reversed(BARS)):  # the first one at the top
        if spread := row["figure"]:
            reach = [[spread["median"] - spread["low"]], [spread["high"] - spread["median"]]]
            colour = "C0" if "fastload" in row["name"] else "C7"
            axes.barh(row["name"], spread["median"], xerr=reach, color=colour)
            axes.text(spread["high"], row["name"], f"  {spread['median']:,.0f}", va="center")
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("images per second: higher is better")
    drawing.suptitle(title(known), fontsize=11, fontweight="bold")
    drawing.supxlabel(
        f"{known['trial']}2,048 JPEGs, random crop to 224, flip, batches of 64, two workers. "
        f"{known['machine']}, {known['date']}, medians of {known['runs']} runs",
        fontsize=8,
    )
    drawing.savefig(PLOT)


if __name__ == "__main__":
    click.echo("\n".join(write_pages()))
