"""The index of a set: which Arrow files it has, what is in them, how it was written. No set opens without it.

    SET/index.json         written last, atomically
    SET/shard-00000.arrow  Arrow IPC file format, uncompressed
    SET/rejected.txt       the inputs that were left out, if any: name, tab, reason

An index has only one valid form, which ends with a CRC-32 of the text before it. So any change is noticed.

A set has a mode. In a set of mode "columns", a shard is one record batch of whole columns, without nulls; see
`fastload.store`. Sets of the other modes hold payloads, such as JPEGs; see `fastload.datasets.packed`.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow as pa

from fastload._kit.disk import open_file
from fastload.errors import PackedDataError
from fastload.remote.files import apart, is_url, read_whole

FORMAT = "fastload-packed"
VERSION = 1
INDEX = "index.json"
REJECTED = "rejected.txt"
Mode = Literal["encoded", "jpeg", "raw", "columns"]
MODES: tuple[Mode, ...] = ("encoded", "jpeg", "raw", "columns")
_TAIL = re.compile(r',\n "checksum": \d+\n}\n\Z')


@dataclass(frozen=True)
class Shard:
    """The entry of a shard in the index.

    Attributes:
        name: the name of the file.
        rows, bytes: the number of its rows and bytes.
        checksum: the CRC-32 of all bytes of the file except payloads. None, only in mode "columns", if not computed.
        payload: (offset, length) of each record batch's payloads in the file, in bytes; none in mode "columns".
        node: the name of the node that has the file, in mode "columns"; "" if all nodes see it.
        fingerprint: the fingerprint of its source; "" if `fastload.store.prepare` did not write it.
    """

    name: str
    rows: int
    bytes: int
    checksum: int | None
    payload: tuple[tuple[int, int], ...] = ()
    node: str = ""
    fingerprint: str = ""

    @classmethod
    def of(cls, about: dict[str, Any]) -> Shard:
        """Return the shard that a note describes, as JSON values of `asdict`."""
        return cls(**{**about, "payload": tuple((at, size) for at, size in about["payload"])})


@dataclass(frozen=True)
class Index:
    """The content of an index: what a set is.

    Attributes:
        mode: what its shards hold.
        rows: the number of records or rows of all shards.
        classes: class names in the order of their numbers; () if labels are not class numbers.
        schema: the name and the Arrow type of each column.
        made: how the set was written.
        shards: the shards, in the order of their rows.
        id: in mode "columns", the content's name: sets with the same id have the same rows in the same order.
    """

    mode: Mode
    rows: int
    classes: tuple[str, ...]
    schema: tuple[tuple[str, str], ...]
    made: dict[str, Any]
    shards: tuple[Shard, ...]
    id: str = ""


def described(schema: pa.Schema) -> tuple[tuple[str, str], ...]:
    """Return the name and the type of each column, as the index stores them."""
    return tuple((field.name, str(field.type)) for field in schema)


def expect_size(path: str, shard: Shard, size: int) -> None:
    """Raise `PackedDataError` if the file of a shard is empty, or does not have the size that the index says."""
    reason = "the file is empty"
    if size != shard.bytes:
        reason = f"the file has {size:,} bytes, expected {shard.bytes:,}. It was cut off or changed"
    if size != shard.bytes or not size:
        raise PackedDataError(path, reason, shard=shard.name)


def shard_name(number: int) -> str:
    """Return the file name of shard `number`."""
    return f"shard-{number:05d}.arrow"


def dump_index(index: Index) -> bytes:
    """Return the encoded index: JSON that ends with the CRC-32 of the text before its checksum."""
    about = {"format": FORMAT, "version": VERSION, **_without_empty(asdict(index), "id")}
    shards = [
        json.dumps(_without_empty(shard, "node", "fingerprint")) for shard in about.pop("shards")
    ]
    text = json.dumps(about, indent=1).removesuffix("\n}")
    text += ',\n "shards": [\n  ' + ",\n  ".join(shards) + "\n ]"
    return f'{text},\n "checksum": {zlib.crc32(text.encode())}\n}}\n'.encode()


def _without_empty(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value or name not in names}


def read_index(path: str) -> Index:
    """Read and check the index of the set at `path`.

    Raises FileNotFoundError if the index is missing, `PackedDataError` if it is damaged or of another version.
    """
    name = os.path.join(path, INDEX)
    try:
        if is_url(name):
            encoded = apart(read_whole, name)
        else:
            with open_file(name) as file:
                encoded = file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            2,
            "the folder holds no set. If packing or copying was stopped, delete the folder, and do it again",
            name,
        ) from None
    return parse_index(path, encoded)


def parse_index(path: str, encoded: bytes) -> Index:
    """Return the index that `encoded` holds. Raises `PackedDataError` if it does not hold a valid one."""

    def fail(reason: str) -> PackedDataError:
        return PackedDataError(path, f"{INDEX} {reason}")

    try:
        text = encoded.decode()
        about = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise fail(f"is not JSON: it was damaged or cut off ({error})") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise fail(f'has no "format": "{FORMAT}": this is not a packed set, or a damaged one')
    version = about.get("version")
    if type(version) is int and version > VERSION:
        raise fail(
            f"has format version {version}, but this fastload reads version {VERSION}. Use a newer fastload"
        )
    tail = _TAIL.search(text)
    body = text[: tail.start()] if tail else ""
    if zlib.crc32(body.encode()) != about.pop("checksum", None):
        raise fail("does not match the checksum at its end. It was damaged, or changed by hand")
    if type(version) is not int or version != VERSION:
        raise fail(f"has version {version!r}: expected {VERSION}")
    try:
        return _index(about)
    except (KeyError, TypeError, ValueError) as error:
        raise fail(f"is not as expected: {error}") from error


def _index(about: dict[str, Any]) -> Index:
    _expect(about["mode"] in MODES, f"mode {about['mode']!r}")
    _expect(_are(about["classes"], str), "classes that are not a list of names")
    _expect(isinstance(about["made"], dict), 'a "made" that is not an object')
    schema = tuple((name, kind) for name, kind in about["schema"])
    _expect(
        all(_are(list(field), str) for field in schema),
        "a schema that is not a list of names and types",
    )
    of_columns = about["mode"] == "columns"
    shards = tuple(_shard(s, number, of_columns) for number, s in enumerate(about["shards"]))
    rows = sum(shard.rows for shard in shards)
    _expect(about["rows"] == rows > 0, f"{about['rows']!r} rows, but its shards have {rows}")
    name = about.get("id", "")
    _expect(isinstance(name, str) and bool(name) == of_columns, f"the id {name!r}")
    classes = tuple(about["classes"])
    return Index(about["mode"], rows, classes, schema, about["made"], shards, name)


def _shard(about: dict[str, Any], number: int, of_columns: bool) -> Shard:
    counts = {name: about[name] for name in ("rows", "bytes", "checksum")}
    for name, value in counts.items():
        absent = value is None and name == "checksum" and of_columns
        whole = type(value) is int and 0 <= value < 2**62
        _expect(absent or whole, f"{name} {value!r} of shard {number}")
    _expect(about["name"] == shard_name(number), f"{about['name']!r} as the name of shard {number}")
    end = 0
    for extent in about["payload"]:
        _expect(_are(extent, int) and len(extent) == 2, f"the extent {extent!r} in shard {number}")
        start, length = extent
        _expect(
            end <= start and 0 <= length <= counts["bytes"] - start,
            f"the extent {extent!r} in shard {number}, outside its file or in another one",
        )
        end = start + length
    batches = len(about["payload"])
    good = not batches if of_columns else 0 < batches <= counts["rows"]
    _expect(good and counts["rows"] > 0, f"a shard {number} without records")
    texts = {name: about.get(name, "") for name in ("node", "fingerprint")}
    for name, text in texts.items():
        _expect(isinstance(text, str) and (of_columns or not text), f"the {name} {text!r}")
    names = ("name", "payload")
    return Shard.of({**counts, **texts, **{name: about[name] for name in names}})


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _expect(good: bool, found: str) -> None:
    if not good:
        raise ValueError(f"it has {found}")
