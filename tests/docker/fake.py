"""A fake engine that records what reaches it."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any

OWNER = "org.agent-sandbox.owner"
API = "1.41"
ALPINE = {"Id": "sha256:" + "a" * 64, "RepoTags": ["alpine:latest"], "RepoDigests": []}
IMAGES = {f"/images/{name}/json": ALPINE for name in ("alpine:latest", ALPINE["Id"])}


# --- a fake engine


class Seen:
    """One request as it arrived."""

    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body

    def __repr__(self) -> str:
        return f"{self.method} {self.path} {self.body[:2000]!r}"


class FakeEngine(ThreadingMixIn, UnixStreamServer):
    """Answers like an engine with nothing in it but what the tests put there, and records all."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, path: Path) -> None:
        self.seen: list[Seen] = []
        # (method, path without version) → status, document or bytes, headers.
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {}
        # Name or id → id and owner.
        self.objects: dict[str, tuple[str, str]] = {}
        super().__init__(str(path), Handler)
        self.path = path

    def forget(self) -> None:
        """Be as new."""
        self.seen.clear()
        self.answers.clear()
        self.objects.clear()

    def start(self) -> None:
        """Serve in the background."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}).start()

    def stop(self) -> None:
        """No more."""
        self.shutdown()
        self.server_close()

    def asked(self) -> list[Seen]:
        """What arrived, without the questions that the filter asks on its own."""
        own = ("/version", "/json", "/info")
        return [
            s for s in self.seen if not (s.method == "GET" and s.path.split("?")[0].endswith(own))
        ]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeEngine

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        return

    def _body(self) -> bytes:
        if "chunked" in (self.headers.get("Transfer-Encoding") or ""):
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _serve(self) -> None:
        seen = Seen(self.command, self.path, dict(self.headers.items()), self._body())
        self.server.seen.append(seen)
        bare = self.path.partition("?")[0]
        parts = bare.split("/")
        if len(parts) > 1 and parts[1].startswith("v1."):
            bare = "/" + "/".join(parts[2:])
        status, answer = self._answer(bare, seen)
        if callable(answer):
            self.close_connection = True
            answer(self)
            return
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        kind = "text/plain" if isinstance(answer, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _answer(self, bare: str, seen: Seen) -> tuple[int, Any]:
        parts = [{"Name": "Engine", "Version": "20.10.24"}]
        version = {"ApiVersion": API, "MinAPIVersion": "1.12", "Components": parts}
        known = {
            "/version": version, "/containers/json": [], "/images/json": [], "/networks": [],
            "/volumes": {"Volumes": []}, "/_ping": b"OK", "/info": {"ID": "x"}, **IMAGES,
        }  # fmt: skip
        given = self.server.answers.get((self.command, bare))
        if given is not None:
            return given
        if self.command in ("GET", "HEAD") and bare in known:
            return 200, known[bare]
        if self.command == "POST" and bare == "/volumes/create":
            return 201, json.loads(seen.body)
        if self.command == "POST" and bare in ("/containers/create", "/networks/create"):
            return self._create(json.loads(seen.body))
        return self._object(bare)

    def _create(self, body: dict[str, Any]) -> tuple[int, Any]:
        number = f"{len(self.server.seen):064x}"
        owner = (body.get("Labels") or {}).get(OWNER, "")
        for name in (number, body.get("Name", number)):
            self.server.objects[name] = number, owner
        return 201, {"Id": number, "Warnings": []}

    def _object(self, bare: str) -> tuple[int, Any]:
        kind, _, rest = bare[1:].partition("/")
        name = rest.removesuffix("/json")
        known = self.server.objects.get(name)
        if known is not None and kind in ("containers", "networks", "volumes"):
            labels = {OWNER: known[1]} if known[1] else {}
            about = {"Id": known[0], "Name": name, "Labels": labels, "Config": {"Labels": labels}}
            return 200, about
        if self.command in ("POST", "DELETE", "PUT"):
            return 200, {}
        return 404, {"message": f"no such {kind.removesuffix('s')}: {name}"}

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve  # noqa: N815 - http.server's names


def place() -> Path:
    """A short directory, not below /tmp: a socket's address has 107 bytes."""
    parent = "/srv" if os.access("/srv", os.W_OK) else None
    base = Path(tempfile.mkdtemp(prefix="agsbx-d-", dir=parent))
    base.chmod(0o755)
    return base


def connect(path: Path | str, timeout: float = 20) -> socket.socket:
    """A connection to a unix socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock
