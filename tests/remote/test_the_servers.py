"""Promise: The servers and the proxy of these tests do what their names say, so that a red test is fastload's fault."""

from __future__ import annotations

import http.client
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.remote.proxy import Fault, Kind, Proxy
from tests.remote.servers import Bucket, Rclone, Server, content, path_of, signed


def get(port: int, key: str, span: tuple[int, int] | None = None) -> tuple[int, bytes]:
    """Return status and body of an object, or of bytes of it, asked for without any library."""
    host, path = f"127.0.0.1:{port}", path_of(key)
    more = {} if span is None else {"range": f"bytes={span[0]}-{span[1] - 1}"}
    connection = http.client.HTTPConnection(host, timeout=20)
    try:
        connection.request("GET", path, headers=signed("GET", host, path, b"", more))
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("key", ["plain", "deep/er/one", "a b+c", "100%41", "größe/名前.bin"])
def test_what_is_put_is_read(server: Server, key: str) -> None:
    body = Bucket(server).put(f"put/{key}", content(key, 1000))
    assert get(server.port, f"put/{key}") == (200, body)
    partial = (
        200 if isinstance(server, Rclone) else 206
    )  # rclone 1.75 names the range, and calls it the whole
    assert get(server.port, f"put/{key}", (10, 20)) == (partial, body[10:20])


def test_a_server_keeps_its_data_when_it_is_killed(tmp_path: Path) -> None:
    with Rclone(tmp_path) as server:
        body = Bucket(server).put("kept", content("kept", 100))
        server.kill()
        with pytest.raises(ConnectionRefusedError):
            get(server.port, "kept")
        server.start()
        assert get(server.port, "kept") == (200, body)


def test_the_proxy_hands_on_and_counts(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("counted", content("counted", 100))
    assert get(proxy.port, "counted") == (200, body)
    assert get(proxy.port, "counted", (2, 5)) == (206, body[2:5])
    assert proxy.objects("counted") == [("counted", None, None), ("counted", 2, 5)]
    assert proxy.bytes_sent == 103
    assert proxy.most_in_flight == 1
    proxy.forget()
    assert proxy.objects() == []


def test_the_proxy_asks_for_the_body_of_who_waits_for_that(weed: Server, proxy: Proxy) -> None:
    """As clients of botocore do."""
    host, path, body = f"127.0.0.1:{proxy.port}", path_of("expected"), b"a body"
    head = signed("PUT", host, path, body, {"expect": "100-continue"})
    head["content-length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as client:
        client.sendall(f"PUT {path} HTTP/1.1\r\n{lines}\r\n".encode())
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    assert get(weed.port, "expected") == (200, body)


@pytest.mark.parametrize("kind", ["slow_down", "too_many", "cut", "wrong_range", "whole", "refuse"])
def test_the_proxy_makes_a_fault(bucket: Bucket, proxy: Proxy, kind: Kind) -> None:
    body = bucket.put("faulty", content("faulty", 100))
    proxy.plan = lambda request: Fault(kind) if request.attempt == 0 else None
    try:
        found: object = get(proxy.port, "faulty", (10, 20))
    except (http.client.IncompleteRead, ConnectionResetError) as error:
        found = type(error).__name__
    if isinstance(found, tuple) and found[0] >= 400:
        found = found[0]
    expected = {
        "slow_down": 503,
        "too_many": 429,
        "cut": "IncompleteRead",
        "wrong_range": (206, body[9:19]),
        "whole": (200, body),
        "refuse": "ConnectionResetError",
    }
    assert found == expected[kind]
    assert get(proxy.port, "faulty", (10, 20)) == (206, body[10:20])
    assert proxy.faults == {kind: 1}


def test_the_proxy_holds_answers_until_so_many_are_asked_for(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("held", content("held", 100))
    proxy.hold(together=4)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(get, [proxy.port] * 4, ["held"] * 4))
    assert found == [(200, body)] * 4
    assert proxy.most_in_flight == 4
    assert not proxy.gave_up
    proxy.hold()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(get, proxy.port, "held")
        assert proxy.wait_for(5)
        assert not asked.done()
        proxy.release()
        assert asked.result() == (200, body)


def test_the_proxy_delays_without_holding_others_up(bucket: Bucket, proxy: Proxy) -> None:
    body = bucket.put("late", content("late", 100))
    proxy.plan = lambda request: Fault("stall", 0.2) if request.attempt == 0 else None
    began = time.monotonic()
    assert get(proxy.port, "late") == (200, body)
    assert time.monotonic() - began >= 0.2
    proxy.latency_s = 0.1
    began = time.monotonic()
    assert get(proxy.port, "late") == (200, body)
    assert time.monotonic() - began >= 0.1
