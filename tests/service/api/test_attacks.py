"""What agents may try against the service and against each other. Each attack has its control."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import websockets.exceptions
import websockets.sync.client as websocket

from agent_sandbox.service.api.call import Route
from agent_sandbox.service.api.routes import ROUTES
from agent_sandbox.service.values import ADMIN, SCOPES
from service.api.asking import KNOWN, about, ask, name
from service.conftest import Team

pytestmark = pytest.mark.kernel
# Nobody may come to this list without a thought.
PUBLIC = {
    "GET /healthz", "GET /readyz", "GET /openapi.json", "POST /v1/session", "GET /",
    "GET /assets/{asset}",
}  # fmt: skip
NO_SANDBOX, NO_EXEC = "sbx-" + "a" * 26, "exc-" + "a" * 26


@contextlib.contextmanager
def place(client: httpx.Client) -> Iterator[dict[str, str]]:
    """A sandbox with a file and with a command that runs."""
    box = client.post("/v1/sandboxes", json={"files": [{"path": "x", "content": "secret"}]})
    assert box.status_code == 201, box.text
    sandbox = box.json()["id"]
    run = {"cmd": ["sleep", "100"], "background": True, "tty": True}
    begun = client.post(f"/v1/sandboxes/{sandbox}/exec", json=run)
    assert begun.status_code == 202, begun.text
    yield {"sandboxId": sandbox, "execId": begun.json()["id"]}
    client.delete(f"/v1/sandboxes/{sandbox}")


def told(answer: httpx.Response) -> dict[str, Any]:
    """A refusal, without what differs from request to request."""
    body: dict[str, Any] = answer.json()
    # What was no request has no name.
    assert body.pop("requestId", None) == answer.headers.get("x-request-id")
    return body


# --- what belongs to others


@pytest.mark.parametrize("route", about("sandboxId", "execId"), ids=name)
def test_cannot_tell_what_is_another_s_from_what_is_not(team: Team, route: Route) -> None:
    with place(team.a) as theirs:
        tried = ask(team.b, route, theirs)
        missing = ask(team.b, route, {"sandboxId": NO_SANDBOX, "execId": NO_EXEC})
        strange = ask(team.b, route, {"sandboxId": "1", "execId": "1"})
        assert (tried.status_code, told(tried)["code"]) == (404, "NOT_FOUND")
        assert told(tried) == told(missing) == told(strange)
        # Nothing has happened to it.
        assert team.a.get(f"/v1/sandboxes/{theirs['sandboxId']}").json()["state"] == "Running"
        assert team.a.get(f"/v1/execs/{theirs['execId']}").json()["state"] == "Running"
        # The control: the same request of its owner.
        own = ask(team.a, route, theirs)
        assert own.status_code not in (401, 403, 404), own.text


def test_cannot_find_another_s_by_lists_and_filters(team: Team) -> None:
    with place(team.a) as theirs:
        sandbox, execution = theirs["sandboxId"], theirs["execId"]
        for client, sees in ((team.b, False), (team.a, True), (team.admin, True)):
            boxes = client.get("/v1/sandboxes", params={"limit": 500}).text
            execs = client.get("/v1/execs", params={"sandbox": sandbox}).text
            assert (sandbox in boxes, execution in execs) == (sees, sees)
        assert team.b.get("/v1/whoami").json()["usage"]["sandboxes"] == 0


def test_cannot_use_another_s_place_in_a_list(team: Team) -> None:
    with place(team.a), place(team.a):
        cursor = team.a.get("/v1/sandboxes", params={"limit": 1}).json()["next"]
        assert cursor
        stolen = team.b.get("/v1/sandboxes", params={"after": cursor})
        assert (stolen.status_code, stolen.json()["items"]) == (200, [])


@pytest.mark.parametrize("after", ["x", "AAAA", "bmFuIGE", "LTEgYQ", "a" * 256, "MSAyIDM"])
def test_a_forged_place_in_a_list_is_refused_or_empty(one: Team, after: str) -> None:
    answer = one.a.get("/v1/sandboxes", params={"after": after})
    assert answer.status_code in (200, 422)
    if answer.status_code == 200:
        assert answer.json()["items"] == []


# --- scopes


class Holders:
    """Tokens by their scopes, made once."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._clients: dict[frozenset[str], httpx.Client] = {}

    def client(self, scopes: frozenset[str]) -> httpx.Client:
        if scopes not in self._clients:
            number = len(self._clients)
            body = {"name": f"holder-{number}", "scopes": sorted(scopes)}
            made = self._team.admin.post("/v1/tokens", json=body)
            assert made.status_code == 201, made.text
            self._clients[scopes] = self._team.served.client(made.json()["token"])
        return self._clients[scopes]

    def close(self) -> None:
        for number, client in enumerate(self._clients.values()):
            client.close()
            self._team.admin.delete(f"/v1/tokens/holder-{number}")


