"""A peer of a server that lies: `liar.py ADDRESS`.

Each line of the input, "malformed SEED COUNT" or "lies SEED COUNT", is answered with a line of JSON: how often each
status came. Malformed messages are made without Arrow's writer, which would not make them. Lies are well-formed calls
whose content is false. None may change what other clients have: a tensor for a parameter of theirs is never right.
"""

from __future__ import annotations

import json
import random
import struct
import sys
from collections import Counter
from typing import Any

import grpc
import pyarrow as pa
import torch

from fastload.parameters.flight import _CALL
from fastload.parameters.wire import Encoded
from tests.forged import BYTES, of_too_many_rows, parts_of

SERVICE = "/arrow.flight.protocol.FlightService/"
METHODS = (
    "DoGet", "DoAction", "GetFlightInfo", "GetSchema", "ListFlights", "ListActions", "DoPut", "DoExchange", "Handshake",
)  # fmt: skip
NUMBERS = (0, 1, -1, 63, 64, 65, 4096, 2**20 + 12_345, 2**27, 2**31, 2**40, 2**62, 2**63 - 1)
ANYTHING: list[Any] = [
    None, True, 0, -1, -2, 3.5, float("nan"), float("inf"), 2**62 + 1, 10**12, -(2**70), 10**300,
    "", "x", "w", "t", "\0", "../s", "\ud800", [], {}, [[]], [None], ["x", 1], {"x": 1}, {"w": {}}, [5] * 50,
]  # fmt: skip


# ---- messages of gRPC ----


