"""Promises:
- No damaged image makes the kernels read or write outside of their memory. See also `scripts/fuzz-jpeg`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fastload.image.kernels import Kernels
from tests.image.kernel_fuzz import PARTS, build, compiler, run, seeds

COUNT = 20_000  # of each part: a few seconds


@pytest.mark.slow
@pytest.mark.skipif(not compiler(), reason="there is no C compiler")
def test_damaged_images_and_records_under_sanitizers(kernels: Kernels, tmp_path: Path) -> None:
    program, files = build(tmp_path), seeds(tmp_path)
    for part in PARTS:
        counts = run(program, part, COUNT, 0, files)
        assert sum(counts.values()) == COUNT
        assert counts["damaged"] > COUNT // 10
        if part == "records" or kernels.libjpeg:
            assert counts["done"] > COUNT // 10
