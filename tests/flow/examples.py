"""Runs `fastload flow` on the examples, and reads what they print."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from tests.distributed.launching import ROOT


def environment(*, mpiexec: Path | None = None) -> dict[str, str]:
    """Return the variables of a run, with one thread of torch's, and this `mpiexec` first on the PATH."""
    home = [] if mpiexec is None else [str(mpiexec.parent)]
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join([*home, os.environ["PATH"]]),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
    }


def flow(
    python: str, file: Path, *options: str, mpiexec: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `fastload flow run` to its end."""
    return subprocess.run(
        [python, "-m", "fastload", "flow", "run", file, *options],
        env=environment(mpiexec=mpiexec),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def accuracy(text: str) -> float:
    """Return the accuracy that the training printed, in percent."""
    (found,) = re.findall(r"Accuracy: \d+/\d+ \(([\d.]+)%\)", text)
    return float(found)