@pytest.fixture(scope="module")
def holders(_user_team: Team) -> Iterator[Holders]:
    found = Holders(_user_team)
    yield found
    found.close()


@pytest.mark.parametrize("route", [r for r in ROUTES if r.scopes], ids=name)
def test_cannot_do_without_the_scope(one: Team, holders: Holders, route: Route) -> None:
    ids = {"sandboxId": NO_SANDBOX, "execId": NO_EXEC, "tokenName": "unknown"}
    for scope in route.scopes:
        others = holders.client(frozenset(SCOPES) - {scope, ADMIN})
        refused = ask(others, route, ids)
        assert (refused.status_code, told(refused)["code"]) == (403, "SCOPE_MISSING")
        assert told(refused)["rule"] == f"scope.{scope}"
    # The control: these scopes and no other will do, and an admin needs none but its own.
    for scopes in (frozenset(route.scopes), frozenset({ADMIN})):
        allowed = ask(holders.client(scopes), route, ids)
        assert allowed.status_code not in (401, 403), allowed.text


def test_cannot_make_or_end_tokens_without_being_an_admin(one: Team, holders: Holders) -> None:
    client = holders.client(frozenset(SCOPES) - {ADMIN})
    body = {"name": "mine", "scopes": ["admin"]}
    assert client.post("/v1/tokens", json=body).status_code == 403
    assert client.delete("/v1/tokens/boss").status_code == 403
    assert client.post("/v1/tokens/agent-a/rotate").status_code == 403
    assert one.a.get("/v1/whoami").status_code == 200


# --- who it is


@pytest.mark.parametrize("route", KNOWN, ids=name)
def test_cannot_ask_without_a_token(one: Team, route: Route) -> None:
    ids = {"sandboxId": NO_SANDBOX, "execId": NO_EXEC}
    refused = ask(one.nobody, route, ids)
    assert (refused.status_code, told(refused)["code"]) == (401, "UNAUTHENTICATED")
    assert refused.headers["www-authenticate"] == "Bearer"
    with_token = ask(one.admin, route, ids)
    assert with_token.status_code != 401


def test_only_what_is_on_the_list_is_public() -> None:
    assert {name(route) for route in ROUTES if route.public} == PUBLIC


def test_cannot_come_in_with_a_token_that_is_not_or_not_any_more(one: Team) -> None:
    good = one.tokens["a"]
    key, secret = good[:12], good[13:]
    other = one.tokens["b"]
    dead = one.served.token("dead")
    assert one.admin.delete("/v1/tokens/dead").status_code == 204
    brief = one.admin.post("/v1/tokens", json={"name": "brief", "expiresIn": 1}).json()["token"]
    forged = [
        "x", key, f"{key}_", f"{key}_{secret[:-1]}", f"{key}_{secret}A",
        f"{key}_{secret[::-1]}", f"{other[:12]}_{secret}", f"sbx_aaaaaaaa_{secret}",
        good.upper(), dead, "sbx_%" + secret, good + "\x7f", "A" * 10000, f"{good},{other}",
    ]  # fmt: skip
    for token in forged:
        for header in ({"Authorization": f"Bearer {token}"}, {"X-API-Key": token}):
            answer = one.nobody.get("/v1/whoami", headers=header)
            assert answer.status_code in (400, 401, 431), (token, answer.text)
            assert token[:300] not in answer.text or len(token) == 1
    for header_ in (
        "Authorization: Bearer",
        "Authorization: Bearer ",
        "Authorization:",
        "X-API-Key:",
    ):
        assert raw(one, f"GET /v1/whoami HTTP/1.1\nHost: localhost\n{header_}\n\n")[0] == 401
    deadline = time.monotonic() + 10
    while one.nobody.get("/v1/whoami", headers={"X-API-Key": brief}).status_code == 200:
        assert time.monotonic() < deadline
    expired = one.nobody.get("/v1/whoami", headers={"X-API-Key": brief})
    unknown = one.nobody.get("/v1/whoami", headers={"X-API-Key": "sbx_aaaaaaaa_" + "A" * 43})
    # One answer for all: it tells nothing.
    assert told(expired) == told(unknown)
    # The controls.
    for header in ({"Authorization": f"Bearer {good}"}, {"X-API-Key": good},
                   {"Authorization": f"bearer {good}"}):  # fmt: skip
        assert one.nobody.get("/v1/whoami", headers=header).json()["agent"] == "agent-a"


def test_cannot_be_two_at_once(one: Team) -> None:
    both = {"Authorization": f"Bearer {one.tokens['a']}", "X-API-Key": one.tokens["b"]}
    answer = one.nobody.get("/v1/whoami", headers=both)
    assert (answer.status_code, told(answer)["rule"]) == (400, "auth.twice")
    same = {"Authorization": f"Bearer {one.tokens['a']}", "X-API-Key": one.tokens["a"]}
    assert one.nobody.get("/v1/whoami", headers=same).status_code == 200


