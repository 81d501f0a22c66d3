"""Promises:
- `loader.stats(ranks=True)` names the slowest rank, since when and why, and the most exposed wait. It makes no
  collective call.
- A rank that is made slow is named within 10 s, by cause: storage, decoding, the GIL, other processes on its cores,
  `collate_fn`, or a step that the others do not wait for.
- No rank waits for another. One that was killed, hangs or has not begun is named, and a store that is gone or stuck is
  a sentence.
- Groups, loaders, epochs and forks are told apart. One rank alone has its own figures.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fastload import DataLoader, Stats
from fastload.engine import ranks as engine_ranks
from fastload.telemetry import Stage
from fastload.telemetry.ranks import Latest, Ranks, RankStats
from tests.fakes import Numbers
from tests.train.programs.starting import ranks_started

PROGRAMS = Path(__file__).parent / "programs"


# ---- the rules ----


def said(rank: int, per_s: float = 10.0, share: float = 0.0, **more: Any) -> RankStats:
    values: dict[str, Any] = {
        "epoch": 0, "batches": 7, "total_batches": 700, "ended": False,
        "cause": "storage", "sentence": "It waits.", "since_s": 5.0,
    }  # fmt: skip
    return RankStats(rank=rank, batches_per_s=per_s, wait_share=share, **values | more)


def job(*heard: RankStats, world_size: int = 4) -> Ranks:
    return Ranks("Numbers", world_size, heard)


def test_of_ranks_that_step_together_the_one_that_waits_is_the_slowest() -> None:
    found = job(said(0, 10), said(1, 9.5, 0.02), said(2, 10.2, 0.6), said(3, 10, 0.01))
    assert found.slowest is found.waits_most is found.ranks[2]
    assert "Rank 2 is the slowest of 4, for 5.00 s. It waits." in str(found)
    assert "rank 2: 60 % of its time" in str(found)


def test_a_rank_that_falls_behind_is_the_slowest_though_it_waits_for_no_batch() -> None:
    behind = said(1, 4, total_batches=650)
    found = job(said(0), behind, said(2, share=0.3), said(3))
    assert found.slowest is behind
    assert found.waits_most is found.ranks[2]


def test_ranks_that_are_alike_have_no_slowest() -> None:
    found = job(said(0, share=0.5), said(1, share=0.55), said(2, 9, share=0.45), said(3, share=0.5))
    assert found.slowest is None
    assert "No rank is slower than the others." in str(found)
    assert found.waits_most is found.ranks[1]
    assert job(said(0)).slowest is None


def test_a_hiccup_that_only_some_ranks_have_counted_makes_none_slow() -> None:
    assert job(said(0, 4, total_batches=710), said(1), said(2), said(3)).slowest is None
    assert job(said(0, 4, total_batches=680), said(1), said(2), said(3)).slowest is None


def test_a_rank_that_is_not_heard_is_named_and_not_judged() -> None:
    gone = said(1, 0.1, 0.9, heard_s=30.0, batches=17, epoch=2)
    found = job(said(0), gone, said(2, heard_s=30.0, ended=True))
    assert found.slowest is None
    assert found.silent == (gone,)
    assert found.unheard == (3,)
    assert "Rank 1 has been silent for 30.0 s, in batch 17 of epoch 2" in str(found)
    assert "Not heard of Numbers yet: rank 3." in str(found)


def test_a_table_has_the_ranks_that_wait_most() -> None:
    heard = [said(rank, share=rank / 100) for rank in range(40)]
    lines = str(job(*heard, world_size=60)).splitlines()
    assert [line.split()[0] for line in lines[1:9]] == [str(rank) for rank in range(39, 31, -1)]
    assert lines[-1].endswith("rank 40, 41, 42, 43, 44, 45, 46, 47, ....")


# ---- the latest seconds ----


def after(seconds: float, waited_s: float) -> Stats:
    """The figures of a loader with ten batches a second and one worker."""
    read = Stage("read", waited_s, int(10 * seconds), 0.1, 0.1, 0.1)
    return Stats(
        epoch=0, workers=1, batches=int(10 * seconds), samples=int(10 * seconds), elapsed_s=seconds,
        consumer_wait_s=waited_s, busy_s=waited_s, stages={"sample": read, "read": read},
    )  # fmt: skip


def test_only_the_latest_seconds_count_and_since_when_it_has_been_so() -> None:
    latest = Latest()
    for second in range(0, 100, 2):
        figures = after(second, 0.0)
        one = latest.look(3, figures, figures, float(second))
    assert (one.rank, one.cause, one.wait_share, one.batches_per_s) == (3, "step", 0, 10)
    for second in range(100, 120, 2):
        figures = after(second, second - 98.0)
        one = latest.look(3, figures, figures, float(second))
        assert one.since_s == second - 98.0
    assert one.cause == "storage"
    assert one.wait_share == 1.0
    assert len(latest._points) < 5
    for second in range(120, 160, 2):
        figures = after(second, 20.0)
        one = latest.look(3, figures, figures, float(second))
    assert (one.cause, one.wait_share) == ("step", 0)
    assert 30 < one.since_s <= 40


def test_a_loop_that_hangs_is_seen_though_no_batch_comes() -> None:
    latest, figures = Latest(), after(2, 0.0)
    latest.look(0, figures, figures, 2.0)
    for second in range(4, 60, 2):
        stuck = replace(figures, elapsed_s=float(second), consumer_wait_s=second - 2.0)
        one = latest.look(0, stuck, stuck, float(second))
    assert one.wait_share > 0.9
    assert one.since_s == pytest.approx(56, abs=4)


# ---- one process ----


def test_a_process_alone_has_its_own_figures() -> None:
    loader = DataLoader(Numbers(100), 10)
    assert loader.stats(ranks=True).ranks[0].batches == 0
    list(loader)
    found = loader.stats(ranks=True)
    assert (found.world_size, found.loader, found.slowest) == (1, "Numbers", None)
    assert (found.ranks[0].batches, found.ranks[0].ended) == (10, True)
    assert "There are no other ranks" in str(found)
    assert engine_ranks.watch_of(loader) is None


@pytest.mark.parametrize("keep", [False, True])
def test_the_total_is_that_of_all_epochs(keep: bool) -> None:
    with DataLoader(
        Numbers(100), 10, num_workers=1, worker_method="thread", persistent_workers=keep
    ) as loader:
        assert loader.stats(total=True).samples == 0
        for _ in range(3):
            list(loader)
        assert (loader.stats(total=True).samples, loader.stats().samples) == (300, 100)
        steps = iter(loader)
        next(steps)
        total, latest = loader.stats(total=True), loader.stats()
        assert (total.samples, total.batches, total.epoch) == (310, 31, 3)
        assert latest.samples == 10
        assert total.elapsed_s > latest.elapsed_s
        del steps
        list(loader)
        assert loader.stats(total=True).samples == 410


def test_what_was_said_before_this_rank_spoke_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a restart in the same store. The other rank is simulated by what it says."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    loader = DataLoader(Numbers(100), 10)
    other = asdict(said(1, share=0.9))
    spoken = dist.distributed_c10d._get_default_store()
    try:
        for at in (0, 10**6):
            text = json.dumps({"at": at, "loaders": {"Numbers": other}})
            spoken.set("fastload/ranks/1/1", text)
            list(loader)
            found = loader.stats(ranks=True)
            assert [one.rank for one in found.ranks] == ([0, 1] if at else [0])
            assert found.unheard == (() if at else (1,))
        watch = engine_ranks.watch_of(loader)
        assert watch is not None
    finally:
        dist.destroy_process_group()
    watch.thread.join(10)
    assert not watch.thread.is_alive(), "it ends with its group"


# ---- real ranks ----


def seen(program: str, *arguments: str) -> dict[str, Any]:
    """Run a program on two ranks, and return what rank 0 printed as JSON."""
    with ranks_started(2, [str(PROGRAMS / program), *arguments]) as started:
        texts = [one.communicate(timeout=90)[0] for one in started]
    assert [one.returncode for one in started] == [0, 0], texts
    found: dict[str, Any] = json.loads(texts[0].splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["storage", "decode", "gil", "others", "collate", "step"])
def test_a_slow_rank_is_named_with_its_cause_within_ten_seconds(cause: str) -> None:
    found = seen("slow_rank.py", cause)
    named = found["named"]
    assert named, "\n".join(found["seen"])
    assert named["after_s"] < 10
    assert named["since_s"] < named["after_s"] + 4, "it was healthy before"
    assert named["said"].startswith("Rank 1 is the slowest of 2, for ")
    assert cause == "step" or named["waits_most"] == 1


@pytest.mark.slow
def test_groups_loaders_epochs_and_forks_are_told_apart(tmp_path: Path) -> None:
    for name, found in seen("groups.py", str(tmp_path)).items():
        train, valid = found["train"], found["valid"]
        assert train["own"] == train["loader"] == "Numbers", name
        assert train["batches"] == {"0": 1, "1": 1}
        assert train["epochs"]["0"] == train["epochs"]["1"]
        assert train["threads"] == valid["threads"] == 1
        assert valid["loader"] == "Numbers 2"
        assert (valid["batches"], valid["ended"], valid["unheard"]) == ({"0": 3}, [True], [1])
        assert "a fork of a rank" in found["fork"]
        assert found["fork"].endswith("[]"), "it has no thread that speaks"
        assert "There are no other ranks" in found["alone"]


def until(rank: subprocess.Popen[str], holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the first report of a rank that is so, and check that none took long."""
    assert rank.stdout is not None
    lines = []
    for line in rank.stdout:
        lines.append(line)
        if not line.startswith("{"):
            continue  # a warning of torch's
        found: dict[str, Any] = json.loads(line)
        assert found["took_s"] < 8
        if holds(found):
            return found
    raise AssertionError("".join(lines[-40:]))


