"""A running service on PostgreSQL: all of it works, and nothing half when the database goes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from agent_sandbox.service.store_address import Database

from .conftest import Serve, Served
from .postgres import Cluster, Sited
from .test_audit_postgres import url_of
from .test_store_postgres import EVIL

pytestmark = [pytest.mark.kernel, pytest.mark.network]
AWAY = {"STATE_UNAVAILABLE", "AUDIT_UNAVAILABLE"}


def exec_in(client: httpx.Client, sandbox: str, *command: str, **more: Any) -> httpx.Response:
    return client.post(f"/v1/sandboxes/{sandbox}/exec", json={"cmd": list(command), **more})


def make(client: httpx.Client, **wish: Any) -> str:
    answer = client.post("/v1/sandboxes", json=wish)
    assert answer.status_code == 201, answer.text
    found: str = answer.json()["id"]
    return found


def eventually(act: Callable[[], httpx.Response], seconds: float = 30.0) -> httpx.Response:
    """The first answer that is not 503."""
    deadline = time.monotonic() + seconds
    while (answer := act()).status_code == 503:
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.05)
    return answer


def whole(sited: Sited, url: str) -> dict[str, Any]:
    done = sited.sandboxctl("audit", "verify", "--json", "--database", url)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"], found["findings"]
    return found


def start(serve: Serve, sited: Sited, url: str, data: Path | None = None) -> Served:
    return serve(sited, "--database", url, data=data)


def test_the_whole_service_works_on_a_database(
    serve: Serve, sited: Sited, database: Database
) -> None:
    url = url_of(database)
    served = start(serve, sited, url)
    token = served.token("worker", "--database", url)
    with served.client(token) as client:
        sandbox = make(client, metadata={"team": "a"})
        answer = exec_in(client, sandbox, "sh", "-c", "echo hi; echo x > /workspace/kept")
        assert (answer.json()["exitCode"], answer.json()["stdout"]) == (0, "hi\n")
        listed = client.get("/v1/sandboxes", params={"metadata": "team=a"}).json()
        assert [one["id"] for one in listed["items"]] == [sandbox]
    assert not (served.data / "state.db").exists()
    assert not (served.data / "audit").exists()
    # Killed: the next one on the same data finds all of it.
    served.kill()
    again = start(serve, sited, url, served.data)
    with again.client(token) as client:
        answer = eventually(lambda: exec_in(client, sandbox, "cat", "/workspace/kept"))
        assert answer.json()["stdout"] == "x\n", answer.text
    assert again.stop() == 0
    found = whole(sited, url)
    assert found["lines"] >= 6
    assert (
        sited.sandboxctl("audit", "tail", "--database", url, "-n", "100").stdout.count(
            "exec.start worker"
        )
        == 2
    )


def test_tokens_and_audit_from_the_command_line(
    sited: Sited, database: Database, tmp_path: Path
) -> None:
    url = url_of(database)
    path = sited.own(sited.project()) / "address"
    path.write_text(url)
    path.chmod(0o600)
    sited.own(path)
    env = {"SANDBOX_DATABASE_FILE": str(path)}
    done = sited.sandboxctl("token", "new", "worker", env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sbx_")
    assert "worker" in sited.sandboxctl("token", "list", "--database", url).stdout
    assert sited.sandboxctl("token", "rotate", "worker", env=env).returncode == 0
    assert sited.sandboxctl("token", "revoke", "worker", env=env).returncode == 0
    lines = sited.sandboxctl("audit", "export", env=env).stdout.splitlines()
    assert [json.loads(line)["action"] for line in lines] == [
        "token.new", "token.rotate", "token.revoke",
    ]  # fmt: skip
    assert whole(sited, url)["lines"] == 3
    done = sited.sandboxctl("audit", "prune", "--keep-days", "1", env=env)
    assert (done.returncode, done.stdout) == (0, "")
    # Nothing was made in the user's own data directory.
    assert not (sited.home / ".local" / "state" / "agent-sandbox" / "service").exists()
    done = sited.sandboxctl("token", "list", "--database", "postgresql://u:pw@h/x")
    assert done.returncode != 0
    assert "password on the command line" in done.stderr


def test_a_database_that_goes_away_stops_acts_whole_and_comes_back(
    serve: Serve, sited: Sited, own_postgres: Cluster
) -> None:
    url = own_postgres.new()
    served = start(serve, sited, url)
    token = served.token("worker", "--database", url)
    with served.client(token) as client:
        sandbox = make(client)
        for name in ("before",):
            assert exec_in(client, sandbox, "touch", f"/workspace/{name}").status_code == 200
        own_postgres.stop()
        refused = [
            exec_in(client, sandbox, "touch", "/workspace/during"),
            client.post("/v1/sandboxes", json={"metadata": {"n": "during"}}),
            client.post("/v1/run", json={"cmd": ["true"]}),
            client.get(f"/v1/sandboxes/{sandbox}"),
            client.delete(f"/v1/sandboxes/{sandbox}"),
            client.put(f"/v1/sandboxes/{sandbox}/files", params={"path": "f"}, content=b"x"),
        ]
        for answer in refused:
            assert answer.status_code == 503, answer.text
            assert answer.json()["code"] in AWAY
            assert int(answer.headers["retry-after"]) >= 1
        assert client.get("/healthz").status_code == 200
        own_postgres.start()
        answer = eventually(lambda: exec_in(client, sandbox, "ls", "/workspace"))
        assert answer.status_code == 200, answer.text
        assert answer.json()["stdout"].split() == ["before"]
        found = client.get("/v1/sandboxes").json()["items"]
        assert [one["id"] for one in found] == [sandbox]
        assert exec_in(client, sandbox, "touch", "/workspace/after").status_code == 200
    assert served.stop() == 0
    whole(sited, url)
    text = sited.sandboxctl("audit", "export", "--database", url).stdout
    assert "/workspace/before" in text
    assert "/workspace/after" in text
    assert "during" not in text


def test_a_database_that_goes_away_under_a_command(
    serve: Serve, sited: Sited, own_postgres: Cluster
) -> None:
    """Its end cannot be written down: then its caller is told so, and not that all is well."""
    url = own_postgres.new()
    served = start(serve, sited, url)
    token = served.token("worker", "--database", url)
    with served.client(token) as client, served.client(token) as other:
        sandbox = make(client)
        answers: list[httpx.Response] = []
        script = "touch /workspace/began; sleep 2"
        running = threading.Thread(
            target=lambda: answers.append(exec_in(client, sandbox, "sh", "-c", script))
        )
        running.start()
        look = {"path": "began"}
        deadline = time.monotonic() + 30
        while other.get(f"/v1/sandboxes/{sandbox}/files/stat", params=look).status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        own_postgres.stop()
        running.join(60)
        assert [answer.status_code for answer in answers] == [503]
        assert answers[0].json()["code"] in AWAY
        own_postgres.start()
        answer = eventually(lambda: exec_in(other, sandbox, "echo", "again"))
        assert answer.json()["stdout"] == "again\n"
    whole(sited, url)


# --- what clients choose


@pytest.fixture(scope="module")
def target(request: pytest.FixtureRequest) -> Any:
    """One server for many attacks."""
    from .conftest import _data

    sited: Sited = request.getfixturevalue("sited")
    cluster: Cluster = request.getfixturevalue("postgres")
    url = cluster.new()
    served = Served(sited, _data(sited), "--database", url)
    token = served.token("evil", "--database", url, "--scope", "admin")
    victim = served.token("victim", "--database", url)
    with served.client(victim) as client:
        kept = make(client, metadata={"secret": "s"})
    yield served, url, token, victim, kept
    assert served.stop() == 0
    faults = [line for line in served.log if line["level"] == "error"]
    assert not faults, "\n".join(str(fault.get("traceback", fault)) for fault in faults)


@pytest.mark.parametrize("text", [*EVIL, "\0", "\ud800", "a" * 5000])
def test_cannot_inject_sql_through_the_api(target: Any, sited: Sited, text: str) -> None:
    """Whatever a client may choose, in every place: no fault, nobody else's row, nothing gone."""
    served, url, token, victim, kept = target
    header = "".join(c for c in text if " " <= c < "\x7f") or "x"
    body = json.dumps({
        "metadata": {text: text}, "env": {"A": text}, "template": text, "image": text,
    }).encode()  # fmt: skip
    plain = json.dumps({"metadata": {"k": text}, "env": {"A": text}}).encode()
    kind = {"Content-Type": "application/json"}
    command = json.dumps({"cmd": ["true", text], "cwd": text, "env": {"B": text}}).encode()
    quoted = httpx.QueryParams({"x": text.encode("utf-8", "replace")})["x"]
    with served.client(token) as client:
        keyed = {**kind, "Idempotency-Key": header}
        answers = [
            client.post("/v1/sandboxes", content=body, headers=kind),
            client.post("/v1/sandboxes", content=plain, headers=keyed),
            client.post("/v1/run", content=command, headers=keyed),
            client.post("/v1/tokens", content=json.dumps({"name": text}).encode(), headers=kind),
            *(
                client.get("/v1/sandboxes", params={name: quoted})
                for name in ("metadata", "state", "cursor", "owner", "limit")
            ),
            client.get("/v1/sandboxes", params={"metadata": f"k={quoted}"}),
            *(
                client.get("/v1/execs", params={name: quoted})
                for name in ("state", "cursor", "sandbox")
            ),
            *(
                client.get("/v1/audit", params={name: quoted})
                for name in ("agent", "action", "decision", "target", "after", "since")
            ),
            *(
                client.request(method, f"/v1/{noun}/{quote(header[:200], safe='')}")
                for noun in ("sandboxes", "execs", "tokens")
                for method in ("GET", "DELETE")
            ),
        ]  # fmt: skip
        for answer in answers:
            assert answer.status_code < 500, (answer.request.url, answer.text)
        # Those that were made come back as they were asked for, and go.
        for answer in answers[:2]:
            if answer.status_code == 201:
                made = answer.json()
                assert made["owner"] == "evil"
                assert client.delete(f"/v1/sandboxes/{made['id']}").status_code < 300
    with served.client(header[:250]) as client:
        assert client.get("/v1/whoami").status_code in (400, 401)
    with served.client(victim) as client:
        found = client.get("/v1/sandboxes").json()["items"]
        assert [one["id"] for one in found] == [kept]
        assert client.get(f"/v1/sandboxes/{kept}").json()["metadata"] == {"secret": "s"}
    if text == EVIL[-1]:
        whole(sited, url)
