"""Promises:
- A library without sources beside it, as in a wheel, is used. One that was built from other sources is not.
- If another file lies in the library's place, nothing is raised: a line says why there are no kernels.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastload.image import kernels as package
from fastload.image.kernels import Kernels


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The place of the library, in an empty folder."""
    path = tmp_path / "_kernels.so"
    monkeypatch.setattr(package, "LIBRARY", path)
    monkeypatch.delenv("FASTLOAD_KERNELS", raising=False)
    package._loaded.cache_clear()
    yield path
    package._loaded.cache_clear()


def test_a_library_without_its_sources_is_used(kernels: Kernels, place: Path) -> None:
    shutil.copy(Path(package.__file__).with_name("_kernels.so"), place)
    assert package.state().startswith("on (")
    package._loaded.cache_clear()
    place.with_name("other.c").write_text("int other;\n")
    assert package.state().startswith("off: built from other sources")
    assert package.kernels() is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
@pytest.mark.parametrize("has_sources", [False, True])
def test_a_library_without_our_names_is_not_used(place: Path, has_sources: bool) -> None:
    command = ["cc", "-x", "c", "-", "-shared", "-fPIC", "-o", str(place)]
    subprocess.run(command, input="int other;\n", text=True, check=True)
    if has_sources:
        place.with_name("other.c").write_text("int other;\n")
    assert package.state().startswith("off: ")
    assert package.kernels() is None


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"no library"])
def test_a_file_that_is_no_library(place: Path, content: bytes) -> None:
    place.write_bytes(content)
    assert package.state().startswith("off: ")
    assert package.kernels() is None