@pytest.mark.slow
def test_a_rank_that_hangs_was_killed_or_says_nothing_is_named() -> None:
    program = [str(PROGRAMS / "watched.py"), "asks,reads,idle"]
    with ranks_started(3, program, stdin=subprocess.PIPE) as started:
        asks, reads, _ = started
        found = until(asks, lambda one: one["heard"] == [0, 1] and not one["silent"])
        assert (found["unheard"], found["note"]) == ([2], "")
        reads.send_signal(signal.SIGSTOP)
        found = until(asks, lambda one: one["silent"] == [1])
        assert "Rank 1 has been silent for" in found["said"]
        reads.send_signal(signal.SIGCONT)
        until(asks, lambda one: not one["silent"])
        reads.kill()
        until(asks, lambda one: one["silent"] == [1])


@pytest.mark.slow
def test_a_store_that_is_stuck_or_gone_is_a_sentence_and_stops_no_training() -> None:
    program = [str(PROGRAMS / "watched.py"), "reads,asks"]
    with ranks_started(2, program, stdin=subprocess.PIPE) as started:
        keeps, asks = started
        until(asks, lambda one: one["heard"] == [0, 1])
        keeps.send_signal(signal.SIGSTOP)
        stuck = until(asks, lambda one: bool(one["note"]))
        assert "is gone or stuck (no answer in 1 s)" in stuck["said"]
        assert stuck["heard"] == [1]
        until(asks, lambda one: one["steps"] > stuck["steps"] + 50)
        keeps.send_signal(signal.SIGCONT)
        until(asks, lambda one: not one["note"])
        keeps.kill()
        gone = until(asks, lambda one: bool(one["note"]))
        assert gone["heard"] == [1]
        until(asks, lambda one: one["steps"] > gone["steps"] + 50)
        _, _ = asks.communicate("", timeout=30)
        assert asks.returncode == 0
