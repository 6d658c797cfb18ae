"""`sandboxctl docker serve`: a filter that stands by itself, for root and for a user."""

# ruff: noqa: E501 - command lines read better in one piece
from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import As
from engine import Engine

from .conftest import IMAGE
from .fake import FakeEngine, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROJECT = "com.docker.compose.project"
SECRET = "hunter2-in-a-variable"


class Serving:
    """One filter in the foreground."""

    def __init__(self, identity: As, path: Path, *words: str, **env: str) -> None:
        self.path = path
        self.process = identity.popen(
            identity.command("ctl", "docker", "serve", "--socket", str(path), *words),
            cwd=identity.project(), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stderr is not None
        # Its first line says that it serves, or why not.
        self.said = self.process.stderr.readline()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Signal it, 0 if it ends by itself; exit code, output and errors."""
        self.process.send_signal(number)
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        # Not `communicate`, which forgets what came along with the first line.
        with self.process:
            err, out = self.process.stderr.read(), self.process.stdout.read()
        return self.process.returncode, out, self.said + err

    def kill(self) -> None:
        self.process.kill()
        if not self.process.stdout or not self.process.stdout.closed:
            self.process.communicate()


@pytest.fixture
def home(runner: As) -> Iterator[Path]:
    """A short directory that belongs to the identity."""
    base = place()
    runner.own(base)
    yield base
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def engine_at(home: Path) -> Iterator[FakeEngine]:
    """An engine that everybody may talk to, and that records."""
    made = FakeEngine(home / "engine.sock")
    (home / "engine.sock").chmod(0o666)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def serve(runner: As) -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def start(path: Path, *words: str, **env: str) -> Serving:
        made.append(Serving(runner, path, *words, **env))
        return made[-1]

    yield start
    for one in made:
        one.kill()


def ask(path: Path, method: str, target: str, body: str = "") -> tuple[int, Any]:
    """One request on a connection of its own."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(30)
        line.connect(str(path))
        kind = "Content-Type: application/json\r\n" if body else ""
        line.sendall(
            f"{method} {target} HTTP/1.1\r\nHost: d\r\nConnection: close\r\n{kind}"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        data = b""
        while piece := line.recv(1 << 16):
            data += piece
    head, _, content = data.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        content = _unchunked(content)
    status = int(head.split()[1])
    with contextlib.suppress(ValueError):
        return status, json.loads(content)
    return status, content.decode(errors="replace")


def _unchunked(data: bytes) -> bytes:
    found = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        found, data = found + data[:length], data[length + 2 :]
        if not length:
            break
    return found


# --- its life


def test_it_serves_until_a_signal_and_takes_its_socket_along(
    home: Path, engine_at: FakeEngine, serve: Callable[..., Serving]
) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        path = home / "d.sock"
        filtered = serve(path, f"--engine={engine_at.path}", "--read-only", "--audit=-")
        assert "serving" in filtered.said, filtered.end()
        assert path.stat().st_mode & 0o777 == 0o600
        assert ask(path, "GET", "/_ping") == (200, "OK")
        assert ask(path, "POST", "/containers/create", '{"Image":"x"}')[0] == 403
        code, out, err = filtered.end(number)
        assert code == 0, err
        assert "Traceback" not in err
        assert not path.exists()
        lines = [json.loads(line) for line in out.splitlines()]
        assert [(e["rule"], e["verdict"]) for e in lines] == [
            ("allow.ping", "allow"), ("read-only", "refuse"),
        ]  # fmt: skip
    assert not [s for s in engine_at.seen if s.method != "GET"]


def test_mode_and_group_of_the_socket(
    home: Path, engine_at: FakeEngine, serve: Callable[..., Serving], runner: As
) -> None:
    path = home / "d.sock"
    words = ("--read-only", "--audit=-", "--mode=0660", f"--group={runner.gid}")
    serve(path, f"--engine={engine_at.path}", *words)
    assert path.stat().st_mode & 0o777 == 0o660
    assert path.stat().st_gid == runner.gid


def test_the_audit_log_is_in_the_state_directory(
    home: Path, engine_at: FakeEngine, serve: Callable[..., Serving], runner: As
) -> None:
    state = runner.directory(home / "state")
    words = ("--read-only", "--owner=dash", f"--engine={engine_at.path}")
    filtered = serve(home / "d.sock", *words, XDG_STATE_HOME=str(state))
    ask(home / "d.sock", "GET", "/containers/x/logs?stdout=1")
    assert filtered.end()[0] == 0
    log = state / "agent-sandbox" / "audit" / "docker.jsonl"
    (line,) = [json.loads(text) for text in log.read_text().splitlines()]
    assert (line["run"], line["rule"]) == ("dash", "read-only.content")
    assert log.stat().st_mode & 0o777 == 0o600


def test_what_a_killed_filter_left_is_taken_over(
    home: Path, engine_at: FakeEngine, serve: Callable[..., Serving]
) -> None:
    path = home / "d.sock"
    words = (f"--engine={engine_at.path}", "--read-only", "--audit=-")
    serve(path, *words).kill()
    assert path.exists()
    second = serve(path, *words)
    assert ask(path, "GET", "/_ping")[0] == 200
    # But not from one that lives.
    third = serve(path, *words)
    code, _, err = third.end(0)
    assert code == 125
    assert "somebody listens there" in err
    assert "hint:" in err
    assert ask(path, "GET", "/_ping")[0] == 200
    assert second.end()[0] == 0


def test_a_named_owner_comes_again_after_a_crash_but_not_twice(
    home: Path, engine_at: FakeEngine, serve: Callable[..., Serving], runner: As
) -> None:
    state = str(runner.directory(home / "state"))
    words = (f"--engine={engine_at.path}", "--owner=team")
    serve(home / "a.sock", *words, XDG_STATE_HOME=state).kill()
    second = serve(home / "b.sock", *words, XDG_STATE_HOME=state)
    assert ask(home / "b.sock", "GET", "/_ping")[0] == 200
    third = serve(home / "c.sock", *words, XDG_STATE_HOME=state)
    code, _, err = third.end(0)
    assert code == 125
    assert "--owner" in err
    assert not (home / "c.sock").exists()
    assert second.end()[0] == 0


WRONG = [
    ((), "needs --socket"),
    (("--socket", "{}/d.sock", "--engine={}/nowhere", "--read-only"), "cannot use the container"),
    (("--socket", "{}/no/d.sock", "--engine={}/engine.sock", "--read-only", "--audit=-"), "cannot serve at"),
    (("--socket", "{}/file", "--engine={}/engine.sock", "--read-only", "--audit=-"), "else than a socket"),
    (("--socket", "{}/d.sock", "--engine=tcp://127.0.0.1:1", "--read-only"), "not a unix socket"),
    (("--socket", "{}/d.sock", "--label=a=b"), "--read-only"),
    (("--socket", "{}/d.sock", "--label=a", "--read-only"), "NAME=VALUE"),
    (("--socket", "{}/d.sock", "--mode=abc", "--read-only"), "--mode"),
    (("--socket", "{}/d.sock", "--mode=4755", "--read-only"), "--mode"),
    (("--socket", "{}/d.sock", "--group=docker", "--read-only"), "--group"),
    (("--socket", "{}/d.sock", "--owner=A/b", "--read-only"), "--owner"),
    (("--socket", "{}/d.sock", "--nonsense", "--read-only"), "means nothing"),
    (("--socket", "{}/d.sock", "--engine={}/engine.sock", "--nonsense"), "unknown flag"),
    (("--socket", "{}/d.sock", "--engine={}/engine.sock", "--read-only", "--own-project"), "cannot find the compose"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "why"), WRONG, ids=[why for _, why in WRONG])
def test_what_cannot_work_is_said(
    home: Path, engine_at: FakeEngine, runner: As, words: tuple[str, ...], why: str
) -> None:
    (home / "file").write_text("kept")
    filled = [word.replace("{}", str(home)) for word in words]
    words = tuple(runner.command("ctl", "docker", "serve", *filled))
    done = runner.run(words, cwd=runner.project(), timeout=30)
    assert done.returncode == 125
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert not (home / "d.sock").exists()
    assert (home / "file").read_text() == "kept"


def test_who_may_not_talk_to_the_engine_is_told_so(home: Path, user: As) -> None:
    """No root is needed, but access to the engine is."""
    made = FakeEngine(home / "closed.sock")
    (home / "closed.sock").chmod(0o600)
    os.chown(home / "closed.sock", 0, 0)
    made.start()
    try:
        path = f"{home}/d.sock"
        words = ("docker", "serve", "--read-only", "--audit=-", "--engine", f"{home}/closed.sock")
        done = user.run(user.command("ctl", *words, "--socket", path))
    finally:
        made.stop()
    assert done.returncode == 125
    assert "Permission denied" in done.stderr


# --- before a real engine


@pytest.fixture
def containers(daemon: Engine) -> Iterator[dict[str, str]]:
    """One container of the project, and one of somebody else, with a secret each."""
    made = {}
    for name, label in (("shop_web", "shop"), ("other_db", "other")):
        made[name] = daemon.run(
            "run", "-d", "--name", name, "--network", "none", "--label", f"{PROJECT}={label}",
            "-e", f"PASSWORD={SECRET}", "-v", "/etc/hostname:/mounted", IMAGE,
            "sleep", "1000000",
        ).stdout.strip()  # fmt: skip
    yield made
    daemon.run("rm", "-f", *made, check=False)


CHANGES = [
    ("POST", "/containers/create", '{"Image":"busybox:test","Cmd":["true"],"HostConfig":{"Binds":["/:/h"]}}', 201),
    ("POST", "/containers/shop_web/exec", '{"Cmd":["true"]}', 201),
    ("POST", "/containers/shop_web/stop?t=0", "", 204),
    ("POST", "/containers/shop_web/start", "", 204),
    ("GET", "/containers/shop_web/archive?path=/etc/passwd", "", 200),
    ("GET", "/containers/shop_web/logs?stdout=1", "", 200),
    ("GET", "/containers/shop_web/top", "", 200),
    ("GET", "/containers/shop_web/export", "", 200),
    ("PUT", "/containers/shop_web/archive?path=/tmp", "", 200),
    ("DELETE", "/containers/shop_web?force=1", "", 204),
]  # fmt: skip


@pytest.mark.docker
def test_cannot_change_or_read_through_a_read_only_filter(
    base: Path, daemon: Engine, superuser: As, containers: dict[str, str]
) -> None:
    """The control: the same requests on the engine's socket, which no `:ro` mount would stop."""
    path = base / "d.sock"
    filtered = Serving(superuser, path, f"--engine={daemon.socket}", "--read-only", "--audit=-")
    try:
        for method, target, body, _ in CHANGES:
            status, said = ask(path, method, target, body)
            assert status == 403, (method, target, said)
            assert "read-only" in said["message"] or "not offered" in said["message"]
        assert daemon.run("inspect", "-f", "{{.State.Running}}", "shop_web").stdout == "true\n"
        for method, target, body, expected in CHANGES:
            assert ask(daemon.socket, method, target, body)[0] == expected, target
    finally:
        filtered.kill()
        for left in daemon.run("ps", "-aq", "--filter", "status=created").stdout.split():
            daemon.run("rm", "-f", left)


@pytest.mark.docker
def test_cannot_see_others_or_secrets_through_a_filter_for_a_label(
    base: Path, daemon: Engine, superuser: As, containers: dict[str, str]
) -> None:
    words = (f"--engine={daemon.socket}", "--read-only", "--audit=-")
    narrow = Serving(superuser, base / "n.sock", *words, f"--label={PROJECT}=shop")
    wide = Serving(superuser, base / "w.sock", *words)

    def names(path: Path) -> set[str]:
        status, listed = ask(path, "GET", "/containers/json?all=1")
        assert status == 200
        return {one["Names"][0] for one in listed}

    try:
        assert names(base / "n.sock") == {"/shop_web"}
        assert names(base / "w.sock") >= {"/shop_web", "/other_db"}
        foreign = f"/containers/{containers['other_db']}/json"
        assert ask(base / "n.sock", "GET", foreign)[0] == 404
        for path in (base / "n.sock", base / "w.sock"):
            status, shown = ask(path, "GET", "/containers/shop_web/json")
            assert status == 200
            assert shown["State"]["Running"]
            assert shown["Config"]["Labels"][PROJECT] == "shop"
            assert SECRET not in json.dumps(shown)
            assert "/etc/hostname" not in json.dumps(shown)
            assert ask(path, "GET", "/containers/shop_web/stats?stream=0")[0] == 200
        # The control.
        direct = ask(daemon.socket, "GET", "/containers/shop_web/json")[1]
        assert SECRET in json.dumps(direct)
        assert "/etc/hostname" in json.dumps(direct)
        assert ask(daemon.socket, "GET", foreign)[0] == 200
    finally:
        narrow.kill()
        wide.kill()


@pytest.mark.docker
def test_events_do_not_tell_command_lines(
    base: Path, daemon: Engine, superuser: As, containers: dict[str, str]
) -> None:
    path = base / "d.sock"
    filtered = Serving(superuser, path, f"--engine={daemon.socket}", "--read-only", "--audit=-")
    try:
        daemon.run("exec", "shop_web", "true", SECRET)
        now = int(daemon.base.stat().st_mtime)
        target = f"/events?since={now}&until={int(time.time()) + 1}"
        seen, direct = (str(ask(where, "GET", target)[1]) for where in (path, daemon.socket))
    finally:
        filtered.kill()
    assert "exec_create" in seen
    assert SECRET not in seen
    assert f"exec_create: true {SECRET}" in direct


@pytest.mark.docker
def test_the_docker_command_line_works_read_only(
    base: Path, daemon: Engine, superuser: As, containers: dict[str, str]
) -> None:
    path = base / "d.sock"
    filtered = Serving(superuser, path, f"--engine={daemon.socket}", "--read-only", "--audit=-")
    env = {**daemon.env, "DOCKER_HOST": f"unix://{path}"}
    try:
        listed = daemon.run("ps", "--format", "{{.Names}} {{.State}}", env=env).stdout
        assert "shop_web running" in listed
        for words in (("inspect", "shop_web"), ("info",), ("version",), ("images",),
                      ("network", "ls"), ("volume", "ls"), ("stats", "--no-stream", "shop_web")):  # fmt: skip
            daemon.run(*words, env=env)
        refused = daemon.run("run", "--rm", IMAGE, "true", env=env, check=False)
        assert refused.returncode
        assert "read-only" in refused.stderr
    finally:
        filtered.kill()


@pytest.mark.docker
def test_what_is_made_through_a_filter_that_owns_goes_with_it(
    base: Path, daemon: Engine, superuser: As
) -> None:
    """Without --read-only: the flags of agent-sandbox, and no directory of the host."""
    path, state = base / "d.sock", superuser.directory(base / "state")
    filtered = Serving(
        superuser, path, f"--engine={daemon.socket}", "--owner=team", "--docker-image=busybox",
        XDG_STATE_HOME=str(state),
    )  # fmt: skip
    env = {**daemon.env, "DOCKER_HOST": f"unix://{path}"}
    before = daemon.run("ps", "-aq").stdout
    daemon.run("run", "-d", "--network", "none", IMAGE, "sleep", "1000000", env=env)
    assert daemon.run("ps", "-aq", "--filter", "label=org.agent-sandbox.owner=team").stdout
    refused = daemon.run("run", "-v", "/srv:/x", IMAGE, "true", env=env, check=False)
    assert refused.returncode
    code, _, err = filtered.end()
    assert code == 0, err
    assert daemon.run("ps", "-aq").stdout == before
