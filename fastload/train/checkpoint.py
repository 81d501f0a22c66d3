"""Checkpoints: model, optimiser, loader and random states together, in one file that is whole or not there.

A checkpoint of step k says: the model has been trained on the batches that the loader's state calls delivered, and on
no others. What was trained after it, by a process that was then killed, is not in the model that is restored:
the samples of those steps are trained on again. So along the steps that lead to a model (its lineage) every sample
of an epoch occurs exactly once, wherever and how often the training was killed.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import secrets
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from fastload.disk import lock, replace_file
from fastload.errors import FastloadError
from fastload.train.models import mismatch

FORMAT = 1
NAME = "checkpoint.pt"


class CheckpointError(FastloadError, ValueError):
    """A checkpoint cannot be used; the message names file, field and, where there are two, both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A training run after `step` steps. Plain values and tensors: read without running code of the file."""

    step: int
    about: dict[str, Any]
    """What a run that resumes must have in common with the one that wrote: names to JSON values."""
    model: dict[str, Any]
    optimizer: dict[str, Any]
    loader: dict[str, Any]
    """`DataLoader.state_dict()`: the same on all ranks."""
    randomness: list[dict[str, Any]]
    """The state of each rank's global random generators, by rank."""

    def save(self, folder: Path) -> Path:
        """Write the file into `folder`, in place of an earlier one: whole, or (kill, full disk) not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        path = folder / NAME
        content = {name: getattr(self, name) for name in self.__slots__}
        partial = folder / f".{NAME}.{secrets.token_hex(4)}"
        try:
            with replace_file(path, partial=partial) as file:
                with contextlib.suppress(OSError):  # without locks, nothing is swept
                    lock(file)
                torch.save({"format": FORMAT, **content}, file)
        except (OSError, RuntimeError) as error:
            # Where a write fails, torch goes on to end its archive, and raises what it finds there.
            cause = error.__context__ if isinstance(error, RuntimeError) else error
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            raise
        return path

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """The checkpoint in `folder`; None where there is none. `CheckpointError` where the file is no such thing."""
        path = folder / NAME
        try:
            with path.open("rb") as file:
                content = _read(path, file)
        except FileNotFoundError:
            return None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            theirs = content.get("format") if isinstance(content, dict) else None
            raise CheckpointError(
                f"{path}: format: the file has {theirs!r}, this fastload reads {FORMAT}"
            )
        if missing := [name for name in cls.__slots__ if name not in content]:
            raise CheckpointError(f"{path}: {missing[0]}: the file has nothing")
        return cls(**{name: content[name] for name in cls.__slots__})

    def check(self, folder: Path, *, about: Mapping[str, Any], model: dict[str, Any]) -> None:
        """Raise `CheckpointError` where a run is another one, with the first field that differs and both values."""
        path = folder / NAME
        for field, ours in about.items():
            theirs = self.about.get(field)
            if theirs != ours:
                raise CheckpointError(
                    f"{path}: {field}: the checkpoint has {theirs!r}, this run {ours!r}; give the same, or begin "
                    "anew with another --checkpoint folder"
                )
        if difference := mismatch(model, self.model, here="this run's model"):
            raise CheckpointError(f"{path}: {difference}")


def _read(path: Path, file: BinaryIO) -> Any:
    try:
        with zipfile.ZipFile(file) as parts:  # torch writes checksums, and does not look at them
            if (wrong := parts.testzip()) is not None:
                raise CheckpointError(f"{path}: damaged: {wrong} in it has another checksum")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (
        *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError),
        *(RuntimeError, EOFError, LookupError, ValueError, OSError),
    ) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path}: no checkpoint, or damaged: {reason}") from error


def _sweep(folder: Path) -> None:
    """Delete what writers that were killed have left: each as large as a checkpoint. Who still writes has a lock."""
    for partial in folder.glob(f".{NAME}.*"):
        with contextlib.suppress(OSError), partial.open("rb") as file:
            lock(file, wait=False)
            partial.unlink()


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of this process's global random generators: torch's (the device's too), NumPy's, Python's."""
    numpy: Any = np.random.get_state(legacy=False)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "python": random.getstate(),
    }
    if device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def restore_random_states(
    states: Sequence[Mapping[str, Any]], *, rank: int, world_size: int, device: torch.device
) -> None:
    """Put this process's global random generators where they were.

    With another number of ranks there is no state for each of them: rank 0 has its own back, the others are seeded from
    that and their rank.
    """
    mine = states[rank if len(states) == world_size else 0]
    numpy = mine["numpy"]
    keys = np.array(numpy["state"]["key"], dtype=np.uint32)
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": keys}})
    version, internal, gauss_next = mine["python"]
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(mine["torch"])
    if device.type != "cpu" and "device" in mine:
        torch.get_device_module(device).set_rng_state(mine["device"], device)
    if len(states) != world_size and rank:
        seed = int(torch.randint(2**31, ())) ^ rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
