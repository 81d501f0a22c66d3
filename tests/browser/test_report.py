"""Promise: `report.html` shows its figures and images in a real browser, opened from the disk, with no complaint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastload.bench.page.render import render
from tests.bench.documents import RACE, TIMELINE, document

SIZES = """
return all('svg').map((picture) => {
  const box = picture.getBoundingClientRect();
  return [picture.querySelector('title').textContent, box.width, box.height];
});
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "report <&>.html"
    path.write_text(render(document(RACE, timeline=TIMELINE)))
    return path


def test_the_report_shows_its_figures_and_pictures(browser: Any, page: Path) -> None:
    browser.open(page.as_uri())
    shown = browser.run("return text()")
    assert "2 ranks x 2 threads, 390 images per second" in shown
    assert "What limits the run" in shown
    assert "206.0" in shown, "the median of 2 threads"
    sizes = browser.run(SIZES)
    assert len(sizes) == 16
    assert all(width > 100 and height > 10 for _, width, height in sizes), sizes
    painted = (
        "return [...new Set(all('.lane rect').map((span) => getComputedStyle(span).fill))].length"
    )
    assert browser.run(painted) >= 4, (
        "waiting, samples, decoding and the queue have colours of their own"
    )
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []
