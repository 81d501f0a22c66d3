"""Promises:
- `report.html` opens offline: nothing is fetched, and no script runs.
- `report.html` shows the figures of the JSON, and n/a for a figure that is missing. See also
  `tests/browser/test_report.py`.
- No text of the user becomes markup in `report.html`.
- Partial and noisy runs are marked in `report.html`, and its timeline has real spans. See also
  `tests/bench/test_sweep.py`.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.bench.page import charts
from fastload.bench.page.render import render
from fastload.bench.report import write_text
from tests.bench.documents import HOSTILE, RACE, TIMELINE, document, failure, outcome

VOID = {"meta", "br", "hr"}


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
        elif tag == "table" and self._caption:
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


@pytest.fixture(scope="module")
def raced() -> tuple[dict[str, Any], str]:
    content = document(RACE, timeline=TIMELINE)
    return content, render(content)


# ---- by itself ----


def test_the_page_fetches_nothing_and_runs_nothing(raced: tuple[dict[str, Any], str]) -> None:
    page = Page(raced[1])
    assert not any(page.all(tag) for tag in ("script", "link", "img", "iframe"))
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "data", "action"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    (style,) = page.texts["style"]
    for text, fetching in ((raced[1], ("http:", "https:")), (style, ("url(", "@import"))):
        assert not any(word in text for word in fetching)
    policies = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_text_of_the_user_s_stays_text() -> None:
    failed = failure(
        "torch", 4, "DecodeError: </td></table><script>alert('x')</script> & \"y\".jpg"
    )
    page = Page(render(document([*RACE, failed])))
    assert not any(page.all(tag) for tag in ("script", "b", "at"))
    assert HOSTILE in page.texts["code"]
    (command,) = (text for text in page.texts["code"] if text.startswith("fastload bench"))
    assert "<b>bold</b>&amp;" in command
    assert page.table("In the order")[-1]["error"] == failed.error
    assert "1 of 17 runs failed. See the table of runs below." in page.texts["p"]


# ---- the figures ----


def test_the_figures_are_the_json_s(raced: tuple[dict[str, Any], str]) -> None:
    content, source = raced
    lines = Page(source).table("Medians")
    assert len(lines) == len(content["rows"]) == 6
    ceilings = {
        (c["plan"], c["ranks"], c["workers"]): c["rate"] for c in content["roofline"]["ceilings"]
    }
    for line, row in zip(lines, content["rows"], strict=True):
        assert line["loader"] == row["name"]
        assert line["img/s"] == f"{row['rate']['median']:.1f}"
        assert (
            line["smallest to largest"] == f"{row['rate']['low']:.1f} to {row['rate']['high']:.1f}"
        )
        assert line["img/s per rank"] == f"{row['rank_rate']['median']:.1f}"
        ratio = row["ratio"]
        assert line["x serial"] == (f"{ratio['median']:.2f}" if ratio else "n/a")
        bound = ceilings.get((row["loader"] == "plan", row["ranks"], row["workers"]))
        assert line["bound"] == (f"{bound:.1f}" if bound else "n/a")
        assert bound is None or bound >= row["rate"]["high"] * 0.999999
        assert line["unique samples"] == f"{row['unique_samples']} of {row['samples']}"
        assert line["runs"] == str(row["runs"])
    for line, run in zip(Page(source).table("In the order"), content["runs"], strict=True):
        assert line["loader"] == run["name"]
        assert line["img/s"] == f"{run['figures']['rate']:.2f}"
        assert line["1st batch s"] == f"{run['figures']['first_batch_s']:.3f}"
    assert "2 ranks x 2 threads, 390 images per second" in Page(source).texts["h1"]


def test_points_lie_where_their_rates_are(raced: tuple[dict[str, Any], str]) -> None:
    rows = [row for row in raced[0]["rows"] if row["ranks"] == 1]
    page = Page(charts.rate_chart(rows, [], label="rates"))
    zero = next(float(a["y1"]) for a in page.all("line") if a["class"] == "axis")
    level = next(float(a["y1"]) for a in page.all("line") if a["class"] == "level")
    heights = [zero - float(a["cy"]) for a in page.all("circle")]
    rates = [row["rate"]["median"] for row in rows if row["loader"] == "thread"]
    scale = (zero - level) / next(r["rate"]["median"] for r in rows if r["loader"] == "serial")
    assert heights == pytest.approx([rate * scale for rate in rates], abs=0.02)
    (with_plan,) = (row["rate"]["median"] for row in rows if row["loader"] == "plan")
    (top,) = (float(re.split("[ ,]", a["d"])[1]) for a in page.all("path"))
    assert zero - (top + 5) == pytest.approx(with_plan * scale, abs=0.06)
    bounds = [
        {"plan": plan, "ranks": 1, "workers": 2, "rate": rate}
        for plan, rate in ((False, 250.0), (True, 300.0))
    ]
    lines = Page(charts.rate_chart(rows, bounds, label="rates")).all("polyline")
    drawn = {a["class"]: float(a["points"].split(",")[-1]) for a in lines if "class" in a}
    assert list(drawn) == ["bound", "bound-plan"]
    assert zero - drawn["bound"] == pytest.approx(5 / 6 * (zero - drawn["bound-plan"]), abs=0.1)
    across = [float(a["cx"]) for a in page.all("circle")]
    assert across == sorted(across)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_stages_of_a_row_are_all_of_its_threads_time_and_name_it_once(workers: int) -> None:
    figures = outcome("thread" if workers else "serial", workers, 100.0).figures
    assert figures is not None
    assert figures.loader_stats is not None
    shares = dict(charts.stage_shares(figures.loader_stats, workers=workers))
    thread_s = 2.0 * max(1, workers)
    expected = {"read": 0.3, "decode": 0.6, "sample": 1.2 - 0.3 - 0.6, "collate": 0.15}
    expected |= {"idle": 0.5} if workers else {}
    expected["rest" if workers else "step"] = thread_s - sum(expected.values())
    assert shares == pytest.approx({name: s / thread_s for name, s in expected.items()})


def test_spans_lie_where_they_were_and_a_thread_is_busy_once_at_a_time(
    raced: tuple[dict[str, Any], str],
) -> None:
    lane = TIMELINE["lanes"][1]  # type: ignore[index]
    page = Page(charts.lane(lane["spans"], seconds=0.2, label="lane"))
    places = [(float(a["x"]), float(a["width"])) for a in page.all("rect")]
    assert places == [(0.0, 500.0), (100.0, 200.0), (750.0, 250.0)]
    spans = Page(raced[1]).texts["span"]
    assert "75 % busy" in spans, "0.1 s and 0.05 s of 0.2 s; the decoding is within the first"
    assert "25 % in next()" in spans
    assert "75 % ready" in spans
    assert any("recorded by torch's profiler" in text for text in Page(raced[1]).texts["p"])


# ---- what is missing, and what is not as it seems ----


def text_of(page: Page) -> str:
    return page.texts["main"][0]


def test_what_torch_s_loader_does_not_tell_is_n_a() -> None:
    page = Page(render(document([outcome("torch", 2, 150.0)])))
    (line,) = page.table("Medians")
    assert line["bound"] == line["bound by"] == line["x serial"] == line["queue ready"] == "n/a"
    assert line["CPU s/1000"] == "n/a"
    for section in ("torch's loader does not measure itself", "only fastload's loader times its"):
        assert any(text.startswith("n/a: ") and section in text for text in page.texts["p"])
    assert not re.search(r"\b(None|nan|inf)\b", text_of(page))


@pytest.mark.parametrize("done", [0, 1])
def test_a_report_of_few_runs_or_none_is_marked_partial(done: int) -> None:
    page = Page(render(document(RACE[:done], planned=20)))
    assert f"Partial: stopped after {done} of 20 runs." in page.texts["p"]
    assert (page.texts["h1"] == ["No run was completed"]) == (done == 0)
    assert ("Medians" in " ".join(page.tables)) == (done > 0)
    assert not re.search(r"\b(None|nan|inf)\b", text_of(page))


def test_noise_is_said_at_the_top_and_without_it_nothing(raced: tuple[dict[str, Any], str]) -> None:
    assert not [a for a in Page(raced[1]).all("p") if "banner" in a.get("class", "")]
    page = Page(render(document([replace(RACE[0], others_share=0.4)])))
    assert any("Noise: other processes used up to 40% " in text for text in page.texts["p"])


def test_a_simulated_step_is_called_simulated_at_the_top_with_the_bound_and_in_the_provenance() -> (
    None
):
    page = Page(render(document([outcome("thread", 2, 150.0, step_ms=12.5)])))
    said = [text for name in ("p", "dd") for text in page.texts[name] if "12.5 ms" in text]
    assert len(said) == 3
    assert all("simulated" in text for text in said)


def test_sixty_four_workers_and_a_full_timeline_still_make_a_page() -> None:
    spans = [
        {"stage": f"stage {i % 40}", "from_s": i / 3000, "to_s": (i + 1) / 3000}
        for i in range(3000)
    ]
    timeline = {**TIMELINE, "seconds": 1.0, "cut": True}
    timeline["lanes"] = [{"thread": f"worker {i}", "spans": spans[i::64]} for i in range(64)]
    race = [outcome("thread", workers, 90.0 * workers) for workers in range(1, 65)]
    source = render(document(race, timeline=timeline))
    page = Page(source)
    assert len(source) < 2_000_000
    assert "Later spans are left out" in text_of(page)
    (chart,) = re.findall(r'<svg[^>]*class="chart">.*?</svg>', source)
    labels = [(float(a["x"]), float(a["y"])) for name, a in Page(chart).elements if name == "text"]
    under = sorted(x for x, y in labels if y == max(y for _, y in labels if y < 240))
    assert len(under) >= 4
    assert min(b - a for a, b in itertools.pairwise(under)) >= 20, "they do not overlap"


@given(st.floats(1e-6, 1e9))
def test_ticks_are_a_few_round_steps_from_0_that_stay_below_the_highest(highest: float) -> None:
    ticks = charts.nice_ticks(highest)
    assert ticks[0] == 0
    assert 3 <= len(ticks) <= 6
    assert ticks[-1] <= highest * (1 + 1e-6)
    assert ticks[-1] + ticks[1] > highest * (1 - 1e-6)


def test_a_name_that_is_no_text_is_written_in_escapes(tmp_path: Path) -> None:
    write_text(tmp_path / "report.html", "pictures\udcff")
    assert (tmp_path / "report.html").read_text() == r"pictures\udcff"
