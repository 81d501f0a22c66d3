"""Checkpoints: model, optimiser, loader and random states in one file, which is written whole or not at all.

The model in a checkpoint has been trained on exactly the batches that its loader state counts as delivered. Steps after
the checkpoint, by a process that was then killed, are not in the restored model, and are repeated. So the steps that
lead to a model (its lineage) contain every sample of an epoch exactly once. It does not matter when and how often the
training was killed.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from fastload._kit.disk import replace_file
from fastload.errors import FastloadError
from fastload.remote.files import apart, is_there, is_url, read_whole, write_whole
from fastload.train.models import mismatch

FORMAT = 1
NAME = "checkpoint.pt"


Place = str | os.PathLike[str]
"""A folder, or its URL."""


def path_of(folder: Place) -> str | Path:
    """Return the path or the URL of the checkpoint in a folder."""
    return f"{folder.rstrip('/')}/{NAME}" if is_url(folder) else Path(folder) / NAME


def exists(folder: Place) -> bool:
    """Return whether a folder has a checkpoint."""
    path = path_of(folder)
    return apart(is_there, path) if is_url(path) else os.path.exists(path)


def expect_writable(url: str) -> None:
    """Raise OSError if no object can be written beside the one at a URL. An empty one stays there."""
    apart(partial(write_whole, data=b""), f"{url}.writable")


class CheckpointError(FastloadError, ValueError):
    """Raised if a checkpoint cannot be used. The message names the file and the field, with both values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A training run after `step` steps, as plain values and tensors. Loading it runs no code of the file."""

    step: int
    about: dict[str, Any]
    """Settings that must be equal when a run resumes, as names and JSON values."""
    model: dict[str, Any]
    optimizer: dict[str, Any]
    loader: dict[str, Any]
    """`DataLoader.state_dict()`: the same on all ranks."""
    randomness: list[dict[str, Any]]
    """The states of the global random generators of each rank, by rank."""

    def save(self, folder: Place) -> str | Path:
        """Write the file into `folder`, and replace an earlier one. If that fails, the earlier one stays.

        One for a URL is in memory first.
        """
        path = path_of(folder)
        content = {"format": FORMAT, **{name: getattr(self, name) for name in self.__slots__}}
        if is_url(path):
            buffer = io.BytesIO()
            torch.save(content, buffer)
            apart(partial(write_whole, data=buffer.getbuffer()), path)
            return path
        os.makedirs(folder, exist_ok=True)
        unfinished = Path(folder) / f".{NAME}.partial"  # replaces what a killed writer left
        try:
            with replace_file(path, partial=unfinished) as file:
                torch.save(content, file)
        except (OSError, RuntimeError) as error:
            # If a write fails, torch still tries to end its archive, and raises a different error.
            cause = error.__context__ if isinstance(error, RuntimeError) else error
            if isinstance(cause, OSError):
                raise OSError(cause.errno, cause.strerror, str(path)) from error
            raise
        return path

    @classmethod
    def load(cls, folder: Place) -> Self | None:
        """Return the checkpoint in `folder`, or None if it has none. Raise `CheckpointError` if the file is not one."""
        path = path_of(folder)
        try:
            with _opened(path) as file:
                content = _read(path, file)
        except FileNotFoundError:
            return None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            theirs = content.get("format") if isinstance(content, dict) else None
            raise CheckpointError(
                f"{path}: the format is {theirs!r}, but this fastload reads {FORMAT}. Use the fastload version that "
                "wrote the file, or another --checkpoint folder"
            )
        if missing := [name for name in cls.__slots__ if name not in content]:
            raise CheckpointError(
                f"{path}: the field {missing[0]!r} is missing. Move the file away, or give another --checkpoint folder"
            )
        return cls(**{name: content[name] for name in cls.__slots__})

    def check(self, folder: Place, *, about: Mapping[str, Any], model: dict[str, Any]) -> None:
        """Raise `CheckpointError` if this run has other settings. Name the first differing field and both values."""
        path = path_of(folder)
        for field, ours in about.items():
            theirs = self.about.get(field)
            if theirs != ours:
                raise CheckpointError(
                    f"{path}: {field}: the checkpoint has {theirs!r}, but this run has {ours!r}. Give the same value, "
                    "or start from the beginning with another --checkpoint folder"
                )
        if difference := mismatch(model, self.model, here="this run's model"):
            raise CheckpointError(
                f"{path}: {difference}. Train the same model, or give another --checkpoint folder"
            )


def _opened(path: str | Path) -> BinaryIO:
    return io.BytesIO(apart(read_whole, path)) if is_url(path) else open(path, "rb")


def _read(path: str | Path, file: BinaryIO) -> Any:
    try:
        with zipfile.ZipFile(file) as parts:  # torch writes checksums, but does not check them
            if (wrong := parts.testzip()) is not None:
                raise ValueError(f"the checksum of {wrong} is wrong")
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)
    except (
        *(zipfile.BadZipFile, zlib.error, pickle.UnpicklingError),
        *(RuntimeError, EOFError, LookupError, ValueError, OSError),
    ) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} is not a checkpoint, or is damaged: {reason}. Move the file away, or restore a copy"
        ) from error


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of this process's global random generators: of torch, its device, NumPy and Python."""
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
    """Restore the states of this process's global random generators.

    With another number of ranks, only rank 0 gets its own state back. The others are seeded from that state and their
    rank.
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
