"""Promise: TensorBoard shows the scalars in a real browser. Its profiler plugin finds the profile and its DataLoader
share.

The plugin's page loads its chart library from the web. Without it, the page shows no more than the list of choices.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastload
from fastload import DataLoader
from fastload.train.profiling import StepProfiler
from fastload.train.tensorboard import loader_scalars
from tests.browser.conftest import Browser

STEPS = 16
RUN = "2026-11-21-18-30-05-workers2-ranks1"


class Images:
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        with fastload.stage("decode"):
            return torch.full((8, 8), float(index))


@pytest.fixture(scope="module")
def url(_session: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """TensorBoard on the logs of one run. Asks for the browser first, so that nothing is done for nobody."""
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    logdir = tmp_path_factory.mktemp("logs")
    loader: Any = DataLoader(Images(), 4, num_workers=2)  # type: ignore[arg-type, var-annotated]
    with (
        loader,
        SummaryWriter(str(logdir / RUN)) as scalars,
        StepProfiler(logdir / RUN, say=lambda line: None) as profiler,
    ):
        for step, batch in zip(range(1, STEPS + 1), loader, strict=False):
            torch.mm(batch[0], batch[1]).relu().sum()
            scalars.add_scalar("train/loss", 1.0 / step, step)
            scalars.add_scalar("rate/images_per_s", 1000.0 + step, step)
            for name, value in loader_scalars(loader.stats()).items():
                scalars.add_scalar(name, value, step)
            profiler.step()
    assert len([*logdir.rglob("*.pt.trace.json.gz")]) == 2
    errors = tmp_path_factory.mktemp("errors") / "stderr"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", "0"]
    with open(errors, "w") as stderr, subprocess.Popen(command, stderr=stderr) as server:
        while not (found := re.search(r" at (http://\S+)", errors.read_text())):
            assert server.poll() is None, errors.read_text()
            time.sleep(0.1)
        yield found[1]
        server.terminate()


@pytest.mark.parametrize(
    ("name", "value"), [("rate/images_per_s", "1,016"), ("train/loss", "0.0625")]
)
def test_a_scalar_is_shown(browser: Browser, url: str, name: str, value: str) -> None:
    browser.open(f"{url}?tagFilter={name}#timeseries")
    # TensorBoard breaks the name in two at its slash. Under the chart: run, smoothed, value, step, time.
    browser.until("return text().replace(/\\s/g, '').includes(arguments[0])", name)
    row = f"{RUN} [\\d.,]+ {value} {STEPS} [\\d.]+ "
    browser.until("return RegExp(arguments[0]).test(text().replace(/\\s+/g, ' '))", row)
    assert browser.run("return all('line-chart').length") == 1
    assert browser.complaints() == []


@pytest.fixture
def profile_page(browser: Browser, url: str) -> str:
    if importlib.util.find_spec("torch_tb_profiler") is None:
        pytest.skip("TensorBoard's profiler plugin is not installed: pip install torch-tb-profiler")
    return f"{url}#pytorch_profiler"


def test_the_profiler_finds_the_profile(browser: Browser, profile_page: str, url: str) -> None:
    browser.open(profile_page)
    listed = "return all('[aria-haspopup=listbox]').map((e) => e.innerText).filter(Boolean)"
    # The lists fill one after another: runs, views, workers.
    browser.until(rf"return /_\d+$/.test(({listed[7:]})[2])")
    run, view, worker, *_ = browser.run(listed)
    assert (run, view) == (RUN, "Overview")
    # What the overview is drawn from, charts or none.
    overview = browser.run(
        """const base = arguments[0] + 'data/plugin/pytorch_profiler/';
        const get = (what) => { const r = new XMLHttpRequest(); r.open('GET', base + what, false); r.send();
                                return JSON.parse(r.responseText); };
        const at = `run=${arguments[1]}&worker=${arguments[2]}`;
        const span = get('spans?' + at)[0];
        return get(`overview?${at}&span=${span}&view=Overview`);""",
        url, run, worker,
    )  # fmt: skip
    names = [part["name"] for part in overview["performance"][0]["children"]]
    assert "DataLoader" in names
    assert len(overview["steps"]["rows"]) == 10
