"""A real browser for tests: headless Chromium, told what to do by chromedriver (WebDriver over HTTP).

    def test_the_page_shows_it(browser: Browser) -> None:
        browser.open(path.as_uri())              # or http://localhost:...
        browser.until("return text().includes('images per second')")
        assert browser.run("return document.querySelectorAll('svg').length") == 3
        assert browser.complaints() == []        # errors and failed requests that the page logged

JavaScript given to `run` and `until` may call `text()`: what a reader sees, in shadow roots and frames of the same
origin too; and `all(selector)`: the elements there, found likewise. There is one browser for all tests, and a new
tab for each. They skip, with the reason, where Chromium or chromedriver is absent: on Debian `apt-get install
chromium chromium-driver`, which `scripts/test` does where it may.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Chromium is installed for `scripts/test --all`, and for CI when it is the turn of these tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)


SHORT_S, LONG_S = 10, 60  # for answers of the driver; for what a page is waited for

HELPERS = """
const roots = (root) => [root, ...[...root.querySelectorAll('*')].flatMap((e) => {
  let frame = null;
  try { frame = e.tagName === 'IFRAME' ? e.contentDocument : null; } catch (error) {}
  return [e.shadowRoot, frame].filter(Boolean).flatMap(roots);
})];
const all = (selector) => roots(document).flatMap((root) => [...root.querySelectorAll(selector)]);
const shows = (e) => !/^(STYLE|SCRIPT|TEMPLATE)$/.test(e.tagName) && getComputedStyle(e).display !== 'none';
const text = () => roots(document).flatMap((root) =>
  [...(root.body ? [root.body] : root.children)].filter(shows).map((e) => e.innerText || '')).join('\\n');
"""


class Browser:
    """One tab of Chromium."""

    def __init__(self, driver: str, session: str) -> None:
        self._session = f"{driver}/session/{session}"

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded; what its scripts do then is not waited for."""
        self.complaints()  # those of the page before
        call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function returns; `arguments` are its `arguments`."""
        body = {"script": HELPERS + script, "args": list(arguments)}
        return call("POST", f"{self._session}/execute/sync", body)

    def until(self, script: str, *arguments: Any, seconds: float = LONG_S) -> Any:
        """Wait for `script` to return something true, and return that; a failure shows the page's text."""
        # A page tells nobody outside of it when it has drawn; it is asked ten times a second.
        deadline = time.monotonic() + seconds
        while True:
            try:
                if found := self.run(script, *arguments):
                    return found
            except DriverError as error:
                found = error
            if time.monotonic() > deadline:
                shown = self.run("return text()")
                pytest.fail(
                    f"not after {seconds:g} s: {script} ({found}). The page shows:\n{shown}"
                )
            time.sleep(0.1)

    def complaints(self) -> list[str]:
        """What the page logged as severe since it was asked last: uncaught errors, requests that failed."""
        entries = call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]


class DriverError(Exception):
    """What chromedriver answers instead of a value."""


def call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        url, None if body is None else json.dumps(body).encode(), method=method
    )
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise DriverError(json.load(error)["value"]["message"]) from None


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Any]]]:
    """The address of a running chromedriver, and what it is to start."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    home = tmp_path_factory.mktemp("chromium")
    arguments = [
        "--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--window-size=1400,1600", f"--user-data-dir={home / 'profile'}",
    ]  # fmt: skip
    with open(home / "driver.log", "w+") as log:
        process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout
            for line in process.stdout:
                if found := re.search(r"successfully on port (\d+)", line):
                    break
            else:
                pytest.fail(f"chromedriver did not start: {Path(log.name).read_text()}")
            options = {"binary": chromium, "args": arguments}
            yield (
                f"http://localhost:{found[1]}",
                {
                    "browserName": "chrome",
                    "goog:chromeOptions": options,
                    "goog:loggingPrefs": {"browser": "ALL"},
                },
            )
        finally:
            process.terminate()
            process.communicate(timeout=SHORT_S)


@pytest.fixture(scope="session")
def _session(_driver: tuple[str, dict[str, Any]]) -> Iterator[Browser]:
    address, wanted = _driver
    answer = call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
    yield Browser(address, answer["sessionId"])
    call("DELETE", f"{address}/session/{answer['sessionId']}")


@pytest.fixture
def browser(_session: Browser) -> Browser:
    """A tab that shows nothing yet."""
    handle = call("POST", f"{_session._session}/window/new", {"type": "tab"})["handle"]
    call("DELETE", f"{_session._session}/window")  # the tab of the test before
    call("POST", f"{_session._session}/window", {"handle": handle})
    return _session
