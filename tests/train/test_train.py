"""Promises:
- The tutorial's two scripts print its lines and take exactly N steps.
- The printed rates are those of a stopwatch within 2 %, between lines and outside the process. One run has one share
  of waiting.
- Loading beside a simulated step takes as long as the longer of the two, within 5 %. The report names the longer one.
- Serial loading, threads and processes train the same parameters, bit for bit.
- SIGTERM or Ctrl-C to one rank ends all ranks after the same step, with a checkpoint. The exit code is 128 + signal.
- A signal that comes twice changes nothing. Ctrl-C more than 2 s later ends at once.
- A SIGINT that is ignored stays ignored. SIGTERM always saves.
- The folder of a run names workers and ranks, and `stats.csv` names the folder.
- Each rank has a device of its own, by one rule. See also `tests/distributed/test_cores.py`.
- A run writes its profile and scalars into a folder of its own. A profile that cannot be completed is refused first.
"""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

pytest.importorskip("PIL")

import fastload
from fastload.cli import main
from fastload.distributed import Control, Rank, device_of
from fastload.errors import RankError, UsageError
from fastload.telemetry.snapshot import percent, waited_share
from fastload.train.checkpoint import NAME, Checkpoint
from fastload.train.control import Stopping
from fastload.train.devices import choose_device
from fastload.train.learner import Learner, open_learner
from fastload.train.loop import Trained, begin, fit, train
from fastload.train.models import ModelError, TinyConvNet, build_model
from fastload.train.recipe import Recipe, TrainError
from fastload.train.stats_file import StatsFileError, append_row
from fastload.train.summary import gather
from fastload.train.tensorboard import Recording
from tests.children import Python
from tests.fakes import SlowDataset
from tests.image_files import listed_images

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from starting import ROOT, ranks_started

