"""The key of a set of features: what they were made of, in named parts that can be compared one by one."""

from __future__ import annotations

import copyreg
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastload.datasets.manifest import INDEX
from fastload.fingerprint import fingerprint, is_installed

TRANSFORMS = ("transform", "target_transform", "transforms")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_RANDOM = (
    "Random",
    "Rand",
    "ColorJitter",
    "AutoAugment",
    "TrivialAugment",
    "AugMix",
    "ElasticT",
    "MixUp",
    "CutMix",
)
"""How names of random transforms begin: fastload's, torchvision's and MONAI's."""


def key_of(
    dataset: Any,
    model: Any,
    *,
    loader: Sequence[Any],
    version: str,
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """Return the hash of each thing that features depend on, by its name.

    Args:
        loader: the arguments of the loader that change samples.
        version: names the samples of the dataset, which is then not looked at; "" if it is to be.
        dtype: of what is kept. None: the model decides.

    Raises TypeError if the dataset cannot be told from another one, and `version` is "".
    """
    key = {
        "weights": _weights(model),
        "model": _structure(model),
        "source": _source(dataset, version),
        "transform": hash_of(list(transforms_of(dataset)), "transform of the dataset"),
        "loader": hash_of(list(loader), "argument of the loader"),
    }
    return key if dtype is None else {**key, "dtype": str(dtype).removeprefix("torch.")}


def random_transforms(dataset: Any) -> list[str]:
    """Return the names of the transforms of a dataset that draw random numbers, as far as their names say so."""
    names = (
        type(found).__name__ for transform in transforms_of(dataset) for found in _within(transform)
    )
    return sorted({name for name in names if name.startswith(_RANDOM)})


def transforms_of(dataset: Any) -> Iterator[Any]:
    """Yield the transforms of a dataset and of the datasets that it wraps."""
    own = dict(getattr(dataset, "__dict__", {}))
    yield from (own[name] for name in TRANSFORMS if own.get(name) is not None)
    for value in own.values():
        for inner in value if isinstance(value, list | tuple) and len(value) < 100 else [value]:
            if isinstance(inner, Dataset):
                yield from transforms_of(inner)


def _within(transform: Any) -> Iterator[Any]:
    """Yield a transform and those that it is composed of."""
    yield transform
    inner = getattr(transform, "transforms", None) or getattr(transform, "transform", None) or ()
    for part in inner if isinstance(inner, list | tuple | nn.ModuleList) else [inner]:
        yield from _within(part)


def _weights(model: Any) -> str:
    if not isinstance(model, nn.Module):
        return ""
    # Not `state_dict()`, which leaves out buffers that are not persistent.
    return fingerprint(dict(model.named_parameters()), dict(model.named_buffers()))


def _structure(model: Any) -> str:
    if not isinstance(model, nn.Module):
        return hash_of(model, "model")
    content = _Content()
    for name, module in model.named_modules():
        content.add((name, type(module)))
        content.add({key: value for key, value in vars(module).items() if _is_setting(key, value)})
    return content.hexdigest()


def _is_setting(name: str, value: Any) -> bool:
    """Return whether an attribute of a module says what it computes. Its mode does not: it is always that of eval."""
    settings = (*_PLAIN, tuple, list, types.FunctionType)
    return not name.startswith("_") and name != "training" and isinstance(value, settings)


def _source(dataset: Any, version: str) -> str:
    if version:
        return fingerprint(version, type(dataset).__qualname__, len(dataset))
    try:
        return hash_of(dataset, "dataset", paths=True)
    except TypeError as error:
        raise TypeError(
            f"{error}, so features of changed samples would be taken for these. Pass version=, a text that you "
            "change whenever the samples change"
        ) from error


def hash_of(value: Any, what: str, *, paths: bool = False) -> str:
    """Return the hash of a value by its content. Raises TypeError, which calls it `what`, if it has none."""
    content = _Content(paths=paths)
    try:
        if paths:
            content.add_dataset(value)
        else:
            content.add(value)
    except RecursionError:
        raise TypeError(f"the {what} is nested too deeply to have a fingerprint") from None
    except Exception as error:
        raise TypeError(
            f"the {what} has no fingerprint ({type(error).__name__}: {error})"
        ) from error
    return content.hexdigest()


class _Content:
    """The hash of values by their content. Code of installed packages counts by name, other code by content.

    Args:
        paths: texts may be paths. Of a file its size and time of change count.
    """

    def __init__(self, *, paths: bool = False) -> None:
        self._digest = blake2b(digest_size=16)
        self._paths = paths
        self._met: dict[int, Any] = {}

    def hexdigest(self) -> str:
        """Return the hash of what was added, as 32 hex digits."""
        return self._digest.hexdigest()

    def add(self, value: Any) -> None:
        """Add a value. Raises what pickling raises, if it has no content that can be known."""
        is_path = isinstance(value, os.PathLike)
        if is_path:
            value = os.fspath(value)
        if isinstance(value, _PLAIN):
            self._add_text(f"{type(value).__name__} {value!r}")
            if self._paths and isinstance(value, str) and (is_path or _may_be_path(value)):
                self._add_file(value)
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._add_text(fingerprint(value))
        elif isinstance(
            value, type | types.FunctionType | types.BuiltinFunctionType | types.ModuleType
        ):
            self._add_code(value)
        elif id(value) in self._met:
            self._add_text("met")
        else:
            self._met[id(value)] = value  # which keeps its id its own
            self._add_compound(value)
            self._add_text("end")

    def _add_compound(self, value: Any) -> None:
        if isinstance(value, tuple | list | Mapping):
            self._add_text(type(value).__qualname__)
            items = value.items() if isinstance(value, Mapping) else value
            if not self._paths and all(type(item) in _PLAIN for item in items):
                self._add_text(repr(list(items)))  # a million numbers at once
                return
            for item in items:
                self.add(item)
        elif isinstance(value, set | frozenset):
            self._add_text(repr(sorted(map(repr, value))))
        elif isinstance(value, partial):
            self.add((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self.add((value.__func__, value.__self__))
        elif isinstance(value, Dataset):
            self.add_dataset(value)
        else:
            self._add_object(value)

    def _add_object(self, value: Any, without: Sequence[str] = ()) -> None:
        """Add what pickle would keep of an object; of its attributes all but those of the names `without`."""
        reduce: Callable[[Any], Any] | None = copyreg.dispatch_table.get(type(value))
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(reduced, str):
            self._add_text(reduced)
            return
        for part in reduced[:2]:
            self.add(part)
        for part in reduced[2:]:
            if isinstance(part, dict):
                part = {name: part[name] for name in sorted(part, key=repr) if name not in without}
            self.add(list(part) if isinstance(part, Iterator) else part)

    def add_dataset(self, dataset: Any) -> None:
        """Add what a dataset reads. Its transforms are another part of the key."""
        self.add(type(dataset))
        own = sorted(getattr(dataset, "__dict__", {}).items())
        settings = {name: value for name, value in own if _says_how_to_read(name, value)}
        if isinstance(dataset, Subset):
            self.add((fingerprint(torch.as_tensor(dataset.indices)), dataset.dataset))
        elif isinstance(dataset, ConcatDataset):
            self.add(list(dataset.datasets))
        elif isinstance(set_id := getattr(dataset, "set_id", None), str):
            self.add((set_id, settings))
        elif isinstance(hugging_face := getattr(dataset, "_fingerprint", None), str):
            self.add(hugging_face)
        elif (index := _index_of(dataset)) is not None:
            self.add((index, settings))
        elif (samples := _files_of(dataset)) is not None:
            for path, target in samples:
                self._add_text(f"{path} {target}")
                self._add_file(path)
            self.add(settings)
        else:
            self._add_object(dataset, TRANSFORMS)

    def _add_code(self, value: Any) -> None:
        name = getattr(value, "__qualname__", value.__name__)
        # Own code counts the same in a script, which is `__main__`, and in a module.
        self._add_text(
            f"{getattr(value, '__module__', '')} {name}" if is_installed(value) else name
        )
        if isinstance(value, types.FunctionType) and not is_installed(value):
            self._add_text(fingerprint(value))
        elif isinstance(value, type):
            for base in value.__mro__:
                if not is_installed(base):
                    self._add_text(fingerprint(base))

    def _add_file(self, path: str) -> None:
        try:
            about = os.stat(path)
        except (OSError, ValueError):  # a text that is no path
            return
        if os.path.isfile(path):
            self._add_text(f"{about.st_size} {about.st_mtime_ns}")

    def _add_text(self, text: str) -> None:
        encoded = text.encode("utf-8", "surrogateescape")
        self._digest.update(len(encoded).to_bytes(8, "little"))
        self._digest.update(encoded)


def _may_be_path(text: str) -> bool:
    return os.sep in text or (0 < text.rfind(".") < len(text) - 1 and "\n" not in text)


def _says_how_to_read(name: str, value: Any) -> bool:
    """Return whether an attribute of a dataset counts whose samples are known by its files or its id."""
    is_path = isinstance(value, str) and os.sep in value
    return (
        not name.startswith("_")
        and name not in TRANSFORMS
        and isinstance(value, _PLAIN)
        and not is_path
    )


def _index_of(dataset: Any) -> bytes | None:
    """Return the index of a packed set, which has the checksums of all that it has; None of another dataset."""
    path = getattr(dataset, "path", None)
    try:
        with open(os.path.join(path or "", INDEX), "rb") as file:
            return file.read() if isinstance(path, str) else None
    except OSError:
        return None


def _files_of(dataset: Any) -> Sequence[tuple[str, Any]] | None:
    """Return (path, class number) of each sample of an image folder or list; None of another dataset."""
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, Sequence) or not len(samples):
        return None
    first = samples[0]
    paired = isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], str)
    return samples if paired and os.path.exists(first[0]) else None
