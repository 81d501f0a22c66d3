"""Promises:
- A `backbone` has both layouts, and takes weights of files, with or without a head.
- `fastload featurize` opens no image for features of the same weights, options and version. Otherwise it names what
  differs.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import URLError

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from fastload import store
from fastload.cli import main
from fastload.errors import UsageError
from fastload.store.model_key import key_of
from tests.children import run_python
from tests.store.test_model_outputs import Numbers, values

ROOT = Path(__file__).parents[2]


def image_tree(folder: Path, count: int = 6) -> Path:
    """A folder of two classes of small JPEGs."""
    image = pytest.importorskip("PIL.Image")
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (20, 16), (40 * number, 99, 7)).save(path)
    return folder


class OpenedImages:
    """Counts the JPEGs that this process opens. An audit hook stays for ever, so there is one."""

    _counts: ClassVar[list[int]] = []

    def __init__(self) -> None:
        if not self._counts:
            self._counts.append(0)
            sys.addaudithook(self._see)
        self._counts[0] = 0

    @classmethod
    def _see(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and os.fsdecode(str(arguments[0])).endswith((".jpg", ".jpg'")):
            cls._counts[0] += 1

    def count(self) -> int:
        found, self._counts[0] = self._counts[0], 0
        return found


# ---- backbones ----


def test_backbones_have_both_layouts() -> None:
    pytest.importorskip("torchvision")
    images = torch.rand(1, 3, 224, 224)
    found = {}
    with torch.inference_mode():
        for layout in ("pooled", "flat"):
            network = store.backbone("resnet18", weights="random", layout=layout)  # type: ignore[arg-type]
            assert not network.training
            found[layout] = network(images)
    assert found["pooled"].shape == (1, 512)
    assert found["flat"].shape == (1, 7 * 7 * 512)
    means = found["flat"].view(1, 512, 7, 7).mean((2, 3))
    torch.testing.assert_close(found["pooled"], means)


def test_random_weights_are_a_function_of_the_seed_and_touch_no_random_state() -> None:
    pytest.importorskip("torchvision")
    state = torch.get_rng_state()
    first, again, other = (
        store.backbone("resnet18", weights="random", seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    key = [key_of(Numbers(), model, "", {})["weights"] for model in (first, again, other)]
    assert key[0] == key[1] != key[2]


def test_weights_come_from_a_file_with_or_without_a_head(tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision.models")
    whole = models.resnet18(weights=None, num_classes=5).eval()
    torch.save(whole.state_dict(), tmp_path / "whole.pt")
    bare = {k: v for k, v in whole.state_dict().items() if not k.startswith("fc.")}
    torch.save(bare, tmp_path / "bare.pt")
    images = torch.rand(2, 3, 32, 32)
    headless = nn.Sequential(*list(whole.children())[:-1], nn.Flatten())
    for file in ("whole.pt", "bare.pt"):
        network = store.backbone("resnet18", weights=tmp_path / file)
        with torch.inference_mode():
            assert torch.equal(network(images), headless(images))
    del bare["conv1.weight"]
    torch.save(bare, tmp_path / "less.pt")
    torch.save([1], tmp_path / "list.pt")
    torch.save({**whole.state_dict(), "conv1.weight": torch.zeros(1)}, tmp_path / "shape.pt")
    (tmp_path / "text.pt").write_text("no weights")
    for file, reason in {
        "less.pt": "conv1.weight: missing in the file, but 'resnet18' has",
        "list.pt": "expected a state_dict, found a list",
        "shape.pt": r"conv1.weight: the file has \(1,\), but 'resnet18' has",
        "text.pt": "is not a file of weights",
    }.items():
        with pytest.raises(UsageError, match=reason):
            store.backbone("resnet18", weights=tmp_path / file)


def test_networks_and_layouts_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchvision")

    def offline(*_: Any, **__: Any) -> Any:
        raise URLError("no route to host")

    monkeypatch.setattr("torch.hub.urlopen", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(UsageError, match=r"cannot be downloaded .*no route to host.*Give a file"):
        store.backbone("resnet18", weights="default")
    with pytest.raises(UsageError, match="'resnet19' is unknown"):
        store.backbone("resnet19", weights="random")
    with pytest.raises(UsageError, match='no layer "avgpool".*Choose "pooled"'):
        store.backbone("densenet121", weights="random", layout="flat")
    with pytest.raises(UsageError, match='layout must be "pooled" or "flat"'):
        store.backbone("resnet18", weights="random", layout="square")  # type: ignore[arg-type]


# ---- the command and the example ----


def featurize(*arguments: str | Path) -> Any:
    command = ["featurize", "--model", "resnet18", "--size", "32", "-w", "1", *map(str, arguments)]
    return CliRunner().invoke(main, command)


def test_the_command_makes_features_once_and_names_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchvision")
    root = image_tree(tmp_path / "images")
    given = (root, "--root", tmp_path / "sets", "--name", "few", "--weights", "random")
    first = featurize(*given, "--parts", "2")
    assert first.exit_code == 0, first.output
    assert "6 rows of float32[512], 0.0 MB, 2 classes, after " in first.output
    assert "random weights, seed 0: use these features only for tests" in first.output
    assert first.output.splitlines()[-1] == str(tmp_path / "sets" / "few")
    found = store.get("few", root=tmp_path / "sets", data="x", label="y")
    assert [int(y) for _, y in found] == [0, 0, 0, 1, 1, 1]
    assert found.classes == ["a", "b"]
    assert [len(part) for part in found.column("x")] == [3, 3]

    opened = OpenedImages()
    assert featurize(*given).exit_code == 0
    assert opened.count() == 0
    other = featurize(*given, "--seed", "1", "--dtype", "float16")
    assert other.exit_code == 1
    assert "features made with other weights and other dtype. " in other.output
    assert "or pass --replace" in other.output
    flat = featurize(*given, "--layout", "flat", "--dtype", "float16", "--replace")
    assert flat.exit_code == 0, flat.output
    assert "6 rows of float16[512]" in flat.output  # 32 pixels leave a map of 1 x 1


def test_the_command_takes_lists_and_packed_sets(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from fastload.datasets.packed.packing import pack

    root = image_tree(tmp_path / "images")
    listed = tmp_path / "list.txt"
    listed.write_text("".join(f"{path}\n" for path in sorted(root.rglob("*.jpg"))))
    pack(root, tmp_path / "packed", mode="encoded")
    given = ("--weights", "random", "--batch-size", "4")
    assert not featurize(tmp_path / "packed", "--name", tmp_path / "a", *given).exit_code
    assert not featurize("--file-list", listed, "--name", tmp_path / "b", *given).exit_code
    assert torch.equal(*(values(store.get(tmp_path / name, data="x"), "x") for name in "ab"))


def test_errors_of_the_command_are_one_line(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    root = image_tree(tmp_path / "images")
    name = ("--name", tmp_path / "set")
    for arguments, code, text in (
        (name, 2, "Give either a folder of images or --file-list-path"),
        ((root, *name, "--weights", tmp_path / "none.pt"), 1, "none.pt: No such file"),
        ((root, *name, "--weights", "random", "--parts", "7"), 2, "parts must be 1 to 6"),
        (
            (root, *name, "--weights", "random", "--device", "abacus"),
            2,
            "--device abacus is not a device",
        ),
        ((root, "--name", ".x", "--weights", "random"), 2, "the name of a set must have"),
    ):
        result = featurize(*arguments)
        assert result.exit_code == code, result.output
        assert text in result.output
        assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "set").exists()


@pytest.mark.slow
def test_the_example_opens_no_image_in_its_second_training(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    command = [ROOT / "examples" / "transfer.py", "--folder", tmp_path, "--count", "100"]
    command += ["--model", "resnet18", "--size", "32", "--epochs", "20"]
    done = run_python(*command, check=True)
    assert "weights: random weights, which know nothing of images" in done.stdout
    lines = re.findall(r"(\w+) training: .* (\d+) images opened, accuracy ([\d.]+)%", done.stdout)
    assert [line[:2] for line in lines] == [("first", "100"), ("second", "0")]
    assert lines[0][2] == lines[1][2]
    assert float(lines[0][2]) > 40  # chance is 20
