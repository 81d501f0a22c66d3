"""Promise: `report.html` shows its figures and images in a real browser, opened from the disk, with no complaint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastload.bench import report
from tests.bench.documents import RACE, document

SIZES = "return all('img').map((image) => [image.alt, image.naturalWidth, image.naturalHeight]);"


def test_the_report_shows_its_figures_and_images(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from fastload.bench.page import render

    page = tmp_path / "report <&>.html"
    report.write_text(page, render(document(RACE), report.summarise(RACE)))
    browser.open(page.as_uri())
    shown = browser.run("return text()")
    assert "2 workers, plan, 261 images per second" in shown
    assert "what bounds each" in shown
    assert "206.0" in shown, "the median of 2 threads"
    [[alt, width, height]] = browser.run(SIZES)
    assert alt
    assert (width > 500, height > 200) == (True, True)
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.complaints() == []
