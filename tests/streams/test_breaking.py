"""Promises:
- A failure that was raised before a state was saved is raised no more when a block is read again, nor does it end that.
- What a generator or a reading function of the user's draws belongs to the sample, also after a resume.
- A state of another stream is refused, and so is a block that the files no longer give.
- One bad line, text or name loses itself alone. What is cut raises.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import pickle
import random
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fastload
from fastload.errors import StateError
from fastload.streams import Mixed, PackedStream, Shards, Stream
from tests.streams.chains import id_of, own, row, write
from tests.streams.test_loaders import loader, samples
from tests.streams.test_resume import reading


def lines(folder: Path, *counts: int) -> list[Path]:
    paths = [folder / f"{k}.jsonl" for k in range(len(counts))]
    for k, (path, count) in enumerate(zip(paths, counts, strict=True)):
        write("jsonl", path, [1000 * k + n for n in range(count)])
    return paths


def drained(it: Iterator[Any], most: int = 10_000) -> tuple[list[Any], list[str]]:
    """Return what an iterator gives, and the names of the errors between."""
    found, errors = [], []
    for _ in range(most):
        try:
            found.append(next(it))
        except StopIteration:
            return found, errors
        except Exception as error:
            errors.append(type(error).__name__)
    raise AssertionError(f"it does not end: {Counter(errors)}")


@pytest.mark.parametrize("stop", [1, 10, 19, 20, 21, 30])
def test_an_error_before_the_state_is_not_raised_again(stop: int, tmp_path: Path) -> None:
    def fails(n: int) -> int:
        if n % 7 == 3:
            raise ValueError(n)
        return n

    stream = Shards(lines(tmp_path, 70)).map(id_of).map(fails).shuffle(20)
    expected, errors = drained(reading(stream, 0, 0, 1))
    it = reading(stream, 0, 0, 1)
    head, before = [], 0
    while len(head) < stop:
        try:
            head.append(next(it))
        except ValueError:
            before += 1
    rest, after = drained(reading(stream, 0, 0, 1, it.state_dict()))
    assert head + rest == expected
    assert before + len(after) == len(errors) == 10


def test_an_error_that_has_gone_does_not_move_the_samples(tmp_path: Path) -> None:
    broken = [True]

    def fails(n: int) -> int:
        if broken[0] and n == 7:
            raise OSError("for a moment")
        return n

    stream = Shards(lines(tmp_path, 60)).map(id_of).map(fails).shuffle(20)
    expected, _ = drained(reading(stream, 0, 0, 1))
    it = reading(stream, 0, 0, 1)
    with pytest.raises(OSError, match="for a moment"):
        next(it)
    head = [next(it) for _ in range(5)]
    broken[0] = False
    assert head + drained(reading(stream, 0, 0, 1, it.state_dict()))[0] == expected


def drawing(sample: dict[str, int]) -> Iterator[tuple[int, float]]:
    for _ in range(random.randint(1, 4)):
        yield sample["id"], random.random()


def shuffling(path: Path) -> Iterator[Any]:
    found = json.loads(path.read_text())
    random.shuffle(found)
    for n in found:
        yield n, random.random()


@pytest.mark.parametrize("kind", ["flat_map", "read"])
def test_a_generator_draws_for_its_sample(kind: str, tmp_path: Path) -> None:
    if kind == "flat_map":
        stream: Stream = Shards(lines(tmp_path, 40)).flat_map(drawing)
    else:
        write("own", tmp_path / "a", [*range(40)])
        write("own", tmp_path / "b", [*range(40, 80)])
        stream = Shards([tmp_path / "a", tmp_path / "b"], shuffling)
    with loader(stream, 0) as whole, loader(stream, 2) as others:
        expected = samples(whole)
        assert sorted(samples(others)) == sorted(expected)
    with loader(stream, 0) as stopped, loader(stream, 0) as resumed:
        head = samples(itertools.islice(stopped, 5))
        resumed.load_state_dict(stopped.state_dict())
        assert head + samples(resumed) == expected


def test_a_state_of_another_stream_is_refused(tmp_path: Path) -> None:
    paths = lines(tmp_path, *[5] * 8)

    def made(paths: Any = paths, size: int = 10, **options: Any) -> Stream:
        return Shards(paths, **options).map(id_of).shuffle(size)

    with loader(made(), 1) as saved:
        next(iter(saved))
        state = saved.state_dict()
    others = (
        made(paths[1:]),
        made(seed=1),
        made(size=11),
        made(shuffle=False),
        Shards(paths),
        Mixed([made()], [1]),
        PackedStream(made(), 16),
    )
    for stream in others:
        with loader(stream, 1) as other, pytest.raises(StateError, match=r"^stream: .*8 paths"):
            other.load_state_dict(state)
    for wrong in ({}, None, [1]):
        with pytest.raises(StateError, match="stream: the state is of None"):
            made().check(wrong)  # type: ignore[arg-type]


def test_a_block_that_reads_otherwise_is_refused_once(tmp_path: Path) -> None:
    [path] = lines(tmp_path, 60)
    stream = Shards([path]).map(id_of).shuffle(20)
    it = reading(stream, 0, 0, 1)
    next(it)
    path.write_text(path.read_text().replace('{"id": 7}', "\n" * 9))
    resumed = reading(stream, 0, 0, 1, it.state_dict())
    with pytest.raises(
        StateError, match="of 20 samples, of which 1 were given, is not what it was"
    ):
        next(resumed)
    assert len(drained(resumed)[0]) == 40


def test_all_states_resume_in_order_if_the_ranks_are_as_many(tmp_path: Path) -> None:
    stream = Shards(lines(tmp_path, *[20] * 17)).map(id_of).shuffle(7)
    states, rests = [], []
    for rank in range(2):
        with loader(stream, 3, rank=rank, world_size=2) as saved:
            it = iter(saved)
            samples(itertools.islice(it, 7))
            states.append(saved.state_dict())
            rests.append(samples(it))
    with loader(stream, 3, rank=1, world_size=2) as resumed:
        resumed.load_state_dict(states)
        assert samples(resumed) == rests[1]


def test_a_shuffle_holds_no_more_than_its_size(tmp_path: Path) -> None:
    live, most = [0], [0]

    class Counted:
        def __init__(self, _: Any) -> None:
            live[0] += 1
            most[0] = max(most[0], live[0])

        def __del__(self) -> None:
            live[0] -= 1

    for _ in Shards(lines(tmp_path, 7000)).map(Counted).shuffle(2000):
        pass
    assert 2000 <= most[0] <= 2100


@pytest.mark.parametrize("bad", [None, ["a"], [[1]], 7, [1] * 17])
def test_a_text_that_cannot_be_packed_fails_alone(bad: Any, tmp_path: Path) -> None:
    texts = Shards(lines(tmp_path, 50)).map(id_of).map(lambda n: bad if n == 7 else [n + 1] * 3)
    found, errors = drained(iter(PackedStream(texts, 16, 1000, long="error").map(row)))
    assert Counter(t for x in found for t in x if t) == {n + 1: 3 for n in range(50) if n != 7}
    assert errors == ["ValueError" if bad == [1] * 17 else "TypeError"]


def test_a_bad_line_in_gzip_fails_alone(tmp_path: Path) -> None:
    with gzip.open(path := tmp_path / "a.jsonl.gz", "wt") as file:
        file.writelines(f'{{"id": {n}}}\n' if n != 7 else "{oops\n" for n in range(40))
    found, errors = drained(iter(Shards([path]).map(id_of)))
    assert found == [n for n in range(40) if n != 7]
    assert errors == ["JSONDecodeError"]


def tar(path: Path, names: list[str]) -> bytes:
    with tarfile.open(path, "w") as file:
        for n, name in enumerate(names):
            info = tarfile.TarInfo(name)
            info.size = len(data := str(n).encode())
            file.addfile(info, io.BytesIO(data))
    return path.read_bytes()


def test_a_tar_that_is_cut_or_broken_raises(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    whole = tar(path, [f"{k}.x" for k in range(9)])
    at = 5 * 1024
    for data in (
        whole[: at + 100],
        whole[: at + 600],
        whole[:at] + b"\xff" * 20 + whole[at + 20 :],
    ):
        path.write_bytes(data)
        found, errors = drained(iter(Shards([path])))
        assert 4 <= len(found) <= 5
        assert errors == ["ReadError"]


def test_a_name_that_comes_twice_in_a_tar_is_not_lost(tmp_path: Path) -> None:
    tar(tmp_path / "a.tar", ["a.jpg", "a.cls", "a.JPG", "b.jpg"])
    stream = Shards([tmp_path / "a.tar"])
    found = [*stream]
    assert [x["jpg"] for x in found] == [b"0", b"2", b"3"]
    for stop in range(4):
        it = reading(stream, 0, 0, 1)
        assert [*itertools.islice(it, stop), *reading(stream, 0, 0, 1, it.state_dict())] == found


def test_parquet_rows_become_objects_a_thousand_at_a_time(tmp_path: Path) -> None:
    import tracemalloc

    pq.write_table(pa.table({"x": [b"x" * 10_000] * 5000}), path := tmp_path / "a.parquet")
    tracemalloc.start()
    try:
        next(iter(Shards([path])))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 20_000_000  # of 50 MB


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shards("abc", own), "paths must be a sequence"),  # type: ignore[arg-type]
        (lambda: Shards(["a"], own, rank=3), "both or neither"),
        (lambda: Shards(["a"], own, rank=2, world_size=2), "rank must be from 0"),
        (lambda: Mixed([], []), "at least one stream"),
        (lambda: Mixed([Shards(["a"], own)], [0]), "not all 0"),
        (lambda: Mixed([Shards(["a"], own)], [float("nan")]), "none below 0"),
    ],
)
def test_arguments_that_would_lose_samples_are_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_a_loader_that_skips_ends_after_a_resume(tmp_path: Path) -> None:
    [path] = lines(tmp_path, 60)
    path.write_text(path.read_text().replace('{"id": 7}', "{oops"))
    stream = Shards([path]).map(id_of).shuffle(20)

    def skips() -> fastload.DataLoader[Any]:
        return fastload.DataLoader(stream, batch_size=4, collate_fn=list, on_error="skip")

    with skips() as stopped, skips() as resumed:
        head = samples(itertools.islice(stopped, 3))
        resumed.load_state_dict(stopped.state_dict())
        found = head + samples(itertools.islice(resumed, 30))
    assert sorted(found) == [n for n in range(60) if n != 7]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "tar"])
def test_what_is_left_of_few_shards_is_divided_among_more_readers(
    kind: str, tmp_path: Path
) -> None:
    write(kind, path := tmp_path / f"a.{kind}", [*range(100)])
    stream = Shards([path]).map(id_of)
    it = reading(stream, 0, 0, 1)
    found = [*itertools.islice(it, 30)]
    states = stream.redealt([it.state_dict()], 0, 4)
    its = [reading(stream, 0, k, 4, state) for k, state in enumerate(states)]
    found += [x for each in its for x in itertools.islice(each, 3)]
    states = stream.redealt([each.state_dict() for each in its], 0, 11)
    parts = [[*reading(stream, 0, k, 11, state)] for k, state in enumerate(states)]
    assert sum(map(bool, parts)) >= 6
    assert sorted(found + [x for part in parts for x in part]) == [*range(100)]


def test_sources_of_a_mixture_draw_other_numbers(tmp_path: Path) -> None:
    for name in "abcdef":
        write("own", tmp_path / name, [*range(5)])
    streams = [Shards([tmp_path / name], own).map(lambda _: random.random()) for name in "abcdef"]
    nested = Mixed([Mixed(streams[:4], [1] * 4), Mixed(streams[4:], [1, 1])], [1, 1])
    with loader(nested, 0) as all_of_them:
        assert len({*samples(all_of_them)}) == 30


def test_a_state_of_several_flat_maps_is_small(tmp_path: Path) -> None:
    stream: Stream = Shards(lines(tmp_path, 40))
    for _ in range(3):
        stream = stream.flat_map(lambda x: [x])
    it = reading(stream, 0, 0, 1)
    assert len([*itertools.islice(it, 7)]) == 7
    size = len(json.dumps(it.state_dict()))
    del it  # and its open files
    assert size < 1500


def test_a_stream_whose_turn_comes_later_is_not_lost(tmp_path: Path) -> None:
    first, then = (Shards([path]) for path in lines(tmp_path, 10, 30))
    assert len([*Mixed([first, then], lambda n: [1, 0] if n < 20 else [0, 1])]) == 40


@pytest.mark.parametrize("step", ["map", "filter", "flat_map"])
def test_stop_iteration_of_a_function_ends_nothing(step: str, tmp_path: Path) -> None:
    def ends(n: int) -> list[int]:
        if n == 7:
            raise StopIteration
        return [n]

    stream = getattr(Shards(lines(tmp_path, 20)).map(id_of), step)(ends)
    found, errors = drained(iter(stream))
    assert (len(found), errors) == (19, ["RuntimeError"])


def test_a_file_that_was_replaced_is_noticed_in_mid_line(tmp_path: Path) -> None:
    [path] = lines(tmp_path, 20)
    it = reading(stream := Shards([path]).map(id_of), 0, 0, 1)
    assert [*itertools.islice(it, 7)] == [*range(7)]
    state = it.state_dict()
    path.write_text("1234567890" * 30)
    with pytest.raises(StateError, match="no line begins at byte"):
        next(reading(stream, 0, 0, 1, state))


def test_paths_in_no_order_are_refused(tmp_path: Path) -> None:
    for paths in ({"a", "b"}, tmp_path.glob("*")):
        with pytest.raises(TypeError, match="in an order that all ranks know"):
            Shards(paths)  # type: ignore[arg-type]


def test_a_state_knows_names_and_format(tmp_path: Path) -> None:
    paths = lines(tmp_path, 5, 5)
    state = reading(Shards(paths), 0, 0, 1).state_dict()
    (tmp_path / "moved").mkdir()
    moved = [path.rename(tmp_path / "moved" / path.name) for path in paths]
    assert len([*reading(Shards(moved), 0, 0, 1, state)]) == 10
    for other in (Shards(moved[::-1]), Shards(moved, "tar")):
        with pytest.raises(StateError, match="checksum"):
            reading(other, 0, 0, 1, state)


def test_the_rank_is_that_of_the_time_of_reading(tmp_path: Path) -> None:
    stream = Shards(lines(tmp_path, 5, 5)).map(id_of)
    said = {"is_initialized": True, "get_rank": 1, "get_world_size": 2}
    with ExitStack() as joined:
        for name, value in said.items():
            joined.enter_context(mock.patch(f"torch.distributed.{name}", return_value=value))
        copied = pickle.loads(pickle.dumps(stream.ups[0]))
        assert (stream.rank, stream.world_size) == (1, 2)
        assert len([*stream]) == 5
    assert (stream.rank, stream.world_size) == (0, 1)
    assert (copied.rank, copied.world_size) == (1, 2)