def field(number: int, content: bytes) -> bytes:
    """Return a field of a protobuf message."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])


DESCRIPTOR = field(1, b"\x08\x02" + field(2, _CALL.command))  # a command


def data(head: bytes, told: bytes, body: bytes) -> bytes:
    """Return a message of a stream of Flight."""
    return field(2, head) + field(3, told) + field(1000, body)


def schema_head(schema: pa.Schema) -> bytes:
    return parts_of(schema.serialize())[0]


SCHEMA_HEAD = schema_head(BYTES)
OTHER_KINDS = (pa.int64(), pa.utf8(), pa.list_(pa.uint8()), pa.dictionary(pa.int8(), pa.utf8()))
OTHER_HEADS = [schema_head(pa.schema([pa.field("bytes", kind)])) for kind in OTHER_KINDS]


# ---- malformed messages ----


def damaged(draw: random.Random, content: bytes) -> bytes:
    """Return the content cut, with other bits, or with another number at a place where Arrow keeps one."""
    changed, kind = bytearray(content), draw.randrange(3)
    if kind == 0 or len(changed) < 8:
        return content[: draw.randint(0, len(content))]
    for _ in range(draw.randint(1, 8) if kind == 1 else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    if kind == 2:
        place = draw.randrange((len(changed) - 4) // 4) * 4
        struct.pack_into("<q", changed, min(place, len(changed) - 8), draw.choice(NUMBERS))
    return bytes(changed)


def malformed_messages(draw: random.Random) -> list[bytes]:
    """Return the messages of a stream, one of which is malformed."""
    content = b"\1" * draw.choice((0, 61, 64, 1000))
    told = json.dumps({"method": "pull", "arguments": {"version": -1}}).encode()
    encoded = pa.RecordBatch.from_arrays([pa.array(content, pa.uint8())], schema=BYTES)
    parts = {
        "schema": SCHEMA_HEAD,
        "said": struct.pack("<q", len(content)) + told,
        **dict(zip(("head", "body"), parts_of(encoded.serialize()), strict=True)),
    }
    kind = draw.choice([*parts, "rows", "size", "kind", "text", "order"])
    if kind in parts:
        parts[kind] = damaged(draw, parts[kind])
    elif kind == "rows":
        rows = draw.choice((65, 4096, 2**20 + 12_345, 2**27 + 12_345, 2**40))
        parts["head"], parts["body"] = of_too_many_rows(rows)
        tensor = {"tensor: dtype, shape, first byte": ["uint8", [rows], 0]}
        told = json.dumps({"method": "pull", "arguments": {"version": tensor}}).encode()
        parts["said"] = struct.pack("<q", rows) + told + b" " * draw.randrange(64)
    elif kind == "size":
        parts["said"] = struct.pack("<q", draw.choice(NUMBERS)) + told
    elif kind == "kind":
        parts["schema"] = draw.choice(OTHER_HEADS)
    elif kind == "text":
        texts = (b"[" * 100_000, b"{}", b"5", b"\xff", b'{"a":' * 9999)
        parts["said"] = struct.pack("<q", len(content)) + draw.choice(texts)
    first = DESCRIPTOR + field(2, parts["schema"])
    messages = [first, data(parts["head"], parts["said"], parts["body"])]
    if kind == "order":
        said = DESCRIPTOR + field(3, parts["said"])
        noise = [draw.randbytes(draw.randint(0, 200)) for _ in range(3)]
        messages = draw.choice((messages[1:], [first, *messages], [said], [first, said], noise))
    return messages


def malformed(draw: random.Random) -> tuple[str, list[bytes]]:
    if draw.random() < 0.9:
        return "DoExchange", malformed_messages(draw)
    messages = [*malformed_messages(draw), DESCRIPTOR, b""]
    return draw.choice(METHODS), [damaged(draw, draw.choice(messages))]


# ---- well-formed lies ----


IDS, ROWS = torch.tensor([3, 5]), torch.ones(2, 2)
WRONG: list[Any] = [
    torch.full((3,), torch.nan), torch.tensor([1.0, torch.inf, 1.0]), torch.full((3,), 1e300, dtype=torch.float64),
    torch.ones(4), torch.ones(1, 3), torch.ones(()), torch.ones(0), torch.ones(2**16), torch.ones(2, 3),
    *(torch.ones(3, dtype=kind) for kind in (torch.int64, torch.bool, torch.uint8, torch.complex64)),
    IDS.int(), IDS.double(), IDS[:, None], IDS[:1], torch.tensor([3, 3]), ROWS * torch.nan, ROWS.long(),
    None, [1.0] * 3,
]  # fmt: skip
"""Right neither for a parameter of other clients, nor as ids or rows for their table, which has rows of 2 numbers."""


def lie(draw: random.Random) -> tuple[Any, Any]:
    """Return the method and the arguments of a call."""

    def number() -> Any:
        return draw.choice((-1, 0, 1, 2, 40, 10**12, 2**62, draw.choice(ANYTHING)))

    worker = draw.choice(("liar", "ghost", draw.choice(ANYTHING)))
    wrong = {"w": draw.choice(WRONG)} if draw.random() < 0.5 else {}
    right = {"v": torch.ones(3)} if draw.random() < 0.5 else {}
    pair = draw.choice(((draw.choice(WRONG), ROWS), (IDS, draw.choice(WRONG)), IDS[:1]))
    gradients: Any = {"version": number(), "lr": draw.choice((None, 1.0)), "dense": right | wrong}
    gradients["rows"] = {} if wrong else {"t": pair}
    if draw.random() < 0.1:
        gradients |= {
            draw.choice([*gradients]): draw.choice(ANYTHING),
            "dense": {"w": torch.ones(4)},
        }
    ids, values = draw.choice(((IDS.int(), ROWS), (IDS, torch.ones(2, 3))))
    table = {"name": draw.choice(("t", "", "u")), "dim": draw.choice((3, 0, 2**40, "2", None))}
    named = {"table": draw.choice(("t", "u")), "ids": ids}
    calls: dict[Any, Any] = {
        "hello": {},
        "meet": {"runs": draw.choice(([], ["x"], [worker], draw.choice(ANYTHING)))},
        "initialise": {"values": draw.choice(({"w": torch.ones(3)}, {"w": 5}, 5)), "version": number()},
        "add_tables": {"infos": draw.choice(([table], [table, 5], 5))},
        "pull": {"version": number()},
        "rows": {**named, "ids": draw.choice((torch.arange(9) - 4, ids, values, 5))},
        "set_rows": {**named, "values": values},
        "push": {"gradients": gradients, "step": number()},
        draw.choice(("save", "close", "__init__", "answer", "lock", "_stage", *map(str, ANYTHING))): {},
    }  # fmt: skip
    method: Any = draw.choice([*calls])
    if draw.random() < 0.02:
        method, calls = (
            "checkpoint",
            {"checkpoint": {"version": number(), "step": number()}},
        )  # which writes files
    arguments, twist = calls[method], draw.random()
    if twist < 0.1:
        arguments = {name: value for name, value in arguments.items() if draw.random() < 0.5}
    elif twist < 0.2:
        arguments = {**arguments, draw.choice(("more", "self", "run")): draw.choice(ANYTHING)}
    elif twist < 0.25:
        arguments = draw.choice(ANYTHING)
    return method, arguments


def well_formed_lie(draw: random.Random) -> tuple[str, list[bytes]]:
    messages = [DESCRIPTOR + field(2, SCHEMA_HEAD)]
    method, arguments = lie(draw)
    encoded = Encoded({"method": method, "arguments": arguments})
    head = struct.pack("<q", encoded.size) + encoded.text
    for found in encoded.batches():
        metadata, body = parts_of(found.serialize())
        messages.append(data(metadata, head, body))
        head = b""
    return "DoExchange", messages


# ---- the program ----


def sent(channel: grpc.Channel, method: str, messages: list[bytes]) -> str:
    """Send messages, read all answers, and return the status."""
    call = channel.stream_stream(SERVICE + method, lambda raw: raw, lambda raw: raw)
    try:
        for _ in call(iter(messages), timeout=60):
            pass
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def main() -> None:
    (address,) = sys.argv[1:]
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address.removeprefix("grpc://"), options=unlimited) as channel:
        for line in sys.stdin:
            what, seed, times = line.split()
            draw = random.Random(f"parameters {what} {seed}")
            making = malformed if what == "malformed" else well_formed_lie
            found: Counter[str] = Counter()
            for _ in range(int(times)):
                found[sent(channel, *making(draw))] += 1
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
