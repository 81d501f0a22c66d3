"""What the tests of the kernels share."""

from __future__ import annotations

import pytest

from fastload.image import kernels as package
from fastload.image.kernels import Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    ready = package.kernels()
    if ready is None:
        pytest.skip(package.state())
    return ready
