"""Promises:
- A flipped bit in any byte of a packed set is found, and the error names shard and record. Damage never gives garbage
  or a crash.
- A shard that is cut off, too long, missing or replaced while it is open is found. A file that is cut off while it is
  open is an error and no signal.
- Forged lengths, offsets, sides and indices are refused, and take no memory. A fuzzer finds no crash. See also
  `tests/promises/damaged_files.py`.
- Sets of format version 1 are read by all later versions. A set of a newer format is refused with a sentence. See
  also `tests/data/packed/v1`.
- `verify` names every bad record and shard once. It reads the columns of a shard once, with any number of bad
  records.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")
import pyarrow as pa

from fastload.datasets import PackedDataset, PackedWriter, manifest
from fastload.datasets.packed import format as packed_format
from fastload.errors import PackedDataError
from fastload.store.verifying import verify
from tests.promises.damaged_files import fitted, with_checksum

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "data" / "packed" / "v1"
SHARD = "shard-00001.arrow"  # of three, the one that is damaged


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "set"
    with PackedWriter(
        path, mode="encoded", columns={"caption": pa.string()}, shard_bytes=100
    ) as writer:
        for k in range(12):
            writer.add(bytes([k]) * 25, label=k, source=f"{k}.bin", caption=f"no. {k}")
    assert len(list(path.glob("shard-*"))) == 3
    return path


@pytest.fixture
def packed(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "set")


def expected(record: int) -> Any:
    return bytes([record]) * 25, record, f"no. {record}"


def open_set(path: Path, **arguments: Any) -> PackedDataset:
    return PackedDataset(path, decode=False, columns=["caption"], **arguments)


def refused(dataset: PackedDataset, records: Sequence[int] = range(12)) -> list[PackedDataError]:
    """Read all records; those that come are right. Return the errors, which all name the damaged shard."""
    errors = []
    for record in records:
        try:
            assert dataset[record] == expected(record)
        except PackedDataError as error:
            assert (error.shard, error.path) == (SHARD, dataset.path)
            assert SHARD in str(error)
            assert 4 <= record < 8
            assert error.record in (None, record - 4)
            errors.append(error)
    return errors


# ---- flipped and missing bytes ----


def test_a_flipped_bit_in_any_byte_of_a_shard_is_found_and_named(packed: Path) -> None:
    dataset = open_set(packed)
    content = (packed / SHARD).read_bytes()
    index = manifest.read_index(str(packed))
    ((start, length),) = index.shards[1].payload
    with open(packed / SHARD, "r+b", buffering=0) as file:
        for place, byte in enumerate(content):
            os.pwrite(file.fileno(), bytes([byte ^ 1 << place % 8]), place)
            errors = refused(dataset, [3, 4, 5, 6, 7, 8])  # the shard and its neighbours
            os.pwrite(file.fileno(), bytes([byte]), place)
            dataset.close()
            if start <= place < start + length:  # a payload: only its record is bad
                assert [error.record for error in errors] == [(place - start) // 25]
                assert "the payload has checksum" in errors[0].reason
            else:
                assert len(errors) == 4
                assert "the columns have checksum" in errors[0].reason
    assert refused(dataset) == []


def test_an_index_with_a_flipped_bit_in_any_byte_or_cut_off_anywhere_is_refused(
    packed: Path,
) -> None:
    content = (packed / "index.json").read_bytes()
    for place in range(len(content)):
        for bit in (1, 0x20, 0x80):
            changed = bytearray(content)
            changed[place] ^= bit
            with pytest.raises(PackedDataError, match="index.json"):
                manifest.parse_index(str(packed), bytes(changed))
        with pytest.raises(PackedDataError, match="index.json"):
            manifest.parse_index(str(packed), content[:place])
    assert manifest.parse_index(str(packed), content).rows == 12


def test_a_shard_of_another_length_or_another_content_is_refused(packed: Path) -> None:
    dataset = open_set(packed)
    content = (packed / SHARD).read_bytes()
    size = len(content)
    for length in (size + 1, *range(size - 1, -1, -7), 0):
        (packed / SHARD).write_bytes((content + b"\0")[:length])
        errors = refused(dataset)
        dataset.close()
        assert len(errors) == 4
        assert f"the file has {length:,} bytes, expected {size:,}" in errors[0].reason
    for other in (bytes(size), (packed / "shard-00000.arrow").read_bytes()):
        (packed / SHARD).write_bytes(other)
        assert len(refused(dataset)) == 4
        dataset.close()
    (packed / SHARD).unlink()
    assert {error.reason for error in refused(dataset)} == {"the file is missing"}


def test_a_file_cut_off_while_it_is_open_is_an_error_and_no_signal(packed: Path) -> None:
    dataset = open_set(packed)
    assert refused(dataset) == []
    ((start, _),) = manifest.read_index(str(packed)).shards[1].payload
    os.truncate(
        packed / SHARD, start + 60
    )  # record 2 of the shard has 10 bytes left, record 3 none
    errors = refused(dataset)
    assert [(error.record, error.reason) for error in errors] == [
        (2, f"the file ends before byte {start + 75:,}. It was cut off"),
        (3, f"the file ends before byte {start + 100:,}. It was cut off"),
    ]


def test_a_file_deleted_or_replaced_while_it_is_open_is_read_on(packed: Path) -> None:
    dataset = open_set(packed)
    assert refused(dataset) == []
    (packed / SHARD).unlink()
    assert refused(dataset) == []
    (packed / SHARD).write_bytes(b"another")
    assert refused(dataset) == []


def test_verify_names_every_bad_record_and_shard_once(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert verify(packed).bad == []
    assert verify(packed).rows == 12
    ((start, _),) = manifest.read_index(str(packed)).shards[1].payload
    with open(packed / SHARD, "r+b") as file:
        os.pwrite(file.fileno(), b"\xff", start + 30)
        os.pwrite(file.fileno(), b"\xff", start + 99)
    (packed / "shard-00002.arrow").unlink()
    looks: list[str] = []

    def counted(path: str, index: Any, shard: Any, *arguments: Any, **keywords: Any) -> Any:
        looks.append(shard.name)
        return packed_format.read_table(path, index, shard, *arguments, **keywords)

    monkeypatch.setattr("fastload.store.shard_bytes.read_table", counted)
    said: list[str] = []
    found = verify(packed, workers=2, say=said.append)
    assert said == found.bad
    assert sorted(looks) == ["shard-00000.arrow", SHARD]
    places = [text.partition(": ")[0].removeprefix(f"{packed}") for text in found.bad]
    assert places == [
        f"/{SHARD}, record 1 (5.bin)",
        f"/{SHARD}, record 3 (7.bin)",
        ", shard shard-00002.arrow",
    ]


# ---- versions ----


def test_sets_of_version_1_are_read_for_ever() -> None:
    columns = ["caption", "box"]
    dataset = PackedDataset(GOLDEN / "encoded", decode=False, columns=columns)
    assert dataset.classes == ["ant", "bee"]
    assert dataset.made == {"by": "the tests of version 1", "rejected": 1}
    assert [dataset[k] for k in range(6)] == [
        (bytes(range(k * 10)), k % 2, f"é {k}" if k else None, [j / 2 for j in [k] * k])
        for k in range(6)
    ]
    assert dataset.locate(5).endswith("shard-00001.arrow, record 1 (5.bin)")
    dataset = PackedDataset(GOLDEN / "raw", decode=False)
    for k in range(3):
        pixels, label = dataset[k]
        assert label == -1 - k
        assert (pixels == np.arange((k + 1) * 6, dtype=np.uint8).reshape(k + 1, 2, 3)).all()
    for mode in ("encoded", "raw"):
        assert verify(GOLDEN / mode).bad == []


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2", "has format version 2, but this fastload reads version 1. Use a newer fastload"),
        ("0", "has version 0: expected 1"),
        ("true", "has version True: expected 1"),
    ],
)
def test_another_version_is_refused_with_a_sentence(version: str, message: str) -> None:
    text = (GOLDEN / "raw" / "index.json").read_bytes()
    changed = text.replace(b'"version": 1', b'"version": ' + version.encode())
    assert changed != text
    with pytest.raises(PackedDataError) as caught:
        manifest.parse_index("set", with_checksum(changed))
    assert caught.value.reason == f"index.json {message}"


# ---- forged: the checksums fit ----


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            '"rows": 4, "bytes"',
            '"rows": 4000000000000, "bytes"',
            "12 rows, but its shards have 4000000000008",
        ),
        ('"rows": 12', '"rows": 13', "13 rows, but its shards have 12"),
        (f'"name": "{SHARD}"', '"name": "../shard-00001.arrow"', "as the name of shard 1"),
        ('"mode": "encoded"', '"mode": "zip"', "mode 'zip'"),
        ('"mode": "encoded"', '"mode": "raw"', "has the columns"),
        ("large_binary", "binary", "has the columns"),
        ('"classes": []', '"classes": [1]', "classes that are not a list of names"),
        ('"made": {', '"made": 3, "x": {', 'a "made" that is not an object'),
        (", 100]]}", ", 4611686018427387904]]}", "outside its file or in another one"),
        (", 100]]}", ", -100]]}", "outside its file or in another one"),
        (", 100]]}", ", 100.0]]}", "the extent"),
        (", 100]]}", ", 100], [0, 1]]}", "outside its file or in another one"),
        ('"checksum": ', '"checksum": -', "checksum"),
        (' "shards": [', ' "sharts": [', "is not as expected: 'shards'"),
    ],
)
def test_an_index_that_cannot_be_says_what(
    whole: Path, before: str, after: str, message: str, tmp_path: Path
) -> None:
    text = (whole / "index.json").read_bytes()
    assert before.encode() in text
    changed = with_checksum(text.replace(before.encode(), after.encode(), 1))
    (tmp_path / "index.json").write_bytes(changed)
    with pytest.raises(PackedDataError, match="index.json") as caught:
        packed_format.packed_index(str(tmp_path), manifest.read_index(str(tmp_path)))
    assert message in str(caught.value)


def forge(path: Path, name: str, change: Callable[[bytearray], None]) -> None:
    """Change a shard, and have the index say that it is right so."""
    content = bytearray((path / name).read_bytes())
    before = bytes(content)
    change(content)
    assert content != before
    (path / name).write_bytes(content)
    index = manifest.read_index(str(path))
    shards = [fitted(s, bytes(content)) if s.name == name else s for s in index.shards]
    changed = dataclasses.replace(index, shards=tuple(shards))
    (path / "index.json").write_bytes(manifest.dump_index(changed))


def replace_numbers(before: list[int], after: list[int], dtype: str = "<i8") -> Any:
    """A change of the one place where `before` stands."""

    def change(content: bytearray) -> None:
        old, new = np.array(before, dtype).tobytes(), np.array(after, dtype).tobytes()
        assert content.count(old) == 1
        content[:] = content.replace(old, new)

    return change


HUGE = 2**62


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 25, 50, 75, HUGE],
        [0, 25, 50, HUGE, 100],
        [0, 75, 50, 75, 100],
        [0, -1, 50, 75, 100],
        [-HUGE, 25, 50, 75, 100],
        [25, 25, 50, 75, 100],
        [0, 25, 50, 75, 99],
    ],
)
def test_forged_offsets_of_payloads_are_refused(packed: Path, offsets: list[int]) -> None:
    forge(packed, SHARD, replace_numbers([0, 25, 50, 75, 100], offsets))
    errors = refused(open_set(packed))
    assert len(errors) == 4
    assert len(str(errors[0])) < 400


@pytest.mark.parametrize("sides", [[2**31 - 1, 2], [0, 2], [-2, 2], [2**21, 2], [3, 2]])
def test_forged_sides_of_raw_images_are_refused(tmp_path: Path, sides: list[int]) -> None:
    path = shutil.copytree(GOLDEN / "raw", tmp_path / "set")
    forge(path, "shard-00000.arrow", replace_numbers([1, 2, 3], [1, sides[0], 3], "<i4"))
    dataset = PackedDataset(path)
    with pytest.raises(PackedDataError, match=f"record 1 has 12 bytes for {sides[0]} x 2 pixels"):
        dataset[0]


@given(
    text=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(json.dumps)
    | st.text()
    | st.binary()
)
def test_no_text_is_taken_for_an_index(text: str | bytes) -> None:
    encoded = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    with pytest.raises(PackedDataError, match="index.json"):
        manifest.parse_index("set", encoded)
    if encoded.startswith(b"{"):
        forged = b'{"format": "fastload-packed", "version": 1, ' + encoded[1:]
        with pytest.raises(PackedDataError, match="index.json"):
            manifest.parse_index("set", with_checksum(forged))
