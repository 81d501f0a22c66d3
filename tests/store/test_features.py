"""Promises:
- Row `i` of features is what the model returns for sample `i`, pooled or flat. Parts may differ in size; labels,
  classes and dtype are kept.
- The model's modes, gradients and the random states are unchanged after features were made.
- Features of the same weights, model, samples, transforms, seed and dtype are opened in any process. No image is
  opened, and neither dataset nor model runs.
- If features were made otherwise, the error names what differs, and both remedies.
- A run over a dataset for features that was killed resumes with the missing parts and gives the same bytes.
- Too little room for features is an error after the first batch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import URLError

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from fastload import DataLoader, store
from fastload.cli import main
from fastload.errors import StoreFullError, UsageError
from fastload.store import feature_key
from tests.children import run_python
from tests.contracts.sets import WrittenSet

ROOT = Path(__file__).parents[2]
ROWS = 103
BATCHES = {"batch_size": 8, "num_workers": 2}


class Numbers(Dataset[Any]):
    """Sample `i` is (float32[3, 4, 4] of i, i % 5)."""

    fastload_per_worker = ()

    def __init__(self, rows: int = ROWS, *, scale: float = 1, transform: Any = None) -> None:
        self.rows, self.scale, self.transform = rows, scale, transform

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        assert not os.environ.get("FORBIDDEN"), "a sample was read"
        image = torch.full((3, 4, 4), float(index)) * self.scale
        return (image if self.transform is None else self.transform(image)), index % 5


class Net(nn.Module):
    """float32[B, 3, 4, 4] -> float32[B, width]; of eval mode, or other values."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert torch.is_inference_mode_enabled()
        assert not os.environ.get("FORBIDDEN"), "the model ran"
        return self.body(images)


