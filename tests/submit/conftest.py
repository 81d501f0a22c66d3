"""A clone of the project, as a user has it at a centre, with a few images in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.launching import ROOT
from tests.image_files import listed_images


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A fresh clone with 16 listed images, and a home beside it."""
    clone = tmp_path / "the clone"
    listed_images(clone / "samples", 16)
    (tmp_path / "home").mkdir()
    (clone / "logdir").mkdir()
    for name in ("fastload", "submit", "scripts", "pyproject.toml"):
        (clone / name).symlink_to(ROOT / name)
    return clone
