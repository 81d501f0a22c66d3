"""Promise: A `backbone` has both layouts, and takes weights of files, with or without a head."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
from torch import nn

from fastload import store
from fastload.errors import UsageError
from fastload.store.model_key import key_of
from tests.children import run_python
from tests.store.test_model_outputs import Numbers

ROOT = Path(__file__).parents[2]


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


# ---- the example ----


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