def net(width: int = 7, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(width)


def expected(model: Net, rows: int = ROWS) -> torch.Tensor:
    images = torch.stack([Numbers(rows)[i][0] for i in range(rows)])
    linear = model.body[2]
    return (images.flatten(1) @ linear.weight.T + linear.bias).detach()


def values(found: store.SetDataset, column: str = "x") -> torch.Tensor:
    return torch.cat(found.column(column))


# ---- what is kept ----


@pytest.mark.parametrize(("parts", "workers"), [(1, 0), (8, 2), (None, 2), (ROWS, 0)])
def test_row_i_is_what_the_model_returns_for_sample_i(
    parts: int | None, workers: int, tmp_path: Path
) -> None:
    model = net()
    found = store.features(
        tmp_path / "set",
        dataset=Numbers(),
        model=model,
        parts=parts,
        loader={"batch_size": 8, "num_workers": workers},
    )
    torch.testing.assert_close(values(found), expected(model), rtol=1e-4, atol=1e-3)
    assert values(found, "y").tolist() == [i % 5 for i in range(ROWS)]
    assert values(found, "y").dtype == torch.int64
    x, y = found[3]
    assert (x.shape, x.dtype, int(y)) == ((7,), torch.float32, 3)
    sizes = [len(part) for part in found.column("x")]
    assert len(sizes) == (parts or 1)
    assert max(sizes) - min(sizes) <= 1
    with DataLoader(found, batch_size=16, shuffle=True, seed=0) as loader:
        assert sum(len(y) for _, y in loader) == ROWS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_features_have_the_dtype_that_is_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = net()
    found = store.features(tmp_path / "set", dataset=Numbers(20), model=model, dtype=dtype)
    assert values(found).dtype == dtype
    torch.testing.assert_close(values(found).float(), expected(model, 20), rtol=1e-2, atol=5e-2)


def test_a_value_too_large_for_float16_is_an_error_and_not_infinite(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"70,000 does not fit into float16"):
        store.features(
            tmp_path / "set",
            dataset=Numbers(4),
            model=lambda images: images[:, 0, 0] + 70_000 - images[:, 0, 0],
            dtype=torch.float16,
        )


def test_samples_without_labels_dicts_and_labels_that_are_no_integers(tmp_path: Path) -> None:
    plain = TensorDataset(torch.arange(6.0)[:, None])

    class Alone(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            return plain[index][0]

    class Dicts(Alone):
        def __getitem__(self, index: int) -> Any:
            return {"image": plain[index][0], "cost": index / 2, "name": f"no {index}"}

    def twice(images: torch.Tensor) -> torch.Tensor:
        return 2 * images

    found = store.features(tmp_path / "alone", dataset=Alone(), model=twice)
    assert [float(x) for x in found] == [0, 2, 4, 6, 8, 10]
    with pytest.raises(TypeError, match=r"dicts with the keys \['image', 'cost', 'name'\]. Name"):
        store.features(tmp_path / "dicts", dataset=Dicts(), model=twice)
    found = store.features(
        tmp_path / "dicts", dataset=Dicts(), model=twice, data="image", label="cost"
    )
    assert [(float(x), float(y)) for x, y in found][3] == (6, 1.5)
    found = store.features(
        tmp_path / "names", dataset=Dicts(), model=twice, data="image", label="name"
    )
    assert found[5][1] == "no 5"
    with pytest.raises(TypeError, match="a list of 1 as a batch"):
        store.features(tmp_path / "one", dataset=plain, model=twice)


def test_classes_and_how_it_was_made_are_kept(tmp_path: Path) -> None:
    dataset = Numbers(10)
    dataset.classes = ["a", "b", "c", "d", "e"]  # type: ignore[attr-defined]
    found = store.features(
        tmp_path / "set", dataset=Subset(dataset, [1, 3]), model=net(), made={"by": "a test"}
    )
    assert found.classes == ["a", "b", "c", "d", "e"]
    assert found.made["by"] == "a test"
    assert found.made["model"] == "Net"
    assert set(found.made["features"]) == {
        *("weights", "model", "source", "transform", "loader", "dtype")
    }


class TestFeatures(WrittenSet):
    rows = 24

    def write(self, path: Path, *, other: bool = False) -> None:
        loader = {"batch_size": 8, "num_workers": 0}
        dataset = Numbers(self.rows, scale=2 if other else 1)
        store.features(path, dataset=dataset, model=nn.Flatten(), parts=4, loader=loader)

    def opened(self, path: Path) -> store.SetDataset:
        return store.get(path, data="x", label="y")

    def sample(self, row: int) -> Any:
        return torch.full((48,), float(row)), torch.tensor(row % 5)


# ---- the model and its state ----


def test_modes_gradients_and_random_states_are_those_of_before(tmp_path: Path) -> None:
    model = net()
    model.train()
    model.body[1].eval()
    before = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    store.features(tmp_path / "set", dataset=Numbers(), model=model, loader=BATCHES)
    assert [module.training for module in model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert all(parameter.requires_grad for parameter in model.parameters())

    class Broken(Net):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise LookupError("no such layer")

    broken = Broken()
    with pytest.raises(LookupError, match="no such layer"):
        store.features(tmp_path / "broken", dataset=Numbers(), model=broken)
    assert all(module.training for module in broken.modules())
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda x: (x, x),
            r"returned a tuple of 2 for a batch of 8 samples, float32\[8, 3, 4, 4\]",
        ),
        (lambda x: x.mean(), r"returned float32\[\] for a batch of 8"),
        (lambda x: x[:3], r"returned float32\[3, 3, 4, 4\] for a batch of 8"),
        (lambda x: x.flatten(1)[:, : len(x)], r"rows of \[7\], but \[8\] for an earlier batch"),
    ],
    ids=["tuple", "number", "too few", "shapes"],
)
def test_what_is_no_tensor_of_rows_is_named(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message):
        store.features(tmp_path / "set", dataset=Numbers(15), model=model, loader={"batch_size": 8})
    assert not (tmp_path / "set").exists()