@pytest.mark.parametrize("scheme", ["Basic", "Digest", "Token", ""])
def test_other_schemes_are_refused(one: Team, scheme: str) -> None:
    header = {"Authorization": f"{scheme} {one.tokens['a']}".strip()}
    assert one.nobody.get("/v1/whoami", headers=header).status_code == 401


@pytest.mark.parametrize("param", ["token", "access_token", "api_key", "apiKey", "key", "TOKEN"])
def test_a_token_in_the_address_is_refused_and_kept_nowhere(one: Team, param: str) -> None:
    token = one.tokens["a"]
    for client in (one.nobody, one.a):
        for path in ("/v1/whoami", "/healthz", "/v1/sandboxes"):
            answer = client.get(path, params={param: token})
            assert (answer.status_code, told(answer)["rule"]) == (400, "auth.query")
            assert token not in answer.text
    assert one.a.get("/v1/whoami").status_code == 200
    assert token not in "".join(one.served.lines)
    assert token not in json.dumps(one.audit())


def test_who_is_refused_stands_in_the_audit(one: Team) -> None:
    one.nobody.get("/v1/whoami", headers={"X-API-Key": "sbx_aaaaaaaa_" + "B" * 43})
    one.b.post("/v1/tokens", json={"name": "x"})
    with place(one.a) as theirs:
        one.b.delete(f"/v1/sandboxes/{theirs['sandboxId']}")
        one.b.post("/v1/sandboxes", json={"resources": {"memory": "900G"}})
        lines = one.audit(decision="deny")
    found = [(line["action"], line["rule"], line.get("actor", {}).get("agent")) for line in lines]
    assert ("auth.fail", "auth.token", None) in found
    assert ("token.new", "scope.admin", "agent-b") in found
    assert ("sandbox.delete", "access.owner", "agent-b") in found
    assert ("sandbox.create", "limits.max_memory", "agent-b") in found
    tried = next(line for line in lines if line["action"] == "sandbox.delete")
    assert tried["target"]["id"] == theirs["sandboxId"]
    assert tried["result"]["status"] == 404


def test_a_flood_of_strangers_does_not_fill_the_audit(one: Team) -> None:
    before = one.audit(limit="1")[0]["seq"]
    for _ in range(300):
        assert one.nobody.get("/v1/whoami").status_code == 401
    lines = [line for line in one.audit(action="auth.fail") if line["seq"] > before]
    assert 1 <= len(lines) < 150
    # The control: of those who are known, every refusal has its line.
    before = one.audit(limit="1")[0]["seq"]
    for _ in range(60):
        one.b.get(f"/v1/sandboxes/{NO_SANDBOX}")
    lines = [line for line in one.audit(action="sandbox.get") if line["seq"] > before]
    assert len(lines) == 60


# --- browsers


def raw(team: Team, head: str, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    """Send bytes as they are; the status and the JSON of the first answer."""
    host, port = team.served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        sock.sendall(head.replace("\n", "\r\n").encode("latin-1") + body)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        text = answer.read()
    return answer.status, json.loads(text) if text else {}


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8650", "localhost.evil.example", "127.0.0.1.evil.example",
        "10.0.0.1", "[::2]", "2130706433", "0x7f.1", "localhost:x", "localhost:", "a@localhost",
        "localhost/", "LOCALHOST.EVIL.", "localhost localhost", "[::1", "127.1",
    ],
)  # fmt: skip
def test_cannot_call_us_by_another_s_name(one: Team, host: str) -> None:
    for path in ("/v1/whoami", "/healthz", "/", "/v1/session"):
        head = f"GET {path} HTTP/1.1\nHost: {host}\nX-API-Key: {one.tokens['a']}\n\n"
        status, body = raw(one, head)
        assert status in (400, 403), (path, body)
        assert body["code"] in ("BAD_REQUEST", "FORBIDDEN")


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1", "127.0.0.1", "[::1]:99", "localhost."]
)
def test_our_own_names_are_known(one: Team, host: str) -> None:
    head = f"GET /v1/whoami HTTP/1.1\nHost: {host}\nX-API-Key: {one.tokens['a']}\n\n"
    assert raw(one, head)[1]["agent"] == "agent-a"


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example", "null", "http://localhost:1", "http://127.0.0.1", "file://",
        "https://127.0.0.1:{port}", "http://127.0.0.1:{port}.evil.example", "http://[::1]:{port}",
        "chrome-extension://abc", "", "127.0.0.1:{port}", "http://localhost:{port}",
    ],
)  # fmt: skip
def test_cannot_ask_from_a_page_of_another_site(one: Team, origin: str) -> None:
    port = one.served.url.rpartition(":")[2]
    header = {"Origin": origin.format(port=port)}
    for client in (one.a, one.nobody):
        for method, path in (("POST", "/v1/run"), ("GET", "/v1/whoami"), ("OPTIONS", "/v1/run")):
            answer = client.request(method, path, headers=header)
            assert (answer.status_code, told(answer)["rule"]) == (403, "origin.same")
            assert "access-control-allow-origin" not in answer.headers
    # The control: a page of ours.
    own = one.a.get("/v1/whoami", headers={"Origin": one.served.url})
    assert own.status_code == 200


