"""A server that answers like the API, for states that a real one cannot be put into at will.

Hostile names that the real one refuses, a thousand sandboxes, failures, broken streams. That its
answers have the fields of the real ones is checked in test_real.py.
"""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from agent_sandbox.service import dashboard

TOKEN, WORKER = "sbx_abcdefgh_admin", "sbx_ijklmnop_worker"
CSRF = "csrf-of-the-stub"
SCOPES = {
    TOKEN: ["admin", "audit:read", "exec", "files", "sandbox:create"],
    WORKER: ["exec", "files", "sandbox:create"],
}
NAMES = {TOKEN: "boss", WORKER: "worker-1"}
GIB, MIB = 1 << 30, 1 << 20


def iso(seconds: float = 0.0) -> str:
    """A time from now."""
    moment = datetime.now(UTC) + timedelta(seconds=seconds)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def sandbox(number: int, **more: Any) -> dict[str, Any]:
    """A sandbox as the API has it."""
    bound = {"limit": 64, "enforced": True, "enforcedBy": "cgroup"}
    return {
        "id": f"sbx-{number:026d}", "state": "Running", "owner": "worker-1", "backend": "bwrap",
        "template": "default", "image": "", "digest": "", "runtime": "", "createdAt": iso(-number),
        "expiresAt": iso(3600 - number), "lastUsedAt": iso(-1), "metadata": {}, "envNames": [],
        "resources": {"cpu": 1.0, "memory": 512 * MIB, "pids": 64, "disk": 256 * MIB},
        "effective": {
            "cpu": {"limit": 1.0, "enforced": False, "enforcedBy": ""},
            "memory": {**bound, "limit": 512 * MIB}, "pids": bound,
            "disk": {**bound, "limit": 256 * MIB, "enforcedBy": "server"},
        },
        "network": {"mode": "off", "allowOut": [], "denyOut": []}, "inner": "preferred",
        "guarantees": {"memory": "cgroup", "pids": "cgroup", "disk": "server"}, "reason": "",
        **more,
    }  # fmt: skip


def execution(number: int, **more: Any) -> dict[str, Any]:
    """An execution as the API has it, ended well."""
    name = f"exc-{number:026d}"
    return {
        "execId": name, "id": name, "sandboxId": f"sbx-{1:026d}", "owner": "worker-1",
        "state": "Exited", "command": ["make", "-j2", "test"], "cwd": "/workspace", "tty": False,
        "background": False, "timeout": 60.0, "exitCode": 0, "signal": None, "timedOut": False,
        "oomKilled": False, "exceeded": None, "truncated": False, "stdoutBytes": 12,
        "stderrBytes": 0, "durationMs": 1834, "cpuMs": 1204, "maxRssKb": 38112,
        "startedAt": iso(-60 - number), "endedAt": iso(-58 - number), "error": "", "attempts": 1,
        **more,
    }  # fmt: skip


RUNNING = {"state": "Running", "exitCode": None, "durationMs": None, "endedAt": None,
           "cpuMs": 0, "maxRssKb": 0}  # fmt: skip


def line(seq: int, **more: Any) -> dict[str, Any]:
    """A line of the audit."""
    return {
        "v": 1, "ts": iso(seq - 2000), "seq": seq, "prev": "0" * 64, "hash": "f" * 64,
        "requestId": f"req_{seq:016x}", "action": "exec.start", "decision": "allow", "rule": "",
        "reason": "", "actor": {"agent": "worker-1", "key": "sbx_ijklmnop", "addr": "127.0.0.1"},
        "target": {"type": "exec", "id": f"exc-{1:026d}"}, "request": {"cmd": ["make", "test"]},
        "result": {"status": 200}, **more,
    }  # fmt: skip


def token(name: str, **more: Any) -> dict[str, Any]:
    """A token without its secret."""
    return {
        "id": f"sbx_{name[:8]:x<8}", "name": name, "scopes": ["exec", "sandbox:create"],
        "images": None, "templates": None, "quotas": {}, "createdAt": iso(-86400),
        "expiresAt": iso(86400 * 29), "revokedAt": None, "uid": None, "source": "cli",
        "state": "live", **more,
    }  # fmt: skip


METRICS = """\
# TYPE sandbox_sandboxes gauge
sandbox_sandboxes{state="Paused"} 3
sandbox_sandboxes{state="Running"} 12
# TYPE sandbox_execs_running gauge
sandbox_execs_running 2
"""
LIMITS: dict[str, Any] = {
    "allowedImages": ["python:3.12-slim"], "allowedNetworks": ["off", "allow"],
    "requiredRuntime": "", "maxSandboxes": 500, "maxExecutionTime": 300.0,
    "maxSandboxesPerAgent": 50,
    "maxMemory": 2 * GIB, "maxConcurrentExecsPerAgent": 16, "maxQueuedExecsPerAgent": 256,
    "maxConcurrentExecs": 64,
    "maxOutputBytes": 10 * MIB, "rateRequestsPerSec": 200, "maxLifetime": 86400.0,
}  # fmt: skip


