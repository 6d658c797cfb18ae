"""What A can see, guess or infer of B's through the API. Each test has its control."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agent_sandbox.service.api.call import Route
from agent_sandbox.service.api.routes import ROUTES
from agent_sandbox.service.core import ids
from service.api.asking import about, ask, name
from service.conftest import Team

pytestmark = pytest.mark.kernel
UPGRADE = {
    "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
}  # fmt: skip
# What differs from one answer to the next, whatever was asked.
VARIES = {"x-request-id", "date", "x-ratelimit-remaining", "x-ratelimit-reset"}


class Place:
    """A sandbox of B's with all that B may have in it, and words that are nowhere else."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.word = "word-" + secrets.token_hex(8)
        made = client.post(
            "/v1/sandboxes", headers={"Idempotency-Key": f"key-{self.word}"},
            json={"metadata": {"task": self.word}, "env": {"WORD": self.word},
                  "files": [{"path": path, "content": self.word} for path in (self.word, "x")]},
        )  # fmt: skip
        assert made.status_code == 201, made.text
        self.sandbox = made.json()["id"]
        run = {"command": f"echo {self.word}; sleep 100", "background": True, "tty": True}
        begun = client.post(f"/v1/sandboxes/{self.sandbox}/exec", json=run)
        assert begun.status_code == 202, begun.text
        self.exec = begun.json()["id"]
        ended = client.post("/v1/run", json={"command": f"echo {self.word}"})
        self.ended = ended.json()["id"]
        self.names = (self.word, self.sandbox, self.exec, self.ended, ended.json()["sandboxId"])

    def ids(self, *, ended: bool = False) -> dict[str, str]:
        return {"sandboxId": self.sandbox, "execId": self.ended if ended else self.exec}


@pytest.fixture
def b(team: Team) -> Iterator[Place]:
    """B's place."""
    found = Place(team.b)
    yield found
    team.b.delete(f"/v1/sandboxes/{found.sandbox}")


def fresh() -> dict[str, str]:
    """Ids as good as any, of nothing."""
    return {"sandboxId": ids.new(ids.SANDBOX), "execId": ids.new(ids.EXECUTION)}


def bare(answer: httpx.Response) -> tuple[int, bytes, list[tuple[str, str]]]:
    """An answer to the last byte, without what always differs."""
    request = answer.headers.get("x-request-id", "")
    headers = [(n, v) for n, v in answer.headers.multi_items() if n not in VARIES]
    return answer.status_code, answer.content.replace(request.encode(), b"?"), headers


@pytest.mark.parametrize("ended", [False, True], ids=["runs", "ended"])
@pytest.mark.parametrize("route", about("sandboxId", "execId"), ids=name)
def test_cannot_tell_a_foreign_id_from_one_of_nothing(
    team: Team, b: Place, route: Route, ended: bool
) -> None:
    """To the last byte, also with a WebSocket, a bad body, and a range or an event asked for."""
    more: list[dict[str, Any]] = [{}]
    if route.websocket:
        more.append({"headers": UPGRADE})
    if route.body is not None:
        more += [{"json": {"no such field": 1}}, {"content": b"{", "json": None}]
    if route.method == "GET":
        more.append({"headers": {"Last-Event-ID": "5", "Range": "bytes=1-"}})
    for options in more:
        foreign = bare(ask(team.a, route, b.ids(ended=ended), **options))
        missing = bare(ask(team.a, route, fresh(), **options))
        assert foreign == missing
        assert foreign[0] >= 400
        for word in b.names:
            assert word.encode() not in foreign[1]
    # The control: the same question is answered to B.
    assert ask(team.b, route, b.ids(ended=ended)).status_code not in (401, 403, 404)


READS = [
    route for route in ROUTES
    if route.method == "GET" and not route.public and "{" not in route.path and not route.hidden
]  # fmt: skip


def test_cannot_find_a_word_of_b_in_any_list(team: Team, b: Place) -> None:
    """Whatever can be read without an id, with filters that would find it."""
    filters: list[dict[str, str]] = [
        {}, {"metadata": f"task={b.word}"}, {"state": "Running"}, {"sandbox": b.sandbox},
        {"order": "desc", "limit": "500"}, {"agent": "agent-b"}, {"target": b.sandbox},
    ]  # fmt: skip
    seen = ""
    for route in READS:
        for query in filters:
            known = {param: value for param, value in query.items() if param in route.query}
            if known != query:
                continue
            answer = team.a.get(route.path, params=query)
            # A's own question may be repeated; it has nothing but what A put there.
            for word in b.names:
                assert word not in answer.text, (route.path, query)
            seen += team.b.get(route.path, params=query).text
            seen += team.admin.get(route.path, params=query).text
    # The control: B and an admin find all of it with the same questions.
    assert all(word in seen for word in b.names)


