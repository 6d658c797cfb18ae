"""The API end to end: a real server, a client that is not ours, real sandboxes."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import threading
import time
from typing import Any

import httpx
import pytest

from service.conftest import Team

pytestmark = pytest.mark.kernel


def made(client: httpx.Client, **wanted: Any) -> dict[str, Any]:
    answer = client.post("/v1/sandboxes", json=wanted)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/v1/sandboxes/{found['id']}"
    return found


def test_a_command_runs_in_one_request(team: Team) -> None:
    answer = team.a.post(
        "/v1/run",
        json={
            "command": "cat; echo $WORD; echo bad >&2; cat in.txt; exit 3", "stdin": "typed\n",
            "env": {"WORD": "said"}, "files": [{"path": "in.txt", "content": "given\n"}],
        },
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["stdout"], found["stderr"]) == ("typed\nsaid\ngiven\n", "bad\n")
    assert (found["exitCode"], found["state"], found["timedOut"]) == (3, "Exited", False)
    assert found["execId"] == found["id"]
    assert found["durationMs"] >= 0
    assert found["maxRssKb"] > 0
    # The result stays, the sandbox does not.
    assert team.a.get(f"/v1/execs/{found['id']}").json()["stdout"] == found["stdout"]
    # It is removed behind the answer.
    deadline = time.monotonic() + 20
    while team.a.get(f"/v1/sandboxes/{found['sandboxId']}").status_code != 404:
        assert time.monotonic() < deadline


def test_an_argument_list_is_not_a_shell_command(team: Team) -> None:
    for field in ("cmd", "command"):
        found = team.a.post("/v1/run", json={field: ["echo", "$HOME;", "a b"]}).json()
        assert found["stdout"] == "$HOME; a b\n"


def test_code_runs_without_a_command(team: Team) -> None:
    body: dict[str, Any] = {
        "language": "python",
        "code": "import sys\nprint(sys.stdin.read() + 'é')",
        "stdin": "x",
    }
    assert team.a.post("/v1/run", json=body).json()["stdout"] == "xé\n"
    body = {"language": "sh", "code": "cat < in.txt", "files": [{"path": "in.txt", "content": "y"}]}
    assert team.a.post("/v1/run", json=body).json()["stdout"] == "y"
    for wrong, field in (({"code": "x"}, "language"), ({"language": "sh", "cmd": ["a"]}, "code"),
                         ({"code": "x", "language": "cobol"}, "language")):  # fmt: skip
        answer = team.a.post("/v1/run", json=wrong)
        assert (answer.status_code, answer.json()["field"]) == (422, field)


def test_bytes_that_are_no_text_arrive_exactly(team: Team) -> None:
    data = bytes(range(256))
    sent = base64.b64encode(data).decode()
    found = team.a.post("/v1/run", json={"cmd": ["cat"], "stdinBase64": sent}).json()
    assert base64.b64decode(found["stdoutBase64"]) == data
    assert found["encoding"] == "base64"
    assert "�" in found["stdout"]
    assert "stderrBase64" not in found


def test_a_command_that_takes_too_long_is_ended(team: Team) -> None:
    begun = time.monotonic()
    found = team.a.post("/v1/run", json={"command": "echo early; sleep 60", "timeout": 0.5}).json()
    assert time.monotonic() - begun < 20
    assert (found["timedOut"], found["stdout"], found["timeout"]) == (True, "early\n", 0.5)


def test_a_background_child_does_not_hold_up_the_answer(team: Team) -> None:
    begun = time.monotonic()
    found = team.a.post("/v1/run", json={"command": "sleep 30 & echo done"}).json()
    assert found["stdout"] == "done\n"
    assert time.monotonic() - begun < 15


def test_a_sandbox_keeps_its_files_until_it_is_deleted(team: Team) -> None:
    box = made(team.a, metadata={"task": "1"}, env={"ALWAYS": "here"}, timeout=600)
    path = f"/v1/sandboxes/{box['id']}"
    run = {"command": "echo $ALWAYS >> kept; echo x > ~/home"}
    assert team.a.post(f"{path}/exec", json=run).json()["exitCode"] == 0
    again = team.a.post(f"{path}/exec", json={"command": "cat kept ~/home"}).json()
    assert again["stdout"] == "here\nx\n"
    assert again["sandboxId"] == box["id"]
    assert [e["id"] for e in team.a.get(f"{path}/execs").json()["items"]][-1] == again["id"]
    assert team.a.delete(path).status_code == 204
    assert team.a.get(path).status_code == 404
    assert team.a.delete(path).status_code == 404


def test_a_sandbox_tells_what_holds_for_it(team: Team) -> None:
    box = made(team.a, resources={"pids": 50, "disk": "32Mi"}, env={"SECRET": "s3cr3t"})
    try:
        assert box["resources"]["pids"] == 50
        assert box["resources"]["disk"] == 32 << 20
        assert box["resources"]["memory"] == 512 << 20
        effective = box["effective"]
        assert effective["disk"] == {"limit": 32 << 20, "enforced": True, "enforcedBy": "server"}
        assert effective["memory"]["enforced"] == bool(effective["memory"]["enforcedBy"])
        assert box["network"] == {"mode": "off", "allowOut": [], "denyOut": []}
        assert box["envNames"] == ["SECRET"]
        assert "s3cr3t" not in json.dumps(box)
        assert box["owner"] == "agent-a"
        assert box["createdAt"] < box["expiresAt"]
    finally:
        team.a.delete(f"/v1/sandboxes/{box['id']}")


def test_lists_have_parts_filters_and_an_order(team: Team) -> None:
    boxes = [made(team.a, metadata={"group": "g1", "n": str(n)})["id"] for n in range(5)]
    other = made(team.a, metadata={"group": "g2"})["id"]
    try:
        seen: list[str] = []
        query = {"metadata": "group=g1", "limit": "2"}
        while True:
            page = team.a.get("/v1/sandboxes", params=query).json()
            seen += [item["id"] for item in page["items"]]
            if page["next"] is None:
                break
            query["after"] = page["next"]
        assert seen == boxes
        newest = {"metadata": "group=g1", "order": "desc", "limit": "3"}
        page = team.a.get("/v1/sandboxes", params=newest).json()
        rest = team.a.get("/v1/sandboxes", params={**newest, "after": page["next"]}).json()
        assert [i["id"] for i in page["items"] + rest["items"]] == boxes[::-1]
        both = team.a.get("/v1/sandboxes", params={"metadata": "group=g1,n=3"}).json()
        assert [item["id"] for item in both["items"]] == [boxes[3]]
        assert team.a.get("/v1/sandboxes", params={"state": "Paused"}).json()["items"] == []
        # An agent sees its own; an admin all, or one's.
        assert team.b.get("/v1/sandboxes").json()["items"] == []
        seen_by_admin = team.admin.get("/v1/sandboxes", params={"owner": "agent-a"}).json()
        assert {*boxes, other} <= {item["id"] for item in seen_by_admin["items"]}
        assert team.b.get("/v1/sandboxes", params={"owner": "agent-a"}).status_code == 403
    finally:
        for box in (*boxes, other):
            team.a.delete(f"/v1/sandboxes/{box}")


def test_metadata_changes_member_by_member(team: Team) -> None:
    box = made(team.a, metadata={"a": "1", "b": "2"})
    path = f"/v1/sandboxes/{box['id']}"
    answer = team.a.patch(f"{path}/metadata", json={"a": None, "c": "3"})
    assert answer.json()["metadata"] == {"b": "2", "c": "3"}
    assert team.a.get(path).json()["metadata"] == {"b": "2", "c": "3"}
    team.a.delete(path)


@pytest.mark.parametrize("name", ["renew", "timeout", "renew-expiration"])
def test_a_sandbox_can_live_longer(one: Team, name: str) -> None:
    box = made(one.a, timeout=60)
    path = f"/v1/sandboxes/{box['id']}"
    longer = one.a.post(f"{path}/{name}", json={"timeout": 3000}).json()
    assert longer["expiresAt"] > box["expiresAt"]
    at = one.a.post(f"{path}/{name}", json={"expiresAt": longer["expiresAt"]}).json()
    assert at["expiresAt"] == longer["expiresAt"]
    too_long = one.a.post(f"{path}/{name}", json={"timeout": 10**7})
    assert (too_long.status_code, too_long.json()["code"]) == (422, "LIMIT_EXCEEDED")
    one.a.delete(path)


def test_files_go_in_and_out(team: Team) -> None:
    box = made(team.a)
    files = f"/v1/sandboxes/{box['id']}/files"
    data = bytes(range(256)) * 5000
    put = team.a.put(files, params={"path": "d/a.bin", "mode": "750"}, content=data)
    assert put.status_code == 200, put.text
    assert (put.json()["path"], put.json()["size"]) == ("/workspace/d/a.bin", len(data))
    assert put.json()["mode"] == "0750"
    got = team.a.get(files, params={"path": "/workspace/d/a.bin"})
    assert got.content == data
    assert got.headers["content-type"] == "application/octet-stream"
    assert got.headers["content-disposition"] == "attachment"
    part = team.a.get(files, params={"path": "d/a.bin"}, headers={"Range": "bytes=1000-"})
    assert (part.status_code, part.content) == (206, data[1000:])
    assert part.headers["content-range"] == f"bytes 1000-{len(data) - 1}/{len(data)}"
    listed = team.a.get(f"{files}/list", params={"depth": "3"}).json()
    assert [(i["path"], i["type"]) for i in listed["items"]] == [
        ("/workspace/d", "directory"), ("/workspace/d/a.bin", "file"),
    ]  # fmt: skip
    assert team.a.post(f"{files}/directory", params={"path": "e/f"}).json()["type"] == "directory"
    assert team.a.get(f"{files}/stat", params={"path": "e/f"}).json()["name"] == "f"
    full = team.a.delete(files, params={"path": "d"})
    assert full.status_code in (409, 422)
    gone = team.a.delete(files, params={"path": "d", "recursive": "true"})
    assert gone.status_code == 204
    assert team.a.get(files, params={"path": "d/a.bin"}).status_code == 404
    team.a.delete(f"/v1/sandboxes/{box['id']}")


def test_a_tree_goes_in_and_out_as_tar(team: Team) -> None:
    box = made(team.a)
    path = f"/v1/sandboxes/{box['id']}"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, text in (("src/a.py", b"print('a')\n"), ("src/b/c.txt", b"c")):
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    sent = team.a.put(f"{path}/archive", content=buffer.getvalue())
    assert (sent.status_code, sent.json()["entries"]) == (200, 2), sent.text
    ran = team.a.post(f"{path}/exec", json={"command": "python3 src/a.py || cat src/a.py"}).json()
    assert "a" in ran["stdout"]
    got = team.a.get(f"{path}/archive", params={"path": "src"})
    assert got.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(got.content)) as tar:
        assert {"a.py", "b/c.txt"} <= {name.removeprefix("./") for name in tar.getnames()}
    team.a.delete(path)


def test_what_runs_can_be_seen_fed_signalled_and_killed(team: Team) -> None:
    box = made(team.a)
    path = f"/v1/sandboxes/{box['id']}/exec"
    # A signal interrupts `read`, too.
    script = (
        "trap 'signalled=1; echo got usr1' USR1; echo ready; while :; do "
        'if read line; then echo "<$line>"; elif [ "$signalled" ]; then signalled=; '
        "else break; fi; done; echo end"
    )
    begun = team.a.post(path, json={"command": script, "background": True, "keepStdin": True})
    assert (begun.status_code, begun.json()["state"]) == (202, "Running")
    assert begun.json()["exitCode"] is None
    exec_id = begun.json()["id"]
    assert exec_id in [e["id"] for e in team.a.get("/v1/execs?state=Running").json()["items"]]
    wait_for(team.a, exec_id, "ready")
    stdin = f"/v1/execs/{exec_id}/stdin"
    assert team.a.post(stdin, json={"data": "one\n"}).status_code == 204
    wait_for(team.a, exec_id, "<one>")
    assert team.a.post(f"/v1/execs/{exec_id}/signal", json={"signal": "USR1"}).status_code == 204
    wait_for(team.a, exec_id, "got usr1")
    assert team.a.post(stdin, json={"dataBase64": "dHdvCg==", "eof": True}).status_code == 204
    found = ended(team.a, exec_id)
    assert found["exitCode"] == 0
    assert found["stdout"].endswith("<two>\nend\n")
    late = team.a.post(stdin, json={"data": "late"})
    assert (late.status_code, late.json()["code"]) == (409, "WRONG_STATE")
    held = team.a.post(path, json={"command": "sleep 100", "background": True}).json()
    killed = team.a.post(f"/v1/execs/{held['id']}/kill")
    assert killed.json()["signal"] == "SIGKILL"
    assert killed.json()["state"] == "Exited"
    assert team.a.delete(f"/v1/execs/{held['id']}").status_code == 204
    assert team.a.get(f"/v1/execs/{held['id']}").status_code == 404
    team.a.delete(f"/v1/sandboxes/{box['id']}")


def wait_for(client: httpx.Client, exec_id: str, text: str) -> None:
    """Follow its events until a text has come."""
    with client.stream("GET", f"/v1/execs/{exec_id}/events") as stream:
        seen = ""
        for line in stream.iter_lines():
            if line.startswith("data: "):
                seen += json.loads(line[6:]).get("data", "")
            if text in seen:
                return
    raise AssertionError(f"{text!r} never came: {seen!r}")


def ended(client: httpx.Client, exec_id: str) -> dict[str, Any]:
    with client.stream("GET", f"/v1/execs/{exec_id}/events") as stream:
        for _ in stream.iter_lines():
            pass
    found: dict[str, Any] = client.get(f"/v1/execs/{exec_id}").json()
    return found


def test_a_sandbox_can_be_paused_and_resumed(team: Team) -> None:
    box = made(team.a)
    path = f"/v1/sandboxes/{box['id']}"
    paused = team.a.post(f"{path}/pause")
    if paused.status_code == 422:
        assert paused.json()["code"] == "UNSUPPORTED"
        return
    assert paused.json()["state"] == "Paused"
    refused = team.a.post(f"{path}/exec", json={"command": "true"})
    assert (refused.status_code, refused.json()["code"]) == (409, "WRONG_STATE")
    assert team.a.post(f"{path}/resume", json={}).json()["state"] == "Running"
    assert team.a.post(f"{path}/exec", json={"command": "true"}).json()["exitCode"] == 0
    team.a.delete(path)


def test_a_key_makes_one_thing_of_many_requests(team: Team) -> None:
    key = {"Idempotency-Key": f"key-{time.time_ns()}"}
    first = team.a.post("/v1/sandboxes", json={"metadata": {"a": "1"}}, headers=key)
    again = team.a.post("/v1/sandboxes", json={"metadata": {"a": "1"}}, headers=key)
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["id"] == again.json()["id"]
    other = team.a.post("/v1/sandboxes", json={"metadata": {"a": "2"}}, headers=key)
    assert (other.status_code, other.json()["code"]) == (409, "IDEMPOTENCY_CONFLICT")
    # Another agent's key is another key.
    theirs = team.b.post("/v1/sandboxes", json={"metadata": {"a": "2"}}, headers=key)
    assert theirs.status_code == 201
    team.b.delete(f"/v1/sandboxes/{theirs.json()['id']}")
    team.a.delete(f"/v1/sandboxes/{first.json()['id']}")
    runs = {"Idempotency-Key": f"run-{time.time_ns()}"}
    body = {"command": "cat /proc/sys/kernel/random/uuid"}
    one = team.a.post("/v1/run", json=body, headers=runs).json()
    two = team.a.post("/v1/run", json=body, headers=runs).json()
    assert (one["id"], one["stdout"]) == (two["id"], two["stdout"])


def test_whoever_asks_learns_who_it_is_and_what_holds(team: Team) -> None:
    box = made(team.a)
    found = team.a.get("/v1/whoami").json()
    assert (found["agent"], found["admin"]) == ("agent-a", False)
    assert found["usage"]["sandboxes"] == 1
    assert found["limits"]["maxSandboxesPerAgent"] == 50
    assert team.tokens["a"].startswith(found["key"])
    assert team.tokens["a"] not in json.dumps(found)
    policy = team.a.get("/v1/policy").json()
    assert [b["name"] for b in policy["backends"]] == ["bwrap"]
    assert "default" in policy["templates"]
    team.a.delete(f"/v1/sandboxes/{box['id']}")


def test_a_dry_run_tells_every_reason(one: Team) -> None:
    fine = one.a.post("/v1/policy/check", json={"command": "true", "timeout": 5}).json()
    assert fine["allowed"]
    assert fine["effective"]["backend"] == "bwrap"
    wrong = {"image": "x", "resources": {"pids": 10**6}, "cmd": ["true"], "timeout": 10**6}
    found = one.a.post("/v1/policy/check", json=wrong).json()
    assert not found["allowed"]
    assert found["effective"] is None
    assert {r["code"] for r in found["refusals"]} == {"UNSUPPORTED", "LIMIT_EXCEEDED"}
    assert {"resources.pids", "image", "timeout"} == {r["field"] for r in found["refusals"]}
    lone = one.a.post("/v1/policy/check", json={"stdin": "x"})
    assert (lone.status_code, lone.json()["field"]) == (422, "stdin")


def test_a_client_that_goes_away_does_not_lose_the_result(team: Team) -> None:
    box = made(team.a)
    path = f"/v1/sandboxes/{box['id']}/exec"
    with pytest.raises(httpx.ReadTimeout):
        team.a.post(path, json={"command": "sleep 1; echo kept"}, timeout=0.3)
    found = team.a.get("/v1/execs", params={"sandbox": box["id"]}).json()["items"]
    assert ended(team.a, found[0]["id"])["stdout"] == "kept\n"
    team.a.delete(f"/v1/sandboxes/{box['id']}")


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
def test_a_client_may_ask_that_its_going_ends_the_command(team: Team, accept: str) -> None:
    box = made(team.a)
    path = f"/v1/sandboxes/{box['id']}/exec"
    body = {"command": "sleep 50", "cancelOnDisconnect": True}
    with (
        pytest.raises(httpx.ReadTimeout),
        team.a.stream("POST", path, json=body, timeout=0.5, headers={"Accept": accept}) as stream,
    ):
        stream.read()
    found = team.a.get("/v1/execs", params={"sandbox": box["id"]}).json()["items"]
    result = ended(team.a, found[0]["id"])
    assert result["signal"] == "SIGKILL"
    team.a.delete(f"/v1/sandboxes/{box['id']}")


def test_output_beyond_what_an_answer_carries_is_marked_and_kept(team: Team) -> None:
    answer = team.a.post("/v1/run", json={"command": "head -c 3000000 /dev/zero | tr '\\0' x"})
    found = answer.json()
    assert found["truncated"]
    assert (len(found["stdout"]), found["stdoutBytes"]) == (1 << 20, 3_000_000)
    whole, since = "", 0
    while True:
        part = team.a.get(
            f"/v1/execs/{found['id']}/logs", params={"since": since, "limit": 1 << 20}
        ).json()
        whole += part["stdout"]
        if part["next"] == since:
            break
        since = part["next"]
    assert whole == "x" * 3_000_000


def test_many_at_once_are_all_answered(team: Team) -> None:
    answers: list[httpx.Response] = []

    def work() -> None:
        with team.served.client(team.tokens["a"]) as client:
            answers.extend(client.post("/v1/run", json={"command": "echo x"}) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 40
    assert {answer.json()["stdout"] for answer in answers} == {"x\n"}
