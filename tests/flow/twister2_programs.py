"""Copies the documents' programs to where a test runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from fastload.datasets.synthetic import generate_digits
from tests.distributed.launching import ROOT, clean_environment, command

DOCUMENTS = Path(__file__).parent / "documents"


def write_programs(folder: Path, kind: str, *changes: tuple[str, str]) -> None:
    """Write the programs of a kind, "disk" or "memory", to a folder, below which they find their data too."""
    for program in (DOCUMENTS / kind).glob("*.py"):
        text = program.read_text().replace("/tmp/", f"{folder}/data/")
        for old, new in changes:
            text = text.replace(old, new)
        (folder / program.name).write_text(text)


def write_digits(folder: Path) -> None:
    """Write 3,000 and 500 synthetic digits to the folders "train" and "test"."""
    for split in ("train", "test"):
        generate_digits(folder / split, train=3000, test=500)


def run_flow(launcher: str, program: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that executes a graph, with the Python and the mpiexec of an MPI."""
    mpiexec, *_, python = command(launcher, 1)
    return subprocess.run(
        [python, program.name],
        cwd=program.parent,
        env=clean_environment(
            {
                "PATH": f"{Path(mpiexec).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            }
        ),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