ALONE = Rank(rank=0, world_size=1, local_rank=0, local_size=1, launcher="none")
FILES = 24


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small JPEGs of three classes, and `list.txt`, whose paths are relative to it."""
    return listed_images(tmp_path_factory.mktemp("images"), FILES, classes=3).parent


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def recipe(images: Path, logdir: Path, **options: Any) -> Recipe:
    small: dict[str, Any] = {"batch_size": 4, "image_size": 16, "device": "cpu", "loader": "thread"}
    return Recipe(file_list=images / "list.txt", logdir=logdir, **{**small, **options})


def run(images: Path, logdir: Path, **options: Any) -> tuple[Trained, list[str]]:
    said: list[str] = []
    return train(recipe(images, logdir, **options), say=said.append), said


def entry(said: list[str], name: str) -> str:
    """What the summary says under a name."""
    (line,) = [line for line in said if line.startswith(f"{name} ") or line.startswith(f"{name}:")]
    return line.removeprefix(name).strip(": ")


def stats_rows(logdir: Path) -> list[dict[str, str]]:
    with (logdir / "stats.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# ---- the two scripts ----

RATE = r"step_img_rate: \d+\.\d\d"
AVERAGE = r"Average image rate: mean: \d+\.\d\d, stddev: \d+\.\d\d"
LINES = {
    "serial": ["Batch size: 4", *[RATE] * 4, AVERAGE, r"All Done; total runtime: \d+\.\d\d"],
    "parallel": [
        "Batch size: 4",
        "num workers: 2",
        "Starting data loader",
        *[RATE] * 4,
        AVERAGE,
        "Stopping data loader",
        r"All Done: \d+\.\d\d",
    ],
}


@pytest.mark.parametrize("script", ["serial", "parallel"])
def test_a_script_prints_the_tutorials_lines_and_trains_20_steps_at_the_rate_of_a_stopwatch(
    script: str, images: Path, tmp_path: Path
) -> None:
    command = [str(ROOT / "benchmarks" / f"imagenet_{script}.py")]
    command += ["-b", "4", "-s", "20", "--status-print-interval", "5", "--step-ms", "100"]
    command += ["--base-dir", str(images), "--file-list-path", "list.txt", "--image-size", "16"]
    command += ["--logdir", str(tmp_path), "--device", "cpu"]
    if script == "parallel":
        command += ["-w", "2", "--cache-size", "3"]

    def stopped() -> tuple[list[str], float]:
        """The lines of a run, and its rate by when they came."""
        printed: list[tuple[float, str]] = []
        environ = {"PYTHONPATH": str(ROOT)}
        with Python(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                printed.append((time.perf_counter(), line.rstrip("\n")))
        assert process.returncode == 0
        windows = [at for at, line in printed if line.startswith("step_img_rate")]
        return [line for _, line in printed], 15 * 4 / (windows[3] - windows[0])

    for attempt in range(
        4
    ):  # this process may be late to look at its stopwatch, where cores are few
        said, stopwatch = stopped()
        rate = float(entry(said, "image rate").split()[0])
        if rate == pytest.approx(stopwatch, rel=0.02):
            break
        (tmp_path / "stats.csv").rename(tmp_path / f"{attempt}.csv")
    else:
        pytest.fail(f"the rate is {rate}, by the stopwatch {stopwatch:.2f}")
    tutorials = "|".join(dict.fromkeys(LINES["serial"] + LINES["parallel"]))
    assert len([line for line in said if re.fullmatch(tutorials, line)]) == len(LINES[script])
    for line, form in zip(
        [line for line in said if re.fullmatch(tutorials, line)], LINES[script], strict=True
    ):
        assert re.fullmatch(form, line)
    assert entry(said, "samples") == f"80 trained on, {FILES} of them different"
    assert "simulated" in entry(said, "step ms")

    (row,) = stats_rows(tmp_path)
    assert list(row)[:3] == ["world_size", "training_s", "communication_s"]
    assert "testing_s" not in row, "nothing is tested"
    assert float(row["rate_global"]) == pytest.approx(rate, abs=0.01)
    assert (row["last_step"], row["samples"], row["simulated_step_ms"]) == ("20", "80", "100.0")


def test_each_printed_rate_is_that_of_a_stopwatch_between_the_lines(
    images: Path, tmp_path: Path
) -> None:
    options = {"steps": 16, "status_print_interval": 4, "step_ms": 50}
    for _ in range(4):  # on busy cores `say` may be called late
        heard: list[tuple[float, float]] = []

        def say(line: str, heard: list[tuple[float, float]] = heard) -> None:
            if line.startswith("step_img_rate: "):
                heard.append((time.perf_counter(), float(line.split()[1])))

        train(recipe(images, tmp_path, **options), say=say)
        assert len(heard) == 4
        rates = [rate for _, rate in heard[1:]]
        by_the_stopwatch = [4 * 4 / (at - before) for (before, _), (at, _) in pairwise(heard)]
        if rates == pytest.approx(by_the_stopwatch, rel=0.02):
            break
    else:
        pytest.fail(f"the rates are {rates}, by the stopwatch {by_the_stopwatch}")


@pytest.mark.parametrize(("share", "column"), [(0.375, "0.375"), (None, "")])
def test_what_is_not_known_is_no_figure(
    share: float | None,
    column: str,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastload.train.data.cached_share", lambda _: share)
    _, said = run(images, tmp_path, steps=3, status_print_interval=1)
    assert entry(said, "page cache").startswith("38% of" if share else "n/a of")
    assert any(line.startswith("Average image rate: n/a") for line in said)
    assert entry(said, "image rate").startswith("n/a")
    (row,) = stats_rows(tmp_path)
    assert (row["cached_share"], row["rate_global"], row["folder"]) == (column, "", "")


@pytest.mark.parametrize(
    ("options", "last_step", "samples"),
    [
        ({"epochs": 2, "batch_size": 7}, 8, f"{2 * FILES} trained on, {FILES} of them different"),
        ({"steps": 8, "loader": "torch"}, 8, f"32 trained on, {FILES} of them different"),
    ],
    ids=["whole epochs", "torch's workers"],
)
def test_samples_are_counted(
    options: dict[str, Any], last_step: int, samples: str, images: Path, tmp_path: Path
) -> None:
    """Of whole epochs, the last batches are shorter."""
    trained, said = run(images, tmp_path, **options)
    assert trained.last_step == last_step
    assert entry(said, "samples") == samples
    assert entry(said, "loader").startswith(options.get("loader", "thread"))


def test_workers_are_chosen_by_default_as_the_loader_chooses_them(
    images: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    train(Recipe(file_list=images / "list.txt", steps=2, logdir=tmp_path), say=said.append)
    assert entry(said, "loader").startswith("auto, 1 worker")


def test_number_and_kind_of_workers_change_nothing_that_is_learned(
    images: Path, tmp_path: Path
) -> None:
    found = []
    for loader, workers in (("thread", 0), ("thread", 3), ("process", 2)):
        options = {"workers": workers, "steps": 9, "transform": "rrc", "image_size": 8}
        place = tmp_path / f"{loader}{workers}"
        _, said = run(images, tmp_path, checkpoint=place, loader=loader, **options)
        found.append(Checkpoint.load(place))
    assert entry(said, "loader") == "process, 2 workers per rank, at most 2 batches in flight"
    serial, *parallel = (saved for saved in found if saved is not None)
    assert len(parallel) == 2
    for saved in parallel:
        assert saved.step == serial.step == 9
        for name, value in serial.model.items():
            assert torch.equal(value, saved.model[name])


def test_a_packed_set_is_trained_on(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    arguments = [
        "set",
        "pack",
        str(images / "list.txt"),
        str(tmp_path / "packed"),
        "--max-size",
        "16",
    ]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    arguments = ["train", "--packed", str(tmp_path / "packed"), "-b", "8", "-s", "3"]
    arguments += ["--logdir", str(tmp_path), "--image-size", "8", "--device", "cpu"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert entry(result.output.splitlines(), "samples") == "24 trained on, 24 of them different"


# ---- overlap ----


class Slow(SlowDataset):
    """Samples that take a while to read, as those of images."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), 0, super().__getitem__(index)