def test_cannot_ask_from_another_site_without_an_origin(one: Team) -> None:
    for site in ("cross-site", "same-site"):
        header = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
        assert one.a.get("/v1/whoami", headers=header).status_code == 403
    for header in ({"Sec-Fetch-Site": "same-origin"},
                   {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}):  # fmt: skip
        assert one.a.get("/", headers=header).status_code == 200


@contextlib.contextmanager
def login(team: Team, token: str) -> Iterator[tuple[httpx.Client, str]]:
    with team.served.client() as client:
        answer = client.post("/v1/session", json={"token": token})
        assert answer.status_code == 200, answer.text
        cookie = answer.headers["set-cookie"]
        for part in ("HttpOnly", "SameSite=Strict", "Path=/"):
            assert part in cookie
        assert "Domain" not in cookie
        assert token not in cookie + answer.text
        yield client, answer.json()["csrfToken"]


def test_cannot_act_with_a_cookie_alone(team: Team) -> None:
    with login(team, team.tokens["a"]) as (browser, csrf):
        for header in ({}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": csrf[:-1]},
                       {"X-CSRF-Token": csrf.swapcase()}):  # fmt: skip
            answer = browser.post("/v1/run", json={"command": "true"}, headers=header)
            assert (answer.status_code, told(answer)["code"]) == (403, "CSRF")
            answer = browser.delete("/v1/session", headers=header)
            assert answer.status_code == 403
            # Cookies know no ports: a neighbour's server on this host is sent them.
            for path in ("/v1/session", "/v1/whoami"):
                answer = browser.get(path, headers=header)
                assert (answer.status_code, csrf in answer.text) == (403, False)
        with login(team, team.tokens["a"]) as (_, other):
            answer = browser.post(
                "/v1/run", json={"command": "true"}, headers={"X-CSRF-Token": other}
            )
            assert answer.status_code == 403
        own = {"X-CSRF-Token": csrf}
        assert browser.post("/v1/run", json={"command": "true"}, headers=own).status_code == 200
        assert browser.get("/v1/whoami", headers=own).json()["agent"] == "agent-a"
        assert browser.get("/v1/session", headers=own).json()["csrfToken"] == csrf
        assert browser.delete("/v1/session", headers=own).status_code == 204
        assert browser.get("/v1/whoami", headers=own).status_code == 401


def test_cannot_go_on_with_the_cookie_of_a_revoked_token(one: Team) -> None:
    token = one.served.token("leaver")
    with login(one, token) as (browser, csrf):
        own = {"X-CSRF-Token": csrf}
        assert browser.get("/v1/whoami", headers=own).status_code == 200
        one.admin.delete("/v1/tokens/leaver")
        assert browser.get("/v1/whoami", headers=own).status_code == 401


def test_cannot_guess_or_choose_a_cookie(one: Team) -> None:
    with login(one, one.tokens["a"]) as (browser, csrf):
        value = browser.cookies["sandbox_session"]
    for cookie in (f"sandbox_session={value[:-1]}", "sandbox_session=", "sandbox_session=x",
                   f"sandbox_session={value}; sandbox_session={value}", f"other={value}",
                   f"__Host-sandbox_session={value}"):  # fmt: skip
        answer = one.nobody.get("/v1/whoami", headers={"Cookie": cookie, "X-CSRF-Token": csrf})
        assert answer.status_code == 401, cookie
    good = one.nobody.get(
        "/v1/whoami", headers={"Cookie": f"a=b; sandbox_session={value}", "X-CSRF-Token": csrf}
    )
    assert good.status_code == 200


def test_a_login_with_a_bad_token_is_refused(one: Team) -> None:
    answer = one.nobody.post("/v1/session", json={"token": "sbx_aaaaaaaa_" + "C" * 43})
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)


def test_cannot_open_a_websocket_from_another_site(team: Team) -> None:
    url = team.served.url.replace("http://", "ws://")
    with login(team, team.tokens["a"]) as (browser, csrf), place(team.a) as own:
        cookie = f"sandbox_session={browser.cookies['sandbox_session']}"
        both = {"Cookie": cookie, "X-CSRF-Token": csrf}
        address = f"{url}/v1/execs/{own['execId']}/ws"
        foreign: list[Any] = ["https://evil.example", "null", None]
        for origin in foreign:
            with pytest.raises(websockets.exceptions.InvalidStatus) as error:
                websocket.connect(address, origin=origin, additional_headers=both)
            assert error.value.response.status_code == 403
        # The control: a page of ours, and a program with a token.
        page: Any = team.served.url
        with websocket.connect(address, origin=page, additional_headers=both):
            pass
        with pytest.raises(websockets.exceptions.InvalidStatus):
            websocket.connect(address, origin=page, additional_headers={"Cookie": cookie})
        bearer = {"Authorization": f"Bearer {team.tokens['a']}"}
        with websocket.connect(address, additional_headers=bearer):
            pass


