"""Promise: With transforms and tokenizers at the top of a module or script, 8 workers give 2,048 right pairs, or a
warning names the object and the remedy.

A result is never wrong in silence.
"""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastload.errors
from tests.compat.eight_workers import Pairs, library, sample_image, wrong_pairs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# Set by each test, as a module sets it at its top.
transform: Any = None


def named(name: str, dataset: Any) -> tuple[int, bool]:
    """Return how many pairs are wrong, and whether a warning named the object."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", fastload.errors.ModuleStateWarning)
        wrong = wrong_pairs(dataset)
    found = [w for w in seen if issubclass(w.category, fastload.errors.ModuleStateWarning)]
    return wrong, any(name in str(w.message) for w in found)


class OfMonai(Pairs):
    """Image and label, cropped alike."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = sample_image(index, 1, 24, 24)
        item = transform({"image": image, "label": image.copy()})
        return item["image"].as_tensor(), item["label"].as_tensor()


class OfAlbumentations(Pairs):
    """A crop, and the place that the transform says it was cut from."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        image = np.zeros((24, 24, 3), np.uint8)
        image[..., 0] = np.arange(24)
        found = transform(image=image)["image"]
        return torch.tensor(int(found[0, 0, 0])), torch.tensor(transform.params["crop_coords"][0])


class OfATokenizer(Pairs):
    """A text and a summary, each cut at its own length."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        text = " ".join(f"w{k}" for k in range(20))
        found = transform(text, max_length=12, truncation=True)["input_ids"]
        target = transform(text, max_length=5, truncation=True)["input_ids"]
        return torch.tensor([len(found), len(target)]), torch.tensor([12, 5])


class OfARustTokenizer(Pairs):
    """The same by an object that is no instance of a Python class."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        text = " ".join(f"w{k}" for k in range(20))
        transform.enable_truncation(12)
        found = transform.encode(text).ids
        transform.enable_truncation(5)
        return torch.tensor([len(found), len(transform.encode(text).ids)]), torch.tensor([12, 5])


def rust_tokenizer() -> Any:
    tokenizers = library("tokenizers")
    words = tokenizers.models.WordLevel({f"w{k}": k for k in range(20)}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def fast_tokenizer() -> Any:
    fast = library("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_object=rust_tokenizer(), unk_token="w0", pad_token="w0")


MADE = {
    OfMonai: lambda: library("monai.transforms").RandSpatialCropd(["image", "label"], (8, 8)),
    OfAlbumentations: lambda: library("albumentations").RandomCrop(8, 8),
    OfATokenizer: fast_tokenizer,
}


@pytest.mark.parametrize("dataset", MADE, ids=lambda dataset: dataset.__name__)
def test_an_instance_of_a_python_class_is_right(
    monkeypatch: pytest.MonkeyPatch, dataset: type[Pairs]
) -> None:
    monkeypatch.setitem(globals(), "transform", MADE[dataset]())
    assert wrong_pairs(dataset()) == 0


def test_another_object_is_right_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each sample it looks as it did before, so its state alone tells nothing."""
    monkeypatch.setitem(globals(), "transform", rust_tokenizer())
    wrong, warned = named("transform", OfARustTokenizer())
    assert wrong == 0 or warned, f"{wrong} wrong pairs, and no warning"


class OfAFile(Pairs):
    """A line of a file, as text or as bytes."""

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        index %= 64
        transform.seek(index * 16)
        line = transform.readline()
        return line if isinstance(line, str) else line.decode(), f"{index:015d}\n"


@pytest.mark.parametrize("kind", ["text", "gzip"])
def test_an_open_file_is_right_or_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    lines = "".join(f"{i:015d}\n" for i in range(64)).encode()
    path = tmp_path / "lines"
    path.write_bytes(gzip.compress(lines) if kind == "gzip" else lines)
    with gzip.GzipFile(path) if kind == "gzip" else path.open(encoding="utf-8") as file:
        monkeypatch.setitem(globals(), "transform", file)
        wrong, warned = named("transform", OfAFile())
    assert wrong == 0 or warned, f"{wrong} wrong pairs, and no warning"


SCRIPT = """
    import sys
    import torch
    import fastload
    import numpy as np
    sys.setswitchinterval(1e-6)

    class Mirror:
        def __init__(self):
            self.generator = np.random.default_rng(0)

        def draw(self):
            self.flips = self.generator.integers(2, size=3)

        def __call__(self, image):
            for axis, flip in enumerate(self.flips):
                image = image.flip(axis) if flip else image
            return image

    transform, other = Mirror(), Mirror()

    def mirrored(image):
        other.draw()
        return transform(image), transform(image)

    class Scans(torch.utils.data.Dataset):
        def __len__(self):
            return 2_048

        def __getitem__(self, index):
            transform.draw()
            image = torch.arange(64).reshape(4, 4, 4) + index
            return mirrored(image)

    loader = fastload.DataLoader(Scans(), batch_size=32, num_workers=8)
    print("wrong:", sum(int((a != b).flatten(1).any(1).sum()) for a, b in loader))
"""


def test_a_script(tmp_path: Path) -> None:
    """What stands at the top of a script is right there."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    run = [sys.executable, "-W", "error", str(script)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (0, "wrong: 0\n"), done.stdout + done.stderr
