"""Promises:
- `report.html` opens offline: nothing is fetched, and no script runs.
- `report.html` shows the figures of the JSON, and n/a for a figure that is missing. See also
  `tests/browser/test_report.py`.
- No text of the user becomes markup in `report.html`.
- Partial and noisy runs are marked in `report.html`.
"""

from __future__ import annotations

import base64
import re
from contextlib import nullcontext
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fastload.bench import plot, report
from fastload.bench.figures import Outcome
from fastload.bench.page import render
from tests.bench.documents import HOSTILE, RACE, document, failure, outcome

VOID = {"meta", "img"}


class Page(HTMLParser):
    """A parsed page: every element with its attributes and its text, and the cells of its tables by caption."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}  # by element, its own text and that of those in it
        self.tables: dict[str, list[list[str]]] = {}
        self._open: list[tuple[str, list[str]]] = []
        self._rows: list[list[str]] = []
        self._caption = ""
        self.feed(source)
        self.close()
        assert not self._open, f"left open: {[name for name, _ in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append((tag, []))
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])

    def handle_endtag(self, tag: str) -> None:
        name, parts = self._open.pop()
        assert name == tag, f"</{tag}> ends <{name}>"
        text = "".join(parts)
        self.texts.setdefault(tag, []).append(text)
        if tag in ("td", "th"):
            self._rows[-1].append(text)
        elif tag == "caption":
            self._caption = text
        elif tag == "table":
            self.tables[self._caption] = self._rows

    def handle_data(self, data: str) -> None:
        for _, parts in self._open:
            parts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def table(self, caption: str) -> list[dict[str, str]]:
        """The lines of the table whose caption begins so, by the titles of its columns."""
        rows = next(rows for name, rows in self.tables.items() if name.startswith(caption))
        return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def page_of(outcomes: list[Outcome], *, drawn: bool = False, **options: Any) -> Page:
    """Return a parsed page. Its charts are drawn, which takes a second, only if asked for."""
    with nullcontext() if drawn else mock.patch("matplotlib.figure.Figure.savefig"):
        return Page(render(document(outcomes, **options), report.summarise(outcomes)))


@pytest.fixture(scope="module")
def raced() -> Page:
    return page_of(RACE, drawn=True)


def text_of(page: Page) -> str:
    return page.texts["main"][0]


# ---- by itself ----


def test_the_page_fetches_nothing_and_runs_nothing(raced: Page) -> None:
    assert not any(raced.all(tag) for tag in ("script", "link", "iframe"))
    for name, attributes in raced.elements:
        assert not {"href", "srcset", "data", "action"} & set(attributes)
        assert ("src" in attributes) == (name == "img")
        assert not any(name.startswith("on") for name in attributes)
    assert not any(word in raced.texts["style"][0] for word in ("url(", "@import"))
    policies = [a["content"] for a in raced.all("meta") if "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_the_charts_are_images_within_the_page_and_say_in_words_what_they_show(raced: Page) -> None:
    images = raced.all("img")
    assert len(images) == 3, "rates of 1 rank and of 2, stages"
    for image in images:
        kind, _, content = image["src"].partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(content).startswith(b"\x89PNG")
    said = [image["alt"] for image in images]
    assert "2 threads 206.0" in said[0]
    assert "2 threads: read" in said[2]


def test_text_of_the_user_s_stays_text() -> None:
    failed = failure(
        "torch", 4, "DecodeError: </td></table><script>alert('x')</script> & \"y\".jpg"
    )
    page = page_of([*RACE, failed])
    assert not any(page.all(tag) for tag in ("script", "b", "at"))
    assert any(text.startswith(HOSTILE) for text in page.texts["code"])
    (command,) = (text for text in page.texts["code"] if text.startswith("fastload bench"))
    assert "<b>bold</b>&amp;" in command
    assert page.table("In the order")[-1]["error"] == failed.error
    assert "1 of 17 runs failed. See the table of runs below." in page.texts["p"]


# ---- the figures ----


def test_the_figures_are_the_json_s(raced: Page) -> None:
    content = document(RACE)
    lines = raced.table("Medians")
    assert len(lines) == len(content["rows"]) == 6
    for line, row in zip(lines, content["rows"], strict=True):
        assert set(line) == {name.replace("_", " ") for name in row}
        assert line["name"] == row["name"]
        median, low, high = (f"{row['rate'][name]:.0f}" for name in ("median", "low", "high"))
        assert line["rate"] == f"{median} ({low} to {high})"
        assert line["rank rate"].startswith(f"{row['rank_rate']['median']:.0f} (")
        ratio = row["ratio"]
        assert line["ratio"].partition(" ")[0] == (f"{ratio['median']:.4g}" if ratio else "n/a")
        assert line["peak bytes"] == "314,572,800 (314,572,800 to 314,572,800)"
        assert line["runs"] == str(row["runs"])
    for line, run in zip(raced.table("In the order"), content["runs"], strict=True):
        assert line["name"] == run["name"]
        assert line["rate"] == f"{run['figures']['rate']:.0f}"
        assert line["first batch s"] == "0.25"
    assert "2 ranks x 2 threads, 390 images per second" in raced.texts["h1"]


def test_the_chart_has_the_rates_of_each_loader() -> None:
    rows = [row for row in report.summarise(RACE) if row.ranks == 1]
    figure = plot.rates(rows)
    left = figure.axes[0]
    lines = {str(line.get_label()): [*line.get_ydata()] for line in left.lines}  # type: ignore[arg-type]
    assert lines["serial, one thread"] == [101.0, 101.0]
    points = {str(bar.get_label()): [*bar[0].get_ydata()] for bar in left.containers}  # type: ignore[index,union-attr]
    assert points["fastload threads"] == [111.0, 206.0]
    named = {text.get_text() for text in figure.legends[0].get_texts()}
    assert named == {*points, "serial, one thread"}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stages_of_a_row_are_all_of_its_threads_time_and_name_it_once(workers: int) -> None:
    figures = outcome("thread" if workers else "serial", workers, 100.0).figures
    assert figures is not None
    assert figures.loader_stats is not None
    shares = plot.stage_shares(figures.loader_stats, workers=workers)
    thread_s = 2.0 * max(1, workers)
    expected = {"read": 0.3, "decode": 0.6, "sample": 1.2 - 0.3 - 0.6, "collate": 0.15}
    expected |= {"idle": 0.5} if workers else {}
    expected["rest" if workers else "step"] = thread_s - sum(expected.values())
    assert shares == pytest.approx({name: s / thread_s for name, s in expected.items()})
    assert list(shares) == list(expected)


def test_a_bar_of_stages_has_their_shares_in_their_order() -> None:
    shares = {"serial": {"read": 0.25, "step": 0.75}, "1 thread": {"decode": 0.5, "step": 0.5}}
    figure = plot.stages(shares)
    axes = figure.axes[0]
    bars = {
        str(bars.get_label()): [(bar.get_x(), bar.get_width()) for bar in bars]  # type: ignore[attr-defined]
        for bars in axes.containers
    }
    assert bars == {
        "read": [(0.0, 0.25), (0.0, 0.0)],
        "decode": [(0.25, 0.0), (0.0, 0.5)],
        "the loop's step": [(0.25, 0.75), (0.5, 0.5)],
    }
    assert [label.get_text() for label in axes.get_yticklabels()] == [*shares]
    assert {text.get_text() for text in figure.legends[0].get_texts()} == set(bars)


# ---- what is missing, and what is not as it seems ----


def test_what_torch_s_loader_does_not_tell_is_n_a() -> None:
    page = page_of([outcome("torch", 2, 150.0)])
    (line,) = page.table("Medians")
    assert line["ratio"] == line["occupancy"] == line["cpu s per 1000"] == "n/a"
    said = "n/a: torch's loader does not measure itself"
    assert any(text.startswith(said) for text in page.texts["p"])
    assert not re.search(r"\b(None|nan|inf)\b", text_of(page))


@pytest.mark.parametrize("done", [0, 1])
def test_a_report_of_few_runs_or_none_is_marked_partial(done: int) -> None:
    page = page_of(RACE[:done], planned=20)
    assert f"Partial: stopped after {done} of 20 runs." in page.texts["p"]
    assert (page.texts["h1"] == ["No run was completed"]) == (done == 0)
    assert ("Medians" in " ".join(page.tables)) == (done > 0)
    assert not re.search(r"\b(None|nan|inf)\b", text_of(page))


def test_noise_is_said_at_the_top_and_without_it_nothing(raced: Page) -> None:
    assert not [a for a in raced.all("p") if a.get("class") == "banner"]
    page = page_of([replace(RACE[0], others_share=0.4)])
    assert any("Noise: other processes used up to 40% " in text for text in page.texts["p"])


def test_a_simulated_step_is_called_simulated_at_the_top_and_in_the_provenance() -> None:
    page = page_of([outcome("thread", 2, 150.0, step_ms=12.5)])
    said = [text for name in ("p", "dd") for text in page.texts[name] if "12.5 ms" in text]
    assert len(said) == 2
    assert all("simulated" in text for text in said)


@pytest.mark.slow
def test_sixty_four_numbers_of_workers_still_make_a_page() -> None:
    race = [outcome("thread", workers, 90.0 * workers) for workers in range(1, 65)]
    page = page_of(race, drawn=True)
    assert len(page.table("Medians")) == 64
    assert len("".join(image["src"] for image in page.all("img"))) < 2_000_000


def test_a_name_that_is_no_text_is_written_in_escapes(tmp_path: Path) -> None:
    report.write_text(tmp_path / "report.html", "images\udcff")
    assert (tmp_path / "report.html").read_text() == r"images\udcff"