@pytest.mark.parametrize(
    ("read_s", "step_ms", "bound"),
    [
        pytest.param(0.4, 80.0, "Waiting in storage", marks=pytest.mark.slow),
        (0.08, 400.0, "step bounds"),
    ],
)
def test_loading_and_stepping_take_as_long_as_the_longer_of_them_which_is_named(
    read_s: float, step_ms: float, bound: str, tmp_path: Path
) -> None:
    steps, batch_size, workers = 10, 4, 4
    model = nn.Linear(1, 2)
    learner = Learner(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        forward=model,
        loss=nn.CrossEntropyLoss(),
        prepare=lambda images: images,
        device=torch.device("cpu"),
        about={},
    )
    plan = Recipe(
        file_list=tmp_path, steps=steps, batch_size=batch_size, step_ms=step_ms, logdir=tmp_path
    )
    expected_s = steps * max(read_s * batch_size / workers, step_ms / 1000)
    for _ in range(8):  # other processes on the machine can only make it slower
        sampler = fastload.RankSampler(steps * batch_size, rank=0, world_size=1)
        with fastload.DataLoader(
            Slow(steps * batch_size, seconds=read_s),
            batch_size,
            sampler=sampler,
            num_workers=workers,
        ) as loader:
            source, first = begin(plan, loader, learner, Control(ALONE))
            trained = fit(plan, source, learner, Control(ALONE), first=first, say=lambda _: None)
        took_s = trained.measured.training_s
        assert took_s > expected_s * 0.999
        if took_s < expected_s * 1.05:
            break
    else:
        pytest.fail(f"took {took_s:.2f} s, expected {expected_s:.2f} s")
    assert bound in str(trained.measured.stats)


# ---- what is said of the run ----


