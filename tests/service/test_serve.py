"""`sandboxctl serve`: what it refuses, where it listens, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_sandbox.cli import serve as command
from agent_sandbox.compose import solutions
from agent_sandbox.errors import SandboxError
from conftest import As
from service.conftest import Serve

pytestmark = pytest.mark.kernel


def refused(identity: As, *flags: str, env: dict[str, str] | None = None) -> str:
    """The words with which it does not start."""
    data = ("--data", str(identity.project() / "data")) if "--data" not in flags else ()
    listen = ("--listen", "127.0.0.1:0") if "--listen" not in flags else ()
    done = identity.run(identity.command("ctl", "serve", *data, *listen, *flags), env=env)
    assert done.returncode == 125, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
    assert "hint:" in done.stderr
    return done.stderr


@pytest.fixture(scope="session")
def certificate(shared: Path) -> tuple[str, str]:
    cert, key = shared / "cert.pem", shared / "key.pem"
    if not cert.exists():
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out",
             cert, "-days", "2", "-subj", "/CN=localhost", "-addext",
             "subjectAltName=DNS:localhost,IP:127.0.0.1"],
            check=True, capture_output=True,
        )  # fmt: skip
        for path in (cert, key):
            path.chmod(0o644)
    return str(cert), str(key)


# --- what it refuses


@pytest.mark.parametrize("host", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "example.org:0"])
def test_cannot_listen_where_others_reach_it_without_tls(runner: As, host: str) -> None:
    assert "without TLS" in refused(runner, "--listen", host)


def test_cannot_listen_where_others_reach_it_without_a_token(
    runner: As, serve: Serve, certificate: tuple[str, str]
) -> None:
    cert, key = certificate
    for flags in (("--tls-cert", cert, "--tls-key", key), ("--plain-http",)):
        assert "before there is a token" in refused(runner, "--listen", "0.0.0.0:0", *flags)
    # The control: a token is all that is missing.
    data = runner.directory(runner.project() / "data")
    made = runner.run(runner.command("ctl", "token", "new", "someone", "--data", data))
    assert made.returncode == 0, made.stderr
    served = serve(runner, "--plain-http", data=data, listen="0.0.0.0:0")
    port = served.url.rpartition(":")[2]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/healthz").status_code == 200
        token = {"X-API-Key": made.stdout.strip()}
        assert client.get("/v1/whoami", headers=token).json()["agent"] == "someone"


def test_a_second_server_on_the_same_data_is_refused(runner: As, serve: Serve) -> None:
    served = serve(runner)
    words = refused(runner, "--data", str(served.data))
    assert str(served.data) in words
    # The first goes on, and after its end there is room for another.
    assert httpx.get(f"{served.url}/readyz").status_code == 200
    assert served.stop() == 0
    again = serve(runner, data=served.data)
    assert httpx.get(f"{again.url}/readyz").status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_EXECUTION_TIME", "soon"), ("MAX_MEMORY", "-1"), ("MAX_SANDBOXES", "0"),
        ("MAX_CONCURRENT_EXECS", "1.5"), ("DEFAULT_MEMORY", "900G"), ("RATE_CREATE_PER_MIN", "x"),
        ("ALLOWED_NETWORKS", "on"),
    ],
)  # fmt: skip
def test_a_bad_value_in_the_environment_is_named(user: As, name: str, value: str) -> None:
    assert name in refused(user, env={name: value})


@pytest.mark.parametrize(
    "flags",
    [
        ("--listen", "8650"), ("--listen", "::1:8650"), ("--listen", "a:99999"),
        ("--listen", ":1"), ("--unknown",), ("--tls-cert", "x"), ("--drain-seconds", "long"),
        ("--drain-seconds", "-1"), ("--log", "xml"), ("--backend", "vm"), ("--public-host", "a:1"),
        ("--public-host", "a/b"), ("--listen", "none", "--socket", "none"), ("--data",),
        ("--templates", "/nonexistent.toml"), ("--tls-cert", "/no", "--tls-key", "/no"), ("word",),
    ],
)  # fmt: skip
def test_a_bad_flag_is_named(user: As, flags: tuple[str, ...]) -> None:
    words = refused(user, *flags)
    assert flags[0].lstrip("-") in words or flags[-1] in words


def test_a_port_that_is_taken_is_named(user: As) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in refused(user, "--listen", address)


def test_a_data_directory_that_others_can_change_is_refused(runner: As) -> None:
    data = runner.directory(runner.project() / "data")
    data.chmod(0o777)
    assert str(data) in refused(runner, "--data", str(data))


# --- where it listens


def test_it_keeps_its_data_to_itself(runner: As, serve: Serve) -> None:
    served = serve(runner)
    served.token("someone")
    for path in (served.data, *served.data.rglob("*")):
        mode = path.lstat().st_mode
        if path.parts[len(served.data.parts) :][:1] == ("base",) or stat.S_ISLNK(mode):
            # What sandboxes see of it.
            continue
        assert not mode & 0o077, (path, oct(mode))
    assert "sbx_" not in "".join(served.lines)


def test_the_owner_of_a_unix_socket_needs_no_token_and_others_have_no_access(
    superuser: As, user: As, serve: Serve
) -> None:
    open_place = user.directory(user.project() / "open")
    served = serve(user, "--socket", str(open_place / "sock"))
    with served.owner() as client:
        # Root is who it is, wherever it comes from.
        assert client.get("/v1/whoami").json()["admin"]
    script = (
        "import http.client,socket,sys;c=http.client.HTTPConnection('x');"
        "c.sock=socket.socket(socket.AF_UNIX);c.sock.connect(sys.argv[1]);"
        "c.request('GET','/v1/whoami');r=c.getresponse();print(r.status,r.read().decode())"
    )
    own = user.run([user.python, "-I", "-c", script, served.socket])
    assert json.loads(own.stdout.partition(" ")[2])["agent"] == "owner"
    stranger = As("stranger", uid=54321, gid=54321, home=Path("/"), shared=user.shared)
    refused_ = stranger.run([user.python, "-I", "-c", script, served.socket], cwd="/")
    assert refused_.stdout.startswith("401"), refused_
    # The control: a token for that user.
    served.token("guest", "--uid", "54321")
    guest = stranger.run([user.python, "-I", "-c", script, served.socket], cwd="/")
    assert json.loads(guest.stdout.partition(" ")[2])["agent"] == "guest"


def test_tls_is_served(user: As, serve: Serve, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    served = serve(user, "--tls-cert", cert, "--tls-key", key)
    token = served.token("someone")
    context = ssl.create_default_context(cafile=cert)
    with httpx.Client(base_url=served.url, verify=context) as client:
        answer = client.post("/v1/session", json={"token": token})
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-sandbox_session=")
        assert "; Secure" in cookie
        own = {"X-CSRF-Token": answer.json()["csrfToken"]}
        assert client.get("/v1/whoami", headers=own).json()["agent"] == "someone"
        bad = client.get("/v1/whoami", headers={"Origin": served.url.replace("https", "http")})
        assert bad.status_code == 403
    port = int(served.url.rpartition(":")[2])
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(("127.0.0.1", port)) as sock, old.wrap_socket(sock) as wrapped:
        assert wrapped.version() == "TLSv1.2"


def test_a_public_host_is_a_name_of_ours(user: As, serve: Serve) -> None:
    served = serve(user, "--public-host", "Sandbox.Example")
    for host, status in (("sandbox.example", 200), ("other.example", 403)):
        answer = httpx.get(f"{served.url}/healthz", headers={"Host": host})
        assert answer.status_code == status


def test_monitors_are_told_enough_and_no_more(user: As, serve: Serve) -> None:
    served = serve(user)
    with served.client() as nobody, served.client(served.token("plain")) as plain:
        assert nobody.get("/healthz").json() == {"status": "ok"}
        assert nobody.get("/readyz").json() == {"status": "ok"}
        assert nobody.head("/healthz").status_code == 200
        assert nobody.get("/metrics").status_code == 401
        assert plain.get("/metrics").status_code == 403
        plain.post("/v1/run", json={"command": "true"})
        reader = served.client(served.token("reader", "--scope", "audit:read"))
        text = reader.get("/metrics").text
        reader.close()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['sandbox_http_requests_total{method="POST",route="/v1/run",status="200"}'] == "1"
    assert values['sandbox_denials_total{code="UNAUTHENTICATED"}'] == "1"
    assert values["sandbox_exec_duration_seconds_count"] == "1"
    assert values["sandbox_execs_running"] == "0"
    assert int(values["sandbox_audit_seq"]) > 2
    assert int(values["process_resident_memory_bytes"]) > 1 << 20
    public = serve(user, "--metrics-public")
    assert httpx.get(f"{public.url}/metrics").status_code == 200


def test_the_log_is_json_without_secrets(user: As, serve: Serve) -> None:
    served = serve(user)
    token = served.token("someone")
    with served.client(token) as client:
        body = {"command": "echo hidden-word", "env": {"S": "hidden-word"}, "stdin": "hidden-word"}
        client.post("/v1/run", json=body)
        client.get("/v1/sandboxes", params={"metadata": "hidden-word=1"})
    served.stop()
    events = [line["event"] for line in served.log]
    assert events[0] == "ready"
    assert events[-2:] == ["draining", "stopped"]
    lines = [line for line in served.log if line["event"] == "request"]
    assert {(line["agent"], line["route"], line["status"]) for line in lines} == {
        ("someone", "/v1/run", 200), ("someone", "/v1/sandboxes", 200),
    }  # fmt: skip
    whole = "".join(served.lines)
    assert "hidden-word" not in whole
    assert token not in whole


# --- how it ends


def test_a_signal_lets_what_runs_end_and_takes_nothing_new(runner: As, serve: Serve) -> None:
    served = serve(runner, "--drain-seconds", "20")
    token = served.token("someone")
    answers: list[httpx.Response] = []
    with served.client(token) as client, served.client(token) as other:
        sandbox = client.post("/v1/sandboxes", json={}).json()["id"]
        started = threading.Event()

        def work() -> None:
            body = {"command": "echo begun; sleep 2; echo ended"}
            path = f"/v1/sandboxes/{sandbox}/exec"
            with client.stream(
                "POST", path, json=body, headers={"Accept": "text/event-stream"}
            ) as answer:
                for line in answer.iter_lines():
                    if "begun" in line:
                        started.set()
                    lines.append(line)

        lines: list[str] = []
        thread = threading.Thread(target=work)
        thread.start()
        assert started.wait(20)
        # A connection that is open already, and is in use.
        other.get("/healthz")
        served.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.TransportError):
            while thread.is_alive():
                answers.append(other.get("/v1/whoami"))
        refused_in_time = thread.is_alive()
        thread.join(20)
        # The signal takes a moment to arrive; then all are refused, or not even connected.
        statuses = [answer.status_code for answer in answers]
        assert refused_in_time or statuses[-1] == 503
        assert statuses == sorted(statuses)
        assert set(statuses) <= {200, 503}
        assert any("ended" in line for line in lines)
        assert any(line == "event: exit" for line in lines)
    assert served.wait() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/healthz")
    assert not os.path.lexists(served.socket)


def test_what_runs_beyond_the_drain_is_ended_and_its_result_kept(runner: As, serve: Serve) -> None:
    served = serve(runner, "--drain-seconds", "0.5")
    token = served.token("someone")
    with served.client(token) as client:
        sandbox = client.post("/v1/sandboxes", json={}).json()["id"]
        body = {"command": "echo kept; touch kept; sleep 100", "background": True}
        exec_id = client.post(f"/v1/sandboxes/{sandbox}/exec", json=body).json()["id"]
        with client.stream("GET", f"/v1/execs/{exec_id}/events") as answer:
            for line in answer.iter_lines():
                if "kept" in line:
                    break
    assert served.stop() == 0
    again = serve(runner, data=served.data)
    with again.client(token) as client:
        found = client.get(f"/v1/execs/{exec_id}").json()
        assert (found["stdout"], found["state"]) == ("kept\n", "Exited")
        assert found["error"] == "the service was stopped"
        # The sandbox is there, with its files.
        ran = client.post(f"/v1/sandboxes/{sandbox}/exec", json={"cmd": ["ls"]}).json()
        assert ran["stdout"] == "kept\n"


def test_a_second_signal_ends_it_now(user: As, serve: Serve) -> None:
    served = serve(user, "--drain-seconds", "600")
    with served.client(served.token("someone")) as client:
        body = {"command": "sleep 500", "background": True}
        assert client.post("/v1/run", json=body).status_code == 202
    served.process.send_signal(signal.SIGTERM)
    while not any(line["event"] == "draining" for line in served.log):
        pass
    served.process.send_signal(signal.SIGINT)
    assert served.wait() == 0


def test_systemd_is_told(user: As, serve: Serve) -> None:
    place = user.directory(user.project() / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(place / "sock"))
        (place / "sock").chmod(0o666)
        told.settimeout(20)
        served = serve(user, env={"NOTIFY_SOCKET": str(place / "sock")})
        assert told.recv(100) == b"READY=1"
        served.stop()
        assert told.recv(100) == b"STOPPING=1"


# --- the words


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], [("127.0.0.1", 8650)]), (["--listen", "[::1]:0"], [("::1", 0)]),
        (["--listen=a:1", "--listen", "b:2"], [("a", 1), ("b", 2)]), (["--listen", "none"], []),
    ],
)  # fmt: skip
def test_addresses_are_read(words: list[str], found: list[tuple[str, int]]) -> None:
    settings = command.settings_of(command.split([*words, "--data", "/d"]), {})
    assert list(settings.listen) == found
    assert settings.socket == "/d/service.sock"


def test_the_environment_of_a_container_is_read() -> None:
    environ = {
        "SANDBOX_LISTEN": "0.0.0.0:80",
        "SANDBOX_PUBLIC_HOSTS": "a b.c",
        "SANDBOX_DATA": "/e",
    }
    settings = command.settings_of(command.split([]), environ)
    assert (settings.listen, settings.data) == ((("0.0.0.0", 80),), "/e")
    assert settings.public_hosts == ("a", "b.c")


def test_the_words_of_a_secured_compose_file_are_read() -> None:
    """What `sandboxctl compose secure --solution service` and the example write."""
    made: Any = solutions.service(solutions.Wish(solution=solutions.SERVICE))
    settings = command.settings_of(command.split(made["command"][1:]), {})
    assert (settings.listen, settings.socket) == ((("0.0.0.0", solutions.SERVICE_PORT),), "")
    assert (settings.data, settings.backends) == ("/data", ("docker",))
    assert settings.plain_http
    assert settings.public_hosts == (solutions.SERVICE_NAME,)


def test_every_flag_is_in_the_usage() -> None:
    for flag in (*command.SWITCHES, *command.VALUES):
        assert flag in command.USAGE
    with pytest.raises(SandboxError) as error:
        command.split(["--nothing"])
    hint: Any = error.value.hint
    assert hint == command.USAGE
