"""Promise: While `fastload train` runs, rank 0 prints which rank is slow, since when and why, and serves metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("PIL")
pytest.importorskip("prometheus_client")

from tests.image_files import listed_images
from tests.train.programs.starting import ranks_started

PROGRAM = Path(__file__).parent / "programs" / "slow_training.py"


@pytest.mark.slow
def test_a_training_says_which_rank_is_slow(tmp_path: Path) -> None:
    images = listed_images(tmp_path, 24).parent
    with ranks_started(2, [str(PROGRAM), str(images), str(tmp_path)]) as started:
        first, second = (one.communicate(timeout=100)[0] for one in started)
    assert [one.returncode for one in started] == [0, 0], f"{first}\n{second}"
    assert "slow rank: 1, for " in first
    assert 'fastload_slow_rank_seconds{loader="Numbered",rank="1"}' in first
    assert "Stopped by SIGTERM" in first
    assert second == ""
