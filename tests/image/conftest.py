"""What the tests of the kernels share."""

from __future__ import annotations

import importlib.util

import pytest

from fastload.image import kernels as package
from fastload.image.kernels import Kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The compiled kernels; the first test that asks for them waits for the compiler."""
    if package.wait(600):
        ready = package.kernels()
        assert ready is not None
        return ready
    if importlib.util.find_spec("numba") and "compilation failed" in package.state():
        pytest.fail(package.state())
    pytest.skip(package.state())