def test_cannot_count_what_others_have(team: Team, b: Place) -> None:
    """Nothing that A may read changes with what B makes."""
    reads = [route for route in READS if team.a.get(route.path).status_code == 200]
    assert {"/v1/whoami", "/v1/policy", "/v1/sandboxes"} <= {route.path for route in reads}
    before = [volatile(team.a.get(route.path).text) for route in reads]
    mine = [volatile(team.b.get(route.path).text) for route in reads]
    more = Place(team.b)
    try:
        assert [volatile(team.a.get(route.path).text) for route in reads] == before
        assert [volatile(team.b.get(route.path).text) for route in reads] != mine
    finally:
        team.b.delete(f"/v1/sandboxes/{more.sandbox}")


def volatile(text: str) -> str:
    """Without times, which go on by themselves."""
    return re.sub(r"\d{4}-\d\d-\d\dT[0-9:.]+Z", "", text)


def test_cannot_see_totals_of_the_service(team: Team, b: Place) -> None:
    for path in ("/metrics", "/v1/audit", "/v1/tokens"):
        refused = team.a.get(path)
        assert refused.status_code == 403
        assert not any(word in refused.text for word in b.names)
        assert team.admin.get(path).status_code == 200
    assert team.nobody.get("/metrics").status_code == 401


def test_cannot_use_or_block_a_key_of_b(team: Team, b: Place) -> None:
    """The same key is another key for another agent, whatever its body."""
    key = {"Idempotency-Key": f"key-{b.word}"}
    own = team.a.post("/v1/sandboxes", json={}, headers=key)
    assert own.status_code == 201
    assert own.json()["id"] != b.sandbox
    # The control: for B the key is taken, by exactly that request.
    assert team.b.post("/v1/sandboxes", json={}, headers=key).status_code == 409
    team.a.delete(f"/v1/sandboxes/{own.json()['id']}")
    # Nor is one that A has taken first, also for runs, while it runs and afterwards.
    taken = {"Idempotency-Key": f"key2-{b.word}"}
    bodies = ({"command": "echo of a"}, {"command": "echo of b"})
    first = team.a.post("/v1/run", json=bodies[0], headers=taken).json()
    second = team.b.post("/v1/run", json=bodies[1], headers=taken).json()
    assert (first["stdout"], second["stdout"]) == ("of a\n", "of b\n")
    again = team.a.post("/v1/run", json=bodies[0], headers=taken).json()
    assert again["id"] == first["id"]


def test_cannot_guess_an_id(team: Team, b: Place) -> None:
    """130 random bits, no order, no part of one in another."""
    made = [team.b.post("/v1/run", json={"command": "true"}).json() for _ in range(8)]
    found = [one["id"] for one in made] + [one["sandboxId"] for one in made]
    assert len(set(found)) == len(found)
    for text in found:
        kind, _, rest = text.partition("-")
        assert kind in ("exc", "sbx")
        assert re.fullmatch("[a-z2-7]{26}", rest)
    # No two share a beginning, as a counter or a clock would give them: 2^40 to one.
    assert len({text[4:12] for text in found}) == len(found)
    # Others' ids as they stand, changed in case, cut or lengthened, lead nowhere either.
    for text in (b.exec.upper(), b.exec[:-1], b.exec + "a", f"{b.exec}%00", f"{b.exec}/", "%2e"):
        assert team.a.get(f"/v1/execs/{text}").status_code in (400, 404)


def test_b_s_audit_lines_say_who_tried(team: Team, b: Place) -> None:
    team.a.delete(f"/v1/sandboxes/{b.sandbox}")
    team.a.post(f"/v1/execs/{b.exec}/signal", json={"signal": "KILL"})
    lines = team.audit(decision="deny", agent="agent-a")
    tried = {(line["action"], line["target"]["id"]) for line in lines if "target" in line}
    assert {("sandbox.delete", b.sandbox), ("exec.signal", b.exec)} <= tried
    assert team.b.get(f"/v1/execs/{b.exec}").json()["state"] == "Running"
    assert "word" not in json.dumps([line.get("request") for line in lines])