# ---- the second time ----


def test_the_second_call_runs_neither_dataset_nor_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net()
    first = store.features(tmp_path / "set", dataset=Numbers(), model=model)
    monkeypatch.setenv("FORBIDDEN", "1")
    with pytest.raises(AssertionError, match="a sample was read"):
        store.features(tmp_path / "other", dataset=Numbers(), model=model)
    model.train()  # the mode is no part of the key, nor are these:
    loader = {"batch_size": 3, "num_workers": 1}
    again = store.features(
        tmp_path / "set", dataset=Numbers(), model=model, loader=loader, parts=3, device="cpu"
    )
    assert again.set_id == first.set_id
    assert torch.equal(values(again), values(first))


def test_another_process_finds_the_same_key(tmp_path: Path) -> None:
    """Although it makes its objects anew. `test_prepare.py` has fingerprints under several hash seeds."""
    command = ["-c", SAME_IN_EACH_PROCESS, tmp_path / "set"]
    first = run_python(*command, cwd=ROOT, check=True).stdout
    environment = {**os.environ, "FORBIDDEN": "1"}
    again = run_python(*command, cwd=ROOT, check=True, env=environment).stdout
    assert first == again != ""


def same_in_each_process(out: Path) -> None:
    transform = nn.Sequential(nn.Hardtanh(-1, 5), nn.LocalResponseNorm(2))
    found = store.features(out, dataset=Numbers(20, transform=transform), model=net(), parts=2)
    print(found.set_id, found.made["features"])


SAME_IN_EACH_PROCESS = f"""
import sys; sys.path.insert(0, "tests/store")
from pathlib import Path
import test_features  # not as pytest has rewritten it
test_features.{same_in_each_process.__name__}(Path(sys.argv[1]))
"""


def doubled(image: torch.Tensor) -> torch.Tensor:
    return 2 * image


def tripled(image: torch.Tensor) -> torch.Tensor:
    return 3 * image


class Wide(Net):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) * 2


def same_weights(kind: type[Net]) -> Net:
    torch.manual_seed(0)
    return kind()


def changed_weights() -> Net:
    model = net()
    with torch.no_grad():
        model.body[2].bias[3] += 1e-6
    return model


CHANGES: list[tuple[Any, list[str]]] = [
    (lambda: {"model": changed_weights()}, ["weights"]),
    (lambda: {"model": same_weights(Wide)}, ["model"]),
    (lambda: {"dataset": Numbers(ROWS - 1)}, ["source"]),
    (lambda: {"dataset": Numbers(scale=2)}, ["source"]),
    (lambda: {"dataset": Numbers(transform=doubled)}, ["transform"]),
    (lambda: {"dtype": torch.float64}, ["dtype"]),
    (lambda: {"loader": {"seed": 1}}, ["loader"]),
    (lambda: {"version": "2"}, ["source"]),
    (lambda: {"model": net(8), "dtype": torch.float16}, ["weights", "model", "dtype"]),
]


def test_the_error_names_what_differs_and_both_remedies(tmp_path: Path) -> None:
    given: dict[str, Any] = {"dataset": Numbers(), "model": net(), "parts": 2}
    first = store.features(tmp_path / "set", **given)
    before = values(first).clone()
    for change, named in CHANGES:
        with pytest.raises(FileExistsError) as caught:
            store.features(tmp_path / "set", **given | change())
        message = str(caught.value)
        assert f"features made with other {' and other '.join(named)}. " in message
        assert "Choose another name, or pass replace=True" in message
    new = store.features(tmp_path / "set", **given | change(), replace=True)
    assert new.made["features"] != first.made["features"]
    assert torch.equal(values(first), before)  # which are mapped, and stay so


# ---- what the dataset is known by ----


def key_of(dataset: Any, **given: Any) -> dict[str, str]:
    arguments = {"dtype": torch.float32, "loader": [], "version": "", **given}
    return feature_key.key_of(dataset, arguments.pop("model", None), **arguments)


