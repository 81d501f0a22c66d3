"""Runs the checks and the tests for `scripts/test`, in the environment that calls it.

    python scripts/_suite.py [--fast | --changed | --ci | --all]

Prints at its end how long each step took, what was left out, and which tests failed. A test that fails beside others
runs again alone. One that then passes is named, to be looked at and listed in tests/flaky.txt by hand. If it is listed
there already, the run fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import _choose  # noqa: E402

FLAKY = ROOT / "tests" / "flaky.txt"
NOT_HERE = 75  # what `scripts/test --python` ends with if that Python is missing
LAST_LINES = 15  # names of failed tests that fit into the last 20 lines

HOOKS = ("-m", "pre_commit", "run", "--all-files", "--hook-stage")
FAST = [
    *(
        f"tests/test_{name}.py"
        for name in ("layering", "sizes", "window", "window_model", "sampler")
    ),
    *(
        f"tests/promises/test_{name}.py"
        for name in ("exactly_once", "errors_in_place", "stalls_and_bounds")
    ),
]
IMAGES = [
    *("tests/image/test_plans.py", "tests/image/test_pixels.py"),
    *(
        f"tests/promises/test_{name}.py"
        for name in ("plans_in_the_loader", "memory_format", "packed_damage")
    ),
]


@dataclass(frozen=True)
class Step:
    """A run of pytest with its arguments and environment, or another command."""

    name: str
    arguments: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    pytest: Sequence[str] = (sys.executable, "-m", "pytest")
    command: Sequence[str] = ()


PYLINTED = ("fastload", "benchmarks")
QUICK = ("-n", "auto", "-m", "not slow")


def in_python(version: str) -> Step:
    tests = ("tests/safety", "tests/random", "tests/promises", "tests/image")
    pytest = ("bash", "scripts/test", "--python", version)
    return Step(f"Python {version}", (*QUICK, *tests), pytest=pytest)


PYTHONS = [in_python(version) for version in ("3.12", "3.13", "3.15")]
"""They take turns in one turn, and 3.14 has one of its own."""
VARIANTS = (
    [
        Step(
            "copy_dataset=False",
            (*QUICK, "tests/promises"),
            {"FASTLOAD_TEST_COPY_DATASET": "False"},
        ),
        Step("duplicate code", (), command=[sys.executable, "-m", "pylint", *PYLINTED]),
    ],
    [
        Step(
            "images without kernels",
            (*QUICK, *IMAGES, "tests/promises/test_filled_images.py"),
            {"FASTLOAD_KERNELS": "0"},
        ),
        Step("images by plain kernels", (*QUICK, *IMAGES), {"FASTLOAD_KERNELS": "plain"}),
        Step("images under the sanitizers", (), command=["bash", "scripts/sanitize"]),
    ],
    [in_python("3.14")],
    PYTHONS,
    [
        Step(
            "the wheel on the oldest torch, without extras",
            (),
            command=["bash", "scripts/build-check", "--oldest"],
        )
    ],
)
"""One for each turn."""
WHEEL = Step("wheel and sdist", (), command=["bash", "scripts/build-check"])


_COVERED = '"$0" -m pytest -n auto -m "not slow" --cov || (($? == 1))'
COVERAGE = Step("coverage", (), command=["bash", "-c", _COVERED, sys.executable])
"""Measures the tests that are not slow. A failure is no news: the tracer is slow, and some have limits in seconds."""


def slow(files: Sequence[str]) -> Step:
    # Tests of a file share what they draw, and compare their results.
    return Step("slow tests", ("-n", "auto", "--dist", "loadfile", "-m", "slow", *files))


def plan(mode: str) -> tuple[list[Step], list[str]]:
    """Return the steps of a mode after the checks, and lines about what is left out."""
    if mode == "":
        return [Step("tests", QUICK)], ["slow tests and variants (--all)"]
    if mode == "--fast":
        return [Step("the core's own tests", (*QUICK, *FAST))], [
            "the checks of a push, and nearly all tests"
        ]
    if mode == "--all":
        variants = [step for steps in VARIANTS for step in steps]
        full = "--hypothesis-profile=full"
        return [
            WHEEL,
            Step("tests", (*QUICK, full)),
            slow(["tests", full]),
            COVERAGE,
            *variants,
        ], []
    base = _choose.base_commit()
    choice = _choose.choose(_choose.changed_files(base) if base else None)
    print(f"Since {base or 'an unknown commit'}: {choice.why}", flush=True)
    left_out = folders(choice.left_out)
    steps = [Step("tests", (*QUICK, *choice.files))]
    if mode == "--changed":
        return steps, [*left_out, "slow tests and variants"]
    changes = _choose.changes()
    turn = changes % _choose.TURNS
    variants = VARIANTS[turn]
    if variants is PYTHONS:
        variants = [PYTHONS[changes // _choose.TURNS % len(PYTHONS)]]
    others = [name for steps in VARIANTS for name in names(steps) if name not in names(variants)]
    left_out += [
        f"slow tests of {len(_choose.slow_files()) - len(_choose.fifth(turn))} files, and {', '.join(others)}"
    ]
    print(f"Turn {turn + 1} of {_choose.TURNS}: {', '.join(names(variants))}", flush=True)
    left_out += [f"the turns of the last changes: {'; '.join(_choose.last_turns())}"]
    return [WHEEL, *steps, slow(_choose.fifth(turn)), *variants], left_out


def names(steps: Iterable[Step]) -> list[str]:
    return [step.name for step in steps]


def folders(files: Iterable[str]) -> list[str]:
    """Return how many files of each folder are left out, a line each."""
    counts: dict[str, int] = {}
    for file in files:
        folder = file.rpartition("/")[0]
        counts[folder] = counts.get(folder, 0) + 1
    return [f"{count} files of {folder}" for folder, count in counts.items()]


class Suite:
    """The steps that ran, and what came of them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[str] = []
        self.passed_alone: list[str] = []
        self.passed = 0

    def note(self, name: str, begun: float, said: str) -> None:
        self.lines.append(f"{time.monotonic() - begun:6.0f} s  {name}: {said}")

    def check(self, stage: str = "pre-push") -> None:
        """Run the hooks of .pre-commit-config.yaml, except the laws, which are tests too, and pylint, which is slow."""
        begun = time.monotonic()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "SKIP": "laws,pylint"}
        bad = subprocess.run(
            [sys.executable, *HOOKS, stage], cwd=ROOT, env=environment, check=False
        ).returncode
        if bad:
            self.failed.append("checks")
        self.note("checks", begun, "failed" if bad else "hold")

    def run(self, step: Step) -> None:
        """Run a step. Tests that fail beside others run again, alone."""
        begun = time.monotonic()
        print(f"\n==== {step.name} ====", flush=True)
        if step.command:
            code, said = self._stream(step.command, step.environment)
            if code:
                self.failed.append(step.name)
            self.note(step.name, begun, "failed" if code else said)
            return
        cache = ROOT / ".pytest_cache" / re.sub(r"\W+", "-", step.name)
        shutil.rmtree(cache, ignore_errors=True)
        pytest = [*step.pytest, "-o", f"cache_dir={cache}"]
        code, said = self._stream([*pytest, *step.arguments], step.environment)
        if code == NOT_HERE:
            said = f"left out: {said}"
        elif code == 1:
            first = last_failed(cache)
            print("\nThe tests that failed run again, alone", flush=True)
            alone = ["-n", "0", "--last-failed", "--last-failed-no-failures", "none"]
            code, again = self._stream([*pytest, *step.arguments, *alone], step.environment)
            said = f"{said}; alone: {again}"
            still = last_failed(cache) if code else []
            self.failed += still
            self.passed_alone += sorted({*first} - {*still})
            if code not in (0, 1) or (code and not still):
                self.failed.append(f"{step.name}: pytest ended with {code}")
        elif code:
            self.failed.append(f"{step.name}: pytest ended with {code}")
        self.note(step.name, begun, said)

    def _stream(self, command: Sequence[str], environment: dict[str, str]) -> tuple[int, str]:
        """Run a command, show what it prints, and return its exit status and last line, or pytest's count."""
        last, counted = "", None  # a process that is killed may have said nothing
        with subprocess.Popen(
            list(command), cwd=ROOT, env={**os.environ, **environment}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace",
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip(" =\n") or last
        counted = re.search(r"\b(\d+) passed", last)
        self.passed += int(counted[1]) if counted else 0
        return process.returncode, last

    def report(self, begun: float, left_out: Iterable[str]) -> int:
        """Print what is to be read at the end, and return the exit status."""
        listed = [f"{line} " for line in FLAKY.read_text().splitlines()]
        # A name may have spaces, in brackets, so it is looked for and not read from the list.
        again = [n for n in self.passed_alone if any(line.startswith(f"{n} ") for line in listed)]
        print("\n==== what ran ====", *self.lines, sep="\n")
        print(f"{time.monotonic() - begun:6.0f} s  in all")
        for line in left_out:
            print(f"Left out: {line}")
        for name in sorted({*self.passed_alone} - {*again}):
            print(
                f"Failed beside others, and passed alone; look at it, and list it in tests/flaky.txt: {name}"
            )
        failed = self.failed + [f"{name} failed again; tests/flaky.txt has it" for name in again]
        if not self.passed:
            failed.append("no test passed")
        if not failed:
            print(f"\nAll of it holds: {self.passed:,} tests passed", flush=True)
            return 0
        print(f"\nFAILED: {len(failed)}")
        print(*failed[:LAST_LINES], sep="\n")
        if len(failed) > LAST_LINES:
            print(f"... and {len(failed) - LAST_LINES} more, above")
        sys.stdout.flush()
        return 1


def last_failed(cache: Path) -> list[str]:
    """Return the tests that failed in the last run with this cache."""
    path = cache / "v" / "cache" / "lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


def main(mode: str = "") -> int:
    begun = time.monotonic()
    suite = Suite()
    suite.check("pre-commit" if mode == "--fast" else "pre-push")
    steps, left_out = plan(mode)
    for step in steps:
        suite.run(step)
    return suite.report(begun, left_out)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
