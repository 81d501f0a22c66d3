"""The positions of loaders in a checkpoint, for `fastload set inspect`. Its code is not run, and no tensor is read."""

from __future__ import annotations

import codecs
import io
import json
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import click

ACCELERATE = "fastload_loader_*_rank_*.json"
SHOWN = ("epoch", "batches", "position", "ended", "seed", "sampler", "world_size", "global_batch")


def positions(path: Path) -> str:
    """Return a text with the position of each loader in a checkpoint. Raise ClickException if there is none."""
    try:
        if path.is_dir():
            found = {f.name: f.read_text() for f in sorted(path.glob(ACCELERATE))} or _of_dcp(path)
        else:
            found = _of_torch(path) if zipfile.is_zipfile(path) else path.read_text()
        if lines := [line for state in _states(found) for line in _described(*state)]:
            return "\n".join(lines)
        raise LookupError("nothing in it has version, kind and epoch")
    except Exception as error:
        raise click.ClickException(
            f"{path}: no set (index.json), and no loader's state was found: {error}. Looked for were files of "
            f"torch.save and JSON, .metadata of torch.distributed.checkpoint, and {ACCELERATE} of Accelerate"
        ) from error


def _of_dcp(folder: Path) -> Any:
    """Return what a folder of torch.distributed.checkpoint holds beside tensors."""
    found: dict[Any, Any] = {}
    stored = _Unpickler(io.BytesIO((folder / ".metadata").read_bytes())).load()
    for index, at in stored["storage_data"].items():
        *outer, last = stored["planner_data"][index["fqn"]]
        if "chunks" not in stored["state_dict_metadata"][index["fqn"]]:  # else a tensor
            with (folder / at["relative_path"]).open("rb") as file:
                file.seek(at["offset"])
                value = _of_torch(io.BytesIO(file.read(at["length"])))
            reduce(lambda inner, key: inner.setdefault(key, {}), outer, found)[last] = value
    return found


def _of_torch(file: Any) -> Any:
    with zipfile.ZipFile(file) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return _Unpickler(archive.open(name)).load()


class _Items(dict[Any, Any]):
    """Stands for an object of any class: has its attributes by name, or else what it was made of by number."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, *parts: Any) -> None:
        self.update(parts[0] if [*map(type, parts)] == [dict] else enumerate(parts))

    __call__ = __setstate__ = __init__  # it may stand for a function


class _Unpickler(pickle.Unpickler):
    persistent_load = _Items  # for tensors

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a class or a function. Only what makes bytes is what it is."""
        return codecs.encode if module == "_codecs" else _Items


def _states(value: Any, place: str = "") -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the states of loaders at any depth of a value, also in pickled bytes and in JSON, each with its place."""
    with suppress(Exception):
        value = _Unpickler(io.BytesIO(value)).load() if type(value) is bytes else json.loads(value)
    parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
    if isinstance(parts, dict):
        if parts.get("kind") in ("map-style", "iterable") and {"version", "epoch"} <= parts.keys():
            yield place or "the state", parts
        for key, part in parts.items():
            yield from _states(part, f"{place}.{key}".strip("."))


def _described(place: str, state: dict[Any, Any]) -> Iterator[str]:
    """Yield the place of a state, and a line for each fact about it."""
    yield place
    for name in filter(state.__contains__, SHOWN):
        of = f" of {state.get('samples')} samples, in the order of all ranks"
        yield f"  {name.replace('_', ' ')}: {state[name]}{of * (name == 'position')}"
    lanes = state.get("lanes", [])
    for key, lane in sorted(lanes.items()) if isinstance(lanes, dict) else enumerate(lanes):
        yield f"  rank {state['rank']}, worker {key}: {lane['samples']} samples{', ended' * lane['ended']}"
