"""Promise: `report.html` shows its figures and images in a real browser, opened from the disk, with no complaint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastload.bench import report
from fastload.bench.page import render
from tests.bench.documents import RACE, document

SIZES = "return all('img').map((image) => [image.alt, image.naturalWidth, image.naturalHeight]);"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "report <&>.html"
    path.write_text(render(document(RACE), report.summarise(RACE)))
    return path


def test_the_report_shows_its_figures_and_images(browser: Any, page: Path) -> None:
    browser.open(page.as_uri())
    shown = browser.run("return text()")
    assert "2 ranks x 2 threads, 390 images per second" in shown
    assert "What bounds each loader" in shown
    assert "206.0" in shown, "the median of 2 threads"
    [[alt, width, height]] = browser.run(SIZES)
    assert alt
    assert (width > 1000, height > 1000) == (True, True)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []
