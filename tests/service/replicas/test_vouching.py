"""What replicas tell each other about who asks, and that nobody else can say it."""

from __future__ import annotations

import asyncio

import httpx

from agent_sandbox.service.replicas import claims
from agent_sandbox.service.replicas.claims import Claim

from .ground import Ground, ending, go, made


def _claim(ground: Ground, receiver: str, box: str, **changes: object) -> Claim:
    import secrets
    import time

    base = Claim(
        sender="rep-x", receiver=receiver, at=time.time(), request_id="req_0", method="GET",
        target=f"/v1/sandboxes/{box}", address="203.0.113.9",
        digest=claims.digest({"authorization": f"Bearer {ground.tokens['alice']}"}),
        nonce=secrets.token_hex(16),
    )  # fmt: skip
    return base.replace(**changes)


def test_cannot_pass_for_a_replica_without_the_key(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            key, me = first.shared.key, first.shared.id
            client = first.client()

            async def ask(text: str) -> httpx.Response:
                return await client.get(f"/v1/sandboxes/{box}", headers={claims.HEADER: text})

            good = _claim(ground, me, box)
            # The control: with the key it is believed, and the audit has the address it names.
            assert (await ask(claims.write(good, key))).status_code == 200
            bad = {
                "another key": claims.write(good, bytes(32)),
                "for another replica": claims.write(good.replace(receiver=second.shared.id), key),
                "for another target": claims.write(good.replace(target="/v1/sandboxes"), key),
                "for another method": claims.write(good.replace(method="DELETE"), key),
                "of the past": claims.write(good.replace(at=good.at - 61), key),
                "of the future": claims.write(good.replace(at=good.at + 61), key),
                "for another token": claims.write(good.replace(digest="0" * 64), key),
                "changed": claims.write(good, key)[:-1] + "0x",
                "noise": "x", "empty": "", "dots": ".", "long": "a" * 5000 + "." + "0" * 64,
            }  # fmt: skip
            for what, text in bad.items():
                answer = await ask(text)
                assert answer.status_code == 403, what
                assert answer.json()["rule"] == "replica.forward"

    go(work())


def test_cannot_become_the_owner_by_the_number_of_a_user(ground: Ground) -> None:
    """A user of another machine has the number of our owner: it has no rights here by that."""

    async def work() -> None:
        import os

        async with ending(ground):
            first, _ = await ground.pair()
            box = await made(first.client())
            nobody = first.client(None)
            claim = _claim(
                ground, first.shared.id, box, unix=True, uid=os.geteuid(), owner=False,
                address="unix", digest=claims.digest({}),
            )  # fmt: skip

            async def ask(one: Claim) -> int:
                text = claims.write(one, first.shared.key)
                answer = await nobody.get(f"/v1/sandboxes/{box}", headers={claims.HEADER: text})
                return answer.status_code

            assert await ask(claim) == 401
            # The control: the replica says that its kernel saw the owner.
            assert await ask(claim.replace(owner=True, nonce="x")) == 200

    go(work())


def test_cannot_send_a_header_again_that_was_seen_on_the_way(ground: Ground) -> None:
    """Without TLS between replicas who listens there could act as the owner, with another body."""

    async def work() -> None:
        import os

        async with ending(ground):
            first, _ = await ground.pair()
            box = await made(first.client())
            nobody, path = first.client(None), f"/v1/sandboxes/{box}/exec"
            claim = _claim(
                ground, first.shared.id, box, unix=True, uid=os.geteuid(), owner=True,
                address="unix", method="POST", target=path, digest=claims.digest({}),
            )  # fmt: skip
            seen = {claims.HEADER: claims.write(claim, first.shared.key)}
            command = {"cmd": ["echo", "owner"]}
            assert (await nobody.post(path, json=command, headers=seen)).status_code == 200
            again = await nobody.post(path, json={"cmd": ["echo", "thief"]}, headers=seen)
            assert (again.status_code, again.json()["rule"]) == (403, "replica.forward")
            # The control: another one for the same request is believed.
            fresh = {claims.HEADER: claims.write(claim.replace(nonce="y"), first.shared.key)}
            assert (await nobody.post(path, json=command, headers=fresh)).status_code == 200

    go(work())


def test_what_was_seen_is_forgotten_when_it_is_worth_nothing_any_more() -> None:
    once = claims.Once()
    claim = Claim(
        sender="a", receiver="b", at=0.0, request_id="r", method="GET", target="/", address="x"
    )
    for number in range(100):
        once.take(claim.replace(at=float(number), nonce=str(number)), float(number))
    late = 99.0 + 2 * claims.SECONDS
    once.take(claim.replace(at=late, nonce="last"), late)
    assert once._seen.keys() == {"last"}


def test_the_owner_at_one_replicas_socket_is_the_owner_at_the_other(ground: Ground) -> None:
    ground.flags["socket"] = str(ground.directory / "first.sock")

    async def work() -> None:
        async with ending(ground):
            first = await ground.replica()
            ground.flags["socket"] = str(ground.directory / "second.sock")
            second = await ground.replica()
            box = await made(first.client())
            transport = httpx.AsyncHTTPTransport(uds=str(ground.directory / "second.sock"))
            owner = second.client(None, transport=transport)
            assert (await owner.get(f"/v1/sandboxes/{box}")).json()["owner"] == "alice"
            done = await owner.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["true"]})
            assert done.json()["exitCode"] == 0
            lines = await second.client("chief").get(
                "/v1/audit", params={"action": "exec.start", "target": done.json()["execId"]}
            )
            assert lines.json()["items"][0]["actor"]["agent"] == "owner"

    go(work())


def test_cookies_and_strange_fields_stay_at_the_door(ground: Ground) -> None:
    """The home sees the token and what handlers read, and nothing else of the client's head."""

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            seen: list[dict[str, str]] = []
            assert first.app._server is not None
            handler = first.app._server.handler

            async def look(request):
                seen.append(dict(request.headers))
                return await handler(request)

            first.app._server.handler = look
            answer = await second.client().get(
                f"/v1/sandboxes/{box}",
                headers={"Cookie": "a=b", "X-Forwarded-For": "1.2.3.4", "Origin": second.url,
                         "X-Strange": "1"},
            )  # fmt: skip
            assert answer.status_code == 200
            assert set(seen[0]) == {
                "host", "authorization", "accept", "content-length", claims.HEADER,
            }  # fmt: skip

    go(work())


def test_the_audit_has_the_clients_address_and_one_line_for_a_request(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            done = await second.client().post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["true"]})
            lines = await second.client("chief").get(
                "/v1/audit", params={"target": done.json()["execId"]}
            )
            found = lines.json()["items"]
            assert [line["action"] for line in found] == ["exec.end", "exec.start"]
            assert {line["requestId"] for line in found} == {done.headers["x-request-id"]}

    go(work())


def test_a_request_that_was_passed_on_is_counted_once(ground: Ground) -> None:
    ground.env["RATE_REQUESTS_PER_SEC"] = "50"

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            box = await made(first.client())
            await asyncio.sleep(1.1)
            answer = await second.client().get(f"/v1/sandboxes/{box}")
            assert answer.headers["x-ratelimit-remaining"] == "49"

    go(work())


# --- logins


def test_a_login_at_one_replica_is_good_at_all_while_that_one_lives(ground: Ground) -> None:
    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            third = await ground.replica()
            box = await made(second.client())
            browser = first.client(None)
            answer = await browser.post("/v1/session", json={"token": ground.tokens["alice"]})
            cookie = answer.headers["set-cookie"].partition(";")[0]
            page = {"Cookie": cookie, "X-CSRF-Token": answer.json()["csrfToken"]}
            for replica in (first, second, third):
                client = replica.client(None, headers=page)
                # Its own data, and a sandbox that is at yet another replica.
                assert (await client.get("/v1/whoami")).json()["agent"] == "alice"
                done = await client.post(f"/v1/sandboxes/{box}/exec", json={"cmd": ["true"]})
                assert done.status_code == 200, done.text
                # The second value is needed as it is at the home.
                bare = replica.client(None, headers={"Cookie": cookie})
                assert (await bare.get("/v1/whoami")).json()["code"] == "CSRF"
                forged = replica.client(None, headers={**page, "Cookie": cookie[:-3] + "xyz"})
                assert (await forged.get("/v1/whoami")).status_code == 401
                other = replica.client(None, headers={**page, "Origin": "https://evil.example"})
                assert (await other.get("/v1/whoami")).status_code == 403
            # Out at one is out at all.
            out = third.client(None, headers=page)
            ended = await out.delete("/v1/session")
            assert (ended.status_code, "Max-Age=0" in ended.headers["set-cookie"]) == (204, True)
            for replica in (first, second, third):
                client = replica.client(None, headers=page)
                assert (await client.get("/v1/whoami")).status_code == 401
            answer = await browser.post("/v1/session", json={"token": ground.tokens["alice"]})
            page["Cookie"] = answer.headers["set-cookie"].partition(";")[0]
            await first.die()
            gone = await second.client(None, headers=page).get("/v1/whoami")
            assert (gone.status_code, gone.json()["rule"]) == (401, "auth.session")

    go(work())


def test_cannot_have_a_session_request_passed_on_for_ever(ground: Ground) -> None:
    """A cookie that names another replica than it came from goes one way, and is refused there."""

    async def work() -> None:
        async with ending(ground):
            first, second = await ground.pair()
            for name in (first.shared.id, second.shared.id, "rep-" + "a" * 26, "x", ".."):
                client = second.client(None, headers={"Cookie": f"sandbox_session={name}.abc"})
                answer = await client.get("/v1/whoami")
                assert answer.status_code == 401, name

    go(work())
