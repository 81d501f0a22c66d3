"""Whether this Python has a GIL."""

from __future__ import annotations

import sys

import pytest

HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
needs_gil = pytest.mark.skipif(not HAS_GIL, reason="there is no GIL to wait for")
