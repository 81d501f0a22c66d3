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
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from fastload.bench import plot, report
from fastload.bench.figures import Outcome
from fastload.bench.page import render
from tests.bench.documents import HOSTILE, RACE, document, failure, outcome

VOID = {"meta", "img"}


class Page(HTMLParser):
    """A parsed page: its elements with their attributes, and the texts of the elements of each kind."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[tuple[str, list[str]]] = []
        self.feed(source)
        self.close()
        assert not self._open, f"left open: {[name for name, _ in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self._open.append((tag, []))

    def handle_endtag(self, tag: str) -> None:
        name, parts = self._open.pop()
        assert name == tag, f"</{tag}> ends <{name}>"
        self.texts.setdefault(tag, []).append("".join(parts))

    def handle_data(self, data: str) -> None:
        for _, parts in self._open:
            parts.append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def warnings(self) -> str:
        return self.texts["p"][0]


def page_of(outcomes: list[Outcome], **options: Any) -> Page:
    return Page(render(document(outcomes, **options), report.summarise(outcomes)))


@pytest.fixture(scope="module")
def raced() -> Page:
    return page_of(RACE)


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


def test_the_chart_is_an_image_within_the_page(raced: Page) -> None:
    (image,) = raced.all("img")
    kind, _, content = image["src"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    assert ElementTree.fromstring(base64.b64decode(content)).tag.endswith("svg")
    assert "the table below" in image["alt"]


def test_text_of_the_user_s_stays_text() -> None:
    failed = failure(
        "torch", 4, "DecodeError: </td></table><script>alert('x')</script> & \"y\".jpg"
    )
    page = page_of([*RACE, failed])
    assert not any(page.all(tag) for tag in ("script", "b", "at"))
    assert f"failed: {failed.error}" in page.texts["td"]
    assert HOSTILE.split("'")[0] in page.texts["p"][-1], "in the command"
    assert "The moon bounds 2 threads <at night> & by day." in page.texts["td"]
    assert "1 of 16 runs failed: 4 torch processes." in page.warnings


# ---- the figures ----


def test_the_figures_are_those_of_the_table(raced: Page) -> None:
    head, *rows = report.cells(report.summarise(RACE))
    assert raced.texts["th"][: len(head)] == head
    cells = [cell for row in rows for cell in row]
    assert raced.texts["td"][: len(cells)] == cells
    thread, torchs = rows[2], rows[3]
    assert thread[head.index("x torch")] == "1.36"
    assert torchs[head.index("x torch")] == "1.00"
    assert raced.texts["h1"] == ["2 workers, plan, 261 images per second"]
    assert "2 workers, plan 1.73 x, 2 threads 1.36 x" in raced.texts["p"][1]


def test_each_run_has_its_rate_and_what_bounds_it(raced: Page) -> None:
    runs = raced.texts["td"][-4 * len(RACE) :]
    assert runs[:4] == ["serial", "1", "100.0", "The moon bounds serial <at night> & by day."]
    assert runs[36:40] == ["2 torch processes", "1", "150.0", runs[39]]
    assert runs[39].startswith("n/a: torch's loader does not measure")


def test_what_was_run_is_said(raced: Page) -> None:
    content = document(RACE)
    origin = content["provenance"]
    said = raced.texts["p"][-1]
    assert said.startswith("fastload bench --file-list ")
    for part in (origin["machine"]["cpu"], f"torch {origin['versions']['torch']}", "batch_size 10"):
        assert part in said
    assert re.search(r"\d{4}-\d\d-\d\dT[\d:+]+, commit \w+", said)


def test_the_chart_has_a_bar_for_each_row_and_figure() -> None:
    figure = plot.draw(document(RACE), report.summarise(RACE))
    left, right = figure.axes
    assert [bar.get_width() for bar in left.patches] == [261.0, 151.0, 206.0, 111.0, 101.0]  # type: ignore[attr-defined]
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["2 workers, plan", "2 torch processes", "2 threads", "1 thread", "serial"]
    assert left.get_title(loc="left").startswith("Images per second")
    assert right.get_title(loc="left").startswith("Seconds to the first batch")
    assert len(right.patches) == 5
    assert "cache warm\nstep none" in figure.get_supxlabel()


# ---- what is missing, and what is not as it seems ----


def test_what_is_not_known_is_n_a() -> None:
    page = page_of([outcome("torch", 2, 150.0)])
    assert page.texts["td"].count("n/a") == 2, "the ratio to serial loading and the CPU seconds"
    assert not re.search(r"\b(None|nan|inf)\b", page.texts["main"][0])


@pytest.mark.parametrize("done", [0, 1])
def test_a_page_of_few_runs_or_none_is_marked_partial(done: int) -> None:
    page = page_of(RACE[:done], planned=20)
    assert f"Partial: stopped after {done} of 20 runs." in page.warnings
    assert (page.texts["h1"] == ["No run was completed"]) == (done == 0)
    assert len(page.texts.get("td", ())) == (15 if done else 0)
    assert not re.search(r"\b(None|nan|inf)\b", page.texts["main"][0])


def test_noise_is_said_at_the_top_and_without_it_nothing(raced: Page) -> None:
    assert raced.warnings == ""
    page = page_of([replace(RACE[0], others_share=0.4)])
    assert "Noise: other processes used up to 40% " in page.warnings


def test_a_simulated_step_is_called_simulated_at_the_top_and_below_the_table() -> None:
    page = page_of([outcome("thread", 2, 150.0, step_ms=12.5)])
    assert "Step simulated: waits 12.5 ms" in page.warnings
    for text in (page.texts["pre"][0], page.texts["p"][-1]):
        assert "simulated: waits 12.5 ms, without an accelerator" in text


def test_a_name_that_is_no_text_is_written_in_escapes(tmp_path: Path) -> None:
    report.write_text(tmp_path / "new" / "report.html", "images\udcff")
    assert (tmp_path / "new" / "report.html").read_text() == r"images\udcff"