def test_the_verdict_is_of_all_epochs_without_the_warm_up(images: Path, tmp_path: Path) -> None:
    """Six steps an epoch: of the first one is counted, and of the last, which is cut off, two."""
    trained, said = run(images, tmp_path, steps=6 + 6 + 2, workers=2)
    assert trained.measured.stats is not None
    assert trained.measured.stats.batches == 1 + 6 + 2
    assert trained.measured.stats.samples == 4 * (1 + 6 + 2)
    assert trained.measured.stats.stages["collate"].count <= 1 + 6 + 6
    assert said[-3].startswith("Rank 0: ")


def test_one_run_has_one_share_of_waiting(images: Path, tmp_path: Path) -> None:
    """The loop's own timer counts the work of `next()` too, and said "1 %" where the verdict said "0 %"."""
    trained, said = run(images, tmp_path, steps=8, workers=1)
    measured = trained.measured
    assert measured.stats is not None
    share = waited_share(measured.stats)
    assert (
        entry(said, "loop waited")
        == f"{percent(share)} of the time waiting for the loader, on rank 0"
    )
    measured.wait[:] = array("d", [measured.steady_s * (share + 1) / 2])
    assert gather(trained, Control(ALONE)).wait_shares == [share]
    measured.stats = None
    assert gather(trained, Control(ALONE)).wait_shares == [measured.wait_share]


# ---- stopping ----


