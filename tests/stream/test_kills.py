"""Promise: A process that is killed 15 times at random loses none of 2,000 files. The test is marked slow.

Each round starts a process that predicts, and kills it with SIGKILL. The last process is left to finish.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.children import Python
from tests.promises.reading import wait_until

FOLDER = """
import sys, torch, fastload
from fastload.stream import Folder, FolderSink
watched, out = sys.argv[1:]
answers = fastload.predict(
    lambda x: x * 2,
    Folder(watched),
    decode=lambda path: torch.tensor(int(path.read_text())),
    batch_size=16,
    num_workers=2,
)
answers.write_to(FolderSink(out))
"""


def run_until(
    program: str, arguments: list[str], done: Callable[[], int], goals: list[int], seconds: float
) -> int:
    """Start the program once for each goal, and kill it when `done()` reaches the goal. Return the number of kills."""
    for goal in goals:
        process = Python(["-c", program, *arguments])
        try:
            wait_until(
                lambda goal=goal, process=process: done() >= goal or process.poll() is not None,
                f"{goal} are answered",
                seconds,
            )
            assert process.poll() is None, "it ended by itself"
        finally:
            process.kill()
            process.wait()
        assert goal == goals[-1] or done() < goals[-1], "the kill struck in the middle"
    return len(goals)


def goals_of(n: int, kills: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [*sorted(rng.sample(range(1, n), kills)), n]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_file_of_a_folder_is_lost_or_answered_with_another_value(tmp_path: Path) -> None:
    n = 2_000
    watched, out = tmp_path / "in", tmp_path / "out"
    watched.mkdir()
    out.mkdir()
    for k in range(n):
        (watched / f"{k:04}").write_text(str(k))

    def answered() -> int:
        return sum(not name.startswith(".") for name in os.listdir(out))

    kills = run_until(FOLDER, [str(watched), str(out)], answered, goals_of(n, 15, seed=1), 60)
    assert kills == 16
    found = {
        name: json.loads((out / name).read_text()) for name in os.listdir(out) if name[0] != "."
    }
    assert found == {f"{k:04}.json": 2 * k for k in range(n)}
