"""A peer of a server that lies: `liar.py parameters|store ADDRESS`.

Each line of the input, "malformed SEED COUNT" or "lies SEED COUNT", is answered with a line of JSON: how often each
status came. Malformed messages are made without Arrow's writer, which would not make them. Lies are well-formed calls
whose content is false. None may change what other clients have: a tensor for a parameter of theirs is never right.
"""

from __future__ import annotations

import json
import random
import re
import struct
import sys
from collections import Counter
from itertools import count
from typing import Any

import grpc
import pyarrow as pa
import torch

from fastload.parameters.wire import Encoded
from tests.forged import BYTES, of_too_many_rows, parts_of

SERVICE = "/arrow.flight.protocol.FlightService/"
METHODS = (
    "DoGet", "DoAction", "GetFlightInfo", "GetSchema", "ListFlights", "ListActions", "DoPut", "DoExchange", "Handshake",
    "PollFlightInfo",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 7, 63, 64, 65, 4096, 2**20 + 12_345, 2**27, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1,
)  # fmt: skip
ANYTHING: list[Any] = [
    None, True, False, 0, -1, -2, 3.5, float("nan"), float("inf"), 2**62 + 1, 10**12, 2**70, -(2**70), 10**300,
    "", "x", "w", "t", "\0", "../s", "\ud800",
    [], {}, [[]], [None], ["x", 1], [["", 0]], [["ghost", 1]], {"x": 1}, {"w": {}}, [5] * 50,
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


DESCRIPTOR = field(1, b"\x08\x02" + field(2, b"call"))  # a command


def data(head: bytes, told: bytes, body: bytes) -> bytes:
    """Return a message of a stream of Flight."""
    return field(2, head) + field(3, told) + field(1000, body)


def schema_head(schema: pa.Schema) -> bytes:
    return parts_of(schema.serialize())[0]


SCHEMA_HEAD = schema_head(BYTES)
OTHER_KINDS = [
    pa.uint8(), pa.int64(), pa.utf8(), pa.list_(pa.uint8()), pa.dictionary(pa.int8(), pa.utf8()), pa.null(),
]  # fmt: skip
OTHER_HEADS = [schema_head(pa.schema([pa.field("bytes", kind)])) for kind in OTHER_KINDS]


def batch(content: bytes, **options: Any) -> tuple[bytes, bytes]:
    """Return the metadata and the body of a record batch with these bytes."""
    column = pa.Array.from_buffers(pa.uint8(), len(content), [None, pa.py_buffer(content)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, BYTES, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([column], schema=BYTES))
    reader = pa.ipc.MessageReader.open_stream(sink.getvalue())
    reader.read_next_message()  # the schema
    return parts_of(reader.read_next_message().serialize())


# ---- malformed messages ----


def flipped(draw: random.Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.randint(1, 8)):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randint(0, len(content))]


def renumbered(draw: random.Random, content: bytes) -> bytes:
    """Return the content with another number at a place where Arrow keeps one."""
    changed = bytearray(content)
    if len(changed) >= 8:
        place = draw.randrange((len(changed) - 4) // 4) * 4
        struct.pack_into("<q", changed, min(place, len(changed) - 8), draw.choice(NUMBERS))
    return bytes(changed)


def damaged(draw: random.Random, content: bytes) -> bytes:
    return draw.choice((flipped, cut, renumbered))(draw, content)


def malformed_messages(draw: random.Random) -> list[bytes]:
    """Return the messages of a stream, one of which is malformed."""
    content = b"\1" * draw.choice((0, 61, 64, 1000))
    told = json.dumps({"method": "pull", "arguments": {"version": -1}}).encode()
    said = struct.pack("<q", len(content)) + told
    schema, (head, body) = SCHEMA_HEAD, batch(content)
    kind = draw.randrange(10)
    if kind == 0:
        rows = draw.choice((65, 4096, 2**20 + 12_345, 2**27 + 12_345, 2**40))
        head, body = of_too_many_rows(rows)
        tensor = {"tensor: dtype, shape, first byte": ["uint8", [rows], 0]}
        told = json.dumps({"method": "pull", "arguments": {"version": tensor}}).encode()
        said = struct.pack("<q", rows) + told + b" " * draw.randrange(64)  # some bodies are aligned
    elif kind == 1:
        head = damaged(draw, head)
    elif kind == 2:
        body = damaged(draw, body + draw.randbytes(draw.randint(0, 99)))
    elif kind == 3:
        said = damaged(draw, said)
    elif kind == 4:
        said = struct.pack("<q", draw.choice(NUMBERS)) + told
    elif kind == 5:
        schema = damaged(draw, schema)
    elif kind == 6:
        schema = draw.choice(OTHER_HEADS)
    elif kind == 7:
        head, body = batch(content or b"\1" * 99, compression=draw.choice(("zstd", "lz4")))
        body = damaged(draw, body)
    elif kind == 8:
        said = struct.pack("<q", len(content)) + draw.choice(
            (b"[" * 100_000, b"{}", b"5", b"\xff", b'{"a":' * 9999)
        )
    messages = [DESCRIPTOR + field(2, schema), data(head, said, body)]
    if kind == 9:
        messages = draw.choice((
            messages[1:],
            [messages[0], *messages],
            [DESCRIPTOR + field(3, said)],
            [messages[0], field(3, said)],
            [messages[0], field(2, head)],
            [flipped(draw, message) for message in messages],
            [draw.randbytes(draw.randint(0, 200)) for _ in range(3)],
        ))  # fmt: skip
    return messages


def malformed(draw: random.Random, kind: str) -> tuple[str, list[bytes]]:
    if kind == "parameters" and draw.random() < 0.9:
        return "DoExchange", malformed_messages(draw)
    method = draw.choice(METHODS)
    _, messages = lie_to_store(draw)
    return method, [
        damaged(draw, draw.choice((*messages, *malformed_messages(draw), DESCRIPTOR, b"")))
    ]


# ---- well-formed lies ----


IDS, ROWS = torch.tensor([3, 5]), torch.ones(2, 2)
WRONG: list[Any] = [
    torch.full((3,), torch.nan), torch.tensor([1.0, torch.inf, 1.0]), torch.full((3,), 1e300, dtype=torch.float64),
    torch.ones(4), torch.ones(1, 3), torch.ones(()), torch.ones(0), torch.ones(2**16), torch.ones(2, 3),
    *(torch.ones(3, dtype=kind) for kind in (torch.int64, torch.bool, torch.uint8, torch.complex64)),
    IDS.int(), IDS.double(), IDS[:, None], IDS[:1], torch.tensor([3, 3]), ROWS * torch.nan, ROWS.long(),
    1.0, None, [1.0] * 3,
]  # fmt: skip
"""Right neither for a parameter of other clients, nor as ids or rows for their table, which has rows of 2 numbers."""


def numbers(draw: random.Random) -> Any:
    return draw.choice((-1, 0, 1, 2, 40, 10**12, 2**62, draw.choice(ANYTHING)))


def lie(draw: random.Random, number: int) -> tuple[Any, Any]:
    """Return the method and the arguments of a call."""
    worker = draw.choice(("liar", f"liar-{number}", "ghost", draw.choice(ANYTHING)))
    wrong = {"w": draw.choice(WRONG)} if draw.random() < 0.5 else {}
    right = {"v": torch.ones(3)} if draw.random() < 0.5 else {}
    pair = draw.choice(((draw.choice(WRONG), ROWS), (IDS, draw.choice(WRONG)), IDS[:1]))
    rows = {} if wrong else {"t": pair}
    gradients: Any = {
        "version": numbers(draw),
        "lr": draw.choice((None, 1.0)),
        "dense": right | wrong,
        "rows": rows,
    }
    about = {"worker": worker, "sequence": numbers(draw)}
    ids, values = draw.choice(((IDS.int(), ROWS), (IDS, torch.ones(2, 3))))
    table = {"name": draw.choice(("t", "", "u")), "dim": draw.choice((3, 0, 2**40, "2", None))}
    calls: dict[Any, Any] = {
        "hello": {},
        "meet": {"runs": draw.choice(([], ["x"], [worker], draw.choice(ANYTHING)))},
        "initialise": {"values": draw.choice(({"w": torch.ones(3)}, {"w": 5}, 5)), "version": numbers(draw)},
        "add_tables": {"infos": draw.choice(([table], [table, 5], 5))},
        "pull": {"version": numbers(draw)},
        "rows": {"table": draw.choice(("t", "u")), "ids": draw.choice((torch.arange(9) - 4, ids, values, 5))},
        "set_rows": {"table": draw.choice(("t", "u")), "ids": ids, "values": values},
        "push": {**about, "gradients": gradients, "fresh": draw.choice((True, False, 5)), "step": numbers(draw)},
        "save": {"version": numbers(draw)},
        "close": {},
    }  # fmt: skip
    method: Any = draw.choice([*calls])
    if draw.random() < 0.02:
        method, calls = (
            "checkpoint",
            {"checkpoint": {"version": numbers(draw), "step": numbers(draw)}},
        )  # writes files
    arguments = calls[method]
    twist = draw.random()
    if twist < 0.1:
        arguments = {name: value for name, value in arguments.items() if draw.random() < 0.5}
    elif twist < 0.2:
        arguments = {
            **arguments,
            draw.choice(("more", "self", "run")): draw.choice(ANYTHING),
        }
    elif twist < 0.3 and method == "push":
        other = {draw.choice([*gradients]): draw.choice(ANYTHING)}
        arguments = {**arguments, "gradients": gradients | other | {"dense": {"w": torch.ones(4)}}}
    elif twist < 0.35:
        method = draw.choice(("__init__", "answer", "lock", "_stage", *ANYTHING))
    elif twist < 0.4:
        arguments = draw.choice(ANYTHING)
    return method, arguments


def false_tensor(draw: random.Random, text: bytes) -> bytes:
    """Return the JSON of a call, one of whose tensors lies elsewhere."""
    found = [*re.finditer(rb'\["\w+", \[[\d, ]*\], \d+\]', text)]
    if not found:
        return text
    place = draw.choice(found)
    entry = json.loads(place[0])
    numbers_and_names = (64, -64, 2**70, 5.5, None, "3", "float16", "quint8", "Tensor", "load")
    entry[draw.randrange(3)] = draw.choice(([-1], [2**62], [2**40], [], *numbers_and_names))
    text = text[: place.start()] + json.dumps(entry).encode() + text[place.end() :]
    # It may lie where it was, under another name: so no call with it is one that is right.
    return text.replace(b'"arguments": {', b'"arguments": {"more": 1, ', 1)


def lie_to_parameters(draw: random.Random, number: int) -> tuple[str, list[bytes]]:
    messages = [DESCRIPTOR + field(2, SCHEMA_HEAD)]
    for _ in range(draw.randint(1, 4)):
        method, arguments = lie(draw, number)
        encoded = Encoded({"method": method, "arguments": arguments})
        text = false_tensor(draw, encoded.text) if draw.random() < 0.2 else encoded.text
        head = struct.pack("<q", encoded.size) + text
        for found in encoded.batches():
            metadata, body = parts_of(found.serialize())
            messages.append(data(metadata, head, body))
            head = b""
    return "DoExchange", messages


def lie_to_store(draw: random.Random) -> tuple[str, list[bytes]]:
    """Return a method of Flight, and its one message."""
    name = draw.choice(("s", "t", "../s", "s/../s", ".", "", "index.json", draw.choice(ANYTHING)))
    part = draw.choice(
        ("shard-00000.arrow", "index.json", "../s/shard-00000.arrow", draw.choice(ANYTHING))
    )
    ticket = {"set": name, "part": part, "file": draw.choice((True, False, *ANYTHING))}
    text = json.dumps(draw.choice((ticket, ticket, ticket, draw.choice(ANYTHING)))).encode()
    path = b"".join(
        field(3, str(each).encode(errors="replace")) for each in (name, part)[: draw.randint(0, 2)]
    )
    return draw.choice((
        ("DoGet", [field(1, text)]),
        ("DoGet", [field(1, draw.choice((b"", b"[" * 100_000, b"\xff\xfe", b"5")))]),
        ("DoAction", [field(1, draw.choice((b"set", b"", b"other"))) + field(2, str(name).encode(errors="replace"))]),
        ("DoAction", [field(1, b"set") + field(2, draw.choice((b"\xff", b"s" * 100_000, b"s\0")))]),
        ("GetFlightInfo", [b"\x08\x01" + path]),
        ("GetFlightInfo", [b"\x08\x02" + field(2, text)]),
        ("GetSchema", [b"\x08\x01" + path]),
        ("ListFlights", [field(1, text)]),
        ("DoExchange", [DESCRIPTOR + field(2, SCHEMA_HEAD)]),
        ("DoPut", [DESCRIPTOR + field(2, SCHEMA_HEAD)]),
    ))  # fmt: skip


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
    kind, address = sys.argv[1:]
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(address.removeprefix("grpc://"), options=unlimited) as channel:
        number = count()
        for line in sys.stdin:
            what, seed, times = line.split()
            draw = random.Random(f"{kind} {what} {seed}")
            found: Counter[str] = Counter()
            for _ in range(int(times)):
                if what == "malformed":
                    method, messages = malformed(draw, kind)
                elif kind == "parameters":
                    method, messages = lie_to_parameters(draw, next(number))
                else:
                    method, messages = lie_to_store(draw)
                found[sent(channel, method, messages)] += 1
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
