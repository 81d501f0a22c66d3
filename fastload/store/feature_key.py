"""The key of a set of features: a hash of each thing that they depend on, by name, to compare one by one."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from fastload._kit.fingerprint import Content, digest_of, fingerprint, of_path, reduced
from fastload.datasets.manifest import INDEX

TRANSFORMS = ("transform", "target_transform", "transforms")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_RANDOM = (
    *("Random", "Rand", "ColorJitter", "AutoAugment", "TrivialAugment", "AugMix", "ElasticT"),
    *("MixUp", "CutMix"),
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
        version: version of the samples, used instead of a hash of the dataset. "": hash the dataset.
        dtype: dtype of the stored outputs. None: that of the model.

    Raises TypeError if `version` is "" and the dataset has no fingerprint.
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
    """Return the names of a dataset's transforms that draw random numbers, judged by the names alone."""
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
    modules = [
        (name, type(module), {key: v for key, v in vars(module).items() if _is_setting(key, v)})
        for name, module in model.named_modules()
    ]
    return hash_of(modules, "model")


def _is_setting(name: str, value: Any) -> bool:
    """Return True if an attribute affects what a module computes. `training` does not: the model runs in eval mode."""
    settings = (*_PLAIN, tuple, list, types.FunctionType)
    return not name.startswith("_") and name != "training" and isinstance(value, settings)


def _source(dataset: Any, version: str) -> str:
    if version:
        return fingerprint(version, type(dataset).__qualname__, len(dataset))
    try:
        return _hash("dataset", _KeyContent(paths=True).of_dataset(dataset))
    except TypeError as error:
        raise TypeError(
            f"{error}, so fastload cannot detect changed samples. Pass version=, a string that you change whenever "
            "the samples change"
        ) from error


def hash_of(value: Any, what: str) -> str:
    """Return the hash of a value's content. If it cannot be hashed, raise TypeError, which calls it `what`."""
    return _hash(what, _KeyContent().of(value))


def _hash(what: str, pieces: Iterator[bytes]) -> str:
    try:
        return digest_of(pieces)
    except RecursionError:
        raise TypeError(f"the {what} is nested too deeply to have a fingerprint") from None
    except Exception as error:
        raise TypeError(
            f"the {what} has no fingerprint ({type(error).__name__}: {error})"
        ) from error


class _KeyContent(Content):
    """Yields bytes that represent values. A dataset is represented by what it reads. Paths of folders do not count.

    Raises what pickle raises for an object that cannot be pickled.
    """

    def of_text(self, value: str | os.PathLike[str]) -> Iterator[bytes]:
        text = os.fspath(value)
        has_suffix = 0 < text.rfind(".") < len(text) - 1 and "\n" not in text
        may_be_path = isinstance(value, os.PathLike) or os.sep in text or has_suffix
        if self.paths and may_be_path and os.path.isfile(text):
            yield from of_path(text)
        else:
            yield os.fsencode(text)

    def of_compound(self, value: Any) -> Iterator[bytes]:
        if isinstance(value, Dataset):
            yield from self.of_dataset(value)
        elif isinstance(value, types.FunctionType | type):
            yield from Content().of(value)  # code may use what cannot be pickled, such as a lock
        else:
            yield from super().of_compound(value)

    def kept(self, value: Any) -> Any:
        return reduced(value)

    def of_dataset(self, dataset: Any) -> Iterator[bytes]:
        """Yield what a dataset reads. Its transforms are another part of the key."""
        yield from self.of(type(dataset))
        own = sorted(getattr(dataset, "__dict__", {}).items())
        settings = {name: value for name, value in own if _says_how_to_read(name, value)}
        if isinstance(dataset, Subset):
            yield from self.of((torch.as_tensor(dataset.indices), dataset.dataset))
        elif isinstance(dataset, ConcatDataset):
            yield from self.of(list(dataset.datasets))
        elif isinstance(set_id := getattr(dataset, "set_id", None), str):
            yield from self.of((set_id, settings))
        elif isinstance(hugging_face := getattr(dataset, "_fingerprint", None), str):
            yield from self.of(hugging_face)
        elif (index := _index_of(dataset)) is not None:
            yield from self.of((index, settings))
        elif (samples := _files_of(dataset)) is not None:
            for path, target in samples:
                yield from of_path(path)
                yield str(target).encode()
            yield from self.of(settings)
        else:
            yield from self.of_object(dataset, TRANSFORMS)


def _says_how_to_read(name: str, value: Any) -> bool:
    """Return True if an attribute counts in the key of a dataset whose files or id identify its samples."""
    is_path = isinstance(value, str) and os.sep in value
    return (
        not name.startswith("_")
        and name not in TRANSFORMS
        and isinstance(value, _PLAIN)
        and not is_path
    )


def _index_of(dataset: Any) -> bytes | None:
    """Return the index of a packed set, with the checksums of its content, or None for another dataset."""
    path = getattr(dataset, "path", None)
    try:
        with open(os.path.join(path or "", INDEX), "rb") as file:
            return file.read() if isinstance(path, str) else None
    except OSError:
        return None


def _files_of(dataset: Any) -> Sequence[tuple[str, Any]] | None:
    """Return (path, class number) of each sample of an image folder or list, or None for another dataset."""
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, Sequence) or not len(samples):
        return None
    first = samples[0]
    paired = isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], str)
    return samples if paired and os.path.exists(first[0]) else None
