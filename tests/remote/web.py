"""A server of files over HTTP or HTTPS, as plain web servers are, and as Azure and Google answer without an account."""

from __future__ import annotations

import hashlib
import re
import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

import pytest


class Web(ThreadingHTTPServer):
    """Serves `objects`, by their paths. `asked` has method, path and range of each request.

    Args:
        certificate: of the server, with its key, or None for HTTP.
    """

    daemon_threads = False

    def __init__(self, certificate: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self.socket = context.wrap_socket(self.socket, server_side=True)
            self.url = f"https://localhost:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that go, or refuse the certificate."""


class _Handler(BaseHTTPRequestHandler):
    server: Web
    protocol_version = "HTTP/1.1"
    timeout = 2  # a connection that is kept ends with its test

    def do_GET(self) -> None:
        path = self._noted()
        if (whole := self.server.objects.get(path)) is None:
            return self._answer(404, b"")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not asked:
            return self._answer(200, whole, whole)
        start, stop = int(asked[1]), int(asked[2] or len(whole)) + bool(asked[2])
        part = whole[start:stop]
        span = f"bytes {start}-{start + len(part) - 1}/{len(whole)}"
        return self._answer(206, part, whole, span)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        path = self._noted()
        self.server.objects[path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(201, b"", self.server.objects[path])

    def _noted(self) -> str:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append((self.command, path, self.headers.get("Range")))
        return path

    def _answer(self, code: int, body: bytes, whole: bytes = b"", span: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(whole).hexdigest()}"')
        self.send_header("Last-Modified", "Mon, 30 Nov 2026 10:00:00 GMT")
        if span:
            self.send_header("Content-Range", span)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def made_certificate(folder: Path) -> Path:
    """Make a certificate of localhost that nobody else has signed, with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    certificate.write_bytes(certificate.read_bytes() + key.read_bytes())
    return certificate