class Stub:
    """What the server knows; tests change it while it runs."""

    def __init__(self) -> None:
        self.sandboxes = [sandbox(1), sandbox(2, state="Paused", metadata={"task": "42"})]
        self.executions = [execution(1, **RUNNING), execution(2)]
        self.audit = [line(1)]
        self.tokens = [token("worker-1"), token("boss", scopes=["admin"])]
        self.limits = dict(LIMITS)
        self.names = dict(NAMES)
        # Output by execution: the pieces of each connection, as (event, data, id); None: the
        # connection breaks; "wait": until `go` is set.
        self.output: dict[str, list[Any]] = {}
        self.go = threading.Event()
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        # An answer for every request whose path has this beginning: {prefix: (status, body)}.
        self.broken: dict[str, tuple[int, dict[str, Any]]] = {}
        self.sessions: dict[str, str] = {}
        self.headers = [("Content-Security-Policy", dashboard.POLICY)]
        self.held = threading.Event()
        self.held.set()
        stub = self

        class Handler(_Handler):
            state = stub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self.go.set()
        self.held.set()
        self.server.shutdown()
        self.server.server_close()

    def asked(self, method: str, beginning: str) -> list[tuple[str, dict[str, str], Any]]:
        """Requests that came: path with query, headers, body."""
        return [(p, h, b) for m, p, h, b in self.seen if m == method and p.startswith(beginning)]


class Asked(NamedTuple):
    """A request behind the login: segments, query, body, and the token of who asks."""

    rest: list[str]
    query: dict[str, str]
    body: Any
    agent: str


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: Stub

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        self.answer()

    do_POST = do_DELETE = do_GET  # noqa: N815

    # --- answers

    def send(self, status: int, body: bytes, kind: str, *more: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (*self.state.headers, *more, ("Content-Type", kind)):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def json(self, status: int, value: Any, *more: tuple[str, str]) -> None:
        self.send(status, b"" if value is None else json.dumps(value).encode(),
                  "application/json", *more)  # fmt: skip

    def problem(self, status: int, code: str, message: str, **more: str) -> None:
        self.json(status, {"code": code, "message": message, "requestId": "req_0", **more})

    def answer(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.state.seen.append((self.command, self.path, dict(self.headers), body))
        found = dashboard.asset(url.path)
        if found is not None:
            self.send(200, found[0], found[1])
            return
        self.state.held.wait(30)
        if url.path == "/metrics":
            self.send(200, METRICS.encode(), "text/plain; version=0.0.4")
            return
        for beginning, (status, wrong) in self.state.broken.items():
            if self.path.startswith(beginning):
                self.json(status, wrong)
                return
        segments = [unquote(part) for part in url.path.strip("/").split("/")[1:]]
        if segments == ["session"] and self.command == "POST":
            self.sign_in(body)
            return
        cookie = (self.headers.get("Cookie") or "").partition("sandbox_session=")[2]
        agent = self.state.sessions.get(cookie)
        if agent is None:
            self.problem(401, "UNAUTHENTICATED", "no session", hint="sign in")
        elif self.command != "GET" and self.headers.get("X-CSRF-Token") != CSRF:
            self.problem(403, "CSRF", "the header X-CSRF-Token is missing")
        else:
            self.dispatch(segments, dict(parse_qsl(url.query)), body, agent)

    def sign_in(self, body: Any) -> None:
        if body.get("token") not in SCOPES:
            self.problem(401, "UNAUTHENTICATED", "the token is not valid", hint="ask for a new one")
            return
        cookie = f"cookie{len(self.state.sessions)}"
        self.state.sessions[cookie] = body["token"]
        header = f"sandbox_session={cookie}; Path=/; HttpOnly; SameSite=Strict"
        self.json(200, self.session(body["token"]), ("Set-Cookie", header))

    def session(self, token: str) -> dict[str, Any]:
        scopes = SCOPES[token]
        return {"agent": self.state.names[token], "scopes": scopes, "admin": "admin" in scopes,
                "csrfToken": CSRF, "expiresAt": iso(3600)}  # fmt: skip

    def dispatch(self, path: list[str], query: dict[str, str], body: Any, agent: str) -> None:
        name, rest = path[0], path[1:]
        act = getattr(self, f"on_{name}", None)
        if act is None:
            self.problem(404, "NOT_FOUND", "there is no such address")
        else:
            act(Asked(rest, query, body, agent))

    def page(self, items: list[dict[str, Any]], query: dict[str, str]) -> None:
        start, limit = int(query.get("after", 0)), int(query.get("limit", 100))
        part = items[start : start + limit]
        more = str(start + limit) if len(items) > start + limit else None
        self.json(200, {"items": part, "next": more})

    # --- routes

    def on_session(self, asked: Asked) -> None:
        if self.command == "DELETE":
            self.state.sessions.clear()
            self.json(204, None)
        else:
            self.json(200, self.session(asked.agent))

    def on_policy(self, _asked: Asked) -> None:
        backend = {"name": "bwrap", "default": True, "ok": True, "reason": "", "images": False,
                   "pause": True, "networks": ["off"], "runtimes": [], "enforced": {},
                   "inner": True}  # fmt: skip
        self.json(200, {"limits": self.state.limits, "backends": [backend],
                        "templates": ["default"], "scopes": [], "signals": []})  # fmt: skip

    def on_whoami(self, asked: Asked) -> None:
        usage = {"sandboxes": len(self.state.sandboxes), "runningExecs": 1, "queuedExecs": 0}
        agent = asked.agent
        self.json(200, {"agent": self.state.names[agent], "key": agent[:12],
                        "scopes": SCOPES[agent], "admin": agent == TOKEN, "images": None,
                        "templates": None, "limits": self.state.limits,
                        "usage": usage})  # fmt: skip

    def on_sandboxes(self, asked: Asked) -> None:
        if not asked.rest:
            found = [
                b
                for b in self.state.sandboxes
                if b["state"] == asked.query.get("state", b["state"])
            ]
            for pair in (
                asked.query.get("metadata", "").split(",") if asked.query.get("metadata") else ()
            ):
                key, _, value = pair.partition("=")
                found = [b for b in found if b["metadata"].get(key) == value]
            self.page(found, asked.query)
            return
        box = next((b for b in self.state.sandboxes if b["id"] == asked.rest[0]), None)
        if box is None:
            self.problem(404, "NOT_FOUND", "there is no such sandbox", hint="it may have expired")
        elif asked.rest[1:] == ["metrics"]:
            self.json(200, {"cpu": None, "memory": 130 * MIB, "pids": 3, "disk": 240 * MIB})
        elif asked.rest[1:] and asked.rest[1] in ("pause", "resume"):
            box["state"] = "Paused" if asked.rest[1] == "pause" else "Running"
            self.json(200, box)
        elif self.command == "DELETE":
            self.state.sandboxes.remove(box)
            self.json(204, None)
        else:
            self.json(200, box)

    def on_execs(self, asked: Asked) -> None:
        if not asked.rest:
            items = [
                e for e in self.state.executions
                if e["state"] == asked.query.get("state", e["state"])
                and e["sandboxId"] == asked.query.get("sandbox", e["sandboxId"])
            ]  # fmt: skip
            self.page(items, asked.query)
            return
        found = next((e for e in self.state.executions if e["id"] == asked.rest[0]), None)
        if found is None:
            self.problem(404, "NOT_FOUND", "there is no such execution")
        elif asked.rest[1:] == ["events"]:
            self.events(found)
        elif asked.rest[1:] == ["kill"]:
            found |= {"state": "Exited", "exitCode": 137, "signal": "SIGKILL", "durationMs": 99}
            self.json(200, found)
        else:
            self.json(200, found)

    def on_audit(self, asked: Asked) -> None:
        found = sorted(self.state.audit, key=lambda one: -one["seq"])
        found = [
            one for one in found
            if one["decision"] == asked.query.get("decision", one["decision"])
            and one["action"] == asked.query.get("action", one["action"])
            and one["actor"]["agent"] == asked.query.get("agent", one["actor"]["agent"])
            and one["ts"] >= asked.query.get("since", "")
        ]  # fmt: skip
        self.page(found, asked.query)

    def on_tokens(self, asked: Asked) -> None:
        found = next(
            (t for t in self.state.tokens if asked.rest and asked.rest[0] in (t["name"], t["id"])),
            None,
        )
        if self.command == "GET":
            self.json(200, {"items": self.state.tokens})
        elif self.command == "DELETE" and found:
            found |= {"revokedAt": iso(), "state": "revoked"}
            self.json(204, None)
        elif asked.rest[1:] == ["rotate"] and found:
            self.json(200, {**found, "token": "sbx_rotated0_secret"})
        elif not asked.rest and any(t["name"] == asked.body["name"] for t in self.state.tokens):
            self.problem(
                409, "CONFLICT", f"the name {asked.body['name']} is taken", hint="rotate it"
            )
        elif not asked.rest:
            made = token(
                asked.body["name"], scopes=asked.body["scopes"], quotas=asked.body.get("quotas", {})
            )
            self.state.tokens.append(made)
            self.json(201, {**made, "token": "sbx_newtoken_secret"})
        else:
            self.problem(404, "NOT_FOUND", "there is no such token")

    # --- streams

    def events(self, found: dict[str, Any]) -> None:
        self.send_response(200)
        for name, value in self.state.headers:
            self.send_header(name, value)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        offset = int(self.headers.get("Last-Event-ID") or 0)
        self.event("start", found, offset)
        for number, piece in enumerate(self.state.output.get(found["id"], ()), 1):
            if number <= offset:
                continue
            if piece is None:
                # Once: the next connection goes on behind it.
                self.state.output[found["id"]][number - 1] = ("stdout", {"data": ""})
                self.close_connection = True
                return
            if piece == "wait":
                self.state.go.wait(30)
                continue
            name, data = piece
            self.event(name, data, number)
        if found["state"] == "Running":
            while not self.state.go.wait(0.05) and found["state"] == "Running":
                time.sleep(0.05)
        self.event("error" if found["error"] else "exit", found, 10**9)
        self.close_connection = True

    def event(self, name: str, data: Any, id: int) -> None:
        self.wfile.write(f"id: {id}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()
