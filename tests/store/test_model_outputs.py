"""Promises of `store.features` and `store.predictions`, which are one thing, with and without labels:
- Row `i` is what the model returns for sample `i`, once, in the same bytes on any number of ranks.
- The model's modes, gradients and the random states are unchanged afterwards.
- A set of the same weights, version, names and number of samples is opened, and neither dataset nor model runs. Each
  reuse prints version and date. Otherwise the error names what differs, and both remedies.
- Sets that an earlier fastload wrote are read bit for bit, and made again only with `replace=True`.
- A run that was stopped resumes with the missing parts, on any number of ranks, and gives the same bytes.
- Too little room is an error after the first batch.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from fastload import DataLoader, store
from fastload.errors import StoreFullError
from tests.children import run_python
from tests.contracts.sets import WrittenSet
from tests.files import files

ROOT = Path(__file__).parents[2]
EARLIER = ROOT / "tests" / "data" / "outputs" / "v1"
"""What fastload of 29 November 2026 wrote, before sets of outputs had versions."""
KINDS = {"features": (store.features, "x"), "predictions": (store.predictions, "y")}
of_each_kind = pytest.mark.parametrize("kind", KINDS)
LOADER = {"batch_size": 3, "num_workers": 2}


class Numbers(Dataset[Any]):
    """Sample `i` is (float32[2] of i, i % 5)."""

    fastload_per_worker = ()

    def __init__(self, rows: int = 40, *, scale: float = 1, transform: Any = None) -> None:
        self.rows, self.scale, self.transform = rows, scale, transform

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        assert not os.environ.get("FORBIDDEN"), "a sample was read"
        x = torch.full((2,), float(index)) * self.scale
        return (x if self.transform is None else self.transform(x)), index % 5


class Net(nn.Module):
    """float32[B, 2] -> float32[B, 3] of i + 1, and notes which samples it has got."""

    def __init__(self, fails_at: float = -1, error: type[BaseException] = LookupError) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 3))
        nn.init.constant_(self.body[1].weight, 0.5)  # type: ignore[arg-type]
        nn.init.constant_(self.body[1].bias, 1)  # type: ignore[arg-type]
        self.register_buffer("hidden", torch.zeros(1), persistent=False)
        self.seen: list[int] = []
        self._fails_at, self._error = fails_at, error

    def forward(self, x: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        assert not os.environ.get("FORBIDDEN"), "the model ran"
        if self._fails_at in x[:, 0].tolist():
            raise self._error(f"no answer for {self._fails_at:g}")
        self.seen += [int(value) for value in x[:, 0]]
        answer: Tensor = self.body(x)
        return answer


def expected(rows: int = 40) -> Tensor:
    return torch.arange(rows)[:, None].expand(rows, 3) + 1.0


def values(found: store.SetDataset, column: str) -> Tensor:
    return torch.cat(found.column(column))


def make(kind: str, path: Path, **given: Any) -> store.SetDataset:
    function: Callable[..., store.SetDataset] = KINDS[kind][0]
    if "model" not in given:
        given["model"] = Net()  # which draws random numbers
    return function(path, **{"dataset": Numbers(), "loader": LOADER, **given})


# ---- what is kept ----


@of_each_kind
def test_row_i_is_what_the_model_returns_for_sample_i(kind: str, tmp_path: Path) -> None:
    for parts, workers in (1, 2), (7, 0), (None, 0), (40, 2):
        net = Net()
        path = tmp_path / f"{parts}"
        loader = {"batch_size": 3, "num_workers": workers}
        found = make(kind, path, model=net, parts=parts, loader=loader, made={"by": "a test"})
        column = KINDS[kind][1]
        assert torch.equal(values(found, column), expected())
        assert net.seen == list(range(40))
        sizes = [len(part) for part in found.column(column)]
        assert len(sizes) == (parts or 1)
        assert max(sizes) - min(sizes) <= 1
        assert (found.made["by"], found.made["model"]) == ("a test", "Net")
        assert [name for name, _ in found.schema] == (["x", "y"] if kind == "features" else ["y"])
        with DataLoader(found, batch_size=16, shuffle=True, seed=0) as loop:
            assert (
                sum(len(batch["y"] if isinstance(batch, dict) else batch[1]) for batch in loop)
                == 40
            )


class TestOutputs(WrittenSet):
    """Of features: predictions are written by the same lines."""

    rows = 24

    def write(self, path: Path, *, other: bool = False) -> None:
        loader = {"batch_size": 3, "num_workers": 0}
        dataset = Numbers(self.rows, scale=2 if other else 1)
        store.features(path, dataset=dataset, model=nn.Identity(), parts=4, loader=loader)

    def opened(self, path: Path) -> store.SetDataset:
        return store.get(path, data="x", label="y")

    def sample(self, row: int) -> Any:
        return torch.full((2,), float(row)), torch.tensor(row % 5)


def test_answers_may_be_a_tensor_a_dict_or_a_tuple(tmp_path: Path) -> None:
    data = TensorDataset(torch.arange(10.0)[:, None])

    def several(x: Tensor) -> dict[str, Tensor]:
        return {"logits": x.half(), "best": x[:, 0] > 3}

    found = make("predictions", tmp_path / "one", dataset=data, model=lambda x: x[:, 0].long())
    assert values(found, "y").tolist() == list(range(10))
    found = make("predictions", tmp_path / "several", dataset=data, model=several, parts=3)
    assert values(found, "logits").dtype == torch.float16
    assert values(found, "best").tolist() == [i > 3 for i in range(10)]
    pair: Any = lambda x: (x, -x[:, 0].double())  # noqa: E731
    found = make("predictions", tmp_path / "pair", dataset=data, model=pair)
    assert [name for name, _ in found.schema] == ["y0", "y1"]
    assert values(found, "y1").tolist() == [-i for i in range(10)]


def test_the_model_gets_x_or_the_batch_or_what_inputs_returns(tmp_path: Path) -> None:
    class Dicts(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"a": index, "b": 10 * index}

    def scaled(batch: Any) -> Tensor:
        x, y = batch
        return x[:, 0] * 100 + y

    def same(batch: Any) -> Tensor:
        return batch

    given: Any
    for name, given, answers in (
        (
            "dicts",
            {"dataset": Dicts(4), "model": lambda batch: batch["a"] + batch["b"]},
            [0, 11, 22, 33],
        ),
        ("alone", {"dataset": torch.arange(4), "model": same}, [0, 1, 2, 3]),
        ("x", {"dataset": Numbers(3), "model": same}, [[0, 0], [1, 1], [2, 2]]),
        (
            "in",
            {"dataset": Numbers(7), "model": same, "inputs": scaled},
            [0, 101, 202, 303, 404, 500, 601],
        ),
    ):
        found = make("predictions", tmp_path / name, **given)
        assert values(found, "y").tolist() == answers
    with pytest.raises(FileExistsError, match=r"of predictions made with other inputs\. Choose"):
        make("predictions", tmp_path / "in", dataset=Numbers(7), model=same)


def test_features_have_labels_of_any_kind_classes_and_a_dtype(tmp_path: Path) -> None:
    plain = TensorDataset(torch.arange(6.0)[:, None])

    class Dicts(Numbers):
        classes = ("a", "b", "c", "d", "e")

        def __getitem__(self, index: int) -> Any:
            return {"x": plain[index][0], "cost": index / 2, "name": f"no {index}"}

    def features(name: str, dataset: Any, **given: Any) -> store.SetDataset:
        return make("features", tmp_path / name, dataset=dataset, model=nn.Identity(), **given)

    found = features("alone", [plain[i][0] for i in range(6)])
    assert [float(x) for x in found] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match=r"dicts with the keys \['x', 'cost', 'name'\]. Name"):
        features("dicts", Dicts(6))
    found = features("dicts", Dicts(6), data="x", label="cost")
    assert [(float(x), float(y)) for x, y in found][3] == (3, 1.5)
    found = features("names", Subset(Dicts(6), [1, 5]), data="x", label="name")
    assert [y for _, y in found] == ["no 1", "no 5"]
    assert found.classes == list(Dicts.classes)
    with pytest.raises(TypeError, match="a list of 1 as a batch"):
        features("one", plain)
    for dtype in torch.float16, torch.bfloat16, torch.float64:
        found = features(str(dtype).removeprefix("torch."), Numbers(6), dtype=dtype)
        assert values(found, "x").dtype == dtype
        assert values(found, "x")[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert values(found, "y").dtype == torch.int64
    with pytest.raises(ValueError, match=r"70,000 does not fit into float16"):
        features("large", Numbers(4, scale=70_000), dtype=torch.float16, loader={"batch_size": 2})


NO_ROWS: dict[str, tuple[Any, str]] = {
    "a number": (
        lambda x: x.mean(),
        r"returned float32\[\] for a batch of 3 samples, float32\[3, 2\]",
    ),
    "too few": (lambda x: x[:2], r"returned float32\[2, 2\] for a batch of 3"),
    "few of a dict": (lambda x: {"a": x, "b": x[:2]}, r"returned dict, with float32\[2, 2\]"),
    "text": (lambda x: (x, "text"), r"a tuple of 2, with str for a batch of 3 samples"),
    "lists": (lambda x: x.tolist(), r"a list of 3, with a list of 2 for a batch of 3"),
    "dtype": (
        lambda x: x.double() if x[0, 0] > 4 else x,
        r"y float64\[2\], but y float32\[2\] for an earlier",
    ),
    "shape": (lambda x: x[:, :1] if x[0, 0] > 4 else x, r"y float32\[1\], but y float32\[2\]"),
    "columns": (
        lambda x: {"a" if x[0, 0] < 4 else "b": x},
        r"b float32\[2\], but a float32\[2\] for an earlier",
    ),
    "complex": (lambda x: x + 0j, r"column 'y'"),
}


def test_what_are_no_rows_is_named(tmp_path: Path) -> None:
    for model, message in NO_ROWS.values():
        with pytest.raises(TypeError, match=message):
            make("predictions", tmp_path / "set", model=model)
        assert not (tmp_path / "set").exists()
    with pytest.raises(TypeError, match="returned a tuple of 2 for a batch of 3"):
        make("features", tmp_path / "set", model=lambda x: (x, x))


def test_modes_gradients_and_random_states_are_those_of_before(tmp_path: Path) -> None:
    for model in Net(), Net(fails_at=20):
        model.train()
        model.body[0].eval()
        before = [module.training for module in model.modules()]
        state = torch.get_rng_state()
        try:
            make("features", tmp_path / "set", model=model)
        except LookupError:
            assert not (tmp_path / "set").exists()
        shutil.rmtree(tmp_path / "set", ignore_errors=True)
        assert [module.training for module in model.modules()] == before
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        assert all(parameter.requires_grad for parameter in model.parameters())


# ---- the second time ----


@of_each_kind
def test_the_second_call_runs_nothing_and_prints_version_and_date(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = make(kind, tmp_path / "set", version="spring")
    make(kind, tmp_path / "none")
    assert "reuses" not in capsys.readouterr().err
    for name in "set", "none":
        os.utime(tmp_path / name / "index.json", (0, 0))
    monkeypatch.setenv("FORBIDDEN", "1")
    monkeypatch.setenv("TZ", "UTC")
    model = Net()
    model.train()  # the mode is no part of the key, nor are these:
    how: dict[str, Any] = {
        "loader": {"batch_size": 9, "num_workers": 1},
        "parts": 3,
        "device": "cpu",
    }
    again = make(kind, tmp_path / "set", version="spring", model=model, **how)
    assert again.set_id == first.set_id
    said = (
        rf"^{tmp_path}/set: reuses {kind} of (1970-01-01|1969-12-31) \d\d:\d\d, version 'spring'\n$"
    )
    assert re.match(said, capsys.readouterr().err)
    make(kind, tmp_path / "none")
    assert "no version. Name one, and change it whenever" in capsys.readouterr().err


def test_another_process_finds_the_same_key(tmp_path: Path) -> None:
    command = ["-c", SAME_IN_EACH_PROCESS, tmp_path / "set"]
    first = run_python(*command, cwd=ROOT, check=True).stdout
    environment = {**os.environ, "FORBIDDEN": "1"}
    again = run_python(*command, cwd=ROOT, check=True, env=environment).stdout
    assert first == again != ""


SAME_IN_EACH_PROCESS = """
import sys
from pathlib import Path
from tests.store.test_model_outputs import make
print(make("features", Path(sys.argv[1])).made)
"""


def changed(parameter: bool) -> Net:
    net = Net()
    with torch.no_grad():
        (net.body[1].bias if parameter else net.hidden)[0] += 1e-6  # type: ignore[operator,index]
    return net


class Other(Net):
    pass


class OtherNumbers(Numbers):
    pass


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a weight": ({"model": changed(parameter=True)}, "weights. "),
    "a buffer": ({"model": changed(parameter=False)}, "weights. "),
    "a class": ({"model": Other()}, "model. "),
    "a function": ({"model": torch.relu}, "weights and other model. "),
    "rows": ({"dataset": Numbers(39)}, "rows. "),
    "a dataset": ({"dataset": OtherNumbers()}, "dataset. "),
    "seed": ({"loader": {"seed": 1}}, "seed. "),
    "what made says": ({"made": {"size": 9}}, "size. "),
    "version": ({"version": "2"}, "version: it has version '1', not '2'. "),
    "dtype": ({"dtype": torch.float64}, "dtype. "),
}


def test_the_error_names_what_differs_and_both_remedies(tmp_path: Path) -> None:
    path = tmp_path / "set"
    given: dict[str, Any] = {"version": "1", "parts": 2, "made": {"size": 8}}
    first = make("features", path, **given)
    before = values(first, "x").clone()
    for change, named in CHANGES.values():
        with pytest.raises(FileExistsError) as caught:
            make("features", path, **given | change)
        assert f"features made with other {named}Choose another name, or pass replace=True" in str(
            caught.value
        )
    with pytest.raises(FileExistsError, match=r"which predictions\(\) did not make"):
        make("predictions", path)
    with pytest.raises(TypeError, match="not JSON serializable"):
        make("predictions", tmp_path / "other", made={"size": tmp_path})
    new = make("features", path, **given | change, replace=True)
    assert values(new, "x").dtype == torch.float64
    assert torch.equal(values(first, "x"), before)  # which are mapped, and stay so


def test_a_dataset_that_knows_its_content_is_known_by_that(tmp_path: Path) -> None:
    for name, first in ("a", 0), ("b", 1):
        store.put({"x": torch.arange(first, first + 9.0)[:, None]}, tmp_path / name, checksums=True)
    a, b = (store.get(tmp_path / name, data="x") for name in "ab")
    hugging, face = Numbers(5), Numbers(5)
    hugging._fingerprint, face._fingerprint = "1", "2"  # type: ignore[attr-defined]
    kinds: list[tuple[Any, Any]] = [
        (a, b),
        (Subset(a, range(5)), Subset(b, range(5))),
        (Subset(a, range(5)), Subset(a, range(1, 6))),
        (Subset(Numbers(), [1, 2]), Subset(OtherNumbers(), [1, 2])),
        (hugging, face),
    ]
    for number, (first, second) in enumerate(kinds):
        given: Any = {"model": nn.Identity(), "loader": {"num_workers": 0}}
        found = make("predictions", tmp_path / f"{number}", dataset=first, **given)
        again = make("predictions", tmp_path / f"{number}", dataset=first, **given)
        assert again.set_id == found.set_id
        with pytest.raises(FileExistsError, match="made with other source. Choose"):
            make("predictions", tmp_path / f"{number}", dataset=second, **given)


# ---- what an earlier fastload wrote ----


def of_earlier() -> dict[str, Any]:
    net = nn.Linear(2, 2)
    nn.init.constant_(net.weight, 0.5)
    nn.init.constant_(net.bias, 1)
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6) % 3)
    return {
        "dataset": data,
        "model": net,
        "parts": 3,
        "loader": {"batch_size": 2, "num_workers": 0},
    }


@of_each_kind
def test_a_set_of_an_earlier_fastload_is_read_and_not_reused(kind: str, tmp_path: Path) -> None:
    path = shutil.copytree(EARLIER / kind, tmp_path / "set")
    column = KINDS[kind][1]
    answers = torch.tensor([[k * 2 + 1.5] * 2 for k in range(6)])
    assert torch.equal(values(store.get(path), column), answers)
    for version in "", "1":
        with pytest.raises(
            FileExistsError, match="a set of this name exists, of .* made with other"
        ):
            make(kind, path, **of_earlier(), version=version)
    assert files(path) == files(EARLIER / kind)
    assert torch.equal(values(make(kind, path, **of_earlier(), replace=True), column), answers)


# ---- stopped, and full ----


def test_a_gap_within_the_parts_is_filled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts that are there stay, wherever the missing ones lie."""
    out, work = tmp_path / "set", tmp_path / ".unsealed" / "set"
    given: dict[str, Any] = {"parts": 10, "version": "1", "loader": LOADER}
    with pytest.raises(LookupError):
        make("features", out, model=Net(fails_at=39), **given)
    notes = sorted(work.glob("*.json"))
    assert len(notes) == 9
    for note in notes[2], notes[5]:
        note.unlink()
    kept = {note.with_suffix(".arrow").stat().st_ino for note in notes if note.exists()}
    found = make("features", out, **given)
    assert torch.equal(values(found, "x"), expected())
    assert kept < {file.stat().st_ino for file in out.glob("*.arrow")}
    assert re.search(r"set: reuses 7 of 10 parts of \d{4}-.*, version '1'", capsys.readouterr().err)
    make("features", tmp_path / "whole", **given)
    assert files(out) == files(tmp_path / "whole")


