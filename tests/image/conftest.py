"""What the tests of the kernels share."""

from __future__ import annotations

import pytest

from fastload.image import kernels as package
from fastload.image.kernels import Kernels
from tests.image.kernel_runs import Trial


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    ready = package.kernels()
    if ready is None:
        pytest.skip(package.state())
    return ready


@pytest.fixture
def trial(kernels: Kernels) -> Trial:
    if kernels.libjpeg is None:
        pytest.skip(package.decoder_state())
    return Trial(kernels)
