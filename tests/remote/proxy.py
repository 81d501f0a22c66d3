"""A proxy between a client and a server of S3, which makes faults, delays answers, and counts what was asked.

It is an asyncio server in one thread: a delayed answer holds no other one up. Each connection of a client has one of
its own to the server. A request goes on as it came, so its signature stays right.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self, TypeVar
from urllib.parse import unquote

from tests.remote.servers import BUCKET, Server, signed

PATIENCE_S = 10.0
T = TypeVar("T")
Kind = Literal["slow_down", "too_many", "cut", "stall", "wrong_range", "whole", "refuse"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request.

    - slow_down: 503 with the code SlowDown. too_many: 429 with `Retry-After: seconds`.
    - cut: half the body, then the connection ends. stall: half the body, and the rest after `seconds`.
    - wrong_range: other bytes than those asked for, and a Content-Range that says so. whole: 200 with the whole object.
      Both leave a request without a range as it is.
    - refuse: the connection is reset before an answer.
    """

    kind: Kind
    seconds: float = 0.0


@dataclass(frozen=True)
class Request:
    """A request that arrived. `attempt` counts the same one: 0 is the first. `stop` is exclusive, None the end."""

    method: str
    key: str
    query: str
    start: int | None
    stop: int | None
    attempt: int
    moment: float
    headers: dict[str, str] = field(repr=False)

    @property
    def of_object(self) -> bool:
        """Whether it asks for the bytes of an object, and not for a list or a size."""
        return self.method == "GET" and bool(self.key)


Plan = Callable[[Request], Fault | None]


def no_faults(_: Request) -> Fault | None:
    """Let all go well."""
    return None


class Proxy:
    """Stands before a server. `plan` says what goes wrong, and `latency_s` how late each answer begins.

    `requests` has all that arrived, `most_in_flight` how many objects were being asked for at once.
    """

    def __init__(self, server: Server) -> None:
        self.plan: Plan = no_faults
        self.latency_s = 0.0
        self.requests: list[Request] = []
        self.faults: Counter[str] = Counter()
        self.most_in_flight = 0
        self.bytes_sent = 0
        self.gave_up = False
        self._server = server
        self._in_flight = 0
        self._attempts: Counter[tuple[str, str, str]] = Counter()
        self._arrived = threading.Condition()
        self._together = 0
        self._gathered = 0
        self._opened = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listener = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=512))
        self.port: int = self._listener.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def objects(self, key: str | None = None) -> list[tuple[str, int | None, int | None]]:
        """Return key, start and stop of each request for bytes of objects, or of the object `key`, in order."""
        found = [(x.key, x.start, x.stop) for x in list(self.requests) if x.of_object]
        return [x for x in found if key is None or x[0] == key]

    def forget(self) -> None:
        """Count anew."""
        self.requests.clear()
        self.faults.clear()
        self._attempts.clear()
        self.most_in_flight = self.bytes_sent = 0

    def hold(self, together: int = 1 << 30) -> None:
        """Hold all answers with bytes of objects until so many were asked for at once, or `release`.

        After ten seconds they go, and `gave_up` is true. So a client that asks for fewer fails its test instead of
        hanging.
        """
        self._together, self._gathered, self.gave_up = together, 0, False
        self._opened = asyncio.Event()

    def release(self) -> None:
        """Let the answers go that are held, and all later ones."""
        self._together = 0
        self._loop.call_soon_threadsafe(self._opened.set)

    def wait_for(self, count: int, seconds: float = PATIENCE_S) -> bool:
        """Wait until `count` objects were asked for, and say whether they were."""
        with self._arrived:
            return self._arrived.wait_for(lambda: len(self.objects()) >= count, seconds)

    def close(self) -> None:
        """End all connections and the thread."""
        if self._loop.is_closed():
            return

        async def end() -> None:
            self._listener.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

        self._do(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, work: Coroutine[object, object, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    # ---- in the loop's thread ----

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        upstream: list[asyncio.StreamWriter] = []
        try:
            source, sink = await asyncio.open_connection("127.0.0.1", self._server.port)
            upstream.append(sink)
            _send_at_once(writer)
            _send_at_once(sink)
            while await self._answer(reader, writer, source, sink):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one of the two ended. So does the other.
        finally:
            self._tasks.discard(task)
            for end in (writer, *upstream):
                end.close()
            for end in (writer, *upstream):
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
    ) -> bool:
        """Answer one request. Return whether the connection goes on."""
        head = await reader.readuntil(b"\r\n\r\n")
        if _headers(head).get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(_headers(head).get("content-length", 0)))
        request = self._note(head)
        self._in_flight += request.of_object
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            fault = self.plan(request)
            if fault is not None:
                self.faults[fault.kind] += 1
            if request.of_object:
                await self._gate()
            if self.latency_s:
                await asyncio.sleep(self.latency_s)
            if fault is not None and fault.kind in ("refuse", "slow_down", "too_many"):
                return await _refuse(writer, fault)
            sink.write(self._changed(head, request, fault) + body)
            answer, content = await _response(source, request.method)
            self.bytes_sent += len(content) if request.of_object else 0
            return await _send(writer, answer, content, fault)
        finally:
            self._in_flight -= request.of_object

    def _note(self, head: bytes) -> Request:
        """Add a request to those that arrived."""
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ")
        path, _, query = target.partition("?")
        headers = _headers(head)
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        start = int(asked[1]) if asked else None
        stop = int(asked[2]) + 1 if asked and asked[2] else None
        key = unquote(path).removeprefix(f"/{BUCKET}").removeprefix("/")
        same = (method, target, headers.get("range", ""))
        request = Request(
            method, key, query, start, stop, self._attempts[same], time.monotonic(), headers
        )
        self._attempts[same] += 1
        with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()
        return request

    async def _gate(self) -> None:
        self._gathered += 1
        if self._gathered >= self._together:
            self._opened.set()
        try:
            await asyncio.wait_for(self._opened.wait(), PATIENCE_S)
        except TimeoutError:
            self.gave_up = True
            self._opened.set()

    def _changed(self, head: bytes, request: Request, fault: Fault | None) -> bytes:
        """Return the request's head as the server gets it: signed anew where it asks for other bytes."""
        if fault is None or fault.kind not in ("wrong_range", "whole") or request.start is None:
            return head
        host = f"127.0.0.1:{self._server.port}"
        path = head.split(b" ", 2)[1].decode()
        by = -1 if request.start else 1
        stop = "" if request.stop is None else request.stop - 1 + by
        other = {"range": f"bytes={request.start + by}-{stop}"} if fault.kind != "whole" else {}
        headers = signed("GET", host, path, b"", other)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode()


def _send_at_once(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _headers(head: bytes) -> dict[str, str]:
    """Return the headers of a request or an answer, by their names in small letters."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.lower(): value.strip() for name, _, value in pairs}


async def _refuse(writer: asyncio.StreamWriter, fault: Fault) -> bool:
    """Answer without the server."""
    if fault.kind == "refuse":
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        return False
    slow = fault.kind == "slow_down"
    status = "503 Slow Down" if slow else "429 Too Many Requests"
    code = "SlowDown" if slow else "TooManyRequests"
    body = f"<Error><Code>{code}</Code><Message>Please reduce your request rate.</Message></Error>"
    retry = "" if slow else f"Retry-After: {fault.seconds:g}\r\n"
    length = f"Content-Type: application/xml\r\nContent-Length: {len(body)}"
    writer.write(f"HTTP/1.1 {status}\r\n{retry}{length}\r\n\r\n{body}".encode())
    await writer.drain()
    return True


async def _response(source: asyncio.StreamReader, method: str) -> tuple[bytes, bytes]:
    """Return head and body of the server's answer. A body in chunks gets a length instead."""
    head = await source.readuntil(b"\r\n\r\n")
    while head.split(b" ")[1] == b"100":  # the client had it of the proxy
        head = await source.readuntil(b"\r\n\r\n")
    headers = _headers(head)
    if method == "HEAD" or head.split(b" ")[1] in (b"204", b"304"):
        return head, b""
    if headers.get("transfer-encoding", "") != "chunked":
        return head, await source.readexactly(int(headers["content-length"]))
    body = bytearray()
    while size := int(await source.readline(), 16):
        body += await source.readexactly(size)
        await source.readexactly(2)
    await source.readexactly(2)
    length = b"Content-Length: %d\r\n" % len(body)
    return re.sub(rb"(?i)transfer-encoding: chunked\r\n", length, head), bytes(body)


async def _send(
    writer: asyncio.StreamWriter, head: bytes, body: bytes, fault: Fault | None
) -> bool:
    """Hand an answer on, with what goes wrong in its body."""
    half = len(body) // 2
    writer.write(head)
    if fault is not None and fault.kind in ("cut", "stall"):
        writer.write(body[:half])
        await writer.drain()
        if fault.kind == "cut":
            return False
        await asyncio.sleep(fault.seconds)
        body = body[half:]
    writer.write(body)
    await writer.drain()
    return True
