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
    faults = ("compilation failed", "rounds differently")  # a wrong kernel turns itself off
    if importlib.util.find_spec("numba") and any(fault in package.state() for fault in faults):
        pytest.fail(package.state())
    pytest.skip(package.state())
