"""Promise: The search of the documentation works on pages that are opened from a disk, without a server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.browser.conftest import Browser

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_search_finds_a_page_without_a_server(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    browser.open(f"{(tmp_path / 'reference' / 'loader.html').as_uri()}?q=prefetch_to")
    browser.until(
        "return all('a.md-search-result__link').some((a) => a.hash === '#fastload.prefetch_to')"
    )
    assert browser.complaints() == []