def test_too_little_room_is_known_after_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 1000 * (3 * 4 + 8)
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, needed - 1))
    net = Net()
    given: dict[str, Any] = {
        "dataset": Numbers(1000),
        "parts": 10,
        "loader": {**LOADER, "num_workers": 0},
    }
    with pytest.raises(StoreFullError) as caught:
        make("features", tmp_path / "set", model=net, **given)
    assert (caught.value.needed, caught.value.free) == (needed, needed - 1)
    assert net.seen == [0, 1, 2]
    monkeypatch.undo()
    assert len(make("features", tmp_path / "set", **given)) == 1000


# ---- what is refused ----

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loader": {"shuffle": True}}, "shuffle cannot be given: rows have the order"),
    ({"loader": {"sampler": [1]}}, "sampler cannot be given"),
    ({"loader": {"drop_last": True}}, "drop_last cannot be given: every sample gets a row"),
    ({"loader": {"on_error": "skip"}}, "would leave rows out"),
    ({"loader": {"batch_size": None}}, "batch_size must be an integer of at least 1, got None"),
    ({"dtype": torch.int64}, "dtype must be a floating dtype of torch"),
    ({"parts": 0}, "parts must be 1 to 40"),
    ({"parts": 41}, "parts must be 1 to 40"),
    ({"dataset": Numbers(0)}, "the dataset has no samples"),
]


def test_arguments_are_checked(tmp_path: Path) -> None:
    for given, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            make("features", tmp_path / "set", **given)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("a sample was read")

    with pytest.raises(TypeError, match="samples by index, got Stream"):
        make("features", tmp_path / "set", dataset=Stream())


def test_random_transforms_are_named_and_drawn_once(tmp_path: Path) -> None:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    transform = v2.Compose([nn.Identity(), v2.RandomApply([v2.ColorJitter()], p=0)])
    given = {"dataset": Subset(Numbers(20, transform=transform), range(10))}
    with pytest.warns(UserWarning, match="transforms ColorJitter, RandomApply give the same"):
        make("features", tmp_path / "set", **given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("features", tmp_path / "set", **given)