def test_an_answer_is_no_page_and_in_no_frame(one: Team) -> None:
    with place(one.a) as own:
        files = f"/v1/sandboxes/{own['sandboxId']}/files"
        html = b"<script>alert(1)</script>"
        one.a.put(files, params={"path": "evil.html"}, content=html)
        answers = [
            one.a.get(files, params={"path": "evil.html"}),
            one.a.get(f"/v1/sandboxes/{own['sandboxId']}/archive"),
            one.a.get("/v1/whoami"), one.nobody.get("/nothing/here"), one.nobody.get("/"),
            one.nobody.get("/openapi.json"), one.nobody.get("/v1/whoami"),
            one.admin.get("/metrics"),
        ]  # fmt: skip
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        assert ("text/html" in answer.headers["content-type"]) == (answer.url.path == "/")
    assert answers[0].content == html


# --- bodies


DEEP = b'{"metadata":' * 100_000
BAD_JSON: dict[str, bytes] = {
    "nothing": b"", "half": b'{"command":', "two": b"{} {}", "a number twice": b"1 1",
    "nan": b'{"command":"true","timeout":NaN}', "infinity": b'{"timeout":Infinity,"command":"a"}',
    "a name twice": b'{"command":"true","command":"id"}',
    "a name twice, escaped": b'{"command":"true","c\\u006fmmand":"id"}',
    "a name twice, below": b'{"command":"true","env":{"A":"1","A":"2"}}',
    "half a character": b'{"command":"\\ud800"}', "half a name": b'{"\\udfff":1,"command":"a"}',
    "latin-1": '{"command":"\xe9"}'.encode("latin-1"), "utf-16": '{"command":"a"}'.encode("utf-16"),
    "a mark": b'\xef\xbb\xbf{"command":"a"}', "deep lists": b"[" * 50_000, "deep objects": DEEP,
    "deep and whole": b"[" * 20_000 + b"]" * 20_000, "many digits": b'{"timeout":' + b"9" * 5000,
    "a comment": b'{"command":"a"/**/}', "single quotes": b"{'command':'a'}", "nul": b"\0",
    "a control character": b'{"command":"a\nb"}',
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_JSON)
def test_json_with_two_meanings_or_none_is_refused(one: Team, kind: str) -> None:
    header = {"Content-Type": "application/json"}
    answer = one.a.post("/v1/run", content=BAD_JSON[kind], headers=header)
    assert (answer.status_code, told(answer)["code"]) == (400, "BAD_REQUEST"), answer.text
    # The control is in the same bytes, without what is wrong with them.
    fine = one.a.post("/v1/run", content=b' {"command" : "tru\\u0065"}\n', headers=header)
    assert fine.status_code == 200


