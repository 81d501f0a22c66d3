"""Promises:
- A training under Accelerate, the Hugging Face Trainer or Lightning changes from torch's loader to fastload's by its
  imports. It learns as well, from as many batches, and fastload's workers read each sample once an epoch.
- Each of these trainings then says what bounds it.
- The example of the Trainer, killed in the middle of an epoch, ends as if it had not been, and reads nothing twice.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("datasets")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from fastload.datasets.synthetic import generate_digits
from tests.children import ROOT
from tests.promises.framework_example_runs import Read, Run, as_before, run_example

pytestmark = pytest.mark.filterwarnings("ignore")  # what the frameworks warn of
EXAMPLES = {
    "accelerate_digits.py": {
        "from torch.utils.data import DataLoader",
        "from accelerate import Accelerator",
    },
    "trainer_digits.py": {"from transformers import Trainer"},
    "lightning_digits.py": {"from torch.utils.data import DataLoader"},
}
TRAINED, BATCH = 2000, 32  # 62 batches and a half in an epoch
STEPS = -(-TRAINED // BATCH)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("digits")
    generate_digits(folder, train=TRAINED, test=300)
    return str(folder)


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "")  # which Lightning sets
    monkeypatch.setenv("FASTLOAD_WORKER_METHOD", "auto")  # as in a program of the user's


@pytest.mark.parametrize("name", EXAMPLES)
def test_imports_and_a_new_line_are_all_that_changed(name: str) -> None:
    now = (ROOT / "examples" / name).read_text()
    before = as_before(now)
    gone = set(now.splitlines()) - set(before.splitlines())
    came = set(before.splitlines()) - set(now.splitlines())
    assert came == EXAMPLES[name]
    assert len(gone) == len(came) + 1
    assert "fastload" not in before.split('"""')[2], "but in its docstring"


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_training_learns_with_either_loader(name: str, digits: str) -> None:
    arguments = [digits, "now"] if name.startswith("trainer") else [digits]
    before = run_example(name, [*arguments[:1], *("before" for _ in arguments[1:])], before=True)
    now = run_example(name, arguments)
    for found in (before, now):
        assert accuracy(found) > 0.4, "chance is 0.1"
        assert found.steps == 2 * STEPS
        times = Counter(read.image for read in found.reads)
        assert len(times) == TRAINED
        more = [n for n in times.values() if n != 2]  # than once in each of two epochs
        # The default may try the code on the first batch.
        assert all(2 < n <= 10 for n in more)
        assert len(more) <= (0 if found is before else BATCH)
    assert {read.thread for read in before.reads} == {"MainThread"}
    are_ours(now.reads)
    assert before.findings == []
    says_what_bounds(now)


@pytest.mark.slow
def test_a_killed_training_goes_on_in_the_middle_of_its_epoch(digits: str) -> None:
    """The example writes a checkpoint every 100 steps, which is batch 37 of the second epoch."""
    whole = run_example("trainer_digits.py", [digits, "whole"])
    killed = run_example("trainer_digits.py", [digits, "killed"], killed_after=110)
    rest = run_example("trainer_digits.py", [digits, "killed"])
    assert (killed.steps, rest.steps) == (110, 2 * STEPS - 100)
    assert (
        len({read.image for read in rest.reads})
        == len(rest.reads)
        == TRAINED - (100 - STEPS) * BATCH
    )
    assert evaluations(whole)[1:] == evaluations(rest)


def are_ours(reads: list[Read]) -> None:
    """Check that worker processes read all, each in its main thread."""
    assert {read.thread for read in reads} == {"MainThread"}


def says_what_bounds(found: Run) -> None:
    """Check that a run ends with a report that names a cause. The loop may read after an epoch of processes."""
    assert re.search(r"^workers( are)? +(processes|0)  ", found.printed, re.MULTILINE)
    [finding] = found.findings
    assert found.printed.rstrip().endswith(finding.sentence)
    started = finding.sentence.startswith("The start bounds the run so far")  # on a busy machine
    assert finding.cause != "nothing" or started, finding


def accuracy(found: Run) -> float:
    """Return the last accuracy that a run printed, from 0 to 1."""
    value, percent = re.findall(r"accuracy'?:? '?([\d.]+)(%?)", found.printed)[-1]
    return float(value) / (100 if percent else 1)


def evaluations(found: Run) -> list[str]:
    """Return the losses that a Trainer printed."""
    return re.findall(r"eval_loss': '?([\d.]+)", found.printed)
