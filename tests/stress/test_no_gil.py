"""Promise: On a Python without the GIL, nothing of fastload turns the GIL on, and its report does not name the GIL.

What torch, NumPy and Pillow import may turn it on, and Python names the module in a warning.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from fastload import DataLoader
from tests.fakes import Numbers

needs_free_threads = pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this Python always has a GIL"
)
EPOCH = """
import sys, warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    import numpy, torch, torchvision
    from PIL import Image
    others = sys._is_gil_enabled()
    import fastload, fastload.image
    from fastload.datasets import ImageFolder
    from fastload.image.kernels import kernels
    kernels()
    plan = fastload.image.RandomResizedCrop(16)
    loader = fastload.DataLoader(ImageFolder(sys.argv[1], transform=plan), 4, num_workers=2, seed=1)
    batches = len(list(loader))
print(batches, sys._is_gil_enabled() == others, loader.stats().gil == others)
print([str(each.message) for each in said if "GIL" in str(each.message)])
"""


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)


@pytest.mark.usefixtures("free")
def test_without_a_gil_the_report_says_so() -> None:
    with DataLoader(Numbers(40), 4, num_workers=2) as loader:
        assert len(list(loader)) == 10
        stats = loader.stats()
    assert not stats.gil
    assert "GIL pressure          none  this Python runs without the GIL" in str(stats).split("\n")
    assert "GIL pressure          0.00" in str(replace(stats, gil=True))


@needs_free_threads
def test_an_epoch_of_images_leaves_the_gil_off(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for k in range(12):
        Image.new("RGB", (40, 30), (k, k, k)).save(tmp_path / "a" / f"{k}.jpg")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON_GIL"}
    command = [sys.executable, "-c", EPOCH, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
    assert done.stdout.splitlines()[:1] == ["3 True True"], done.stdout + done.stderr