WRONG: dict[str, tuple[dict[str, Any] | list[Any] | str | int | None, str]] = {
    "a list": ([], ""), "text": ("x", ""), "null": (None, ""), "a number": (1, ""),
    "nothing to run": ({}, "command"),
    "both": ({"cmd": ["a"], "command": "a"}, "cmd"),
    "an empty list": ({"cmd": []}, "cmd"), "an empty text": ({"command": ""}, "command"),
    "no program": ({"cmd": [""]}, "cmd[0]"), "numbers": ({"cmd": [1]}, "cmd[0]"),
    "nul": ({"cmd": ["a\0b"]}, "cmd[0]"), "an object": ({"command": {"a": 1}}, "command"),
    "too long": ({"cmd": ["x" * 200_000]}, "cmd[0]"),
    "too long in bytes": ({"cmd": ["é" * 100_000]}, "cmd[0]"),
    "too many": ({"cmd": ["x"] * 5000}, "cmd"),
    "an unknown field": ({"command": "a", "privileged": True}, "privileged"),
    "a field of another case": ({"command": "a", "Timeout": 1}, "Timeout"),
    "mounts": ({"command": "a", "mounts": ["/"]}, "mounts"),
    "a time as text": ({"command": "a", "timeout": "5"}, "timeout"),
    "no time": ({"command": "a", "timeout": 0}, "timeout"),
    "time before now": ({"command": "a", "timeout": -1}, "timeout"),
    "endless": ({"command": "a", "timeout": 1e308}, "timeout"),
    "true": ({"command": "a", "timeout": True}, "timeout"),
    "null inside": ({"command": "a", "stdin": None}, "stdin"),
    "a flag as text": ({"command": "a", "tty": "yes"}, "tty"),
    "a flag as number": ({"command": "a", "background": 1}, "background"),
    "size without a terminal": ({"command": "a", "rows": 5}, "rows"),
    "two inputs": ({"command": "a", "stdin": "", "stdinBase64": ""}, "stdinBase64"),
    "no base64": ({"command": "a", "stdinBase64": "a b="}, "stdinBase64"),
    "base64 without padding": ({"command": "a", "stdinBase64": "YQ"}, "stdinBase64"),
    "a list as variables": ({"command": "a", "env": ["A=1"]}, "env"),
    "a number as a variable": ({"command": "a", "env": {"A": 1}}, "env.A"),
    "a variable with =": ({"command": "a", "env": {"A=B": "1"}}, "env"),
    "a variable with nul": ({"command": "a", "env": {"A": "\0"}}, "env.A"),
    "a variable without a name": ({"command": "a", "env": {"": "1"}}, "env"),
    "many variables": ({"command": "a", "env": {f"A{n}": "" for n in range(300)}}, "env"),
    "memory": ({"command": "a", "resources": {"memory": "lots"}}, "resources.memory"),
    "no memory": ({"command": "a", "resources": {"memory": 0}}, "resources.memory"),
    "half a byte": ({"command": "a", "resources": {"memory": 1.5}}, "resources.memory"),
    "memory as digits of another script": (
        {"command": "a", "resources": {"memory": "٥M"}}, "resources.memory"),
    "pids": ({"command": "a", "resources": {"pids": 1e400}}, "resources.pids"),
    "a resource": ({"command": "a", "resources": {"gpu": 1}}, "resources.gpu"),
    "a network": ({"command": "a", "network": "host"}, "network"),
    "the host's network": ({"command": "a", "network": {"mode": "on"}}, "network.mode"),
    "hosts without allow": (
        {"command": "a", "network": {"mode": "public", "allowOut": ["a.example"]}},
        "network.allowOut"),
    "files": ({"command": "a", "files": {"a": "b"}}, "files"),
    "a file without content": ({"command": "a", "files": [{"path": "a"}]}, "files[0].content"),
    "a file with two contents": (
        {"command": "a", "files": [{"path": "a", "content": "", "contentBase64": ""}]},
        "files[0].contentBase64"),
    "a mode with setuid": (
        {"command": "a", "files": [{"path": "a", "content": "", "mode": "4755"}]},
        "files[0].mode"),
    "metadata": ({"command": "a", "metadata": {"a": {"b": 1}}}, "metadata.a"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_field_is_named(one: Team, kind: str) -> None:
    body, field = WRONG[kind]
    text = json.dumps(body).replace("Infinity", "1e400")
    header = {"Content-Type": "application/json"}
    answer = one.a.post("/v1/run", content=text, headers=header)
    assert (answer.status_code, told(answer)["code"]) == (422, "INVALID"), answer.text
    assert told(answer).get("field", "") == field
    assert len(answer.content) < 4096


def test_other_media_types_are_refused(one: Team) -> None:
    body = b'{"command":"true"}'
    for media in ("text/plain", "multipart/form-data", "application/jsonp", "application/json2"):
        answer = one.a.post("/v1/run", content=body, headers={"Content-Type": media})
        assert (answer.status_code, told(answer)["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")
    # `curl -d` sends the last one: with a token it is no form of another site.
    for media in ("application/json", "APPLICATION/JSON; charset=utf-8", "",
                  "application/x-www-form-urlencoded"):  # fmt: skip
        answer = one.a.post("/v1/run", content=body, headers={"Content-Type": media})
        assert answer.status_code == 200


def test_large_bodies_are_refused_before_they_are_read(one: Team) -> None:
    for path, size in (("/v1/run", 9 << 20), ("/v1/session", 70_000), ("/v1/tokens", 70_000)):
        head = (
            f"POST {path} HTTP/1.1\nHost: localhost\nX-API-Key: {one.tokens['admin']}\n"
            f"Content-Type: application/json\nContent-Length: {size}\n\n"
        )
        status, body = raw(one, head)
        assert (status, body["code"]) == (413, "TOO_LARGE")
    # Also when nobody says how much will come.
    pieces = (b" " * 65536 for _ in range(200))
    header = {"Content-Type": "application/json"}
    with contextlib.suppress(httpx.WriteError):
        assert one.a.post("/v1/run", content=pieces, headers=header).status_code == 413


def test_a_question_with_a_body_is_refused(one: Team) -> None:
    answer = one.a.request("GET", "/v1/whoami", content=b"x")
    assert (answer.status_code, told(answer)["rule"]) == (400, "request.body")


# --- paths


OUTSIDE = (
    "../../etc/passwd", "/etc/passwd", "/workspace/../etc/passwd", "..", "a/../../b", "/",
    "/workspace2/x", "/workspace/../../proc/self/environ", "/proc/self/environ", "/home",
    "/home/agent/../../etc/shadow", "~/x/../../../etc/passwd",
)  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_cannot_leave_the_sandbox_by_a_path(team: Team, path: str) -> None:
    with place(team.a) as own:
        base = f"/v1/sandboxes/{own['sandboxId']}"
        query = {"path": path}
        answers = [
            team.a.get(f"{base}/files", params=query),
            team.a.put(f"{base}/files", params=query, content=b"planted"),
            team.a.delete(f"{base}/files", params={**query, "recursive": "true"}),
            team.a.get(f"{base}/files/list", params=query),
            team.a.get(f"{base}/files/stat", params=query),
            team.a.post(f"{base}/files/directory", params=query),
            team.a.get(f"{base}/archive", params=query),
            team.a.put(f"{base}/archive", params=query, content=b""),
        ]
        for answer in answers:
            assert answer.status_code in (403, 404, 422), (answer.url, answer.text)
            assert "root:" not in answer.text
        given = [{"path": path, "content": "planted"}]
        assert team.a.post("/v1/sandboxes", json={"files": given}).status_code in (403, 422)
        # The control: the same file by a path inside.
        assert team.a.get(f"{base}/files", params={"path": "x"}).text == "secret"


def test_cannot_leave_the_sandbox_by_a_link(team: Team) -> None:
    with place(team.a) as own:
        base = f"/v1/sandboxes/{own['sandboxId']}"
        script = "ln -s /etc/passwd file; ln -s /etc dir; ln -s x inside; ln -s ../../../../ up"
        team.a.post(f"{base}/exec", json={"command": script})
        for path in ("file", "dir/passwd", "up/etc/passwd"):
            got = team.a.get(f"{base}/files", params={"path": path})
            assert "root:x" not in got.text
            assert got.status_code in (403, 404, 409, 422)
            put = team.a.put(f"{base}/files", params={"path": f"{path}/new"}, content=b"x")
            assert put.status_code in (403, 404, 409, 422)
        archive = team.a.get(f"{base}/archive").content
        assert b"root:x" not in archive
        assert team.a.get(f"{base}/files", params={"path": "inside"}).text == "secret"


@pytest.mark.parametrize(
    "target",
    [
        "/v1/sandboxes/../whoami", "/v1/./whoami", "/v1//whoami", "//v1/whoami", "/v1/whoami/",
        "/v1/%2e%2e/v1/whoami", "/v1%2fwhoami", "/v1/whoami%00", "/v1/whoami%", "/v1/whoami;a=b",
        "/v1/whoami%20", "/V1/whoami", "http://localhost/v1/whoami", "/v1/who\\ami", "/v1/whoami#x",
        "*", "v1/whoami", "/assets/../index.html", "/assets/%2e%2e%2f__init__.py",
        "/assets/__init__.py", "/__init__.py", "/assets/x/y", "/v1", "/v1/sandboxes/%ff",
    ],
)  # fmt: skip
def test_a_path_has_one_spelling(one: Team, target: str) -> None:
    head = f"GET {target} HTTP/1.1\nHost: localhost\nX-API-Key: {one.tokens['a']}\n\n"
    status, body = raw(one, head)
    assert status in (400, 404), body
    assert body["code"] in ("BAD_REQUEST", "NOT_FOUND")
    assert raw(one, head.replace(target, "/v1/whoami"))[0] == 200


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=501", "limit=1e2", "limit=+5", "limit=٥", "limit=", "limit=-1",
              "limit=1&limit=2", "state=running", "state=", "order=up", "unknown=1", "a[]=1",
              "metadata=x", "metadata=%3D1", "after=%00", "%ff=1", "limit=%"],
)  # fmt: skip
def test_a_wrong_parameter_is_named(one: Team, query: str) -> None:
    answer = one.a.get(f"/v1/sandboxes?{query}")
    assert answer.status_code in (400, 422), answer.text
    assert told(answer)["code"] in ("BAD_REQUEST", "INVALID")
    if answer.status_code == 422:
        assert told(answer)["field"] == query.partition("=")[0]


# --- headers


def test_cannot_smuggle_a_second_request_or_identity(one: Team) -> None:
    token, other = one.tokens["a"], one.tokens["b"]
    start = f"POST /v1/policy/check HTTP/1.1\nHost: localhost\nX-API-Key: {token}\n"
    media = "Content-Type: application/json\n"
    hidden = b"DELETE /v1/tokens/boss HTTP/1.1\r\nHost: localhost\r\n\r\n"
    heads = [
        f"{start}{media}Content-Length: 2\nTransfer-Encoding: chunked\n\n",
        f"{start}{media}Content-Length: 2\nContent-Length: 40\n\n",
        f"{start}{media}Content-Length: +2\n\n",
        f"{start}{media}Content-Length : 2\n\n",
        f"{start}{media}Transfer-Encoding: xchunked\n\n",
        f"{start}{media}Transfer-Encoding: chunked\nTransfer-Encoding: identity\n\n",
        f"{start}{media} folded: line\nContent-Length: 2\n\n",
        f"{start}X-API-Key: {other}\n{media}Content-Length: 2\n\n",
        f"{start}Host: evil.example\n{media}Content-Length: 2\n\n",
        f"{start}{media}Content-Length: 2\nX-Bad: a\rb\n\n",
    ]  # fmt: skip
    for head in heads:
        status, body = raw(one, head, b"{}" + hidden)
        assert (status, body["code"]) == (400, "BAD_REQUEST"), head
    assert raw(one, f"{start}{media}Content-Length: 2\n\n", b"{}" + hidden)[0] == 200


@pytest.mark.parametrize(
    "header",
    ["X-Forwarded-For: 127.0.0.1", "X-Forwarded-User: owner", "X-Remote-User: boss",
     "Forwarded: for=127.0.0.1", "X-Original-URL: /v1/tokens", "X-HTTP-Method-Override: DELETE",
     "X-Agent: boss", "X-Real-IP: 127.0.0.1", "X-Forwarded-Host: localhost"],
)  # fmt: skip
def test_headers_of_proxies_make_nobody_somebody(one: Team, header: str) -> None:
    name_, _, value = header.partition(": ")
    assert one.nobody.get("/v1/tokens", headers={name_: value}).status_code == 401
    own = one.a.get("/v1/whoami", headers={name_: value})
    assert (own.status_code, own.json()["agent"]) == (200, "agent-a")


def test_cannot_write_headers_by_a_name_of_a_file(one: Team) -> None:
    with place(one.a) as own:
        base = f"/v1/sandboxes/{own['sandboxId']}"
        name_ = 'a"\r\nSet-Cookie: x=y\r\n'
        put = one.a.put(f"{base}/files", params={"path": f"{name_}/f"}, content=b"x")
        assert put.status_code == 200
        answer = one.a.get(f"{base}/archive", params={"path": name_})
        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers


# --- methods and floods


@pytest.mark.parametrize("method", ["TRACE", "CONNECT", "OPTIONS", "PUT", "FOO", "get", "PROPFIND"])
def test_other_methods_are_refused_with_those_there_are(one: Team, method: str) -> None:
    head = f"{method} /v1/whoami HTTP/1.1\nHost: localhost\nX-API-Key: {one.tokens['a']}\n\n"
    status, body = raw(one, head)
    assert (status, body["code"]) in ((405, "METHOD_NOT_ALLOWED"), (400, "BAD_REQUEST"))
    assert one.nobody.options("/v1/run").headers["allow"] == "POST"


def test_an_agent_cannot_use_up_another_s_rate(user: Any, serve: Any) -> None:
    served = serve(user, env={"RATE_REQUESTS_PER_SEC": "20", "RATE_CREATE_PER_MIN": "3"})
    team = Team(served)
    try:
        answers = [team.a.get("/v1/whoami") for _ in range(60)]
        limited = [answer for answer in answers if answer.status_code == 429]
        assert limited
        assert told(limited[0])["code"] == "RATE_LIMITED"
        assert int(limited[0].headers["retry-after"]) >= 1
        assert limited[0].headers["x-ratelimit-limit"] == "20"
        assert answers[0].headers["x-ratelimit-remaining"] == "19"
        # The other agent, and whoever watches, do not notice.
        assert team.b.get("/v1/whoami").status_code == 200
        assert team.nobody.get("/healthz").status_code == 200
        made = [team.b.post("/v1/sandboxes", json={}) for _ in range(4)]
        assert [answer.status_code for answer in made] == [201, 201, 201, 429]
        assert told(made[3])["rule"] == "limits.rate_create_per_min"
    finally:
        team.close()


def test_an_agent_cannot_use_up_another_s_quota(user: Any, serve: Any) -> None:
    served = serve(user, env={"MAX_SANDBOXES_PER_AGENT": "2", "MAX_CONCURRENT_EXECS_PER_AGENT": "1",
                              "MAX_QUEUE_SECONDS": "0.2"})  # fmt: skip
    team = Team(served)
    try:
        made = [team.a.post("/v1/sandboxes", json={}) for _ in range(3)]
        assert [answer.status_code for answer in made] == [201, 201, 429]
        assert told(made[2])["code"] == "QUOTA_EXCEEDED"
        path = f"/v1/sandboxes/{made[0].json()['id']}/exec"
        assert team.a.post(path, json={"command": "sleep 50", "background": True}).is_success
        busy = team.a.post(path, json={"command": "true"})
        assert (busy.status_code, told(busy)["code"]) == (429, "BUSY")
        assert int(busy.headers["retry-after"]) >= 1
        assert team.b.post("/v1/run", json={"command": "true"}).json()["exitCode"] == 0
    finally:
        team.close()


def test_faults_of_ours_are_not_shown(one: Team) -> None:
    """Whatever the tests above sent: no answer was a fault (see the end of the fixture)."""
    assert one.a.get("/v1/whoami").status_code == 200
    shown = json.dumps(one.a.get("/v1/nothing").json())
    assert "Traceback" not in shown
