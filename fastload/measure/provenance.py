"""The provenance of figures: the machine, the versions, the commit, the command."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fastload
from fastload._kit.cores import usable_cores


def provenance(command: Sequence[str]) -> dict[str, Any]:
    """Return the provenance of figures. It has no host name, no user name, and only paths from the command."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "machine": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "cores_usable": usable_cores(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "load_average_1min": os.getloadavg()[0],
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "versions": {
            "fastload": fastload.__version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "torchvision", "pillow", "numpy")},
        },
        "git_commit": _git_commit(),
    }


def busy(origin: dict[str, Any]) -> str | None:
    """Return a warning if the load was more than half of the cores at the start, else None."""
    load, cores = (origin["machine"][key] for key in ("load_average_1min", "cores_usable"))
    if load <= cores / 2:
        return None
    return (
        f"The machine was busy in the last minute (load {load:.2f} on {cores} cores). If other programs still "
        "run, the figures will be noisy: stop them and run again."
    )


def caption(origin: dict[str, Any]) -> str:
    """Return the machine and the versions in one line."""
    machine, versions = origin["machine"], origin["versions"]
    names = ("fastload", "python", "torch", "torchvision", "pillow")
    software = ", ".join(f"{name} {versions[name]}" for name in names if versions[name])
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    return f"{machine['cpu']}, {machine['cores_usable']} cores, {memory}; {software}; {origin['date'][:10]}"


def version(distribution: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    models = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git_commit() -> str | None:
    """Return the commit of the checkout that fastload runs from, with "+changes" if it differs, or None without one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(fastload.__file__).parent), *arguments]
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()

    try:
        # fastload may be installed inside the checkout of another project, which does not track it.
        git("ls-files", "--error-unmatch", "__init__.py")
        commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{commit}+changes" if changed else commit