@contextmanager
def handlers_kept() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("second", [0, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_training_after_the_step_with_a_checkpoint(
    second: int, images: Path, tmp_path: Path
) -> None:
    """Slurm sends SIGTERM twice at a time limit, and one Ctrl-C may reach a rank twice."""

    def on_step(step: int, _: torch.Tensor) -> None:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
            if second:
                signal.raise_signal(second)

    said: list[str] = []
    with handlers_kept():
        trained = train(
            recipe(images, tmp_path, checkpoint=tmp_path / "c"), say=said.append, on_step=on_step
        )
    assert (trained.stopped_by, trained.last_step) == (signal.SIGTERM, 3)
    assert "Stopped by SIGTERM after step 3 of 20" in said
    found = Checkpoint.load(tmp_path / "c")
    assert found is not None
    assert found.step == 3
    assert stats_rows(tmp_path)[0]["ended"] == "SIGTERM"


def test_a_later_ctrl_c_ends_the_training_at_once_and_a_later_sigterm_does_not(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastload._kit.guard.TOGETHER_S", -1.0)

    def twice(number: int) -> Callable[[int, torch.Tensor], None]:
        def on_step(step: int, _: torch.Tensor) -> None:
            signal.raise_signal(number)
            signal.raise_signal(number)

        return on_step

    for name, number in (("a", signal.SIGINT), ("b", signal.SIGTERM)):
        plan = recipe(images, tmp_path, checkpoint=tmp_path / name)
        ends: Any = pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext()
        with handlers_kept(), ends:
            train(plan, say=lambda _: None, on_step=twice(number))
        assert (Checkpoint.load(tmp_path / name) is None) == (number == signal.SIGINT)


def test_a_signal_that_comes_again_while_the_results_are_written_changes_nothing(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Recording.step

    def signalled(function: Callable[..., None], *given: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        function(*given)

    monkeypatch.setattr(Recording, "step", lambda self: signalled(step, self))
    monkeypatch.setattr(
        "fastload.train.loop.append_row", lambda *given: signalled(append_row, *given)
    )
    arguments = ["train", "--file-list-path", str(images / "list.txt"), "--device", "cpu"]
    arguments += ["--image-size", "8", "-b", "2", "-s", "9", "--logdir", str(tmp_path)]
    with handlers_kept():
        result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 143, result.output
    assert result.output.splitlines()[-1].startswith("All Done: ")
    assert stats_rows(tmp_path)[0]["ended"] == "SIGTERM"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_sigint_that_is_ignored_stays_ignored_and_sigterm_stops_all_the_same(
    number: signal.Signals, before: signal.Handlers
) -> None:
    """As in a job that a shell started in the background; SIGTERM, as a job script may ignore it."""
    kept = {each: signal.signal(each, before) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Stopping(Control(ALONE)) as stopping:
            signal.raise_signal(number)
            asked = stopping.asked()
        assert [signal.getsignal(each) for each in kept] == [before, before]
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
    ignored = number == signal.SIGINT and before is signal.SIG_IGN
    assert asked == (0 if ignored else number)


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_ends_both_behind_the_same_step(
    images: Path, tmp_path: Path
) -> None:
    arguments = ["-m", "fastload", "train", "--file-list-path", str(images / "list.txt")]
    arguments += ["-b", "2", "-s", "100000", "--status-print-interval", "10", "--step-ms", "5"]
    arguments += ["--image-size", "8", "--device", "cpu", "--logdir", str(tmp_path)]
    arguments += ["--checkpoint", str(tmp_path / "checkpoint"), "--every", "1000000"]
    said = []
    with ranks_started(2, arguments) as (first, second):
        assert first.stdout is not None
        for line in first.stdout:
            said.append(line.rstrip("\n"))
            if line.startswith("step_img_rate"):
                break
        second.send_signal(signal.SIGTERM)
        said += first.communicate(timeout=60)[0].splitlines()
        other = second.communicate(timeout=60)[0]
    assert (first.returncode, second.returncode) == (143, 143), [*said, other]
    assert other == "", "only rank 0 speaks"
    (stop,) = [line for line in said if line.startswith("Stopped by SIGTERM after step")]
    found = Checkpoint.load(tmp_path / "checkpoint")
    assert found is not None
    assert int(stop.split()[5]) == found.step
    samples = int(entry(said, "samples").split()[0].replace(",", ""))
    assert samples == 2 * 2 * found.step, "the ranks took equally many steps"
    one, two = re.findall(r"(\d+\.\d+)", entry(said, "image rate"))[1:]
    both = float(entry(said, "image rate").split()[0])
    assert both == pytest.approx(float(one) + float(two), abs=0.02)
    (row,) = stats_rows(tmp_path)
    assert (row["world_size"], row["ended"]) == ("2", "SIGTERM")
    assert 0 < float(row["communication_s"]) < float(row["training_s"])


# ---- what is asked for and cannot be ----


def test_the_command_ends_in_one_line_where_a_file_is_missing(images: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("class0/none.jpg\n")
    arguments = ["train", "--file-list-path", str(tmp_path / "list.txt"), "--device", "cpu"]
    result = CliRunner().invoke(main, [*arguments, "--logdir", str(tmp_path)])
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("Error: ")
    assert "none.jpg: No such file" in result.output


@pytest.mark.parametrize(
    ("logdir", "said"),
    [
        ("a file/logs", r"stats\.csv: Not a directory\. .*--logdir"),
        ("a folder", r"stats\.csv: Is a directory\. .*--logdir"),
        ("", r"stats\.csv.*Move the file away"),
    ],
)
def test_where_no_row_can_be_written_nothing_is_trained(
    logdir: str, said: str, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "stats.csv").write_text("4,1.5,0.2,0.1\n")
    (tmp_path / "a file").touch()
    (tmp_path / "a folder" / "stats.csv").mkdir(parents=True)

    def on_step(step: int, _: torch.Tensor) -> None:
        pytest.fail("it trained")

    with pytest.raises(StatsFileError, match=said):
        train(recipe(images, tmp_path / logdir), say=lambda _: None, on_step=on_step)


def test_devices_that_are_not_there_are_named(images: Path, tmp_path: Path) -> None:
    for name in ("nonsense", "mps", "cpu:7"):
        with pytest.raises(UsageError, match=f"--device {name}"):
            open_learner(recipe(images, tmp_path, device=name), ALONE, classes=3)
    with pytest.raises(TrainError, match="--file-list-path or --packed"):
        recipe(images, tmp_path, packed=tmp_path)
    with pytest.raises(TrainError, match="--loader torch cannot resume"):
        recipe(images, tmp_path, loader="torch", checkpoint=tmp_path)
    with pytest.raises(TrainError, match="--classes 2 is too small: the dataset has 3"):
        open_learner(recipe(images, tmp_path, classes=2), ALONE, classes=3)


def test_ranks_have_a_device_each_by_one_rule(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: 1,
        "set_device_index": lambda index: None,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    second = Rank(rank=1, world_size=2, local_rank=1, local_size=2, launcher="openmpi")
    for name in ("auto", "cuda"):
        with pytest.raises(RankError, match="Local rank 1 of 2 has no device") as refused:
            choose_device(name, second)
        with pytest.raises(RankError) as refused_too:
            device_of(second, 1)
        assert str(refused.value) == str(refused_too.value)
    with pytest.raises(
        UsageError, match="--device cuda:1 does not exist: torch finds 1 cuda device"
    ):
        choose_device("cuda:1", ALONE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-of-this-rank")
    assert choose_device("auto", second) == torch.device("cuda:0")
    assert device_of(second, 1) == 0


def test_the_resnet_is_the_tutorials() -> None:
    pytest.importorskip("torchvision")
    model = build_model("resnet50", classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_weights_come_from_a_file_that_fits(tmp_path: Path) -> None:
    model = TinyConvNet(5)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    loaded = build_model("tiny", classes=5, weights=tmp_path / "weights.pt").state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, loaded[name])
    for side in (1, 64):
        assert model(torch.zeros(2, 3, side, side + 5)).shape == (2, 5)
    with pytest.raises(
        ModelError, match=r"weights\.pt: head\.weight: the file has \(5, 16\).*has \(6, 16\)"
    ):
        build_model("tiny", classes=6, weights=tmp_path / "weights.pt")
    (tmp_path / "torn.pt").write_bytes(b"no weights")
    with pytest.raises(ModelError, match=r"torn\.pt is not a file of weights"):
        build_model("tiny", classes=5, weights=tmp_path / "torn.pt")
    with pytest.raises(ModelError, match="model 'resnet5' is unknown"):
        build_model("resnet5", classes=5)


# ---- what is recorded ----


def test_a_run_goes_on_from_its_checkpoint_until_nothing_is_left(
    images: Path, tmp_path: Path
) -> None:
    options = {"checkpoint": tmp_path / "c", "resume": True}
    run(images, tmp_path, steps=2, **options)
    assert (tmp_path / "c" / NAME).exists()
    with pytest.raises(TrainError, match=r"has 15\. Give --nsteps 18 or more"):
        run(images, tmp_path, steps=17, profile=True, **options)
    trained, said = run(images, tmp_path, steps=5, **options)
    assert (trained.first_step, trained.last_step) == (2, 5)
    assert entry(said, "steps").startswith("2 to 5 of 5;")
    assert entry(said, "samples") == "12 trained on, 12 of them different"
    _, said = run(images, tmp_path, steps=5, **options)
    assert "No step was left. To continue, give more --epochs or --nsteps" in said
    assert not any("epoch -1" in line for line in said)


def test_a_profile_and_scalars_lie_in_a_folder_of_the_run(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(TrainError, match=r"--profile needs 16 steps.* 15\. Give --nsteps 16 or"):
        run(images, tmp_path, steps=15, profile=True)
    assert list(tmp_path.iterdir()) == [], "it is refused before there is a folder"
    _, said = run(images, tmp_path, steps=16, profile=True, scalars=True, loader="auto")
    folder = Path(entry(said, "Folder of this run"))
    assert folder.parent == tmp_path
    assert re.fullmatch(r"\d{4}(-\d\d){5}-workers1-ranks1", folder.name)
    assert stats_rows(tmp_path)[0]["folder"] == folder.name
    assert len(list(folder.glob("*.pt.trace.json.gz"))) == 2, "one for the memory view"
    assert any(line.startswith("Profile of steps 7 to 16") for line in said)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    printed = [float(line.split()[1]) for line in said if line.startswith("step_img_rate")]
    rates = [event.value for event in events.Scalars("rank0/images_per_s")]
    assert rates == pytest.approx(printed, abs=0.01)
    assert [event.step for event in events.Scalars("train/loss")] == [5, 10, 15]
    assert {"loader/wait_share", "stage_s/read", "stage_s/decode"} <= set(events.Tags()["scalars"])