def image_tree(folder: Path, count: int = 6) -> Path:
    """A folder of two classes of small JPEGs."""
    image = pytest.importorskip("PIL.Image")
    for number in range(count):
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (20, 16), (40 * number, 99, 7)).save(path)
    return folder


def test_image_files_are_known_by_path_size_and_time_and_none_is_opened(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from fastload.datasets import ImageFolder
    from fastload.image import Resize

    root = image_tree(tmp_path / "images")
    # So that Python opens the files: the kernels' opens cannot be counted.
    plan = Resize((8, 8), mean=(0.5, 0.5, 0.5), std=(1, 1, 1), region_decode=False)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    opened = OpenedImages()
    given: dict[str, Any] = {"model": model, "loader": {"batch_size": 2}}
    store.features(tmp_path / "set", dataset=ImageFolder(root, transform=plan), **given)
    assert opened.count() == 6
    again = store.features(tmp_path / "set", dataset=ImageFolder(root, transform=plan), **given)
    with DataLoader(again, batch_size=4, shuffle=True, num_workers=2, seed=0) as loader:
        assert sum(len(labels) for _ in range(2) for _, labels in loader) == 12
    assert opened.count() == 0
    assert again.classes == ["a", "b"]

    file = next(root.rglob("*.jpg"))
    os.utime(file, ns=(0, 0))
    with pytest.raises(FileExistsError, match=r"with other source\. "):
        store.features(tmp_path / "set", dataset=ImageFolder(root, transform=plan), **given)
    with pytest.raises(FileExistsError, match=r"with other transform\. "):
        os.utime(file, ns=(0, 0))
        store.features(tmp_path / "second", dataset=ImageFolder(root, transform=plan), **given)
        store.features(
            tmp_path / "second", dataset=ImageFolder(root, transform=Resize((8, 9))), **given
        )


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


def test_files_of_torchvision_and_of_a_dataset_of_paths_count_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    root = image_tree(tmp_path / "images")

    class Photos(Dataset[Any]):
        def __init__(self) -> None:
            self.paths = [str(path) for path in sorted(root.rglob("*.jpg"))]

        def __len__(self) -> int:
            return len(self.paths)

    for make in (lambda: datasets.ImageFolder(root), Photos):
        before = key_of(make())["source"]
        assert key_of(make())["source"] == before
        file = next(root.rglob("*.jpg"))
        os.utime(file, ns=(1, time.time_ns()))
        assert key_of(make())["source"] != before


def test_sets_tensors_and_parts_of_datasets_are_known_by_their_content(tmp_path: Path) -> None:
    store.put({"x": torch.arange(10.0)}, tmp_path / "a")
    store.put({"x": torch.arange(10.0)}, tmp_path / "b", checksums=True)
    store.put({"x": torch.arange(1, 11.0)}, tmp_path / "c")
    tensors = torch.arange(10.0)
    changed = tensors.clone()
    changed[9] = 0
    different = [
        store.get(tmp_path / "a", data="x"),
        store.get(tmp_path / "c", data="x"),
        TensorDataset(tensors),
        TensorDataset(changed),
        Subset(TensorDataset(tensors), [1, 2]),
        Subset(TensorDataset(tensors), [2, 1]),
        Subset(TensorDataset(changed), [2, 1]),
        ConcatDataset([TensorDataset(tensors), Numbers()]),
        ConcatDataset([TensorDataset(tensors), Numbers(scale=2)]),
    ]
    keys = [key_of(dataset)["source"] for dataset in different]
    assert len(set(keys)) == len(different)
    assert key_of(store.get(tmp_path / "a", data="x"))["source"] == keys[0]
    assert key_of(TensorDataset(tensors.clone()))["source"] == keys[2]
    assert key_of(Subset(TensorDataset(tensors), np.array([1, 2])))["source"] == keys[4]  # type: ignore[arg-type]


def test_a_transform_counts_also_within_a_part_of_a_dataset() -> None:
    plain = key_of(Subset(Numbers(), [1]))
    doubling = key_of(Subset(Numbers(transform=doubled), [1]))
    tripling = key_of(Subset(Numbers(transform=tripled), [1]))
    assert len({key["transform"] for key in (plain, doubling, tripling)}) == 3
    assert {key["source"] for key in (plain, doubling, tripling)} == {plain["source"]}


def test_a_packed_set_is_known_by_its_index(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from fastload.datasets import PackedDataset
    from fastload.datasets.packed.packing import pack

    for name, count in (("a", 6), ("b", 6), ("c", 4)):
        pack(image_tree(tmp_path / f"images-{name}", count), tmp_path / name, mode="encoded")
    keys = []
    for name in "abca":
        packed = PackedDataset(tmp_path / name)
        keys.append(key_of(packed)["source"])
        packed.close()
    assert keys[0] == keys[3]
    assert keys[0] != keys[2]


def test_a_dataset_without_a_fingerprint_asks_for_a_version(tmp_path: Path) -> None:
    class Locked(Numbers):
        def __init__(self) -> None:
            super().__init__(12)
            self.lock = threading.Lock()

    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock'.*Pass version="):
        store.features(tmp_path / "set", dataset=Locked(), model=net())
    given: dict[str, Any] = {"dataset": Locked(), "model": net(), "loader": {"copy_dataset": False}}
    first = store.features(tmp_path / "set", version="1", **given)
    assert store.features(tmp_path / "set", version="1", **given).set_id == first.set_id
    with pytest.raises(FileExistsError, match=r"with other source\. "):
        store.features(tmp_path / "set", version="2", **given)


def test_what_a_model_computes_counts_and_its_mode_does_not() -> None:
    class Scaled(nn.Module):
        def __init__(self, by: float = 1.0, buffer: float = 1.0) -> None:
            super().__init__()
            self.by = by
            self.register_buffer("hidden", torch.tensor([buffer]), persistent=False)

    def key(model: nn.Module) -> tuple[str, ...]:
        found = key_of(Numbers(), model=model)
        return found["weights"], found["model"]

    assert key(Scaled()) == key(Scaled().eval())
    assert key(Scaled()) != key(Scaled(by=2))
    assert key(Scaled()) != key(Scaled(buffer=2))
    assert key(nn.Conv2d(1, 1, 3, padding=1).eval())[1] != key(nn.Conv2d(1, 1, 3))[1]
    assert key_of(Numbers(), model=doubled) != key_of(Numbers(), model=tripled)
    orders = [nn.ReLU, nn.Sigmoid, nn.ReLU], [nn.ReLU, nn.Sigmoid, nn.Sigmoid]
    assert len({key(nn.Sequential(*(kind() for kind in order)))[1] for order in orders}) == 2


LOCK = threading.Lock()


def locked(image: torch.Tensor) -> torch.Tensor:
    with LOCK:
        return image


def test_code_may_name_what_has_no_content() -> None:
    assert key_of(Numbers(transform=locked))["transform"] != key_of(Numbers())["transform"]


# ---- killed, and full ----


def test_a_gap_within_the_parts_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that are there stay, wherever the missing ones lie."""
    out = tmp_path / "set"

    class Stops(Net):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            if bool((images == 99).any()) and os.environ.get("STOP"):
                raise InterruptedError("stopped")
            return super().forward(images)

    monkeypatch.setenv("STOP", "1")
    model = same_weights(Stops)
    given: dict[str, Any] = {"dataset": Numbers(100), "parts": 10, "loader": BATCHES}
    with pytest.raises(InterruptedError):
        store.features(out, model=model, **given)
    monkeypatch.delenv("STOP")
    work = tmp_path / ".unsealed" / "set"
    notes = sorted(work.glob("*.json"))
    assert len(notes) == 9
    for note in notes[2], notes[5]:
        note.unlink()
    kept = {note.with_suffix(".arrow").stat().st_ino for note in notes if note.exists()}
    found = store.features(out, model=model, **given)
    torch.testing.assert_close(values(found), expected(model, 100), rtol=1e-4, atol=1e-3)
    assert kept < {file.stat().st_ino for file in out.glob("*.arrow")}


def test_too_little_room_is_known_after_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    class Counting(Numbers):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return super().__getitem__(index)

    needed = 1000 * (7 * 4 + 8)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, needed - 1))
    given: dict[str, Any] = {
        "dataset": Counting(1000),
        "model": net(),
        "parts": 10,
        "version": "1",
        "loader": {"batch_size": 8, "num_workers": 0},
    }
    with pytest.raises(StoreFullError) as caught:
        store.features(tmp_path / "set", **given)
    assert (caught.value.needed, caught.value.free) == (needed, needed - 1)
    assert len(read) == 8
    monkeypatch.undo()
    assert len(store.features(tmp_path / "set", **given)) == 1000


# ---- what is refused ----


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loader": {"shuffle": True}}, "shuffle cannot be given: rows have the order"),
        ({"loader": {"sampler": [1]}}, "sampler cannot be given"),
        ({"loader": {"drop_last": True}}, "drop_last cannot be given: every sample gets a row"),
        ({"loader": {"on_error": "skip"}}, "would leave rows out"),
        ({"loader": {"batch_size": None}}, "batch_size must be an integer of at least 1, got None"),
        ({"dtype": torch.int64}, "dtype must be a floating dtype of torch"),
        ({"parts": 0}, "parts must be 1 to 103"),
        ({"parts": 104}, "parts must be 1 to 103"),
        ({"dataset": Numbers(0)}, "the dataset has no samples"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_are_checked(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        store.features(tmp_path / "set", **{"dataset": Numbers(), "model": net(), **given})


def test_a_dataset_without_indices_is_refused(tmp_path: Path) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("a sample was read")

    with pytest.raises(TypeError, match="samples by index, got Stream"):
        store.features(tmp_path / "set", dataset=Stream(), model=net())


def test_random_transforms_are_named_and_drawn_once(tmp_path: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    transform = v2.Compose([v2.RandomCrop(2), nn.Identity(), v2.RandomApply([v2.ColorJitter()])])
    dataset = Subset(Numbers(20, transform=transform), range(10))

    def flat(images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)

    with pytest.warns(
        UserWarning, match="transforms ColorJitter, RandomApply, RandomCrop give the same"
    ):
        store.features(tmp_path / "set", dataset=dataset, model=flat)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.features(tmp_path / "set", dataset=dataset, model=flat)


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
    key = [key_of(Numbers(), model=model)["weights"] for model in (first, again, other)]
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
        "less.pt": "does not fit 'resnet18': the file has no 'conv1.weight'",
        "list.pt": "expected a state_dict, found a list",
        "shape.pt": "does not fit 'resnet18': size mismatch for conv1.weight",
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
    with pytest.raises(UsageError, match="'resnet19' is not a classification network"):
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
    assert torch.equal(*(values(store.get(tmp_path / name, data="x")) for name in "ab"))


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


class Rows(torch.utils.data.Dataset[Any]):
    """Row `i` of an array in a file."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return torch.from_numpy(np.load(self.path))[index]


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_that_a_dataset_names_counts(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("rows.npy", np.zeros((6, 3), np.float32))
    store.features(tmp_path / "set", dataset=Rows(kind("rows.npy")), model=nn.Identity())
    np.save("rows.npy", np.ones((6, 3), np.float32))
    os.utime("rows.npy", (1, 1))
    with pytest.raises(FileExistsError):
        store.features(tmp_path / "set", dataset=Rows(kind("rows.npy")), model=nn.Identity())
