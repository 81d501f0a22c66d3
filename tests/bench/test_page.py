"""Promises:
- `report.html` opens offline: nothing is fetched, and no script runs.
- `report.html` shows the figures of the JSON, and n/a for a figure that is missing. See also
  `tests/browser/test_report.py`.
- No text of the user becomes markup in `report.html`.
- Partial and noisy runs are marked in `report.html`.
"""

from __future__ import annotations

import base64
import json
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
    """A parsed page: every element with its attributes and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}  # by element, its own text and that of those in it
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
    def banners(self) -> str:
        return self.texts["p"][0]

    @property
    def table(self) -> str:
        return self.texts["pre"][0]

    @property
    def values(self) -> Any:
        return json.loads(self.texts["pre"][1])


def page_of(outcomes: list[Outcome], *, drawn: bool = False, **options: Any) -> Page:
    """Return a parsed page. Its charts are drawn, which takes a second, only if asked for."""
    with nullcontext() if drawn else mock.patch("matplotlib.figure.Figure.savefig"):
        return Page(render(document(outcomes, **options), report.summarise(outcomes)))


@pytest.fixture(scope="module")
def raced() -> Page:
    return page_of(RACE, drawn=True)


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
    assert kind == "data:image/png;base64"
    assert base64.b64decode(content).startswith(b"\x89PNG")
    assert "the table below" in image["alt"]


def test_text_of_the_user_s_stays_text() -> None:
    failed = failure(
        "torch", 4, "DecodeError: </td></table><script>alert('x')</script> & \"y\".jpg"
    )
    page = page_of([*RACE, failed])
    assert not any(page.all(tag) for tag in ("script", "b", "at"))
    assert page.values["workload"]["file_list"] == HOSTILE
    assert page.values["provenance"]["command"][-1] == HOSTILE
    assert page.values["runs"][-1]["error"] == failed.error
    assert "2 threads: The moon bounds 2 threads <at night> & by day." in page.texts["p"][2]
    assert "1 of 17 runs failed. The values below have their errors." in page.banners


# ---- the figures ----


def test_the_figures_are_the_json_s(raced: Page) -> None:
    content, rows = document(RACE), report.summarise(RACE)
    assert raced.values | {"provenance": None} == content | {"provenance": None}
    assert raced.table == report.table(rows, RACE[0].run.workload)
    assert "2 ranks x 2 threads, 390 images per second" in raced.texts["h1"]


def test_the_chart_has_the_rates_of_each_loader_and_number_of_ranks() -> None:
    figure = plot.draw(document(RACE), report.summarise(RACE))
    left, _, ranks, _ = figure.axes
    lines = {str(line.get_label()): [*line.get_ydata()] for line in left.lines}  # type: ignore[arg-type]
    assert lines["serial, one thread"] == [101.0, 101.0]
    points = {str(bar.get_label()): [*bar[0].get_ydata()] for bar in left.containers}  # type: ignore[index,union-attr]
    assert points["fastload threads"] == [111.0, 206.0]
    legend = left.get_legend()
    assert legend is not None
    named = {text.get_text() for text in legend.get_texts()}
    assert named == {*points, "serial, one thread"}
    assert ranks.get_xlabel().endswith("in each of 2 ranks")
    assert "cache warm\nstep none" in figure.get_supxlabel()


# ---- what is missing, and what is not as it seems ----


def test_what_torch_s_loader_does_not_tell_is_n_a() -> None:
    page = page_of([outcome("torch", 2, 150.0)])
    assert page.table.count("n/a") == 2, "the ratio and the CPU seconds"
    assert "2 torch processes: n/a, because torch's loader does not measure" in page.texts["p"][2]
    assert not re.search(r"\b(None|nan|inf)\b", page.texts["main"][0])


@pytest.mark.parametrize("done", [0, 1])
def test_a_report_of_few_runs_or_none_is_marked_partial(done: int) -> None:
    page = page_of(RACE[:done], planned=20)
    assert f"Partial: stopped after {done} of 20 runs." in page.banners
    assert (page.texts["h1"] == ["No run was completed"]) == (done == 0)
    assert ("img/s" in page.table) == (done > 0)
    assert not re.search(r"\b(None|nan|inf)\b", page.texts["main"][0])


def test_noise_is_said_at_the_top_and_without_it_nothing(raced: Page) -> None:
    assert raced.banners == ""
    page = page_of([replace(RACE[0], others_share=0.4)])
    assert "Noise: other processes used up to 40% " in page.banners


def test_a_simulated_step_is_called_simulated_at_the_top_and_in_the_values() -> None:
    page = page_of([outcome("thread", 2, 150.0, step_ms=12.5)])
    assert "Step simulated: waits 12.5 ms" in page.banners
    assert page.values["step"] == "simulated: waits 12.5 ms, without an accelerator"


@pytest.mark.slow
def test_sixty_four_numbers_of_workers_still_make_a_page() -> None:
    race = [outcome("thread", workers, 90.0 * workers) for workers in range(1, 65)]
    page = page_of(race, drawn=True)
    assert len(re.findall(r"^\d+ threads? ", page.table, re.MULTILINE)) == 64
    assert len("".join(image["src"] for image in page.all("img"))) < 2_000_000


def test_a_name_that_is_no_text_is_written_in_escapes(tmp_path: Path) -> None:
    report.write_text(tmp_path / "report.html", "images\udcff")
    assert (tmp_path / "report.html").read_text() == r"images\udcff"
