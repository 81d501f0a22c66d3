"""Promise: Each of several ranks prints a user's error in the line that one process prints, and exits with its code.
See also `tests/distributed/test_end_job.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("PIL")

from fastload.cli import main
from tests.distributed.launching import command, run
from tests.image_files import listed_images

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from starting import ranks_started

pytestmark = pytest.mark.slow

FILES, MISSING = 8, "class1/5.jpg"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with JPEGs, and `list.txt` of them, one of which is not there."""
    folder = listed_images(tmp_path_factory.mktemp("images"), FILES).parent
    (folder / MISSING).unlink()
    return folder


def arguments(folder: Path, logdir: Path, *more: str) -> list[str]:
    given = ["train", "--file-list-path", str(folder / "list.txt"), "--image-size", "8"]
    return [*given, "-b", "1", "--device", "cpu", "--logdir", str(logdir), *more]


USER_ERRORS = {
    "an option's value": (["--lr", "nan"], 2),
    "options that exclude each other": (["--resume"], 2),
    "what the dataset says": (["--classes", "1"], 2),
    "a model that there is not": (["--model", "resnet5"], 2),
    "another stats.csv": ([], 1),
}


@pytest.mark.parametrize("error", USER_ERRORS)
def test_an_error_of_all_ranks_is_one_line_of_each(
    error: str, images: Path, tmp_path: Path
) -> None:
    options, code = USER_ERRORS[error]
    (tmp_path / "stats.csv").write_text("4,1.5,0.2,0.1\n" if code == 1 else "")
    alone = CliRunner().invoke(main, arguments(images, tmp_path, *options))
    assert alone.exit_code == code
    (line,) = alone.stderr.splitlines()
    with ranks_started(2, ["-m", "fastload", *arguments(images, tmp_path, *options)]) as processes:
        printed = "".join(process.communicate(timeout=100)[0] for process in processes)
        assert [process.returncode for process in processes] == [code, code]
    assert printed == f"{line}\n" * 2


@pytest.mark.parametrize("seed", ["1", "2"])
def test_an_error_of_one_rank_ends_all_ranks(seed: str, images: Path, tmp_path: Path) -> None:
    """An image that is not there is in the part of one rank; the other one waits for its gradients."""
    options = ["--epochs", "1", "--status-print-interval", "1000", "--seed", seed]
    with ranks_started(2, ["-m", "fastload", *arguments(images, tmp_path, *options)]) as processes:
        printed = "".join(process.communicate(timeout=100)[0] for process in processes)
        assert [process.returncode for process in processes] == [1, 1], printed
    assert f"Error: {images / MISSING}: No such file or directory\n" in printed


@pytest.mark.parametrize("launcher", ["mpich", "openmpi"])
def test_under_a_launcher_too(launcher: str, images: Path, tmp_path: Path) -> None:
    options = ["--oversubscribe"] if launcher == "openmpi" else []
    started = command(
        launcher,
        2,
        *("-m", "fastload", *arguments(images, tmp_path, "--lr", "nan")),
        options=tuple(options),
    )
    ended = run(started, tmp_path)
    assert ended.code == 2
    lines = [line for line in ended.text.splitlines() if "nan" in line]
    assert set(lines) == {"Error: Invalid value for '--lr': 'nan' is not a finite number."}
    assert "Traceback" not in ended.text
